"""Exporting a trained agent to files that other programs run.

A file is written under a temporary name, opened again and compared with the agent, and renamed only
if both agree (`verify`).
"""

import contextlib
import dataclasses
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from agalite import files, validation
from agalite.export import stablehlo as stablehlo_file
from agalite.export.metadata import describe
from agalite.export.onnx import file as onnx_file
from agalite.export.step import Step, make_step
from agalite.export.verify import check
from agalite.networks.actor_critic import ActorCritic


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written and verified."""

    path: Path
    size: int
    """In bytes."""
    difference: float
    """The largest difference from the agent."""
    at_step: int
    """Environment steps that the agent had been trained for."""


def export_model(
    model: ActorCritic,
    spaces: tuple[Any, Any],
    *,
    onnx: Path | None = None,
    stablehlo: Path | None = None,
    batch_size: int = 1,
    tolerance: float | None = None,
    config: dict[str, Any] | None = None,
    at_step: int = 0,
) -> list[ExportedFile]:
    """Writes an agent to an ONNX file, a StableHLO file or both.

    **Arguments:**

    - `model`: the agent; the products of one in bfloat16 are written in float32.
    - `spaces`: the environment's spaces of observations and of actions.
    - `onnx`, `stablehlo`: the files to write.
    - `batch_size`: agents that act together, the first axis of all inputs and outputs.
    - `tolerance`: the largest difference allowed between a file and the agent; a file that differs
        by more is a ValueError and not kept. `None`: as in `verify.check`.
    - `config`: the run's configuration, for the metadata.
    - `at_step`: environment steps that the agent was trained for, for the metadata.

    **Returns:**

    The files that were written.
    """
    formats = check_arguments(onnx, stablehlo, batch_size, tolerance)
    # Other programs run the file on a CPU, where ONNX Runtime has no products in bfloat16.
    model = dataclasses.replace(model, precision="float32")
    step = make_step(model, spaces[0].dtype, batch_size)
    metadata = describe(step, model.actor, spaces, config or {}, at_step)
    return [
        _write(path, module, step, metadata, spaces[0], tolerance) for _, path, module in formats
    ]


def check_arguments(
    onnx: Path | None, stablehlo: Path | None, batch_size: int, tolerance: float | None
) -> list[tuple[str, Path, ModuleType]]:
    """Refuses what `export_model` refuses, before anything is loaded.

    **Returns:**

    The files to write: the argument's name, the path, and the module of its format.
    """
    validation.check_integer("batch_size", batch_size, minimum=1)
    if tolerance is not None:
        validation.check_number("tolerance", tolerance, minimum=0)
    formats: list[tuple[str, Path, ModuleType]] = []
    if onnx is not None:
        formats.append(("onnx", Path(onnx), onnx_file))
    if stablehlo is not None:
        formats.append(("stablehlo", Path(stablehlo), stablehlo_file))
    if not formats:
        raise ValueError("nothing to write: name a file with --onnx or --stablehlo, or both")
    if len({os.path.realpath(path) for _, path, _ in formats}) < len(formats):
        raise ValueError(f"onnx and stablehlo are both {str(onnx)!r}: one would replace the other")
    for name, path, module in formats:
        module.require()
        files.check_writable(name, path)
    return formats


def export_run(
    folder: str | os.PathLike[str],
    *,
    onnx: Path | None = None,
    stablehlo: Path | None = None,
    batch_size: int = 1,
    tolerance: float | None = None,
    seed_number: int = 0,
    best: bool = False,
) -> list[ExportedFile]:
    """Writes the agent of a run to an ONNX file, a StableHLO file or both.

    **Arguments:**

    - `folder`: of the run.
    - `onnx`, `stablehlo`, `batch_size`, `tolerance`: as in `export_model`.
    - `seed_number`: which of the run's seeds; 0 is the first.
    - `best`: the best checkpoint instead of the newest.

    **Returns:**

    The files that were written.
    """
    from agalite.training.policy import load
    from agalite.training.run import Run

    run = Run.open(folder)
    model, trainer, at_step = load(folder, seed_number=seed_number, best=best)
    env: Any = trainer.env
    return export_model(
        model,
        (env.observation_space(env.default_params), env.action_space(env.default_params)),
        onnx=onnx,
        stablehlo=stablehlo,
        batch_size=batch_size,
        tolerance=tolerance,
        config=run.config,
        at_step=at_step,
    )


def _write(
    path: Path,
    module: ModuleType,
    step: Step,
    metadata: dict[str, Any],
    observation_space: Any,
    tolerance: float | None,
) -> ExportedFile:
    data = module.encode(step, metadata)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    unverified = Path(name)
    try:
        files.write(unverified, data)
        run, _ = module.open_file(unverified)
        difference = check(step, run, observation_space, tolerance=tolerance)
        os.replace(unverified, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            unverified.unlink()
    files.sync(path.parent)
    return ExportedFile(path, len(data), difference, metadata["checkpoint_step"])
