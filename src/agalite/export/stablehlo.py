"""Writing a step as StableHLO, and running such a file in JAX.

The file is a .zip with metadata.json and program.bin, which is the output of `jax.export` and runs
on any device of `_PLATFORMS`.
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
    """A ValueError unless flatbuffers is installed."""
    extras.require("a StableHLO file", ["flatbuffers"], "export")


def encode(step: Step, metadata: dict[str, Any]) -> bytes:
    """Lowers a step to StableHLO.

    **Arguments:**

    - `step`: the function and its inputs and outputs.
    - `metadata`: stored in the file (`metadata.describe`).

    **Returns:**

    The contents of the .zip file.
    """
    require()
    with kernels.switched_off():  # other machines do not have the custom kernels
        exported = jax.export.export(jax.jit(step.function), platforms=_PLATFORMS)(
            *(x.like for x in step.inputs)
        )
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, data in (
            (METADATA, json.dumps(metadata, indent=2, ensure_ascii=False).encode()),
            (PROGRAM, bytes(exported.serialize())),
        ):
            file.writestr(name, data)
    return archive.getvalue()


def open_file(path: Path) -> tuple[Run, dict[str, Any]]:
    """The function in the file and the file's metadata."""
    with zipfile.ZipFile(path) as file:
        metadata = json.loads(file.read(METADATA))
        exported = jax.export.deserialize(bytearray(file.read(PROGRAM)))
    call = jax.jit(exported.call)

    def run(inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return call(*inputs)

    return run, metadata
