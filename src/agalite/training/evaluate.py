"""How good a trained agent is: whole episodes, and an episode as a film.

The functions here are for JAX environments; environments of Gymnasium are handed to
`asynchronous/evaluate.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from rich.console import Console

from agalite import validation
from agalite.agents import rollout
from agalite.agents.rollout import RunnerState
from agalite.envs import rendering
from agalite.envs.rendering import MAX_STEPS, play, render_fps
from agalite.envs.vector import VectorEnv
from agalite.memory.layers import prepare_for_inference
from agalite.networks.actor_critic import ActorCritic
from agalite.training.plots import bootstrap_interval

_NUM_ENVS = 64


class Scores(NamedTuple):
    """Results of N episodes."""

    returns: Float[np.ndarray, " N"]
    lengths: Float[np.ndarray, " N"]
    success: Float[np.ndarray, " N"] | None
    """1 or 0; None where the environment does not report success."""


def evaluate(
    model: ActorCritic,
    env: Any,
    *,
    episodes: int,
    seed: int = 0,
    greedy: bool = False,
    num_envs: int = _NUM_ENVS,
) -> Scores:
    """Plays N = `episodes` whole episodes.

    Every environment plays the same number of episodes one after the other. Stopping as soon as N
    episodes have ended, in whichever environments, would favour short episodes.

    **Arguments:**

    - `model`, `env`: as `agalite.training.policy.load` gives them.
    - `episodes`: N.
    - `seed`: of the episodes and of the sampled actions.
    - `greedy`: take the most likely action instead of a sampled one.
    - `num_envs`: parallel environments, at most.

    **Returns:**

    The scores (N,).
    """
    from agalite.training.asynchronous import evaluate as host

    if isinstance(env, host.HostEnv):
        return host.evaluate(
            model, env, episodes=episodes, seed=seed, greedy=greedy, num_envs=num_envs
        )
    validation.check_integer("episodes", episodes, minimum=1)
    validation.check_integer("num_envs", num_envs, minimum=1)
    count = min(num_envs, episodes)
    episodes_per_env = -(-episodes // count)
    envs = VectorEnv(env, count)

    def step(model: ActorCritic, carry: Any) -> Any:
        state, played, results, key = carry
        key, action_key, env_key = jax.random.split(key, 3)
        memory_state, policy, _ = jax.vmap(model.step)(state.memory_state, state.obs, state.resets)
        keys = jax.random.split(action_key, count)
        sampled = jax.vmap(lambda p, k: p.mode() if greedy else p.sample(k))(policy, keys)
        actions = jax.vmap(model.to_env)(sampled)
        obs, env_state, reward, terminated, truncated, info = envs.step(
            env_key, state.env_state, actions
        )
        ends = terminated | truncated
        returns, lengths = state.returns + reward, state.lengths + 1
        success = info["success"] if "success" in info else jnp.full(count, jnp.nan)
        row = jnp.stack([returns, lengths, success.astype(jnp.float32)], axis=-1)
        # An environment that has played its episodes continues, and its results are dropped.
        slot = jnp.where(ends & (played < episodes_per_env), played, episodes_per_env)
        results = results.at[jnp.arange(count), slot].set(row, mode="drop")
        going = jnp.where(ends, 0.0, 1.0)
        obs = model.inputs(obs, sampled, reward)
        state = RunnerState(env_state, obs, ends, memory_state, going * returns, going * lengths)
        return state, played + ends, results, key

    @eqx.filter_jit  # the model is an argument: weights as constants make the program slow
    def run(model: ActorCritic, key: Array) -> Float[Array, "B E 3"]:
        model = prepare_for_inference(model, streams=count)
        init_key, run_key = jax.random.split(key)
        state = rollout.init(model, envs, init_key)
        results = jnp.zeros((count, episodes_per_env, 3))
        carry = (state, jnp.zeros(count, jnp.int32), results, run_key)

        def unfinished(carry: Any) -> Array:
            return jnp.any(carry[1] < episodes_per_env)

        return lax.while_loop(unfinished, partial(step, model), carry)[2]

    # First episodes first, so that the surplus that is dropped are last episodes.
    table = np.asarray(run(model, jax.random.key(seed))).swapaxes(0, 1).reshape(-1, 3)[:episodes]
    known = not np.isnan(table[:, 2]).any()
    return Scores(table[:, 0], table[:, 1], table[:, 2] if known else None)


def film(model: ActorCritic, env: Any, out: Path, *, seed: int = 0, greedy: bool = False) -> float:
    """Writes one episode as a video, a GIF or a strip of frames.

    **Arguments:**

    - `model`: the agent.
    - `env`: its environment, as the trainer of a run has it.
    - `out`: the file to write: .mp4, .gif or .png.
    - `seed`: of the episode.
    - `greedy`: take the most likely action instead of a sampled one.

    **Returns:**

    The episode's return.
    """
    from agalite.training.asynchronous import evaluate as host

    if isinstance(env, host.HostEnv):
        return host.film(model, env, out, seed=seed, greedy=greedy)
    rendering.check_path(out)

    def act(key: Array, state: Any, obs: Array, reward: Array, first: Array) -> tuple[Any, Array]:
        memory_state, previous = state
        inputs = model.inputs(obs, previous, reward)
        memory_state, policy, _ = model.step(memory_state, inputs, first)
        sampled = policy.mode() if greedy else policy.sample(key)
        return (memory_state, sampled), model.to_env(sampled)

    start = model.initial_state(), model.actor.no_action(())
    episode = play(env, act, start, seed=seed, steps=range(MAX_STEPS))
    rendering.write(episode.frames, out, fps=render_fps(env))
    return episode.episode_return


def report(
    folder: Path,
    *,
    episodes: int,
    greedy: bool,
    best: bool,
    seed: int,
    seed_number: int,
    num_envs: int,
    video: Path | None,
) -> None:
    """Prints what `agalite eval` does: mean scores with 95% bootstrap intervals.

    **Arguments:**

    - `folder`: of the run.
    - `episodes`, `greedy`, `seed`, `num_envs`: as in `evaluate`.
    - `best`: the checkpoint with the highest return instead of the newest.
    - `seed_number`: which of the run's seeds; 0 is the first.
    - `video`: a file for one episode, or `None`.
    """
    if video is not None:
        rendering.check_path(video, "video")
    from agalite.training.policy import load  # which imports this module

    model, trainer, step = load(folder, seed_number=seed_number, best=best)
    env = trainer.env
    scores = evaluate(model, env, episodes=episodes, seed=seed, greedy=greedy, num_envs=num_envs)
    console = Console()

    def line(name: str, values: np.ndarray) -> None:
        low, high = bootstrap_interval(values)
        mean = float(values.mean())
        console.print(f"{name:<16} {mean:.3f}   95% interval {low:.3f} to {high:.3f}")

    console.print(f"{episodes} episodes, checkpoint of step {step:,}", highlight=False)
    line("return", scores.returns)
    line("length", scores.lengths)
    if scores.success is not None:
        line("success", scores.success)
    if video is not None:
        total = film(model, env, video, seed=seed, greedy=greedy)
        console.print(f"an episode with return {total:.2f}: {video}", soft_wrap=True)
