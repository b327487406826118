"""A trained agent into files that other programs run: written, replayed, and only then named."""

import contextlib
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
from agalite.export.verify import TOLERANCE, check
from agalite.networks.actor_critic import ActorCritic


@dataclass(frozen=True)
class Written:
    path: Path
    size: int
    """Bytes."""
    difference: float
    """The largest, in the replay."""
    at_step: int
    """The environment steps that the agent had learned from."""


def export_model(
    model: ActorCritic,
    spaces: tuple[Any, Any],
    *,
    onnx: Path | None = None,
    stablehlo: Path | None = None,
    batch: int = 1,
    tolerance: float = TOLERANCE,
    config: dict[str, Any] | None = None,
    at_step: int = 0,
) -> list[Written]:
    """spaces: of observations and actions. A file that does not replay as the model does is not
    left behind: that is a ValueError."""
    validation.integer("batch", batch, minimum=1)
    validation.number("tolerance", tolerance, minimum=0)
    asked: list[tuple[str, Path, ModuleType]] = []
    if onnx is not None:
        asked.append(("onnx", Path(onnx), onnx_file))
    if stablehlo is not None:
        asked.append(("stablehlo", Path(stablehlo), stablehlo_file))
    if not asked:
        raise ValueError("nothing to write: name a file with --onnx or --stablehlo, or both")
    if len({os.path.realpath(path) for _, path, _ in asked}) < len(asked):
        raise ValueError(f"onnx and stablehlo are both {str(onnx)!r}: one would replace the other")
    for name, path, kind in asked:
        kind.require()
        files.check_writable(name, path)
    step = make_step(model, spaces[0].dtype, batch)
    metadata = describe(step, model.actor, spaces, config or {}, at_step)
    return [_write(path, kind, step, metadata, spaces[0], tolerance) for _, path, kind in asked]


def export_run(
    folder: str | os.PathLike[str],
    *,
    onnx: Path | None = None,
    stablehlo: Path | None = None,
    batch: int = 1,
    tolerance: float = TOLERANCE,
    seed_number: int = 0,
    best: bool = False,
) -> list[Written]:
    """The agent of a run as its newest checkpoint has it, or its best: see `export_model`."""
    from agalite.training.policy import load
    from agalite.training.run import Run

    run = Run.open(folder)
    model, trainer, at_step = load(folder, seed_number=seed_number, best=best)
    world: Any = trainer.world
    spaces = tuple(
        kind(world.default_params) for kind in (world.observation_space, world.action_space)
    )
    return export_model(
        model,
        (spaces[0], spaces[1]),
        onnx=onnx,
        stablehlo=stablehlo,
        batch=batch,
        tolerance=tolerance,
        config=run.config,
        at_step=at_step,
    )


def _write(
    path: Path,
    kind: ModuleType,
    step: Step,
    metadata: dict[str, Any],
    observation_space: Any,
    tolerance: float,
) -> Written:
    data = kind.encode(step, metadata)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    unverified = Path(name)
    try:
        files.write(unverified, data)
        run, _ = kind.open_file(unverified)
        difference = check(step, run, observation_space, tolerance=tolerance)
        os.replace(unverified, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            unverified.unlink()
    files.sync(path.parent)
    return Written(path, len(data), difference, metadata["checkpoint_step"])
