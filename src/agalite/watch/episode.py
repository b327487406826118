"""One episode of a trained agent: observations, policies, values, actions, rewards and frames."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8

from agalite.envs.rendering import render_fps
from agalite.memory.layers import prepare_for_inference
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.heads import Distribution
from agalite.training.asynchronous.evaluate import HostEnv

_UNFINISHED = "stopped before its end"


class Step(NamedTuple):
    """One step of an episode."""

    obs: Shaped[np.ndarray, "..."]
    policy: Distribution
    """Of this observation; unbatched."""
    value: float
    sampled: Shaped[np.ndarray, "..."]
    """The action as the policy drew it."""
    reward: float
    """For the action."""


class WatchedEpisode(NamedTuple):
    """The steps of an episode and its frames."""

    steps: list[Step]
    frames: list[UInt8[np.ndarray, "height width 3"]]
    """One for each step, before its action; of JAX environments also one after the last action."""
    ending: str
    """How the episode ended, in words."""
    fps: float

    @property
    def total(self) -> float:
        """The return."""
        return sum(step.reward for step in self.steps)

    @property
    def obs(self) -> Shaped[np.ndarray, "T ..."]:
        return np.stack([step.obs for step in self.steps])

    @property
    def sampled(self) -> Shaped[np.ndarray, "T ..."]:
        return np.stack([step.sampled for step in self.steps])

    @property
    def rewards(self) -> Float[np.ndarray, " T"]:
        return np.array([step.reward for step in self.steps], np.float32)

    @property
    def values(self) -> Float[np.ndarray, " T"]:
        return np.array([step.value for step in self.steps])


def play(model: ActorCritic, env: Any, *, seed: int, steps: int, greedy: bool) -> WatchedEpisode:
    """Plays one episode.

    **Arguments:**

    - `model`: the agent.
    - `env`: a JAX environment, or the `HostEnv` of an asynchronous run.
    - `seed`: of the environment and of the actions.
    - `steps`: the episode is stopped after so many.
    - `greedy`: the most likely action instead of a sampled one.
    """
    run = _play_host if isinstance(env, HostEnv) else _play_jax
    return run(model, env, seed=seed, steps=steps, greedy=greedy)


def _act_function(model: ActorCritic, *, greedy: bool) -> Any:
    """act(memory_state, obs, previous, reset, key) -> memory_state, policy, value, sampled, action.

    `previous` is the sampled action and the reward of the step before.
    """
    weights, rest = eqx.partition(prepare_for_inference(model), eqx.is_array)

    @jax.jit
    def act(
        weights: Any, memory_state: Any, obs: Array, previous: Any, reset: Array, key: Array
    ) -> Any:
        model: ActorCritic = eqx.combine(weights, rest)
        inputs = model.inputs(obs, *previous)
        memory_state, policy, value = model.step(memory_state, inputs, reset)
        sampled = policy.mode() if greedy else policy.sample(key)
        return memory_state, policy, value, sampled, model.to_env(sampled)

    return lambda *args: act(weights, *args)


def _play_jax(
    model: ActorCritic, env: Any, *, seed: int, steps: int, greedy: bool
) -> WatchedEpisode:
    params, act = env.default_params, _act_function(model, greedy=greedy)

    @jax.jit
    def reset(key: Array) -> Any:
        obs, env_state = env.reset_env(key, params)
        return obs, env_state, env.render(env_state, params)

    @jax.jit
    def step(key: Array, env_state: Any, action: Array) -> Any:
        obs, env_state, reward, terminated, _ = env.step_env(key, env_state, action, params)
        truncated = env.is_truncated(env_state, params)
        return obs, env_state, reward, terminated, truncated, env.render(env_state, params)

    key = jax.random.key(seed)
    obs, env_state, frame = reset(jax.random.fold_in(key, 0))
    memory_state, ending = model.initial_state(), _UNFINISHED
    previous = model.actor.no_action(()), np.float32(0)
    taken, frames = [], [np.asarray(frame)]
    for t in range(steps):
        act_key, step_key = jax.random.split(jax.random.fold_in(key, t + 1))
        seen = np.asarray(obs)
        memory_state, policy, value, sampled, action = act(
            memory_state, obs, previous, np.asarray(t == 0), act_key
        )
        obs, env_state, reward, terminated, truncated, frame = step(step_key, env_state, action)
        previous = sampled, reward
        taken.append(Step(seen, policy, float(value), np.asarray(sampled), float(reward)))
        frames.append(np.asarray(frame))
        if terminated or truncated:
            ending = _ending(terminated)
            break
    return WatchedEpisode(taken, frames, ending, render_fps(env))


def _play_host(
    model: ActorCritic, env: HostEnv, *, seed: int, steps: int, greedy: bool
) -> WatchedEpisode:
    act, key = _act_function(model, greedy=greedy), jax.random.key(seed)
    taken, frames, ending = [], [], _UNFINISHED
    with env.make(1, seed=seed, processes=False, render_mode="rgb_array") as vector:
        obs, memory_state = vector.reset(), model.initial_state()
        previous = model.actor.no_action(()), np.float32(0)
        frames.append(vector.render())
        for t in range(steps):
            seen = np.asarray(obs[0])
            memory_state, policy, value, sampled, action = act(
                memory_state, seen, previous, np.asarray(t == 0), jax.random.fold_in(key, t)
            )
            result = vector.step(np.asarray(action)[None])
            obs, reward = result.obs, float(result.reward[0])
            previous = sampled, np.float32(reward)
            taken.append(Step(seen, policy, float(value), np.asarray(sampled), reward))
            if result.terminated[0] or result.truncated[0]:
                ending = _ending(result.terminated[0])
                break
            frames.append(vector.render())  # after the last step it shows the next episode
    return WatchedEpisode(taken, frames, ending, 30.0)


def _ending(terminated: Any) -> str:
    return "ended" if terminated else "stopped by the time limit"
