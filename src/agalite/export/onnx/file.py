"""Writing a step as an ONNX file, and running such a file in onnxruntime."""

import json
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
    onnx.helper.set_model_props(model, {KEY: json.dumps(metadata, ensure_ascii=False)})
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def open_file(path: Path) -> tuple[Run, dict[str, Any]]:
    """The function in the file, run by onnxruntime on the CPU, and the file's metadata."""
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
