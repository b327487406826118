"""Rollouts in T-Maze that the tests of the learning rules share, one for each memory model."""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import pytest

from agalite.agents import rollout
from agalite.agents.rollout import Episodes, Rollout, RunnerState
from agalite.envs import make
from agalite.envs.vector import VectorEnv
from agalite.networks.actor_critic import ActorCritic
from modules import random_weights

NUM_STEPS, SEQ_LEN, NUM_ENVS = 48, 12, 4
SMALL = {"d_model": 16, "layers": 1, "heads": 2, "head_size": 8, "ffn_size": 16}
OPTIONS = {
    "agalite": {**SMALL, "eta": 2, "r": 3},
    "gtrxl": {**SMALL, "memory": 6},
    "gru": {"d_model": 16, "hidden_size": 16},
}


class Collected(NamedTuple):
    model: ActorCritic
    before: RunnerState
    after: RunnerState
    rollout: Rollout
    initial_states: object
    episodes: Episodes


@pytest.fixture(scope="session")
def collected():
    """By memory model: the second of two rollouts, in which episodes terminate and truncate."""
    env = make("tmaze", corridor=3, max_steps=7)
    envs = VectorEnv(env, NUM_ENVS)
    done = {}

    @eqx.filter_jit
    def collect(model, state, key):
        return rollout.collect_rollout(
            model, envs, state, key, num_steps=NUM_STEPS, seq_len=SEQ_LEN
        )

    def of(memory):
        if memory not in done:
            make = partial(
                ActorCritic.make,
                env.observation_space(env.default_params),
                env.action_space(env.default_params),
                memory=memory,
                memory_options=OPTIONS[memory],
                hidden_size=16,
            )
            model = random_weights(lambda key: make(key=key))
            before = jax.jit(lambda: rollout.init(model, envs, jax.random.key(1)))()
            before = collect(model, before, jax.random.key(2))[0]
            done[memory] = Collected(model, before, *collect(model, before, jax.random.key(3)))
        return done[memory]

    return of
