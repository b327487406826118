"""The contracts of the library as functions, for everybody's models and environments.

    from agalite.testing import check_env, check_memory

    check_memory(MyMemory(input_size=3, key=jax.random.key(0)))   # raises ContractError, or nothing

`check_memory` tests the seven promises of `agalite.memory.base`, `check_env` a JAX environment.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from agalite.memory.base import Memory

__all__ = ["PROMISES", "ContractError", "check_env", "check_memory"]

PROMISES = {
    1: "scan equals repeated step",
    2: "any chunking of a sequence gives the same outputs",
    3: "after a reset, outputs equal those from initial_state()",
    4: "the state is a fixed-size pytree of arrays",
    5: "gradients of scan equal gradients of unrolled step",
    6: "outputs and gradients are finite",
    7: "a trace leaves outputs alone, is the same for any chunking, and ends at a reset",
}
TOLERANCE = 1e-5  # of the outputs' scale, in float32
# A difference is rounding if inputs one unit in the last place away change the output by at least
# the difference divided by this.
_ROUNDING = 4.0
_GRADIENT_TOLERANCE = 1e-8  # of the largest gradient, in float64
_NUDGES = 8
_PARTS = ("initial_state", "step", "scan", "input_size", "output_size", "state_size")
_LONGEST_REASON = 300  # characters of a model's own error message
# For programs that run once and whose rounding does not matter: half the time to compile.
_COMPILE_QUICKLY = {"xla_backend_optimization_level": 0}


class ContractError(AssertionError):
    """A promise that a model or an environment does not keep; the message says which and where."""


def check_memory(
    memory: Memory,
    *,
    key: PRNGKeyArray | None = None,
    steps: int = 17,
    longest: int = 4096,
    promises: Iterable[int] = tuple(PROMISES),
) -> None:
    """Tests that a memory model keeps its contract, as Gymnasium's `check_env` does for
    environments.

    Shapes come first, before anything is compiled: `scan` gives (T, output_size), `step` gives
    (output_size,), and both give a state like `initial_state()`.

    **Arguments:**

    - `memory`: the model, with `initial_state`, `step`, `scan`, `input_size`, `output_size` and
        `state_size`. Small sizes are enough, and fast.
    - `key`: draws inputs and resets; `None` is `jax.random.key(0)`.
    - `steps`: length of the sequences of promises 1 to 4, at least 4.
    - `longest`: length of the longest sequence of promise 6, at least 2.
    - `promises`: which of the seven to test, see `PROMISES`. The last is for models with traces.

    **Raises:**

    `ContractError`, which names the promise and the input at which it fails. An exception of the
    model becomes one too, chained to it.
    """
    for name, value, least in (("steps", steps, 4), ("longest", longest, 2)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    promises = list(promises)
    for promise in promises:
        if promise not in PROMISES:
            raise ValueError(f"promises has {promise!r}; choose from {sorted(PROMISES)}")
    _check_parts(memory)
    case = _Case(memory, jax.random.key(0) if key is None else key, steps, longest)
    # Wrong shapes make all other promises fail, with less to the point messages.
    case.check_shapes()
    for promise in sorted(promises, key=lambda promise: (promise != 4, promise)):
        with case.blame(promise, "while it was tested"):
            getattr(case, f"promise_{promise}")()


def check_env(env: Any, **options: Any) -> None:
    """Tests that a JAX environment keeps gymnax's contract and this library's.

    **Arguments:**

    - `env`: a gymnax environment, for example from `agalite.envs.make`.
    - `options`: of `agalite.envs.checker.check_env` (`key`, `steps`, `render`).

    **Raises:**

    `ContractError`, which names the promise and the step at which it fails.
    """
    from agalite.envs import checker

    try:
        checker.check_env(env, **options)
    except AssertionError as error:
        raise ContractError(str(error)) from None


def _check_parts(memory: Any) -> None:
    """Raises if this is no memory model at all."""
    if isinstance(memory, type):
        raise ContractError(f"{memory.__name__} is a class: check an instance of it")
    name = type(memory).__name__
    # Looked up in the class where possible: a property may fail, which is another error.
    missing = [x for x in _PARTS if not hasattr(type(memory), x) and not hasattr(memory, x)]
    if missing:
        raise ContractError(f"{name} is not a memory model: it has no {', '.join(missing)}")
    for size in ("input_size", "output_size"):
        value = getattr(memory, size)
        if not isinstance(value, int | np.integer) or value < 1:
            raise ContractError(f"{name}: {size} is {value!r}, not a whole number >= 1")


class _Case:
    """A model, the programs that all promises share, and one method for each promise."""

    def __init__(self, memory: Memory, key: PRNGKeyArray, steps: int, longest: int) -> None:
        self.memory, self.key, self.steps, self.longest = memory, key, steps, longest
        weights, rest = eqx.partition(memory, eqx.is_array)

        @jax.jit
        def scan(weights: Any, state: Any, xs: Array, resets: Array) -> Any:
            return eqx.combine(weights, rest).scan(state, xs, resets)

        @jax.jit
        def step(weights: Any, state: Any, x: Array, reset: Array) -> Any:
            return eqx.combine(weights, rest).step(state, x, reset)

        def blamed_scan(state: Any, xs: Any, resets: Any) -> Any:
            with self.blame(self.promise, f"scan of {_count(len(xs))}"):
                return scan(weights, state, xs, resets)

        def blamed_step(state: Any, x: Any, reset: Any) -> Any:
            with self.blame(self.promise, "step"):
                return step(weights, state, x, reset)

        self.scan: Callable[..., Any] = blamed_scan
        self.step: Callable[..., Any] = blamed_step
        self.scan_shapes: Callable[..., Any] = lambda *args: scan.eval_shape(weights, *args)
        self.step_shapes: Callable[..., Any] = lambda *args: step.eval_shape(weights, *args)
        self.promise = 4  # the one that is being tested
        with self.blame(4, "initial_state()"):
            self.start = memory.initial_state()

    @contextmanager
    def blame(self, promise: int, what: str) -> Iterator[None]:
        """An exception of the model in here is a broken promise."""
        self.promise = promise
        try:
            yield
        except ContractError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            if len(reason) > _LONGEST_REASON:
                reason = f"{reason[:_LONGEST_REASON]}..."
            raised = f"{what}: raised {type(error).__name__}: {reason}"
            raise self.error(promise, raised) from error

    def check_shapes(self) -> None:
        """Traces scan and step, and compiles nothing."""
        leaves = jax.tree.leaves(self.start)
        for x in leaves:
            if not isinstance(x, jax.Array | np.ndarray):
                raise self.error(4, f"initial_state() has a {type(x).__name__}, not an array")
        # A state without arrays is allowed (Feedforward's), but is often a mistake.
        origin = "" if leaves else f" from initial_state() = {self.start!r}, which has no arrays"
        xs, resets = self.inputs(30)
        calls = {
            f"scan of {_count(self.steps)}": (self.scan_shapes, xs, resets),
            "scan of one input": (self.scan_shapes, xs[:1], resets[:1]),
            "step": (self.step_shapes, xs[0], resets[0]),
        }
        for name, (run, x, reset) in calls.items():
            with self.blame(4, name + origin):
                found = run(self.start, x, reset)
            if not isinstance(found, tuple) or len(found) != 2:
                raise self.error(4, f"{name} gives a {type(found).__name__}, not (state, output)")
            state, y = found
            before, after = _structure(self.start), _structure(state)
            if before != after:
                before, after = (x or "no arrays" for x in (before, after))
                raise self.error(4, f"{name} changes the state from {before} to {after}")
            shape, expected = getattr(y, "shape", None), (*x.shape[:-1], self.memory.output_size)
            if shape != expected:
                gives = f"a {type(y).__name__}" if shape is None else f"outputs of shape {shape}"
                raise self.error(
                    1,
                    f"{name} gives {gives}; output_size={self.memory.output_size} promises "
                    f"{expected}",
                )

    @cached_property
    def used(self) -> Any:
        """The state after a sequence."""
        return self.scan(self.start, *self.inputs(7))[0]

    def inputs(
        self, seed: int, steps: int | None = None, rate: float = 0.2
    ) -> tuple[np.ndarray, np.ndarray]:
        """xs (T, input) in float32 and resets (T,), random."""
        steps, rng = self.steps if steps is None else steps, self.random(seed)
        xs = rng.standard_normal((steps, self.memory.input_size), np.float32)
        return xs, rng.random(steps) < rate

    def random(self, seed: int) -> np.random.Generator:
        data = np.asarray(jax.random.key_data(self.key)).ravel()
        return np.random.default_rng([*data, seed])

    def repeated_step(
        self, state: Any, xs: np.ndarray, resets: np.ndarray
    ) -> tuple[Any, np.ndarray]:
        ys = []
        for x, reset in zip(xs, resets, strict=True):
            state, y = self.step(state, x, reset)
            ys.append(np.asarray(y))
        return state, np.stack(ys)

    def promise_1(self) -> None:
        never = np.zeros(self.steps, bool)
        patterns = {"random resets": None, "no resets": never, "a reset at every input": ~never}
        for seed, (name, resets) in enumerate(patterns.items()):
            xs, drawn = self.inputs(seed)
            resets = drawn if resets is None else resets
            for origin, start in (("initial_state()", self.start), ("a used state", self.used)):
                _, scanned = self.scan(start, xs, resets)
                _, stepped = self.repeated_step(start, xs, resets)
                where = f"from {origin}, with {name}"
                self.same(1, scanned, stepped, where, resets, nudged=(start, xs))

    def promise_2(self) -> None:
        half = self.steps // 2
        for seed, rate in enumerate((0.0, 0.3)):
            xs, resets = self.inputs(10 + seed, rate=rate)
            _, whole = self.scan(self.used, xs, resets)
            for lengths in ((1, half, self.steps - 1 - half), (half, self.steps - 1 - half, 1)):
                state, parts, at = self.used, [], 0
                for length in lengths:
                    part = slice(at, at + length)
                    state, ys = self.scan(state, xs[part], resets[part])
                    parts.append(np.asarray(ys))
                    at += length
                where = f"in chunks of {', '.join(map(str, lengths))} inputs"
                self.same(2, np.concatenate(parts), whole, where, resets, nudged=(self.used, xs))

    def promise_3(self) -> None:
        half, never = self.steps // 2, np.zeros(self.steps, bool)
        first, middle = never.copy(), never.copy()
        first[0] = middle[half] = True
        xs, _ = self.inputs(20)
        states = {
            "a used state": self.used,
            "a state of enormous numbers": jax.tree.map(_fill_with_huge_values, self.start),
        }
        for name, run in (("scan", self.scan), ("step", self.repeated_step)):
            _, fresh = run(self.start, xs, never)
            for state, start in states.items():
                _, ys = run(start, xs, first)
                self.same(3, ys, fresh, f"{name} from {state} with a reset at input 0", first, 0.0)
        other = xs.copy()
        other[:half] += 1.0
        a, b = (np.asarray(self.scan(self.start, x, middle)[1])[half:] for x in (xs, other))
        where = f"after a reset at input {half}, for other inputs before it"
        self.same(3, a, b, where, middle, 0.0, offset=half)

    def promise_4(self) -> None:
        floats = [x for x in jax.tree.leaves(self.start) if jnp.issubdtype(x.dtype, jnp.floating)]
        size = sum(x.size for x in floats)
        with self.blame(4, "state_size"):
            state_size = self.memory.state_size
        if state_size != size:
            raise self.error(4, f"state_size is {state_size}; the state has {size}")

    def promise_5(self) -> None:
        weights, rest = eqx.partition(self.memory, eqx.is_inexact_array)
        xs, resets = self.inputs(40, 7)
        precise = jax.tree.map(lambda x: np.asarray(x, np.float64), (weights, xs))

        def gradient(run: Callable[..., Any]) -> tuple[Any, np.ndarray]:
            def loss(weights: Any, xs: Array) -> Array:
                memory = eqx.combine(weights, rest)
                _, ys = run(memory, memory.initial_state(), xs, resets)
                return jnp.sum(jnp.sin(ys + np.arange(ys.size, dtype=ys.dtype).reshape(ys.shape)))

            compiled = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=_COMPILE_QUICKLY)
            return jax.tree.map(np.asarray, compiled(*precise))

        def unrolled(memory: Memory, state: Any, xs: Array, resets: Array) -> Any:
            return jax.lax.scan(lambda s, x: memory.step(s, *x), state, (xs, resets))

        with jax.enable_x64(True):
            with self.blame(5, f"gradient of {len(xs)} steps, in float64"):
                expected = gradient(unrolled)
            with self.blame(5, f"gradient of a scan of {_count(len(xs))}, in float64"):
                found = gradient(lambda memory, *args: memory.scan(*args))
        scale = max(np.abs(x).max() for x in jax.tree.leaves(expected))
        apart = jax.tree.map(lambda a, b: np.abs(a - b) / scale, found, expected)
        wrong = jax.tree.map(lambda x: ~(x <= _GRADIENT_TOLERANCE), apart)
        for where in _located("gradient by the weights", wrong[0], "gradient by xs", wrong[1]):
            most = max(x.max() for x in jax.tree.leaves(apart))
            raise self.error(5, f"{where}; in float64, {most:.1e} of the largest gradient apart")

    def promise_6(self) -> None:
        # Weights times 100 drive every gate to exactly 0 or 1.
        factors = {"": (1.0, 1.0), " of zeros": (1.0, 0.0), " and weights times 100": (100.0, 1.0)}
        for steps in (1, self.longest):
            self.finite(steps, factors)
        xs, resets = self.inputs(50)
        _, ys = self.scan(self.start, xs.astype(jnp.bfloat16), resets)
        for where in _located("", None, "outputs", ~np.isfinite(ys)):
            raise self.error(6, f"for bfloat16 inputs: {where}")

    def promise_7(self) -> None:
        if not getattr(self.memory, "has_traces", False):
            return
        weights, rest = eqx.partition(self.memory, eqx.is_inexact_array)
        xs, resets = self.inputs(80, 7, 0.0)
        split = 3
        precise = jax.tree.map(lambda x: np.asarray(x, np.float64), (weights, xs))

        def run(weights: Any, xs: Array) -> tuple[Any, ...]:
            memory = eqx.combine(weights, rest)
            start = memory.initial_state(), memory.initial_trace()

            def advance(carry: Any, part: slice, resets: Any) -> Any:
                state, ys, trace = memory.scan_and_advance(
                    carry[0], xs[part], resets[part], carry[1]
                )
                return (state, trace), ys

            whole, _ = advance(start, slice(None), resets)
            used, _ = advance(start, slice(split), resets)
            parts, ys = advance(used, slice(split, None), resets)
            single = start
            for i in range(split):
                single, _ = advance(single, slice(i, i + 1), resets)
            again = np.arange(len(xs)) == split
            fresh, _ = advance(start, slice(split, None), again)
            after_reset, _ = advance(used, slice(split, None), again)
            plain = memory.scan(used[0], xs[split:], resets[split:])[1]
            traces = [x[1] for x in (whole, parts, used, single, fresh, after_reset)]
            return plain, ys, *traces

        with jax.enable_x64(True), self.blame(7, "scan_and_advance, in float64"):
            compiled = jax.jit(run, compiler_options=_COMPILE_QUICKLY)
            found = jax.tree.map(np.asarray, compiled(*precise))
        plain, ys, whole, parts, used, single, fresh, after_reset = found
        pairs = {
            "outputs with a trace differ from those without": (ys, plain),
            f"the trace in chunks of {split} and {len(xs) - split}": (parts, whole),
            "the trace of one input at a time": (single, used),
            "the trace after a reset remembers what was before it": (after_reset, fresh),
        }
        for where, pair in pairs.items():
            scale = max(np.abs(x).max() for x in jax.tree.leaves(pair[1]))
            apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), *pair)
            if not max(jax.tree.leaves(apart)) <= _GRADIENT_TOLERANCE * scale:
                raise self.error(7, where)

    def finite(self, steps: int, cases: dict[str, tuple[float, float]]) -> None:
        """Requires finite outputs and gradients of `steps` inputs.

        cases: name -> factors of the weights and of the inputs.
        """
        weights, rest = eqx.partition(self.memory, eqx.is_inexact_array)
        weights = jax.tree.map(np.asarray, weights)
        xs, _ = self.inputs(60, steps)

        def loss(weights: Any, xs: Array) -> tuple[Array, Array]:
            memory = eqx.combine(weights, rest)
            _, ys = memory.scan(memory.initial_state(), xs, np.zeros(steps, bool))
            return jnp.mean(jnp.square(ys)), ys

        gradient = jax.jit(
            jax.grad(loss, argnums=(0, 1), has_aux=True), compiler_options=_COMPILE_QUICKLY
        )
        for name, (of_weights, of_inputs) in cases.items():
            scaled = jax.tree.map(lambda x, f=of_weights: (f * x).astype(x.dtype), weights)
            with self.blame(6, f"gradient of a scan of {_count(steps)}{name}"):
                found = gradient(scaled, xs * np.float32(of_inputs))
            (by_weights, by_xs), ys = jax.tree.map(lambda x: ~np.isfinite(x), found)
            problems = (
                *_located("", None, "outputs", ys),
                *_located("gradient by the weights", by_weights, "gradient by xs", by_xs),
            )
            for where in problems:
                raise self.error(6, f"for {_count(steps)}{name}: {where}")

    def same(
        self,
        promise: int,
        found: Any,
        expected: Any,
        where: str,
        resets: np.ndarray,
        tolerance: float = TOLERANCE,
        *,
        offset: int = 0,
        nudged: tuple[Any, np.ndarray] | None = None,
    ) -> None:
        """Raises at the first output that differs by more than `tolerance` of the largest output.

        nudged: the state and inputs that gave `expected`. If they are given, a difference that
        rounding of the inputs explains is accepted.
        """
        found, expected = np.asarray(found), np.asarray(expected)
        scale = max(float(np.abs(expected).max()), 1e-6)
        apart = np.abs(found - expected) / scale
        wrong = ~(apart <= tolerance)
        if wrong.any() and nudged is not None:
            wrong &= ~(apart <= _ROUNDING * self.sensitivity(*nudged, resets) / scale)
        if not wrong.any():
            return
        raise self.error(
            promise,
            f"{where}: first at input {_first(wrong) + offset}, {np.nanmax(apart):.1e} of the "
            f"outputs' scale apart (at most {tolerance:g}); episodes begin at inputs "
            f"{np.flatnonzero(resets).tolist()}",
        )

    def sensitivity(self, state: Any, xs: np.ndarray, resets: np.ndarray) -> np.ndarray:
        """(T, 1): how much the outputs change for inputs one unit in the last place away.

        Attention divides by s . q. Where that is almost zero, no two orders of summation agree.
        """
        ys = np.asarray(self.scan(state, xs, resets)[1])
        most = np.zeros((len(xs), 1))
        for i in range(_NUDGES):
            up = self.random(70 + i).random(xs.shape) < 0.5
            other = np.nextafter(xs, np.where(up, np.inf, -np.inf).astype(xs.dtype))
            change = np.abs(self.scan(state, other, resets)[1] - ys)
            most = np.maximum(most, change.max(axis=1, keepdims=True))
        return most

    def error(self, promise: int, where: str) -> ContractError:
        name = type(self.memory).__name__
        return ContractError(f"{name}, promise {promise} ({PROMISES[promise]}): {where}")


def _fill_with_huge_values(x: Array) -> Any:
    """Enormous numbers and counters at the end of their range; random keys (uint32) are kept."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return np.full(x.shape, 1e30, x.dtype)
    if x.dtype in (jnp.uint32, jnp.bool_) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.full(x.shape, jnp.iinfo(x.dtype).max - 1, x.dtype)


def _count(inputs: int) -> str:
    return "one input" if inputs == 1 else f"{inputs} inputs"


def _structure(state: Any) -> list[str]:
    leaves = jax.tree.leaves_with_path(state)
    return [f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}" for path, x in leaves]


def _first(wrong: np.ndarray) -> int:
    """The first index along the first axis at which anything is true."""
    return int(np.argmax(wrong.reshape(wrong.shape[0], -1).any(axis=1)))


def _located(tree_name: str, tree: Any, name: str, by_input: np.ndarray) -> Iterator[str]:
    """Where anything is true: the inputs of `by_input` (T, ...), then the arrays of `tree`."""
    if by_input.any():
        yield f"{name}, first at input {_first(by_input)}"
    for path, wrong in jax.tree.leaves_with_path(tree):
        if wrong.any():
            yield f"{tree_name} {jax.tree_util.keystr(path)}"
