"""Workers, and groups of workers whose environments step together.

A worker is a `GymnasiumVector` of `envs_per_worker` environments. When one of them fails (it
raises, dies, hangs or gives NaN), the whole worker is restarted and the other workers of its group
go on.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Shaped

from agalite.envs import registry
from agalite.envs.gymnasium.vector import GymnasiumVector, Step
from agalite.envs.gymnasium.workers import EnvError
from agalite.training.config import HostConfig

_STARTING_AT_ONCE = 8  # workers that start at the same time
_NO_METRICS = {"terminated", "truncated", "final_observation"}
_METRICS = {"episode_return": "episodic_return", "episode_length": "episodic_length"}


def make_worker(config: HostConfig, seed: int, **options: Any) -> GymnasiumVector:
    """A worker of a run: its environments, each in its own process or all in this one."""
    settings = {
        "num_envs": config.envs_per_worker,
        "asynchronous": config.processes,
        "timeout": config.timeout if config.processes else None,
        "seed": seed,
    }
    made = registry.make(config.env, **{**config.env_options, **settings, **options})
    assert isinstance(made, GymnasiumVector)
    return made


def worker_seed(
    config: HostConfig, start_update: int, actor: int, worker: int, restart: int = 0
) -> int:
    """The seed of a worker's environments, different after every restart and resume.

    **Arguments:**

    - `start_update`: the update at which this session of training started.
    - `actor`, `worker`: their indices.
    - `restart`: how often the worker was restarted.
    """
    entropy = [config.seed, start_update, actor, worker, restart]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def split_workers(workers: int, groups: int) -> list[range]:
    """The indices of the workers in each group, as evenly as possible."""
    ends = [round(workers * (i + 1) / groups) for i in range(groups)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


# A worker that fails as often as this after as many steps with the same message is not restarted.
_SAME_FAULTS = 5


class TooManyFaults(ValueError):
    """Environments failed more often than `restarts` allows, or in the same way every time."""


class FaultCounter:
    """Counts and logs the faults of an actor's environments.

    **Arguments:**

    - `limit`: how many are allowed.
    - `log`: takes a line for the run's log.
    """

    def __init__(self, limit: int, log: Callable[[str], None]) -> None:
        self.count = 0
        self.stopping = False
        """The actor is being closed: its environments end with errors and are not restarted."""
        self._limit, self._log = limit, log
        self._last: dict[str, tuple[tuple[str, int], int]] = {}

    def add(self, where: str, error: EnvError, steps: int) -> None:
        """Count a fault; raise `TooManyFaults` if it is one too many.

        **Arguments:**

        - `where`: names the environments.
        - `error`: what happened.
        - `steps`: since these environments were started.
        """
        if self.stopping:
            raise error
        self.count += 1
        self._log(f"fault {self.count} in {where}: {error}")
        what = (str(error).splitlines()[0], steps)
        last, repeated = self._last.get(where, (None, 0))
        repeated = repeated + 1 if what == last else 1
        self._last[where] = what, repeated
        if repeated == _SAME_FAULTS and self.count <= self._limit:
            raise TooManyFaults(
                f"{where} failed {repeated} times in the same way, each time {steps} steps after "
                f"it was started, so that another restart will not help: {what[0]}"
            )
        if self.count > self._limit:
            raise TooManyFaults(
                f"environments failed {self.count} times (restarts={self._limit} are allowed); "
                f"the last, in {where}: {str(error).splitlines()[0]}"
            )
        self._log(f"{where} is restarted")


class GroupStep(NamedTuple):
    """A step of the B environments of a group."""

    obs: Shaped[np.ndarray, "B ..."]
    rewards: Float[np.ndarray, " B"]
    terminated: Bool[np.ndarray, " B"]
    truncated: Bool[np.ndarray, " B"]
    final_obs: Shaped[np.ndarray, "B ..."]
    """The observation that the step led to, also where it ended the episode."""
    metrics: dict[str, Float[np.ndarray, " B"]]
    """Metrics of the episode so far; NaN where there is no value."""
    restarted: Bool[np.ndarray, " B"]
    """The environment failed; `obs` is the first observation of its replacement."""


class EnvGroup:
    """The B environments of several workers: `reset`, then `send` and `receive` in turn.

    **Arguments:**

    - `first`: the first worker; the others are made like it.
    - `indices`: of the workers among those of their actor.
    - `actor`: the actor's name, for messages.
    - `seed`: gives a worker's seed from its index and its number of restarts.
    - `faults`: counts the faults of the actor.
    """

    def __init__(
        self,
        first: GymnasiumVector,
        indices: range,
        *,
        actor: str,
        seed: Callable[[int, int], int],
        faults: FaultCounter,
    ) -> None:
        self._indices, self._actor, self._seed, self._faults = indices, actor, seed, faults
        self._restarts = [0] * len(indices)
        self._steps = [0] * len(indices)  # since the last restart
        self._envs_per_worker = first.num_envs
        self._errors: dict[int, EnvError] = {}  # of `send`, handled by the next `receive`
        self.workers = [first]
        try:
            with ThreadPoolExecutor(_STARTING_AT_ONCE) as pool:
                seeds = [seed(index, 0) for index in indices[1:]]
                made = [pool.submit(first.recreate, s) for s in seeds]
                errors = [future.exception() for future in made]
            self.workers += [f.result() for f, e in zip(made, errors, strict=True) if e is None]
            for error in errors:
                if error is not None:
                    raise error
        except BaseException:
            self.close()
            raise

    @property
    def num_envs(self) -> int:
        return self._envs_per_worker * len(self.workers)

    def reset(self) -> Shaped[np.ndarray, "B ..."]:
        """The first observations of all environments."""
        out = []
        for i, worker in enumerate(self.workers):
            try:
                out.append(worker.reset(seed=self._seed(self._indices[i], 0)))
            except EnvError as error:
                out.append(self._restart(i, error))
        return np.concatenate(out)

    def send(self, actions: Shaped[np.ndarray, "B ..."]) -> None:
        """Start a step of all environments."""
        size = self._envs_per_worker
        for i, worker in enumerate(self.workers):
            try:
                worker.send(actions[i * size : (i + 1) * size])
            except EnvError as error:
                self._errors[i] = error

    def ready(self) -> bool:
        """Whether `receive` would return at once."""
        return all(i in self._errors or w.ready() for i, w in enumerate(self.workers))

    def receive(self) -> GroupStep:
        """Wait for the step. Workers that failed are restarted."""
        steps, restarted = [], []
        for i, worker in enumerate(self.workers):
            error = self._errors.pop(i, None)
            if error is None:
                try:
                    steps.append(worker.receive())
                    self._steps[i] += 1
                    restarted.append(np.zeros(self._envs_per_worker, bool))
                    continue
                except EnvError as caught:
                    error = caught
            steps.append(_end_of_episode(self._restart(i, error)))
            restarted.append(np.ones(self._envs_per_worker, bool))
        return _concatenate(steps, np.concatenate(restarted))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _restart(self, i: int, error: EnvError) -> Shaped[np.ndarray, "b ..."]:
        """Replace a worker, again if the new one fails too; returns its first observations."""
        while True:
            index = self._indices[i]
            self._faults.add(f"worker {index} of {self._actor}", error, self._steps[i])
            self._restarts[i] += 1
            self._steps[i] = 0
            try:
                self.workers[i] = self.workers[i].recreate(self._seed(index, self._restarts[i]))
                return self.workers[i].reset()
            except EnvError as again:
                error = again


def _end_of_episode(obs: Shaped[np.ndarray, "b ..."]) -> Step:
    """In place of a step that failed: the end of an episode, so that `obs` begins the next one."""
    zeros, ends = np.zeros(len(obs), np.float32), np.ones(len(obs), bool)
    return Step(obs, zeros, ends, ~ends, {"final_observation": obs})


def _concatenate(steps: list[Step], restarted: Bool[np.ndarray, " B"]) -> GroupStep:
    names = {name for step in steps for name in step.info} - _NO_METRICS
    missing = np.full(len(restarted) // len(steps), np.nan, np.float32)
    metrics = {
        _METRICS.get(name, name): np.concatenate([step.info.get(name, missing) for step in steps])
        for name in sorted(names)
    }
    return GroupStep(
        np.concatenate([step.obs for step in steps]),
        np.concatenate([step.reward for step in steps]),
        np.concatenate([step.terminated for step in steps]),
        np.concatenate([step.truncated for step in steps]),
        np.concatenate([step.info["final_observation"] for step in steps]),
        metrics,
        restarted,
    )
