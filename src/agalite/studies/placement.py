"""Where trials are run: in this process, in several on this machine (`workers.py`), or on a Ray
cluster (`on_ray.py`). All are generators of outcomes, told by `begun` which trials are at work, and
stopped by what is put in the list `asked`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from agalite.studies.trials import Trial
from agalite.studies.work import Outcome, perform

Begun = Callable[[Trial], None]


class Placement(Protocol):
    def run(self, trials: Sequence[Trial], begun: Begun) -> Iterator[Outcome]: ...


class Here:
    """One after the other, in this process: JAX starts once."""

    def run(self, trials: Sequence[Trial], begun: Begun) -> Iterator[Outcome]:
        for trial in trials:
            begun(trial)
            outcome = perform(trial)
            yield outcome
            if outcome.state == "stopped":
                return
