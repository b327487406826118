"""An ONNX model built from a flat program: nodes that refer to each other by name, constants."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from agalite.export.onnx.program import Equation, Program, Value, Variable

OPSET = 18
_IR_VERSION = 8  # the one that came with this opset; runtimes refuse newer files


def onnx_dtype(dtype: Any) -> int:
    """The type in the graph. uint32 becomes int64, since runtimes hardly support uint32."""
    dtype = np.dtype(dtype)
    if dtype == np.uint32:
        return TensorProto.INT64
    try:
        return helper.np_dtype_to_tensor_dtype(dtype)
    except (KeyError, ValueError) as error:
        raise ValueError(f"numbers of dtype {dtype} have no form in ONNX") from error


class Graph:
    """The nodes and constants of a model under construction. Values are referred to by name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        return self.add_many(operator, inputs, 1, **attributes)[0]

    def add_many(
        self, operator: str, inputs: Sequence[str], outputs: int, **attributes: Any
    ) -> list[str]:
        """Adds a node with so many outputs and returns their names."""
        names = [self._name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names

    def constant(self, value: Any, dtype: Any = None) -> str:
        """The name of a constant; equal constants are stored once."""
        array = np.asarray(value, dtype)
        if array.dtype == np.uint32:
            array = array.astype(np.int64)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = self._name()
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
            if array.ndim == 0:  # ascontiguousarray gives it one axis
                del self.initializers[-1].dims[:]
        return self._constants[key]

    def integers(self, values: Sequence[int]) -> str:
        """The name of a constant int64 vector."""
        return self.constant(np.array([int(x) for x in values], np.int64))

    def reshape(self, name: str, shape: Sequence[int]) -> str:
        return self.add("Reshape", name, self.integers(shape))

    def _name(self) -> str:
        self._count += 1
        return f"x{self._count}"


class Context:
    """The argument of a rule: the graph, the equation, and the names of the equation's inputs."""

    def __init__(self, graph: Graph, equation: Equation, names: list[str]) -> None:
        self.graph, self.names = graph, names
        self.params, self.inputs, self.outputs = (
            equation.params,
            equation.inputs,
            equation.outputs,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first output."""
        return self.outputs[0].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the first output."""
        return np.dtype(self.outputs[0].dtype)

    def value(self, i: int) -> np.ndarray | None:
        """The i-th input if it is a constant, else None."""
        x = self.inputs[i]
        return None if isinstance(x, Variable) else np.asarray(x)


# Adds the nodes of one equation, and returns the name of each output.
Rule = Callable[[Context], str | list[str]]


def build(
    program: Program, rules: dict[str, Rule], inputs: Sequence[str], outputs: Sequence[str]
) -> onnx.ModelProto:
    """Converts a program to an ONNX model.

    **Arguments:**

    - `program`: the equations.
    - `rules`: by primitive, how its equations are written.
    - `inputs`, `outputs`: names of the model's inputs and outputs.

    **Returns:**

    The model. A primitive without a rule is a ValueError that names it.
    """
    graph = Graph()
    names: dict[int, str] = {id(x): y for x, y in zip(program.inputs, inputs, strict=True)}

    def name_of(x: Value) -> str:
        return names[id(x)] if isinstance(x, Variable) else graph.constant(x)

    for equation in program.equations:
        rule = rules.get(equation.primitive)
        if rule is None:
            raise ValueError(
                f"the step uses JAX's primitive {equation.primitive!r}, for which there is no rule "
                "to write it in ONNX; --stablehlo can export any model"
            )
        found = rule(Context(graph, equation, [name_of(x) for x in equation.inputs]))
        found = [found] if isinstance(found, str) else found
        names.update({id(x): y for x, y in zip(equation.outputs, found, strict=True)})
    for value, name in zip(program.outputs, outputs, strict=True):
        graph.nodes.append(helper.make_node("Identity", [name_of(value)], [name]))

    def value_infos(values: Sequence[Value], names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, onnx_dtype(x.dtype), x.shape)
            for x, name in zip(values, names, strict=True)
        ]

    # A constant is unused if a rule stores it in another form.
    used = {name for node in graph.nodes for name in node.input}
    onnx_graph = helper.make_graph(
        graph.nodes,
        "policy",
        value_infos(program.inputs, inputs),
        value_infos(program.outputs, outputs),
        [x for x in graph.initializers if x.name in used],
    )
    return helper.make_model(
        onnx_graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION
    )
