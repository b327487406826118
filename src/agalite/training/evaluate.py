"""How good a trained agent is: whole episodes, none counted for being short."""

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
from agalite.envs import rendering
from agalite.envs.rendering import LONGEST, play, speed
from agalite.envs.vector import Vector
from agalite.memory.layers import prepare_for_inference
from agalite.networks.actor_critic import ActorCritic
from agalite.training.plots import bootstrap_interval

_TOGETHER = 64


class Scores(NamedTuple):
    returns: Float[np.ndarray, " N"]
    lengths: Float[np.ndarray, " N"]
    success: Float[np.ndarray, " N"] | None
    """None where the world does not say."""


def evaluate(
    model: ActorCritic,
    world: Any,
    *,
    episodes: int,
    seed: int = 0,
    greedy: bool = False,
    together: int = _TOGETHER,
) -> Scores:
    """Every environment plays the same number of episodes one after the other.

    To stop when enough have ended, wherever they were, would prefer the short ones.
    """
    from agalite.training.asynchronous import evaluate

    if isinstance(world, evaluate.HostWorld):
        return evaluate.evaluate(
            model, world, episodes=episodes, seed=seed, greedy=greedy, together=together
        )
    validation.integer("episodes", episodes, minimum=1)
    validation.integer("together", together, minimum=1)
    count = min(together, episodes)
    each = -(-episodes // count)
    vector = Vector(world, count)

    def step(model: ActorCritic, carry: Any) -> Any:
        place, played, results, key = carry
        key, choose, move = jax.random.split(key, 3)
        memory, policy, _ = jax.vmap(model.step)(place.memory, place.obs, place.resets)
        keys = jax.random.split(choose, count)
        sampled = jax.vmap(lambda p, k: p.mode() if greedy else p.sample(k))(policy, keys)
        actions = jax.vmap(model.to_world)(sampled)
        obs, state, reward, terminated, truncated, info = vector.step(move, place.world, actions)
        ends = terminated | truncated
        returns, lengths = place.returns + reward, place.lengths + 1
        success = info["success"] if "success" in info else jnp.full(count, jnp.nan)
        row = jnp.stack([returns, lengths, success.astype(jnp.float32)], axis=-1)
        # Past its share an environment plays on, and nobody counts.
        slot = jnp.where(ends & (played < each), played, each)
        results = results.at[jnp.arange(count), slot].set(row, mode="drop")
        going = jnp.where(ends, 0.0, 1.0)
        place = rollout.RunnerState(state, obs, ends, memory, going * returns, going * lengths)
        return place, played + ends, results, key

    @eqx.filter_jit  # the model is an argument: weights compiled into a program slow it down
    def play(model: ActorCritic, key: Array) -> Float[Array, "B E 3"]:
        model = prepare_for_inference(model, streams=count)
        begin, run = jax.random.split(key)
        place = rollout.init(model, vector, begin)
        start = (place, jnp.zeros(count, jnp.int32), jnp.zeros((count, each, 3)), run)
        return lax.while_loop(lambda c: jnp.any(c[1] < each), partial(step, model), start)[2]

    # Episode by episode, so that leaving the surplus out leaves out somebody's last.
    table = np.asarray(play(model, jax.random.key(seed))).swapaxes(0, 1).reshape(-1, 3)[:episodes]
    known = not np.isnan(table[:, 2]).any()
    return Scores(table[:, 0], table[:, 1], table[:, 2] if known else None)


def film(
    model: ActorCritic, world: Any, out: Path, *, seed: int = 0, greedy: bool = False
) -> float:
    """One episode as a moving picture; returns its return."""
    from agalite.training.asynchronous import evaluate

    if isinstance(world, evaluate.HostWorld):
        return evaluate.film(model, world, out, seed=seed, greedy=greedy)
    rendering.check_path(out)

    def act(key: Array, memory: Any, obs: Array, first: Array) -> tuple[Any, Array]:
        memory, policy, _ = model.step(memory, obs, first)
        return memory, model.to_world(policy.mode() if greedy else policy.sample(key))

    episode = play(world, act, model.initial_state(), seed=seed, steps=range(LONGEST))
    rendering.write(episode.frames, out, fps=speed(world))
    return episode.total


# --- What `agalite eval` says ---------------------------------------------------------------------


def evaluation(
    folder: Path,
    *,
    episodes: int,
    greedy: bool,
    best: bool,
    seed: int,
    seed_number: int,
    together: int,
    video: Path | None,
) -> None:
    if video is not None:
        rendering.check_path(video, "video")
    from agalite.training.policy import load  # which imports this module

    model, trainer, step = load(folder, seed_number=seed_number, best=best)
    world = trainer.world
    scores = evaluate(model, world, episodes=episodes, seed=seed, greedy=greedy, together=together)
    console = Console()

    def line(what: str, values: np.ndarray) -> None:
        low, high = bootstrap_interval(values)
        mean = float(values.mean())
        console.print(f"{what:<16} {mean:.3f}   95% interval {low:.3f} to {high:.3f}")

    console.print(f"{episodes} episodes, checkpoint of step {step:,}", highlight=False)
    line("return", scores.returns)
    line("length", scores.lengths)
    if scores.success is not None:
        line("success", scores.success)
    if video is not None:
        total = film(model, world, video, seed=seed, greedy=greedy)
        console.print(f"an episode with return {total:.2f}: {video}", soft_wrap=True)
