"""A trained agent as a function of observations: `policy = agalite.load_policy("runs/NAME")`."""

import os
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from agalite import validation
from agalite.memory.layers import prepare_for_inference
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.heads import Categorical, Distribution
from agalite.training.asynchronous.evaluate import HostTrainer
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import HostConfig, TrainConfig
from agalite.training.run import Run
from agalite.training.seeds import Seeds
from agalite.training.session import load_config
from agalite.training.train import Trainer


class Loaded(NamedTuple):
    """The network of a run, with the environment it was trained in (`trainer.env`)."""

    model: ActorCritic
    trainer: Trainer | HostTrainer
    step: int
    """Of the checkpoint, in environment steps."""


class State(eqx.Module):
    """The state of one episode, or of `batch` of them along a first axis."""

    memory_state: Any
    previous_action: Any
    """As it was sampled; None where the memory does not read it."""
    batch: int | None = eqx.field(static=True)


class Policy:
    """An agent that acts, one observation at a time. The caller holds its state.

    ```python
    state = policy.initial_state()
    action, state = policy.act(obs, state, reset=first_of_an_episode)
    ```

    With `initial_state(batch=N)` it acts for N environments at once: obs (N, ...), reset (N,),
    actions (N, ...). An agent trained with `previous_reward` also needs the reward of the last
    action: `policy.act(obs, state, reset, reward)`. The last action is part of the state.

    **Arguments:**

    - `model`: the network.
    - `greedy`: take the most likely action instead of a sampled one.
    - `seed`: of the sampling.
    - `dtype`: of the environment's observations.
    """

    def __init__(
        self, model: ActorCritic, *, greedy: bool = False, seed: int = 0, dtype: Any = np.float32
    ) -> None:
        validation.check_boolean("greedy", greedy)
        validation.check_integer_between("seed", seed, 0, 2**32 - 1)
        self.model, self.greedy = model, greedy
        self._dtype = np.dtype(dtype)
        self._key = jax.random.key(seed)
        self._calls = 0
        # The weights are passed as a flat list: flattening the model's modules at every call takes
        # longer than the rest of it.
        arrays, rest = eqx.partition(prepare_for_inference(model), eqx.is_array)
        self._weights, structure = jax.tree.flatten(arrays)

        def look(
            weights: list[Array], state: State, obs: Array, reset: Array, reward: Array
        ) -> tuple[Any, Distribution, Array]:
            model: ActorCritic = eqx.combine(jax.tree.unflatten(structure, weights), rest)
            step = model.step if state.batch is None else jax.vmap(model.step)
            inputs = model.inputs(obs, state.previous_action, reward)
            return step(state.memory_state, inputs, reset)

        def act(
            weights: list[Array],
            state: State,
            obs: Array,
            reset: Array,
            reward: Array,
            key: Array,
            call: Array,
        ) -> tuple[Array, State]:
            memory_state, policy, _ = look(weights, state, obs, reset, reward)

            def choose(policy: Distribution, key: Array) -> tuple[Array, Array]:
                sampled = policy.mode() if greedy else policy.sample(key)
                return sampled, model.to_env(sampled)

            key = jax.random.fold_in(key, call)
            if state.batch is None:
                sampled, action = choose(policy, key)
            else:
                sampled, action = jax.vmap(choose)(policy, jax.random.split(key, state.batch))
            previous = sampled if model.previous_action else None
            return action, State(memory_state, previous, state.batch)

        self._look, self._act = jax.jit(look), jax.jit(act)

    def initial_state(self, batch: int | None = None) -> State:
        """The state before the first observation of an episode, or of `batch` episodes."""
        if batch is not None:
            validation.check_integer("batch", batch, minimum=1)
        shape = () if batch is None else (batch,)
        previous = self.model.actor.no_action(shape) if self.model.previous_action else None
        return State(self.model.initial_state(batch), previous, batch)

    def act(
        self, obs: Shaped[ArrayLike, "..."], state: State, reset: Any = False, reward: Any = None
    ) -> tuple[Any, State]:
        """The next action.

        **Arguments:**

        - `obs`: an observation (...), or (N, ...).
        - `state`: from `initial_state` or from the last call.
        - `reset`: true when an episode begins with `obs`; one, or (N,).
        - `reward`: of the last action; one, or (N,). Needed by agents that were trained with
            `previous_reward`, except where an episode begins.

        **Returns:**

        The action (of the environment's action space, or N of them) and the new state.
        """
        inputs = self._checked(obs, state, reset, reward)
        call = np.uint32(self._calls % 2**32)
        self._calls += 1
        action, state = self._act(self._weights, *inputs, self._key, call)
        # A NumPy scalar rather than an array (): some environments use actions as dictionary keys.
        return np.asarray(action)[()], state

    def value(
        self, obs: Shaped[ArrayLike, "..."], state: State, reset: Any = False, reward: Any = None
    ) -> Float[np.ndarray, "..."]:
        """The critic's estimate of the discounted return from `obs` on: () or (N,).

        **Arguments:** as for `act`. The state is not advanced.
        """
        inputs = self._checked(obs, state, reset, reward)
        return np.asarray(self._look(self._weights, *inputs)[2])[()]

    def probabilities(
        self, obs: Shaped[ArrayLike, "..."], state: State, reset: Any = False, reward: Any = None
    ) -> Float[np.ndarray, "... n"]:
        """The probabilities of n discrete actions: (n,) or (N, n).

        **Arguments:** as for `act`. The state is not advanced.
        """
        policy = self._look(self._weights, *self._checked(obs, state, reset, reward))[1]
        if not isinstance(policy, Categorical):
            raise ValueError("only Discrete action spaces have probabilities; this one is another")
        return np.asarray(jax.nn.softmax(policy.logits, axis=-1))

    def _checked(
        self, obs: Any, state: Any, reset: Any, reward: Any
    ) -> tuple[State, np.ndarray, np.ndarray, np.ndarray]:
        if not isinstance(state, State):
            raise ValueError(
                f"state is a {type(state).__name__}; it must come from policy.initial_state() or "
                "policy.act()"
            )
        batch = () if state.batch is None else (state.batch,)
        resets = np.asarray(reset)
        if resets.dtype.kind not in "biu" or resets.shape not in ((), batch):
            more = f", or {state.batch} of them" if batch else ""
            raise ValueError(f"reset={reset!r} must be True or False{more}")
        values = _numbers(obs, self._dtype)
        validation.check_shape("obs", values, (*batch, *self.model.encoder.shape))
        validation.check_finite("obs", values)
        resets = np.broadcast_to(resets.astype(bool), batch)
        if reward is None and self.model.previous_reward and not resets.all():
            raise ValueError(
                "this agent was trained with previous_reward: give the reward of its last action, "
                "act(obs, state, reset, reward)"
            )
        rewards = np.asarray(0.0 if reward is None else reward)
        if rewards.dtype.kind not in "biuf" or rewards.shape not in ((), batch):
            more = f", or {state.batch} of them" if batch else ""
            raise ValueError(f"reward={reward!r} must be a number{more}")
        validation.check_finite("reward", rewards)
        rewards = np.broadcast_to(rewards.astype(np.float32), batch)
        return state, values.astype(self._dtype), resets, rewards


def _numbers(obs: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """As an array; floats are refused where integers are expected, since pixels from 0 to 1 instead
    of 0 to 255 are a mistake."""
    try:
        values = np.asarray(obs)
    except ValueError as error:  # lists of unequal length
        raise ValueError(f"obs is not an array: {error}") from error
    whole = dtype.kind in "iu"
    if values.dtype.kind not in ("iu" if whole else "biuf"):
        raise ValueError(f"obs has dtype {values.dtype}; expected {dtype}")
    if whole and values.dtype != dtype and values.size:
        low, high = values.min(), values.max()
        if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
            raise ValueError(f"obs goes from {low} to {high}; expected {dtype}")
    return values


def load_policy(
    folder: str | os.PathLike[str],
    *,
    seed_number: int = 0,
    best: bool = False,
    greedy: bool = False,
    seed: int = 0,
) -> Policy:
    """The agent of a run.

    **Arguments:**

    - `folder`: of the run.
    - `seed_number`: which of the run's seeds; 0 is the first.
    - `best`: the checkpoint with the highest return instead of the newest.
    - `greedy`: take the most likely action instead of a sampled one.
    - `seed`: of the sampling.

    **Returns:**

    A `Policy`.
    """
    model, trainer, _ = load(folder, seed_number=seed_number, best=best)
    space: Any = trainer.env.observation_space(trainer.env.default_params)
    return Policy(model, greedy=greedy, seed=seed, dtype=space.dtype)


def open_run(
    folder: str | os.PathLike[str], *, seed_number: int = 0
) -> tuple[Run, TrainConfig | HostConfig]:
    """Opens a run to read one of its seeds.

    **Arguments:**

    - `folder`: of the run.
    - `seed_number`: which of the run's seeds; 0 is the first.

    **Returns:**

    The run and its configuration.
    """
    run = Run.open(folder)
    config = load_config(run)
    if config.num_seeds == 1 and seed_number != 0:
        raise ValueError(
            f"seed_number={seed_number!r}, but the run has 1 seed: seed_number must be 0"
        )
    validation.check_integer_between("seed_number", seed_number, 0, config.num_seeds - 1)
    return run, config


def load(folder: str | os.PathLike[str], *, seed_number: int = 0, best: bool = False) -> Loaded:
    """The network of a run, from its newest checkpoint or its best.

    **Arguments:**

    - `folder`: of the run.
    - `seed_number`: which of the run's seeds; 0 is the first.
    - `best`: the checkpoint with the highest return instead of the newest.

    **Returns:**

    The network, its trainer and the environment steps that it was trained for.
    """
    run, config = open_run(folder, seed_number=seed_number)
    checkpoints = Checkpoints(run.checkpoints_folder, config.keep_checkpoints)
    which = checkpoints.best() if best else None
    if isinstance(config, HostConfig):
        trainer = HostTrainer(config)
        step, state = checkpoints.restore(trainer.learner.state_shapes(), which)
        return Loaded(trainer.model(state.weights), trainer, step)
    trainer = Trainer(config)
    like = Seeds(config.seeds).shapes(trainer.init, config.seed_numbers)
    step, state = checkpoints.restore(like, which)
    weights = jax.tree.map(lambda x: x[seed_number], state.weights)
    return Loaded(trainer.model(weights), trainer, step)
