"""Environments that step together, whatever happens to some of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Shaped

from agalite.envs.gymnasium.vector import GymnasiumVector, Step
from agalite.envs.gymnasium.workers import Fault

_AT_ONCE = 8  # workers that start side by side


class TooManyFaults(ValueError):
    """Environments failed more often than the run puts up with."""


class Faults:
    """Counts them, tells about each, and says when it is enough."""

    def __init__(self, limit: int, tell: Callable[[str], None]) -> None:
        self.count = 0
        self.over = False
        """Nobody wants anything begun again: an end that comes from here looks like a fault."""
        self._limit, self._tell = limit, tell

    def add(self, where: str, fault: Fault) -> None:
        if self.over:
            raise fault
        self.count += 1
        self._tell(f"fault {self.count} in {where}: {fault}")
        if self.count > self._limit:
            raise TooManyFaults(
                f"environments failed {self.count} times (restarts={self._limit} are allowed); "
                f"the last, in {where}: {str(fault).splitlines()[0]}"
            )
        self._tell(f"{where} is begun again")


class Received(NamedTuple):
    obs: Shaped[np.ndarray, "B ..."]
    rewards: Float[np.ndarray, " B"]
    terminated: Bool[np.ndarray, " B"]
    truncated: Bool[np.ndarray, " B"]
    final: Shaped[np.ndarray, "B ..."]
    """The observation that the step led to, also where the episode ended with it."""
    charts: dict[str, Float[np.ndarray, " B"]]
    """What there is to say of the episode so far; NaN where nothing."""
    torn: Bool[np.ndarray, " B"]
    """The environment failed; this is the first observation of another that took its place."""


class Group:
    """The B environments of several workers: `reset`, then `send` and `receive` by turns.

    A worker with a fault is replaced by a new one. `numbers` are those of the workers within their
    actor, whose name is for messages; `seed(number, life)` gives a seed to a worker's environments,
    anew in each of its lives.
    """

    def __init__(
        self,
        first: GymnasiumVector,
        numbers: range,
        *,
        actor: str,
        seed: Callable[[int, int], int],
        faults: Faults,
    ) -> None:
        """`first` is the first worker."""
        self._numbers, self._actor, self._seed, self._faults = numbers, actor, seed, faults
        self._lives = [0] * len(numbers)
        self.workers = [first]
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                seeds = [seed(number, 0) for number in numbers[1:]]
                made = [pool.submit(first.another, s) for s in seeds]
                errors = [future.exception() for future in made]
            self.workers += [f.result() for f, e in zip(made, errors, strict=True) if e is None]
            for error in errors:
                if error is not None:
                    raise error
        except BaseException:
            self.close()
            raise
        self._size = first.count
        self._broken: dict[int, Fault] = {}

    @property
    def count(self) -> int:
        return self._size * len(self.workers)

    def reset(self) -> Shaped[np.ndarray, "B ..."]:
        out = []
        for i, worker in enumerate(self.workers):
            try:
                out.append(worker.reset(seed=self._seed(self._numbers[i], 0)))
            except Fault as fault:
                out.append(self._replace(i, fault))
        return np.concatenate(out)

    def send(self, actions: Shaped[np.ndarray, "B ..."]) -> None:
        for i, worker in enumerate(self.workers):
            try:
                worker.send(actions[i * self._size : (i + 1) * self._size])
            except Fault as fault:
                self._broken[i] = fault

    def ready(self) -> bool:
        return all(i in self._broken or w.ready() for i, w in enumerate(self.workers))

    def receive(self) -> Received:
        steps, torn = [], []
        for i, worker in enumerate(self.workers):
            fault = self._broken.pop(i, None)
            if fault is None:
                try:
                    steps.append(worker.receive())
                    torn.append(np.zeros(self._size, bool))
                    continue
                except Fault as caught:
                    fault = caught
            steps.append(self._nothing(self._replace(i, fault)))
            torn.append(np.ones(self._size, bool))
        return self._joined(steps, np.concatenate(torn))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _replace(self, i: int, fault: Fault) -> Shaped[np.ndarray, "b ..."]:
        """The first observations of a new worker; as often as it takes, or is allowed."""
        while True:
            number = self._numbers[i]
            self._faults.add(f"worker {number} of {self._actor}", fault)
            self._lives[i] += 1
            try:
                self.workers[i] = self.workers[i].another(self._seed(number, self._lives[i]))
                return self.workers[i].reset()
            except Fault as again:
                fault = again

    def _nothing(self, obs: Shaped[np.ndarray, "b ..."]) -> Step:
        """In place of a step that did not happen: an end, so that the next one is a beginning."""
        zeros, yes = np.zeros(len(obs), np.float32), np.ones(len(obs), bool)
        return Step(obs, zeros, yes, ~yes, {"final_observation": obs})

    def _joined(self, steps: list[Step], torn: Bool[np.ndarray, " B"]) -> Received:
        def join(parts: list[Any]) -> np.ndarray:
            return np.concatenate(parts)

        known = {name for step in steps for name in step.info} - _NOT_CHARTS
        blank = np.full(self._size, np.nan, np.float32)
        charts = {
            _CHARTS.get(name, name): join([step.info.get(name, blank) for step in steps])
            for name in sorted(known)
        }
        return Received(
            join([step.obs for step in steps]),
            join([step.reward for step in steps]),
            join([step.terminated for step in steps]),
            join([step.truncated for step in steps]),
            join([step.info["final_observation"] for step in steps]),
            charts,
            torn,
        )


_NOT_CHARTS = {"terminated", "truncated", "final_observation"}
_CHARTS = {"episode_return": "episodic_return", "episode_length": "episodic_length"}


def split(workers: int, groups: int) -> list[range]:
    """The numbers of the workers in each group: as even as can be."""
    ends = [round(workers * (i + 1) / groups) for i in range(groups)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
