"""A traced JAX function as a flat list of equations, for conversion to another format.

Nested calls are inlined and short loops unrolled. What depends on no input is computed at once and
becomes a constant; what no output needs is dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from agalite import kernels
from agalite.export.onnx import random_numbers

_MAX_ITERATIONS = 16  # of a loop that is unrolled
_MAX_FILL = 1024  # numbers of a constant fill that is stored; larger ones are broadcast at run time


class Variable:
    """A value that depends on the inputs. Variables are compared by identity."""

    def __init__(self, aval: Any) -> None:
        self.shape: tuple[int, ...] = tuple(aval.shape)
        self.dtype: Any = aval.dtype


# A constant is a JAX array, since random keys have no NumPy form.
Value = Variable | jax.Array


@dataclass(frozen=True)
class Equation:
    """One primitive with its parameters, its inputs and its outputs."""

    primitive: str
    params: dict[str, Any]
    inputs: list[Value]
    outputs: list[Variable]


@dataclass(frozen=True)
class Program:
    """Equations in the order of execution."""

    inputs: list[Variable]
    equations: list[Equation]
    outputs: list[Value]


def trace(function: Callable[..., Any], inputs: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """Traces a function and flattens its jaxpr.

    **Arguments:**

    - `function`: of arrays, to a list of arrays.
    - `inputs`: shapes and dtypes of its arguments.

    **Returns:**

    The program. An output that does not depend on the inputs is an array.
    """
    # No custom kernels, which ONNX does not have. JAX keeps traces by function, so this one is new.
    with kernels.switched_off():
        closed = jax.make_jaxpr(lambda *args: function(*args))(*inputs)
    flattener = _Flattener()
    variables = [Variable(x) for x in inputs]
    outputs = flattener.run(closed.jaxpr, closed.consts, variables)
    return Program(variables, _needed(flattener.equations, outputs), outputs)


class _Flattener:
    """Evaluates a jaxpr on variables and constants, and collects the equations of variables."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
        known: dict[Any, Value] = {}
        known.update(zip(jaxpr.constvars, map(jnp.asarray, consts), strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                aval: Any = atom.aval
                return jnp.asarray(atom.val, aval.dtype)
            return known[atom]

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [read(x) for x in equation.invars])
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(params, inputs)
        keyed = [random_numbers.is_key(x.aval) for x in equation.invars]
        random = name in random_numbers.FUNCTIONS or any(keyed)
        if random and any(isinstance(x, Variable) for x in inputs):
            words = [
                jax.random.key_data(x) if isinstance(x, jax.Array) and is_key else x
                for x, is_key in zip(inputs, keyed, strict=True)
            ]
            function = random_numbers.on_words(equation.primitive, params, keyed)
            plain = jax.make_jaxpr(function)(*map(_shape, words))
            return self.run(plain.jaxpr, plain.consts, words)
        inner = next((params[x] for x in ("jaxpr", "call_jaxpr", "fun_jaxpr") if x in params), None)
        if isinstance(inner, ClosedJaxpr) and name != "while":
            return self.run(inner.jaxpr, inner.consts, inputs)
        if isinstance(inner, Jaxpr):
            return self.run(inner, (), inputs)
        if all(isinstance(x, jax.Array) for x in inputs) and not _is_large_fill(equation):
            found = equation.primitive.bind(*inputs, **params)
            return list(found) if equation.primitive.multiple_results else [found]
        outputs = [Variable(x.aval) for x in equation.outvars]
        self.equations.append(Equation(name, dict(params), inputs, outputs))
        return list(outputs)

    def _scan(self, params: dict[str, Any], inputs: list[Value]) -> list[Value]:
        length, consts, carried = (params[x] for x in ("length", "num_consts", "num_carry"))
        if length > _MAX_ITERATIONS:
            raise ValueError(
                f"the step has a loop of {length} iterations; at most "
                f"{_MAX_ITERATIONS} can be exported"
            )
        body: ClosedJaxpr = params["jaxpr"]
        fixed, carry, sequences = (
            inputs[:consts],
            inputs[consts : consts + carried],
            inputs[consts + carried :],
        )
        order = reversed(range(length)) if params["reverse"] else range(length)
        results: dict[int, list[Value]] = {}
        for i in order:
            slices = [self._apply(lambda x, i=i: x[i], x) for x in sequences]
            found = self.run(body.jaxpr, body.consts, [*fixed, *carry, *slices])
            carry, results[i] = found[:carried], found[carried:]
        count = len(body.jaxpr.outvars) - carried
        stacked = [
            self._apply(lambda *xs: jnp.stack(xs), *(results[i][k] for i in range(length)))
            for k in range(count)
        ]
        return [*carry, *stacked]

    def _apply(self, function: Callable[..., jax.Array], *inputs: Value) -> Value:
        closed = jax.make_jaxpr(function)(*map(_shape, inputs))
        return self.run(closed.jaxpr, closed.consts, inputs)[0]


def _shape(x: Value) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _is_large_fill(equation: JaxprEqn) -> bool:
    if equation.primitive.name != "broadcast_in_dim":
        return False
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    return before.size == 1 and after.size > _MAX_FILL


def _needed(equations: list[Equation], outputs: list[Value]) -> list[Equation]:
    wanted = {id(x) for x in outputs}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if any(id(x) in wanted for x in equation.outputs):
            kept.append(equation)
            wanted.update(id(x) for x in equation.inputs)
    return kept[::-1]
