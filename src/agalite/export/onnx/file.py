"""Writing a step as an ONNX file, and running such a file in onnxruntime.

A property of the model holds the SHA-256 of the file, in which that property itself is zeros.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agalite import extras
from agalite.export.onnx.program import trace
from agalite.export.step import Step
from agalite.export.verify import Run
from agalite.version import __version__

KEY = "agalite"
"""The model's property that holds the metadata, as JSON."""
DIGEST = "agalite_sha256"
"""The property that holds the checksum."""

_ZEROS = b"0" * 64
_SEAL = re.compile(DIGEST.encode() + rb".{2}([0-9a-f]{64})", re.DOTALL)  # tag and length between


def require() -> None:
    """A ValueError unless onnx and onnxruntime are installed."""
    extras.require("an .onnx file", ["onnx", "onnxruntime"], "export")


def encode(step: Step, metadata: dict[str, Any]) -> bytes:
    """Converts a step to ONNX.

    **Arguments:**

    - `step`: the function and its inputs and outputs.
    - `metadata`: stored in the file (`metadata.describe`).

    **Returns:**

    The contents of an .onnx file.
    """
    require()
    import onnx

    from agalite.export.onnx.graph import build
    from agalite.export.onnx.rules import RULES

    program = trace(step.function, [x.like for x in step.inputs])
    model = build(program, RULES, [x.name for x in step.inputs], [x.name for x in step.outputs])
    model.producer_name, model.producer_version = "agalite", __version__
    model.doc_string = metadata["use"]
    onnx.helper.set_model_props(
        model, {KEY: json.dumps(metadata, ensure_ascii=False), DIGEST: _ZEROS.decode()}
    )
    onnx.checker.check_model(model, full_check=True)
    data = model.SerializeToString()
    digest = hashlib.sha256(data).hexdigest().encode()
    return _SEAL.sub(lambda match: match[0][:-64] + digest, data)


def check(path: Path) -> None:
    """ValueError unless the file is one of ours and undamaged."""
    data = path.read_bytes()
    found = _SEAL.findall(data)
    blank = _SEAL.sub(lambda match: match[0][:-64] + _ZEROS, data)
    if len(found) != 1 or hashlib.sha256(blank).hexdigest().encode() != found[0]:
        raise ValueError(
            f"{path} is not an ONNX file of this version of agalite, or is damaged: its SHA-256 is "
            "missing or another; export the agent again"
        )


def open_file(path: Path) -> tuple[Run, dict[str, Any]]:
    """The function in the file, run by onnxruntime on the CPU, and the file's metadata.

    A damaged file is a ValueError.
    """
    check(path)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    metadata = json.loads(session.get_modelmeta().custom_metadata_map[KEY])

    def run(inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        outputs: Any = session.run(None, dict(zip(names, inputs, strict=True)))
        return outputs

    return run, metadata
