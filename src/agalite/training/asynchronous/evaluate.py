"""A trained agent back in its Gymnasium environments: to score it, and to film it."""

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
from agalite.envs.rendering import LONGEST
from agalite.networks.actor_critic import ActorCritic
from agalite.training.asynchronous.actor import make_worker
from agalite.training.asynchronous.learner import Learner, Network
from agalite.training.config import HostConfig
from agalite.training.evaluate import Scores

_FRAMES_A_SECOND = 30.0


class HostWorld:
    """The environment of a run, asked for its spaces as a JAX environment is."""

    default_params = None

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        with self.make(1, seed=0, processes=False) as vector:
            self.spaces = vector.observation_space, vector.action_space

    def observation_space(self, _: Any = None) -> Any:
        return self.spaces[0]

    def action_space(self, _: Any = None) -> Any:
        return self.spaces[1]

    def make(self, count: int, *, seed: int, processes: bool, **options: Any) -> GymnasiumVector:
        config = dataclasses.replace(
            self.config,
            num_workers=1,
            num_actors=1,
            envs_per_worker=count,
            processes=processes,
            batch_size=None,
            agent=dataclasses.replace(self.config.agent, num_minibatches=1),
        )
        return make_worker(config, seed, **options)


class HostTrainer:
    """What belongs to the configuration of a run: its world and its network."""

    def __init__(self, config: HostConfig) -> None:
        self.config = config
        self.world = HostWorld(config)
        self.network = Network(config, *self.world.spaces)
        self.parameter_count = self.network.parameter_count
        self.learner = Learner(config, self.network)

    def model(self, weights: Any) -> ActorCritic:
        return self.network.model(weights)


def evaluate(
    model: ActorCritic, world: HostWorld, *, episodes: int, seed: int, greedy: bool, together: int
) -> Scores:
    """Every environment plays the same number of episodes one after the other."""
    validation.integer("episodes", episodes, minimum=1)
    validation.integer("together", together, minimum=1)
    # Each is a process: a few for every core keep it busy.
    count = min(together, episodes, 4 * (os.cpu_count() or 1))
    each = -(-episodes // count)
    act = _compiled(model, greedy=greedy)
    played = np.zeros(count, int)
    results = np.full((each, count, 3), np.nan)
    with world.make(count, seed=seed, processes=world.config.processes) as vector:
        state = model.initial_state(count)
        obs, resets, key, t = vector.reset(), np.ones(count, bool), jax.random.key(seed), 0
        while (played < each).any():
            state, actions = act(state, obs, resets, jax.random.fold_in(key, t))
            step = vector.step(np.asarray(actions))
            resets, obs, t = step.terminated | step.truncated, step.obs, t + 1
            success = step.info.get("success", np.full(count, np.nan))
            row = [step.info["episode_return"], step.info["episode_length"], success]
            # Past its share an environment plays on, and nobody counts.
            for b in np.flatnonzero(resets & (played < each)):
                results[played[b], b] = [x[b] for x in row]
            played += resets
    table = results.reshape(-1, 3)[:episodes]
    known = not np.isnan(table[:, 2]).any()
    return Scores(table[:, 0], table[:, 1], table[:, 2] if known else None)


def film(model: ActorCritic, world: HostWorld, out: Path, *, seed: int, greedy: bool) -> float:
    """One episode as a moving picture; returns its return."""
    rendering.check_path(out)
    act = _compiled(model, greedy=greedy)
    key, frames, total = jax.random.key(seed), [], 0.0
    with world.make(1, seed=seed, processes=False, render_mode="rgb_array") as vector:
        state, obs, resets = model.initial_state(1), vector.reset(), np.ones(1, bool)
        frames.append(vector.render())
        for t in range(LONGEST):
            state, actions = act(state, obs, resets, jax.random.fold_in(key, t))
            step = vector.step(np.asarray(actions))
            obs, resets = step.obs, step.terminated | step.truncated
            total += float(step.reward[0])
            if resets[0]:  # a frame would be of the next episode
                break
            frames.append(vector.render())
    rendering.write(frames, out, fps=_FRAMES_A_SECOND)
    return total


def _compiled(model: ActorCritic, *, greedy: bool) -> Any:
    weights, rest = eqx.partition(model, eqx.is_array)

    @jax.jit
    def act(weights: Any, state: Any, obs: Array, resets: Array, key: Array) -> Any:
        model = eqx.combine(weights, rest)
        keys = jax.random.split(key, resets.shape[0])
        state, policy, _ = jax.vmap(model.step)(state, obs, resets)
        chosen = jax.vmap(lambda p, k: p.mode() if greedy else p.sample(k))(policy, keys)
        return state, jax.vmap(model.to_world)(chosen)

    return lambda *args: act(weights, *args)
