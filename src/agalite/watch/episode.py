"""One episode of a trained agent, with all that it saw, thought and did."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8

from agalite.envs.rendering import speed
from agalite.memory.layers import prepare_for_inference
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.heads import Distribution
from agalite.training.asynchronous.evaluate import HostWorld


class Step(NamedTuple):
    obs: Shaped[np.ndarray, "..."]
    policy: Distribution
    """Before the action; one, not a batch."""
    value: float
    sampled: Shaped[np.ndarray, "..."]
    """The action as the policy drew it."""
    reward: float
    """For the action."""


class Watched(NamedTuple):
    steps: list[Step]
    frames: list[UInt8[np.ndarray, "height width 3"]]
    """One for each step, before its action, and where the world can draw it one of the end."""
    why: str
    """How it ended, in words."""
    fps: float

    @property
    def total(self) -> float:
        return sum(step.reward for step in self.steps)

    @property
    def obs(self) -> Shaped[np.ndarray, "T ..."]:
        return np.stack([step.obs for step in self.steps])

    @property
    def sampled(self) -> Shaped[np.ndarray, "T ..."]:
        return np.stack([step.sampled for step in self.steps])

    @property
    def values(self) -> Float[np.ndarray, " T"]:
        return np.array([step.value for step in self.steps])


def play(model: ActorCritic, world: Any, *, seed: int, steps: int, greedy: bool) -> Watched:
    """Until the episode ends, or for so many steps."""
    run = _play_host if isinstance(world, HostWorld) else _play_world
    return run(model, world, seed=seed, steps=steps, greedy=greedy)


def _actor(model: ActorCritic, *, greedy: bool) -> Any:
    """act(memory, obs, first, key) -> memory, policy, value, sampled, action."""
    weights, rest = eqx.partition(prepare_for_inference(model), eqx.is_array)

    @jax.jit
    def act(weights: Any, memory: Any, obs: Array, first: Array, key: Array) -> Any:
        model: ActorCritic = eqx.combine(weights, rest)
        memory, policy, value = model.step(memory, obs, first)
        sampled = policy.mode() if greedy else policy.sample(key)
        return memory, policy, value, sampled, model.to_world(sampled)

    return lambda *args: act(weights, *args)


def _play_world(model: ActorCritic, world: Any, *, seed: int, steps: int, greedy: bool) -> Watched:
    params, act = world.default_params, _actor(model, greedy=greedy)

    @jax.jit
    def begin(key: Array) -> Any:
        obs, state = world.reset_env(key, params)
        return obs, state, world.render(state, params)

    @jax.jit
    def move(key: Array, state: Any, action: Array) -> Any:
        obs, state, reward, terminated, _ = world.step_env(key, state, action, params)
        truncated = world.is_truncated(state, params)
        return obs, state, reward, terminated, truncated, world.render(state, params)

    key = jax.random.key(seed)
    obs, state, frame = begin(jax.random.fold_in(key, 0))
    memory, why = model.initial_state(), "stopped before its end"
    taken, frames = [], [np.asarray(frame)]
    for t in range(steps):
        choose, chance = jax.random.split(jax.random.fold_in(key, t + 1))
        seen = np.asarray(obs)
        memory, policy, value, sampled, action = act(memory, obs, np.asarray(t == 0), choose)
        obs, state, reward, terminated, truncated, frame = move(chance, state, action)
        taken.append(Step(seen, policy, float(value), np.asarray(sampled), float(reward)))
        frames.append(np.asarray(frame))
        if terminated or truncated:
            why = "ended" if terminated else "stopped by the time limit"
            break
    return Watched(taken, frames, why, speed(world))


def _play_host(
    model: ActorCritic, world: HostWorld, *, seed: int, steps: int, greedy: bool
) -> Watched:
    act, key = _actor(model, greedy=greedy), jax.random.key(seed)
    taken, frames, why = [], [], "stopped before its end"
    with world.make(1, seed=seed, processes=False, render_mode="rgb_array") as vector:
        obs, memory = vector.reset(), model.initial_state()
        frames.append(vector.render())
        for t in range(steps):
            seen = np.asarray(obs[0])
            memory, policy, value, sampled, action = act(
                memory, seen, np.asarray(t == 0), jax.random.fold_in(key, t)
            )
            result = vector.step(np.asarray(action)[None])
            obs, reward = result.obs, float(result.reward[0])
            taken.append(Step(seen, policy, float(value), np.asarray(sampled), reward))
            if result.terminated[0] or result.truncated[0]:
                why = "ended" if result.terminated[0] else "stopped by the time limit"
                break
            frames.append(vector.render())  # after the end it would be of the next episode
    return Watched(taken, frames, why, 30.0)
