"""The step as StableHLO, which JAX and other XLA programs run on any device.

The file is a .zip of two: metadata.json, and program.bin as `jax.export` writes it.
"""

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from agalite import extras, kernels
from agalite.export.step import Step
from agalite.export.verify import Run

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
METADATA, PROGRAM = "metadata.json", "program.bin"


def require() -> None:
    extras.require("a StableHLO file", ["flatbuffers"], "export")


def encode(step: Step, metadata: dict[str, Any]) -> bytes:
    require()
    with kernels.switched_off():  # the file is for machines that do not have our kernels
        exported = jax.export.export(jax.jit(step.function), platforms=_PLATFORMS)(
            *(x.like for x in step.inputs)
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, data in (
            (METADATA, json.dumps(metadata, indent=2, ensure_ascii=False).encode()),
            (PROGRAM, bytes(exported.serialize())),
        ):
            file.writestr(name, data)
    return packed.getvalue()


def open_file(path: Path) -> tuple[Run, dict[str, Any]]:
    """What the file computes, and what it says about itself."""
    with zipfile.ZipFile(path) as file:
        metadata = json.loads(file.read(METADATA))
        exported = jax.export.deserialize(bytearray(file.read(PROGRAM)))
    call = jax.jit(exported.call)

    def run(inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return call(*inputs)

    return run, metadata
