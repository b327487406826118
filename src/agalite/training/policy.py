"""A trained agent that you can call: `policy = load_policy("runs/NAME")`."""

import os
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from agalite import errors
from agalite.nets.actor_critic import ActorCritic
from agalite.training.checkpoint import Checkpoints
from agalite.training.loop import Trainer
from agalite.training.run import Run
from agalite.training.seeds import Seeds
from agalite.training.train import config_of


class Loaded(NamedTuple):
    """A model out of a run, with the world it was trained in."""

    model: ActorCritic
    trainer: Trainer
    step: int


class Policy:
    """Acts one observation at a time; the state is the caller's, and never grows.

    state = policy.initial_state()
    action, state = policy.act(obs, state, reset=first_of_an_episode)
    """

    def __init__(self, model: ActorCritic, *, greedy: bool = False, seed: int = 0) -> None:
        self.model, self.greedy = model, greedy
        self._key = jax.random.key(seed)
        self._calls = 0

        @eqx.filter_jit
        def act(model: ActorCritic, state: Any, obs: Array, reset: Array, key: Array) -> Any:
            state, policy, _ = model.step(state, obs, reset)
            action = policy.mode() if greedy else policy.sample(key)
            return model.to_world(action), state

        self._act = act

    def initial_state(self) -> Any:
        return self.model.initial_state()

    def act(
        self, obs: Shaped[Array, "..."] | np.ndarray, state: Any, reset: bool = False
    ) -> tuple[np.ndarray, Any]:
        """obs (...) -> action, state; `reset` is true when an episode begins with this one."""
        key = jax.random.fold_in(self._key, self._calls)
        self._calls += 1
        action, state = self._act(self.model, state, jnp.asarray(obs), jnp.asarray(reset), key)
        return np.asarray(action), state


def load_policy(
    folder: str | os.PathLike[str], *, seed_number: int = 0, best: bool = False,
    greedy: bool = False,
) -> Policy:  # fmt: skip
    """The agent of a run as its newest checkpoint has it, or its best."""
    return Policy(load(folder, seed_number=seed_number, best=best).model, greedy=greedy)


def load(folder: str | os.PathLike[str], *, seed_number: int = 0, best: bool = False) -> Loaded:
    run = Run.open(folder)
    config = config_of(run)
    errors.integer_between("seed_number", seed_number, 0, config.seeds - 1)
    trainer = Trainer(config)
    like = jax.eval_shape(Seeds(config.seeds).over(trainer.begin), config.seed_numbers)
    checkpoints = Checkpoints(run.checkpoints_folder, config.keep)
    step, state = checkpoints.restore(like, checkpoints.best() if best else None)
    weights = jax.tree.map(lambda x: x[seed_number], state.weights)
    return Loaded(trainer.model(weights), trainer, step)
