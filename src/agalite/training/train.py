"""Training in JAX environments, from top to bottom.

1. `Trainer.init`: a seed -> the network, the optimizer and the environments (`TrainState`).
2. `Trainer.update`: collect a rollout (`agents/rollout.py`), then learn from it (`agents/a2c.py`,
   `agents/ppo.py`). Streaming agents act and learn at every step (`agents/stream.py`).
3. `Trainer.advance`: a number of updates as one compiled program; returns the mean metrics.
4. `train` and `resume`: a new run, or one from its newest checkpoint.
5. `_train_loop`: advance, log, warn (`diagnostics.py`), checkpoint, until the run has ended or is
   asked to stop.

All seeds of a run are trained by one program (`seeds.py`). Runs in Gymnasium environments are
handed to `asynchronous/train.py`.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from agalite import kernels
from agalite.agents import rollout
from agalite.agents.base import Metrics
from agalite.agents.ppo import PPO
from agalite.agents.pqn import PQN
from agalite.agents.rollout import Episodes, RunnerState
from agalite.agents.stream import StreamAgent
from agalite.envs.registry import make
from agalite.envs.vector import VectorEnv
from agalite.memory.registry import models_with_traces
from agalite.networks.actor_critic import ActorCritic, partition_shapes
from agalite.networks.encoders import observation_bytes
from agalite.system import Stopped, available_memory
from agalite.training.asynchronous import train as asynchronous
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import HostConfig, TrainConfig
from agalite.training.diagnostics import Diagnostics
from agalite.training.logging import MetricsWriter, ProgressBar, check_wandb, enable_wandb
from agalite.training.run import Run
from agalite.training.seeds import Seeds
from agalite.training.session import (
    RETURN,
    SuccessWindow,
    already_finished,
    check_gradient_memory,
    check_losses,
    check_memory,
    enable_compilation_cache,
    finish,
    load_config,
    mean_over_seeds,
    restore_latest,
    stop_signals,
)


class TrainState(NamedTuple):
    """The whole state of one seed between two updates. Arrays only: a checkpoint is exact."""

    weights: Any
    """The arrays of the `ActorCritic`; `Trainer.model` adds its static part."""
    opt_state: Any
    """Of the optimizer; of a streaming agent all that it carries from step to step."""
    runner_state: RunnerState
    key: Array
    update: Int[Array, ""]
    """The number of updates done."""
    trace: Any = None
    """(B, ...) of the runner's memory states; None unless `gradient` is rtrl."""


class Trainer:
    """The pure functions of a configuration: `init`, `update` and `advance`, all of one seed.

    **Arguments:**

    - `config`: the configuration; the environment and the shapes of the network are made here, so
        that mistakes in it show up before a run is created.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.env: Any = make(config.env, **config.env_options)
        check_memory(config, self.env.observation_space(self.env.default_params))
        if config.stop_at_success is not None and not _reports_success(self.env):
            raise ValueError(
                f"stop_at_success={config.stop_at_success:g}: {config.env} reports no success; "
                "leave the option out"
            )
        self.envs = VectorEnv(self.env, config.num_envs)
        agent = config.agent
        self.optimizer: Any = None
        shapes = eqx.filter_eval_shape(self._make_model, jax.random.key(0))
        if not isinstance(agent, StreamAgent):
            self.optimizer = agent.make_optimizer(config.updates)
        if config.gradient == "rtrl" and not shapes.has_traces:
            raise ValueError(
                f"gradient='rtrl' needs a memory model with traces, and {config.memory} has none "
                f"with these options; choose one of: {', '.join(models_with_traces())}, or bptt"
            )
        self.parameter_count: int = shapes.parameter_count
        _, self._static = partition_shapes(shapes)
        if not isinstance(agent, StreamAgent):
            batches = isinstance(agent, (PPO, PQN))
            parts = agent.num_minibatches if batches else 1
            check_gradient_memory(
                config.steps_per_update // parts,
                self.observation_bytes // parts,
                lambda: self._kept_for_backward(config.sequences // parts),
                min(config.num_seeds, jax.local_device_count()),
                "take fewer environments, a smaller num_steps"
                + (" or more minibatches (num_minibatches)" if batches else ""),
            )

    @property
    def observation_bytes(self) -> int:
        """What the observations of an update take, as they are kept for learning."""
        space = self.env.observation_space(self.env.default_params)
        return self.config.steps_per_update * observation_bytes(self.config.encoder, space)

    def check_state_memory(self) -> None:
        """Refuses more seeds than fit into memory with their weights, optimizers and states."""
        available = available_memory()
        if available is None or jax.default_backend() != "cpu":
            return
        state = jax.eval_shape(self.init, jnp.uint32(0))
        one = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        count = self.config.num_seeds
        if count * one > available:
            raise ValueError(
                f"{count:,} seeds of {one / 2**20:.1f} MiB each need "
                f"{count * one / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB of memory are "
                f"available; at most {available // one:,} fit: take fewer (seeds), or several runs"
            )

    def _kept_for_backward(self, sequences: int) -> int:
        """Bytes that the network keeps of so many sequences for the backward pass."""
        length = self.config.sequence_length
        state = jax.eval_shape(self.init, jnp.uint32(0))

        def shaped(x: Array, *batch: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*batch, *x.shape[1:]), x.dtype)

        packed = jax.eval_shape(lambda: self.model(state.weights).pack(state.runner_state.obs))
        obs = jax.tree.map(lambda x: shaped(x, length, sequences), packed)
        memory = jax.tree.map(lambda x: shaped(x, sequences), state.runner_state.memory_state)

        def pull_back(weights: Any, memory: Any, obs: Any, resets: Array) -> Any:
            trained, rest = eqx.partition(weights, eqx.is_inexact_array)

            def outputs(trained: Any) -> Any:
                model = self.model(eqx.combine(trained, rest))
                scan = jax.vmap(model.scan, in_axes=(0, 1, 1), out_axes=(0, 1, 1))
                return jax.tree.leaves(scan(memory, obs, resets)[1:])

            return jax.vjp(outputs, trained)[1]

        resets = jax.ShapeDtypeStruct((length, sequences), bool)
        kept = jax.eval_shape(pull_back, state.weights, memory, obs, resets)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))

    def _make_model(self, key: Array) -> ActorCritic:
        c = self.config
        params = self.env.default_params
        return ActorCritic.make(
            self.env.observation_space(params),
            self.env.action_space(params),
            **c.network_options,
            key=key,
        )

    def model(self, weights: Any) -> ActorCritic:
        """The network with these weights."""
        return eqx.combine(weights, self._static)

    def init(self, seed: Int[Array, ""]) -> TrainState:
        """The state before the first update."""
        model_key, env_key, run_key = jax.random.split(jax.random.key(seed), 3)
        model = self._make_model(model_key)
        runner_state = rollout.init(model, self.envs, env_key)
        if isinstance(self.config.agent, StreamAgent):
            opt_state = self.config.agent.init(model, runner_state, traced=self._traced)
        else:
            opt_state = self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        weights = eqx.filter(model, eqx.is_array)
        # A streaming agent carries its trace itself.
        rolls = self._traced and not isinstance(self.config.agent, StreamAgent)
        trace = model.initial_trace(self.config.num_envs) if rolls else None
        none = jnp.zeros((), jnp.int32)
        state = TrainState(weights, opt_state, runner_state, run_key, none, trace)
        return jax.tree.map(_with_strong_type, state)

    def _noise_key(self, state: TrainState) -> Array | None:
        """The randomness of the actions, if it outlasts a rollout (`noise_steps`)."""
        rollouts = self.config.noise_steps // self.config.num_steps
        if rollouts < 2:
            return None
        first = jax.random.fold_in(state.key, state.update - state.update % rollouts)
        return jax.random.fold_in(jax.random.split(first)[0], 0)

    @property
    def _traced(self) -> bool:
        return self.config.gradient == "rtrl"

    def update(self, state: TrainState) -> tuple[TrainState, tuple[Episodes, Metrics]]:
        """One update: a rollout of `num_steps` in every environment, and learning from it."""
        c = self.config
        act_key, learn_key = jax.random.split(jax.random.fold_in(state.key, state.update))
        model = self.model(state.weights)
        remaining = 1 - state.update / c.updates
        if isinstance(c.agent, StreamAgent):
            model, opt_state, runner_state, episodes, losses = c.agent.run(
                model,
                self.envs,
                state.opt_state,
                state.runner_state,
                act_key,
                remaining,
                num_steps=c.num_steps,
                noise_steps=c.noise_steps,
            )
            weights = eqx.filter(model, eqx.is_array)
            step = state.update + 1
            new = TrainState(weights, opt_state, runner_state, state.key, step, state.trace)
            return new, (episodes, losses)
        runner_state, data, initial_states, episodes = rollout.collect_rollout(
            model,
            self.envs,
            state.runner_state,
            act_key,
            num_steps=c.num_steps,
            seq_len=c.sequence_length,
            bootstrap=c.agent.bootstraps,
            noise_steps=c.noise_steps,
            noise_key=self._noise_key(state),
            sample=c.agent.sampler(remaining),
        )
        start = model, self.optimizer, state.opt_state, data, initial_states
        rest, trace = (c.sequence_length, learn_key, remaining), None
        if self._traced:
            model, opt_state, losses, trace = c.agent.learn_with_trace(*start, state.trace, *rest)
        else:
            model, opt_state, losses = c.agent.learn(*start, *rest)
        # What a memory state caches was computed with the old weights. The axis size is given
        # because a memory state may hold no arrays.
        refresh = jax.vmap(model.refresh, axis_size=c.num_envs)
        runner_state = runner_state._replace(memory_state=refresh(runner_state.memory_state))
        weights = eqx.filter(model, eqx.is_array)
        new = TrainState(weights, opt_state, runner_state, state.key, state.update + 1, trace)
        return new, (episodes, losses)

    def advance(self, state: TrainState, updates: Int[Array, ""]) -> tuple[TrainState, Metrics]:
        """`updates` updates, and their mean metrics.

        The number of updates is an argument of the compiled program, so that a shorter last
        interval does not compile another one.
        """
        # Jitted so that it is traced once for both uses: tracing dominates the start of a run.
        update = jax.jit(self.update)
        shapes = jax.eval_shape(update, state)[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def body(_: Array, carry: Any) -> Any:
            state, sums = carry
            state, new = update(state)
            return state, jax.tree.map(jnp.add, sums, new)

        state, (episodes, losses) = lax.fori_loop(0, updates, body, (state, zeros))
        return state, {**_charts(episodes), **jax.tree.map(lambda x: x / updates, losses)}


def _reports_success(env: Any) -> bool:
    """Whether an episode of the environment can succeed."""

    def info(key: Array) -> Any:
        _, state = env.reset(key)
        return env.step(key, state, env.action_space(env.default_params).sample(key))[5]

    return "success" in jax.eval_shape(info, jax.random.key(0))


def _with_strong_type(x: Array) -> Array:
    """The same array without JAX's weak type.

    An array made from a Python number has a weak type, its successor after an update has not, and
    the difference would compile the program a second time.
    """
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(x, x.dtype)


def _charts(episodes: Episodes) -> dict[str, Float[Array, ""]]:
    """Means over the episodes that ended; NaN if none did."""
    extras = {f"charts/{name}": x / episodes.ended for name, x in episodes.extras.items()}
    return {
        "charts/episodic_return": episodes.returns / episodes.ended,
        "charts/episodic_length": episodes.lengths / episodes.ended,
        "charts/episodes": episodes.ended,
        **extras,
    }


def train(
    config: TrainConfig | HostConfig,
    folder: str | os.PathLike[str],
    *,
    quiet: bool = False,
    wandb: bool = False,
    ray: str | None = None,
) -> Run:
    """Trains a new run to its end.

    **Arguments:**

    - `config`: the configuration.
    - `folder`: a new folder for the run.
    - `quiet`: no progress on the terminal.
    - `wandb`: send the metrics to Weights & Biases too, also whenever the run is resumed.
    - `ray`: for a `HostConfig`, the address of a Ray cluster for the actors; "auto" finds one.

    **Returns:**

    The run. On Ctrl-C or SIGTERM the run is saved and `agalite.system.Stopped` is raised.
    """
    if wandb:
        check_wandb()
    _check_ray(config, ray)
    enable_compilation_cache()
    kernels.build_ahead()
    if isinstance(config, HostConfig):
        with contextlib.closing(asynchronous.make_actors(config, ray)) as actors:
            learner = asynchronous.make_learner(config, actors)
            with _new_run(config, folder, wandb=wandb, quiet=quiet) as run:
                asynchronous.train(run, learner, actors, resumed=False, quiet=quiet)
        return run
    trainer = Trainer(config)
    trainer.check_state_memory()
    with _new_run(config, folder, wandb=wandb, quiet=quiet) as run:
        run.log(
            f"started: {config.env}, {config.memory}, {trainer.parameter_count:,} parameters; "
            f"observations of an update: {trainer.observation_bytes / 2**20:.1f} MiB"
        )
        seeds = Seeds(config.seeds, uneven=True)
        state = seeds.init(trainer.init, config.seed_numbers)
        _train_loop(run, trainer, seeds, state, quiet=quiet)
    return run


def resume(folder: str | os.PathLike[str], *, quiet: bool = False, ray: str | None = None) -> Run:
    """Continues a run from its newest checkpoint, to the same end as if it had never stopped.

    Gymnasium environments cannot be restored: in a run with them, the weights and the optimizer
    continue and the environments begin new episodes.

    **Arguments:**

    - `folder`: of the run.
    - `quiet`, `ray`: as in `train`.

    **Returns:**

    The run. On Ctrl-C or SIGTERM the run is saved and `agalite.system.Stopped` is raised.
    """
    enable_compilation_cache()
    with Run.open(folder, write=True) as run:
        config = load_config(run)
        _check_ray(config, ray)
        if isinstance(config, HostConfig):
            with contextlib.closing(asynchronous.make_actors(config, ray)) as actors:
                learner = asynchronous.make_learner(config, actors)
                asynchronous.train(run, learner, actors, resumed=True, quiet=quiet)
            return run
        trainer, seeds = Trainer(config), Seeds(config.seeds, uneven=True)
        checkpoints = Checkpoints(run.checkpoints_folder, config.keep_checkpoints)
        init = trainer.init, config.seed_numbers
        saved = restore_latest(run, checkpoints, seeds.shapes(*init))
        state = seeds.init(*init) if saved is None else seeds.put(saved)
        if not already_finished(run, config, state.update, quiet=quiet):
            _train_loop(run, trainer, seeds, state, quiet=quiet)
    return run


@contextlib.contextmanager
def _new_run(
    config: TrainConfig | HostConfig,
    folder: str | os.PathLike[str],
    *,
    wandb: bool,
    quiet: bool,
) -> Iterator[Run]:
    with Run.create(folder, config.to_dict()) as run:
        if wandb:
            enable_wandb(run)
        if not quiet:
            print(f"training into {run.folder}", file=sys.stderr)
        yield run


def _check_ray(config: TrainConfig | HostConfig, ray: str | None) -> None:
    if ray is not None and isinstance(config, TrainConfig):
        raise ValueError(
            f"ray={ray!r}: {config.env} is a JAX environment, part of the compiled program; "
            "Ray is for environments of Gymnasium"
        )


def _train_loop(
    run: Run, trainer: Trainer, seeds: Seeds, state: TrainState, *, quiet: bool
) -> None:
    """Trains from `state` (a first axis for the seeds) to the end of the run."""
    config = trainer.config
    checkpoints = Checkpoints(run.checkpoints_folder, config.keep_checkpoints)
    advance = seeds.compile(trainer.advance, shared=1, donate=True)
    done = first = int(np.asarray(state.update)[0])
    steps_per_update, total = config.steps_per_update, config.updates
    log_every = config.in_updates(config.log_every)
    save_every = config.in_updates(config.checkpoint_every)
    began = time.perf_counter()
    with (
        MetricsWriter(run, config.seeds, done * steps_per_update, quiet=quiet) as metrics,
        ProgressBar(total * steps_per_update, done * steps_per_update, quiet=quiet) as bar,
        stop_signals() as received,
    ):
        action_space = trainer.env.action_space(trainer.env.default_params)
        diagnostics = Diagnostics(run, config, action_space, quiet=quiet)
        window = SuccessWindow(run, config.stop_at_success, total * steps_per_update)
        solved = False
        while done < total and not solved:
            # To the next multiple of the log interval: a resumed run logs at the same steps.
            updates = min(log_every - done % log_every, total - done)
            start = time.perf_counter()
            state, values = advance(state, jnp.int32(updates))
            rows = _rows(values, config.seeds)  # waits for the device
            seconds = time.perf_counter() - start
            steps_per_second = updates * steps_per_update * config.seeds / seconds
            done += updates
            step = done * steps_per_update

            check_losses(run, rows, step, checkpoints)
            metrics.write(step, [{**row, "charts/SPS": steps_per_second} for row in rows])
            bar.update(step, steps_per_second, mean_over_seeds(rows))
            diagnostics.add(step, rows, state.opt_state)
            solved = window.reached(step)
            due = done // save_every > (done - updates) // save_every
            if due or solved or done == total or received:
                checkpoints.save(step, seeds.take(state), mean_over_seeds(rows).get(RETURN))
            if received and done < total and not solved:
                name = signal.Signals(received[0]).name
                run.log(f"stopped at step {step} by {name}; all is saved")
                raise Stopped(received[0], run.folder)
    finish(
        run,
        config,
        parameters=trainer.parameter_count,
        seconds=time.perf_counter() - began,
        updates=done - first,
        stopped_at_success=done < total,
    )


def _rows(values: dict[str, Any], seeds: int) -> list[dict[str, float]]:
    """Metrics (seeds,) as a row for each seed."""
    host = {name: np.asarray(x, np.float64) for name, x in values.items()}
    return [{name: float(x[i]) for name, x in host.items()} for i in range(seeds)]
