"""An ONNX graph while it is being built: nodes by name, constants stored once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from agalite.export.onnx.program import Equation, Program, Reference, Value

OPSET = 18
_IR_VERSION = 8  # of the same time; readers refuse files newer than themselves


def onnx_dtype(dtype: Any) -> int:
    """As the graph holds it: runtimes hardly compute with uint32, so it is a long int64 there."""
    plain = np.dtype(dtype)
    if plain == np.uint32:
        return TensorProto.INT64
    try:
        return helper.np_dtype_to_tensor_dtype(plain)
    except (KeyError, ValueError) as error:
        raise ValueError(f"numbers of dtype {plain} have no form in ONNX") from error


class Graph:
    """`add` a node and get the name of its output; inputs are names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        return self.add_many(operator, inputs, 1, **attributes)[0]

    def add_many(
        self, operator: str, inputs: Sequence[str], outputs: int, **attributes: Any
    ) -> list[str]:
        names = [self._name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names

    def constant(self, value: Any, dtype: Any = None) -> str:
        array = np.asarray(value, dtype)
        if array.dtype == np.uint32:
            array = array.astype(np.int64)
        where = (array.dtype.str, array.shape, array.tobytes())
        if where not in self._constants:
            name = self._constants[where] = self._name()
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
            if array.ndim == 0:  # ascontiguousarray makes a row of a single number
                del self.initializers[-1].dims[:]
        return self._constants[where]

    def integers(self, values: Sequence[int]) -> str:
        return self.constant(np.array([int(x) for x in values], np.int64))

    def reshape(self, name: str, shape: Sequence[int]) -> str:
        return self.add("Reshape", name, self.integers(shape))

    def _name(self) -> str:
        self._count += 1
        return f"x{self._count}"


class Site:
    """What a rule is given: the graph, the equation, and the names of its inputs there."""

    def __init__(self, graph: Graph, equation: Equation, names: list[str]) -> None:
        self.graph, self.names = graph, names
        self.params, self.inputs, self.outputs = (
            equation.params,
            equation.inputs,
            equation.outputs,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outputs[0].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.outputs[0].dtype)

    def value(self, i: int) -> np.ndarray | None:
        """The i-th input, if it is a constant."""
        x = self.inputs[i]
        return None if isinstance(x, Reference) else np.asarray(x)


Rule = Callable[[Site], str | list[str]]


def build(
    program: Program, rules: dict[str, Rule], inputs: Sequence[str], outputs: Sequence[str]
) -> onnx.ModelProto:
    """The program as a model whose inputs and outputs have these names."""
    graph = Graph()
    names: dict[int, str] = {id(x): y for x, y in zip(program.inputs, inputs, strict=True)}

    def name_of(x: Value) -> str:
        return names[id(x)] if isinstance(x, Reference) else graph.constant(x)

    for equation in program.equations:
        rule = rules.get(equation.primitive)
        if rule is None:
            raise ValueError(
                f"the step uses JAX's primitive {equation.primitive!r}, for which there is no rule "
                "to write it in ONNX; --stablehlo can export any model"
            )
        found = rule(Site(graph, equation, [name_of(x) for x in equation.inputs]))
        found = [found] if isinstance(found, str) else found
        names.update({id(x): y for x, y in zip(equation.outputs, found, strict=True)})
    for value, name in zip(program.outputs, outputs, strict=True):
        graph.nodes.append(helper.make_node("Identity", [name_of(value)], [name]))

    def described(values: Sequence[Value], called: Sequence[str]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, onnx_dtype(x.dtype), x.shape)
            for x, name in zip(values, called, strict=True)
        ]

    # A rule may have stored a constant in another form.
    read = {name for node in graph.nodes for name in node.input}
    made = helper.make_graph(
        graph.nodes,
        "policy",
        described(program.inputs, inputs),
        described(program.outputs, outputs),
        [x for x in graph.initializers if x.name in read],
    )
    return helper.make_model(
        made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION
    )
