"""Training a run from its beginning, or from where it stopped, to its end."""

import contextlib
import os
import signal
import sys
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from agalite.agents import rollout
from agalite.agents.rollout import Episodes, RunnerState
from agalite.envs.registry import make
from agalite.envs.vector import Vector
from agalite.networks.actor_critic import ActorCritic
from agalite.system import Stopped
from agalite.training import wandb_log
from agalite.training.asynchronous import train as asynchronous
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import HostConfig, TrainConfig
from agalite.training.logging import Bar, MetricsWriter
from agalite.training.run import Run
from agalite.training.seeds import Seeds
from agalite.training.session import (
    RETURN,
    SUCCESS,
    Diverged,
    asked_to_stop,
    config_of,
    ended,
    finish,
    mean,
    refuse_divergence,
    remember_programs,
    restored,
)
from agalite.training.skeleton import Skeleton

# --- The training program: act, learn, again, for a whole log interval without leaving the device -


class TrainState(NamedTuple):
    """All that a run is, between two updates: arrays only, so that it can be saved to the bit."""

    weights: Any
    """The arrays of the actor-critic."""
    optimiser: Any
    place: RunnerState
    key: Array
    update: Int[Array, ""]
    """How many have been done."""


class Trainer:
    """The pure functions of one configuration: `begin` a run with a seed, `advance` it."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.world: Any = make(config.env, **config.env_options)
        self.vector = Vector(self.world, config.num_envs)
        self._optimiser = config.agent.optimiser(config.updates)
        skeleton = Skeleton(self._make_model)
        self.model, self.parameter_count = skeleton.model, skeleton.parameter_count

    def _make_model(self, key: Array) -> ActorCritic:
        c = self.config
        params = self.world.default_params
        return ActorCritic.make(
            self.world.observation_space(params),
            self.world.action_space(params),
            memory=c.memory,
            memory_options=c.memory_options,
            encoder=c.encoder,
            hidden_size=c.hidden_size,
            key=key,
        )

    def begin(self, seed: Int[Array, ""]) -> TrainState:
        key = jax.random.key(seed)
        model_key, world_key, run_key = jax.random.split(key, 3)
        model = self._make_model(model_key)
        optimiser = self._optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        place = rollout.init(model, self.vector, world_key)
        weights = eqx.filter(model, eqx.is_array)
        state = TrainState(weights, optimiser, place, run_key, jnp.zeros((), jnp.int32))
        return jax.tree.map(_strong, state)

    def update(
        self, state: TrainState
    ) -> tuple[TrainState, tuple[Episodes, dict[str, Float[Array, ""]]]]:
        c = self.config
        act_key, learn_key = jax.random.split(jax.random.fold_in(state.key, state.update))
        model = self.model(state.weights)
        place, data, starts, episodes = rollout.collect_rollout(
            model, self.vector, state.place, act_key, steps=c.num_steps, sequence=c.sequence_length
        )
        remaining = 1 - state.update / c.updates
        model, optimiser, losses = c.agent.learn(
            model,
            self._optimiser,
            state.optimiser,
            data,
            starts,
            c.sequence_length,
            learn_key,
            remaining,
        )
        # What a memory has cached belongs to the weights that made it.
        refresh = jax.vmap(model.refresh, axis_size=c.num_envs)  # a state may hold nothing
        place = place._replace(memory=refresh(place.memory))
        weights = eqx.filter(model, eqx.is_array)
        new = TrainState(weights, optimiser, place, state.key, state.update + 1)
        return new, (episodes, losses)

    def advance(
        self, state: TrainState, updates: Int[Array, ""]
    ) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
        """So many updates; the means of what happened meanwhile.

        The number is not part of the program, so that a shorter last interval compiles nothing.
        """
        # Traced once here and used again by the loop: tracing is what a small run waits for.
        update = jax.jit(self.update)
        shapes = jax.eval_shape(update, state)[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def one(_: Array, carry: Any) -> Any:
            state, sums = carry
            state, new = update(state)
            return state, jax.tree.map(jnp.add, sums, new)

        state, (episodes, losses) = lax.fori_loop(0, updates, one, (state, zeros))
        return state, {**_charts(episodes), **jax.tree.map(lambda x: x / updates, losses)}


def _strong(x: Array) -> Array:
    """The same with a dtype that is no longer up for negotiation.

    A number that came from Python's would have one, its successor after an update not, and the
    whole program would be compiled a second time for the difference.
    """
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(x, x.dtype)


def _charts(episodes: Episodes) -> dict[str, Float[Array, ""]]:
    """NaN where no episode ended."""
    extras = {f"charts/{name}": x / episodes.ended for name, x in episodes.extras.items()}
    return {
        "charts/episodic_return": episodes.returns / episodes.ended,
        "charts/episodic_length": episodes.lengths / episodes.ended,
        "charts/episodes": episodes.ended,
        **extras,
    }


__all__ = [
    "RETURN",
    "SUCCESS",
    "Diverged",
    "config_of",
    "remember_programs",
    "resume",
    "train",
]


def train(
    config: TrainConfig | HostConfig,
    folder: str | os.PathLike[str],
    *,
    quiet: bool = False,
    wandb: bool = False,
    ray: str | None = None,
) -> Run:
    """Trains into a new folder; see `TrainConfig`. On Ctrl-C it saves and raises `Stopped`.

    `wandb`: the metrics also go to Weights & Biases, now and whenever the run is resumed. `ray`:
    the actors of a `HostConfig` are on the cluster at this address ("auto" finds it).
    """
    if wandb:
        wandb_log.check()
    _only_for_hosts(config, ray)
    remember_programs()
    if isinstance(config, HostConfig):
        with (
            contextlib.closing(asynchronous.place_actors(config, ray)) as place,
            Run.create(folder, config.to_dict()) as run,
        ):
            if wandb:
                wandb_log.mark(run)
            _announce(run, quiet=quiet)
            asynchronous.train(run, config, place, resumed=False, quiet=quiet)
        return run
    trainer = Trainer(config)
    with Run.create(folder, config.to_dict()) as run:
        if wandb:
            wandb_log.mark(run)
        _announce(run, quiet=quiet)
        run.log(f"begun: {config.env}, {config.memory}, {trainer.parameter_count:,} parameters")
        seeds = Seeds(config.seeds)
        state = seeds.begin(trainer.begin, config.seed_numbers)
        _continue(run, trainer, seeds, state, quiet=quiet)
    return run


def _announce(run: Run, *, quiet: bool) -> None:
    """Only now: whatever was wrong with the configuration or the folder has been said before."""
    if not quiet:
        print(f"training into {run.folder}", file=sys.stderr)


def resume(folder: str | os.PathLike[str], *, quiet: bool = False, ray: str | None = None) -> Run:
    """Goes on from the newest whole checkpoint, to the same end as if it had never stopped.

    Environments of Gymnasium cannot be restored: there it is what was learned that goes on.
    """
    remember_programs()
    with Run.open(folder, write=True) as run:
        config = config_of(run)
        _only_for_hosts(config, ray)
        if isinstance(config, HostConfig):
            with contextlib.closing(asynchronous.place_actors(config, ray)) as place:
                asynchronous.train(run, config, place, resumed=True, quiet=quiet)
            return run
        trainer, seeds = Trainer(config), Seeds(config.seeds)
        checkpoints = Checkpoints(run.checkpoints_folder, config.keep_checkpoints)
        saved = restored(run, checkpoints, seeds.shapes(trainer.begin, config.seed_numbers))
        if saved is None:
            state = seeds.begin(trainer.begin, config.seed_numbers)
        else:
            state = seeds.put(saved)
        if not ended(run, config, state.update, quiet=quiet):
            _continue(run, trainer, seeds, state, quiet=quiet)
    return run


def _only_for_hosts(config: TrainConfig | HostConfig, ray: str | None) -> None:
    if ray is not None and isinstance(config, TrainConfig):
        raise ValueError(
            f"ray={ray!r}: {config.env} is a JAX environment, part of the compiled program; "
            "Ray is for environments of Gymnasium"
        )


def _continue(run: Run, trainer: Trainer, seeds: Seeds, state: TrainState, *, quiet: bool) -> None:
    config = trainer.config
    checkpoints = Checkpoints(run.checkpoints_folder, config.keep_checkpoints)
    advance = seeds.compile(trainer.advance, shared=1, donate=True)
    done = int(np.asarray(state.update)[0])
    per_update, total = config.steps_per_update, config.updates
    log_every = config.in_updates(config.log_every)
    save_every = config.in_updates(config.checkpoint_every)
    began = time.perf_counter()
    first = done
    with (
        MetricsWriter(run, config.seeds, done * per_update, quiet=quiet) as metrics,
        Bar(total * per_update, done * per_update, quiet=quiet) as bar,
        asked_to_stop() as asked,
    ):
        while done < total:
            count = min(log_every - done % log_every, total - done)
            start = time.perf_counter()
            state, values = advance(state, jnp.int32(count))
            rows = _rows(values, config.seeds)
            rate = count * per_update * config.seeds / (time.perf_counter() - start)
            done += count
            step = done * per_update
            refuse_divergence(run, rows, step, checkpoints)
            metrics.write(step, [{**row, "charts/SPS": rate} for row in rows])
            bar.update(step, rate, mean(rows))
            due = done // save_every > (done - count) // save_every
            if due or done == total or asked:
                checkpoints.save(step, state, mean(rows).get(RETURN))
            if asked and done < total:
                run.log(f"stopped at step {step} by {signal.Signals(asked[0]).name}; all is saved")
                raise Stopped(asked[0], run.folder)
    finish(
        run,
        config,
        parameters=trainer.parameter_count,
        seconds=time.perf_counter() - began,
        updates=done - first,
    )


def _rows(values: dict[str, Any], seeds: int) -> list[dict[str, float]]:
    host = {name: np.asarray(x, np.float64) for name, x in values.items()}
    return [{name: float(x[i]) for name, x in host.items()} for i in range(seeds)]
