"""Programs timed in turns, so many runs each or until their time is used up."""

from collections.abc import Sequence

import jax
from rich.progress import Progress

from agalite.bench.timing import Program

_LEAST = 3
"""Runs that a median needs at least, whatever the time limit; one that is very long gets fewer."""
_BURST = 4
_QUICK = 0.1  # seconds: a longer run warms its own caches


def take_turns(
    programs: Sequence[Program], progress: Progress, what: str, *, runs: int, seconds: float
) -> None:
    """Each program has up to `runs` runs and `seconds` of time; a busy machine slows all alike.

    A turn of short runs is several in a row after one that does not count: a stream finds the
    caches as its own last step left them, not as another model did. No run is begun that would take
    more than the time left; every program has one, and three if they take no more than twice it.
    """
    for program in programs:
        # The very first run can take many times as long as any other.
        jax.block_until_ready(program.call())
        program.seconds.clear()
    task = progress.add_task(what, total=runs * len(programs))
    waiting = list(range(len(programs)))
    while waiting:
        for i in list(waiting):
            _turn(programs[i], runs)
            enough = len(programs[i].seconds) >= runs
            if enough or not _has_time(programs[i], seconds):
                waiting.remove(i)
            progress.update(task, completed=_completed(programs, runs, waiting))
    progress.remove_task(task)


def _turn(program: Program, runs: int) -> None:
    program.time()
    if program.seconds[-1] <= _QUICK:
        program.seconds.pop()
        for _ in range(min(_BURST, runs - len(program.seconds))):
            program.time()


def _has_time(program: Program, seconds: float) -> bool:
    limit = 2 * seconds if len(program.seconds) < _LEAST else seconds
    return sum(program.seconds) + min(program.seconds) <= limit


def _completed(programs: Sequence[Program], runs: int, waiting: list[int]) -> int:
    return sum(len(p.seconds) if i in waiting else runs for i, p in enumerate(programs))
