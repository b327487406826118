"""Trials as tasks of a Ray cluster. The study's folder must be one that every node sees.

A task that is lost with its node is begun again on another, and goes on from its last checkpoint.
"""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from agalite.studies.placement import Begun
from agalite.studies.trials import Trial
from agalite.studies.work import Outcome, perform, record_failure
from agalite.training.cluster import connect, import_ray, own_paths, require_cluster

_GLANCE = 0.5  # seconds between two looks at whether somebody wants us to stop
_RETRIES = 20  # of one trial; nodes are lost, or taken away, often enough
_LOCKED = 120.0  # seconds until a process on a lost node has surely noticed
_SAVING = 300.0  # seconds for all runs to be saved after Ctrl-C


class OnRay:
    """`address` is that of a cluster; "auto" finds one, or starts one on this machine."""

    def __init__(self, address: str, *, cpus: float = 1.0, gpus: float = 0.0) -> None:
        import_ray()
        require_cluster(address)  # before anything is begun
        self._address = address
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}

    def run(self, trials: Sequence[Trial], begun: Begun) -> Iterator[Outcome]:
        from agalite.training.session import asked_to_stop

        ray = import_ray()
        ours = connect(ray, self._address)
        try:
            task = ray.remote(perform).options(
                **self._resources, max_retries=_RETRIES, scheduling_strategy="SPREAD",
                runtime_env={"env_vars": {"PYTHONPATH": own_paths()}},
            )  # fmt: skip
            pending: dict[Any, Trial] = {}
            for trial in trials:
                pending[task.remote(trial, _LOCKED)] = trial
                begun(trial)
            with asked_to_stop() as asked:
                deadline = None
                while pending:
                    if asked and deadline is None:
                        deadline = time.monotonic() + _SAVING
                        for ref in pending:
                            # Ctrl-C for the task, which saves its run.
                            with contextlib.suppress(ray.exceptions.RayError):
                                ray.cancel(ref)
                    if deadline is not None and time.monotonic() > deadline:
                        break
                    try:
                        ready, _ = ray.wait(list(pending), num_returns=1, timeout=_GLANCE)
                    except KeyboardInterrupt:
                        # What Ray makes of any signal; a second one is not so patient.
                        if deadline is not None or not asked:
                            raise
                        continue
                    for ref in ready:
                        yield _outcome(ray, ref, pending.pop(ref), asked)
                if asked:
                    yield Outcome("", "stopped", 0.0, signal=asked[0])
        finally:
            if ours:
                ray.shutdown()


def _outcome(ray: Any, ref: Any, trial: Trial, asked: list[int]) -> Outcome:
    try:
        return ray.get(ref)
    except (ray.exceptions.RayError, KeyboardInterrupt) as error:
        if asked:
            return Outcome(trial.name, "stopped", 0.0, signal=asked[0] or signal.SIGINT)
        message = f"lost on the cluster: {str(error).strip().splitlines()[-1]}"
        record_failure(trial, message, str(error))
        return Outcome(trial.name, "failed", 0.0, message)
