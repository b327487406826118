"""Writing a step as StableHLO, and running such a file in JAX.

The file is a .zip with metadata.json, program.bin, which is the output of `jax.export` and runs on
any device of `_PLATFORMS`, and the SHA-256 of both, which is compared before anything is read. That
finds damage; it does not make a program of unknown origin one that should be run.
"""

import hashlib
import io
import json
import zipfile
import zlib
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
METADATA, PROGRAM, DIGEST = "metadata.json", "program.bin", "sha256.txt"


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
    about = json.dumps(metadata, indent=2, ensure_ascii=False).encode()
    program = bytes(exported.serialize())
    digest = _digest(about, program).encode()
    return archive({METADATA: about, PROGRAM: program, DIGEST: digest})


def archive(contents: dict[str, bytes]) -> bytes:
    """An uncompressed .zip of these files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in contents.items():
            file.writestr(name, data)
    return out.getvalue()


def _digest(metadata: bytes, program: bytes) -> str:
    both = hashlib.sha256(metadata).digest() + hashlib.sha256(program).digest()
    return hashlib.sha256(both).hexdigest()


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """The metadata and the program in a file; ValueError if it is damaged or none of ours."""
    try:
        with zipfile.ZipFile(path) as file:
            entries = {info.filename: info for info in file.infolist()}
            # Uncompressed, as it was written: the contents are not larger than the file.
            if any(entries[x].compress_type for x in (METADATA, PROGRAM, DIGEST)):
                raise ValueError("it is compressed")
            about, program, digest = (file.read(x) for x in (METADATA, PROGRAM, DIGEST))
        intact = digest.decode("ascii") == _digest(about, program)
        metadata = json.loads(about) if intact else None
    except (
        *(zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError),
        *(NotImplementedError, RuntimeError, OverflowError, RecursionError),
    ) as error:
        raise ValueError(
            f"{path} is not a StableHLO file of this version of agalite, or is damaged ({error}); "
            "export the agent again"
        ) from error
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} is damaged: its SHA-256 is another; export the agent again")
    return metadata, program


def open_file(path: Path) -> tuple[Run, dict[str, Any]]:
    """The function in the file and the file's metadata; ValueError if it is damaged."""
    metadata, program = read(path)
    exported = jax.export.deserialize(bytearray(program))
    call = jax.jit(exported.call)

    def run(inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return call(*inputs)

    return run, metadata
