"""A trained agent in its Gymnasium environments: scoring and filming it."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from agalite import validation
from agalite.envs import rendering
from agalite.envs.gymnasium.vector import GymnasiumVector
from agalite.networks.actor_critic import ActorCritic
from agalite.training.asynchronous.learner import Learner, Network
from agalite.training.asynchronous.worker import make_worker
from agalite.training.config import HostConfig
from agalite.training.evaluate import Scores

_FPS = 30.0


class HostEnv:
    """The Gymnasium environment of a run, with the interface of a JAX environment for spaces."""

    default_params = None

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        with self.make(1, seed=0, processes=False) as envs:
            self.spaces = envs.observation_space, envs.action_space

    def observation_space(self, _: Any = None) -> Any:
        return self.spaces[0]

    def action_space(self, _: Any = None) -> Any:
        return self.spaces[1]

    def make(self, num_envs: int, *, seed: int, processes: bool, **options: Any) -> GymnasiumVector:
        """Copies of the environment; `options` are for its constructor."""
        config = dataclasses.replace(
            self.config,
            num_workers=1,
            num_actors=1,
            envs_per_worker=num_envs,
            processes=processes,
            batch_size=None,
            agent=dataclasses.replace(self.config.agent, num_minibatches=1),
        )
        return make_worker(config, seed, **options)


class HostTrainer:
    """What the configuration of a run determines: its environment, network and learner."""

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self.env = HostEnv(config)
        self.network = Network(config, *self.env.spaces)
        self.parameter_count = self.network.parameter_count
        self.learner = Learner(config, self.network)

    def model(self, weights: Any) -> ActorCritic:
        """The actor-critic with these arrays as its weights."""
        return self.network.model(weights)


def evaluate(
    model: ActorCritic, env: HostEnv, *, episodes: int, seed: int, greedy: bool, num_envs: int
) -> Scores:
    """Play whole episodes; see `agalite.training.evaluate.evaluate`."""
    validation.check_integer("episodes", episodes, minimum=1)
    validation.check_integer("num_envs", num_envs, minimum=1)
    # Each environment is a process: a few per core keep it busy.
    count = min(num_envs, episodes, 4 * (os.cpu_count() or 1))
    episodes_per_env = -(-episodes // count)
    act = _compile_act(model, greedy=greedy)
    played = np.zeros(count, int)
    results = np.full((episodes_per_env, count, 3), np.nan)
    with env.make(count, seed=seed, processes=env.config.processes) as envs:
        memory_state = model.initial_state(count)
        obs, resets, key, t = envs.reset(), np.ones(count, bool), jax.random.key(seed), 0
        previous = model.actor.no_action((count,)), np.zeros(count, np.float32)
        while (played < episodes_per_env).any():
            memory_state, sampled, actions = act(
                memory_state, obs, previous, resets, jax.random.fold_in(key, t)
            )
            step = envs.step(np.asarray(actions))
            resets, obs, t = step.terminated | step.truncated, step.obs, t + 1
            previous = sampled, np.asarray(step.reward, np.float32)
            success = step.info.get("success", np.full(count, np.nan))
            row = [step.info["episode_return"], step.info["episode_length"], success]
            # An environment that has played its episodes continues, and its results are dropped.
            for b in np.flatnonzero(resets & (played < episodes_per_env)):
                results[played[b], b] = [x[b] for x in row]
            played += resets
    table = results.reshape(-1, 3)[:episodes]
    known = not np.isnan(table[:, 2]).any()
    return Scores(table[:, 0], table[:, 1], table[:, 2] if known else None)


def film(model: ActorCritic, env: HostEnv, out: Path, *, seed: int, greedy: bool) -> float:
    """Write one episode as a .gif or .mp4; returns the episode's return."""
    rendering.check_path(out)
    act = _compile_act(model, greedy=greedy)
    key, frames, total = jax.random.key(seed), [], 0.0
    with env.make(1, seed=seed, processes=False, render_mode="rgb_array") as envs:
        memory_state, obs, resets = model.initial_state(1), envs.reset(), np.ones(1, bool)
        previous = model.actor.no_action((1,)), np.zeros(1, np.float32)
        frames.append(envs.render())
        for t in range(rendering.MAX_STEPS):
            memory_state, sampled, actions = act(
                memory_state, obs, previous, resets, jax.random.fold_in(key, t)
            )
            step = envs.step(np.asarray(actions))
            previous = sampled, np.asarray(step.reward, np.float32)
            obs, resets = step.obs, step.terminated | step.truncated
            total += float(step.reward[0])
            if resets[0]:  # the next frame would be of the next episode
                break
            frames.append(envs.render())
    rendering.write(frames, out, fps=_FPS)
    return total


def _compile_act(model: ActorCritic, *, greedy: bool) -> Any:
    """act(memory_state, obs, previous, resets, key) -> memory_state, sampled, env_actions.

    `previous` are the sampled actions and the rewards of the step before.
    """
    weights, static = eqx.partition(model, eqx.is_array)

    @jax.jit
    def act(
        weights: Any, memory_state: Any, obs: Array, previous: Any, resets: Array, key: Array
    ) -> Any:
        model = eqx.combine(weights, static)
        keys = jax.random.split(key, resets.shape[0])
        inputs = model.inputs(obs, *previous)
        memory_state, policy, _ = jax.vmap(model.step)(memory_state, inputs, resets)
        actions = jax.vmap(lambda p, k: p.mode() if greedy else p.sample(k))(policy, keys)
        return memory_state, actions, jax.vmap(model.to_env)(actions)

    return lambda *args: act(weights, *args)
