"""The memory contract for every model: the rows are in memory_models.py."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import testing
from agalite.memory.base import Memory
from agalite.memory.layers import prepare_for_inference
from agalite.testing import PROMISES, ContractError, check_memory
from memory_models import INPUT, OTHERS, QUICK, ROWS, build, distance, inputs

STEPS = 17  # the default of check_memory: programs of this length are compiled already
TOLERANCE = 1e-5

# All tests of one row run before the next row: they share its programs.
quick_rows = pytest.mark.parametrize("row", QUICK, scope="module")


class Compiled(NamedTuple):
    memory: Memory
    scan: object
    steps: object  # repeated step: called as scan, one program for any length


@pytest.fixture(scope="module")
def compiled():
    """row -> its model and compiled programs. It keeps one row at a time."""
    made = {}

    def get(row):
        if row not in made:
            made.clear()
            memory = build(row)
            made[row] = Compiled(memory, with_weights(memory, "scan"), repeated_step(memory))
        return made[row]

    return get


def with_weights(memory, name):
    """A compiled method of a model. Weights are arguments, as in check_memory: one program."""
    weights, rest = eqx.partition(memory, eqx.is_array)

    def run(weights, *args):
        return getattr(eqx.combine(weights, rest), name)(*args)

    run.__name__ = name  # part of the key of the compilation cache
    compiled = jax.jit(run)
    return lambda *args: compiled(weights, *args)


def repeated_step(memory):
    step = with_weights(memory, "step")

    def run(state, xs, resets):
        ys = []
        for x, reset in zip(np.asarray(xs), np.asarray(resets), strict=True):
            state, y = step(state, x, reset)
            ys.append(np.asarray(y))
        return state, np.stack(ys)

    return run


# --- check_memory ---------------------------------------------------------------------------------


# Compiling the gradients of these takes longest; their whole contract is a slow test.
GRADIENTS_SLOW = {
    *("linear", "transformer", "gtrxl", "s5", "rtu", "mingru"),
    *("mlstm", "deltanet", "mamba2"),
}


@quick_rows
def test_contract(row):
    promises = [1, 2, 3, 4] if row in GRADIENTS_SLOW else PROMISES
    check_memory(build(row), longest=256, promises=promises)


@pytest.mark.parametrize("row", OTHERS)
def test_scan_equals_repeated_step(row):
    check_memory(build(row), promises=[1])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_contract_of_every_variant(row):
    check_memory(build(row))
    check_memory(build(row), key=jax.random.key(1), steps=70, promises=[1, 2])


class LeakySum(Memory):
    """h <- 0.3 h + w x, with faults for check_memory to find."""

    weight: jax.Array
    fault: str = eqx.field(static=True)
    input_size: int = eqx.field(static=True, default=INPUT)
    output_size: int = eqx.field(static=True, default=INPUT)

    def initial_state(self):
        return jnp.zeros(self.output_size, self.weight.dtype)

    def _run(self, state, xs, resets):
        fault = self.fault if len(xs) > 1 or self.fault in OF_STEPS_TOO else None
        if fault == "ignores resets":
            resets = jnp.zeros_like(resets)
        if fault == "zero inputs are not finite":
            xs = xs / jnp.linalg.norm(xs, axis=1, keepdims=True)

        def step(h, x):
            x, reset = x
            h = jnp.where(reset, 0, jax.lax.stop_gradient(h) if fault == "gradient is cut" else h)
            decayed = {"scan is not step": 0.4 * h, "sums in another order": h - 0.7 * h}
            h = decayed.get(fault, 0.3 * h) + self.weight * x
            # Any rounding of h is a thousand times as large in the output.
            return h, jnp.sin(1000 * h) if self.fault == "sums in another order" else h

        state, ys = jax.lax.scan(step, state, (xs, resets))
        if fault == "state grows":
            state = jnp.concatenate([state, ys[-1]])
        if fault == "loses the state between calls":
            state = jnp.zeros_like(state)
        return state, ys

    @property
    def has_traces(self):
        return self.fault in ("no fault", "trace survives a reset")

    def initial_trace(self):
        return jnp.zeros_like(self.weight)

    def _run_traced(self, state, trace, xs, resets, past):
        del past  # the gradient is not looked at
        forgets = resets & (self.fault == "no fault")
        for x, reset in zip(xs, forgets, strict=True):
            trace = 0.3 * jnp.where(reset, 0, trace) + x
        return *self._run(state, xs, resets), trace


OF_STEPS_TOO = ("ignores resets", "zero inputs are not finite", "state grows")
FAULTS = {
    "scan is not step": r"promise 1 .* initial_state\(\), with random resets: first at input 1",
    "loses the state between calls": r"promise 2 .* in chunks of 1, 8, 8 inputs: first at input 9",
    "ignores resets": r"promise 3 .* a used state with a reset at input 0: first at input 0",
    "state grows": r"promise 4 .* scan of 17 inputs changes the state from .*\[3\].* to .*\[6\]",
    "gradient is cut": r"promise 5 .* gradient by xs, first at input 0",
    "zero inputs are not finite": r"promise 6 .* for one input of zeros: outputs, first at input 0",
    "trace survives a reset": r"promise 7 .* the trace after a reset remembers what was before it",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_memory_names_the_broken_promise(fault):
    with pytest.raises(ContractError, match="LeakySum, " + FAULTS[fault]):
        check_memory(leaky_sum(fault), longest=9)


def leaky_sum(fault):
    return LeakySum(jnp.array([0.5, 1.0, 2.0]), fault)


def test_every_promise_has_a_fault():
    assert {int(message.split()[1]) for message in FAULTS.values()} == set(PROMISES)


def test_check_memory_accepts_rounding(monkeypatch):
    """A scan that sums in another order than step, where the output depends on the last bits."""
    check_memory(leaky_sum("no fault"), longest=9)
    memory = leaky_sum("sums in another order")
    check_memory(memory, promises=[1, 2])
    monkeypatch.setattr(testing, "_ROUNDING", 0.0)
    with pytest.raises(ContractError, match="promise 1"):
        check_memory(memory, promises=[1])


class Untidy(Memory):
    """A model with another fault in `_run` or `initial_state`. Nothing of it is ever compiled."""

    start: object = None
    run: object = eqx.field(static=True, default=None)
    input_size: int = eqx.field(static=True, default=INPUT)
    output_size: int = eqx.field(static=True, default=4)

    dtype = jnp.dtype("float32")

    def initial_state(self):
        return self.start

    def _run(self, state, xs, _):
        return self.run(state, xs)


def widen(xs):
    return jnp.pad(xs, ((0, 0), (0, 1)))  # (T, 3) -> (T, 4), as output_size says


def grumble(*_):
    raise TypeError("no\nsuch   thing")


UNTIDY = {
    "another width": (
        jnp.zeros(2),
        lambda state, xs: (state, xs),
        r"promise 1 .* scan of 17 inputs gives outputs of shape \(17, 3\); output_size=4 promises "
        r"\(17, 4\)",
    ),
    "no array of outputs": (
        jnp.zeros(2),
        lambda state, xs: (state, [xs]),
        "17 inputs gives a list",
    ),
    "raises": (
        jnp.zeros(2),
        grumble,
        r"promise 4 .*: scan of 17 inputs: raised TypeError: no such thing$",
    ),
    "no state": (
        None,
        lambda state, xs: (state + 1, widen(xs)),
        r"17 inputs from initial_state\(\) = None, which has no arrays: raised TypeError: ",
    ),
    "a state from nothing": (
        None,
        lambda _, xs: (xs[-1], widen(xs)),
        r"changes the state from no arrays to .*float32\[3\]",
    ),
    "a counter that becomes a float": (
        jnp.zeros((), jnp.int32),
        lambda state, xs: (state + 0.5, widen(xs)),
        r"changes the state from .* int32\[\].* to .* float32\[\]",
    ),
    "a number as state": (1.5, lambda state, xs: (state, xs), "initial_state\\(\\) has a float"),
}


@pytest.mark.parametrize("fault", UNTIDY)
def test_check_memory_says_what_is_wrong_before_it_compiles(fault, monkeypatch):
    start, run, message = UNTIDY[fault]
    monkeypatch.setattr(testing._Case, "promise_4", lambda _: pytest.fail("shapes come first"))
    with pytest.raises(ContractError, match="Untidy, .*" + message) as raised:
        check_memory(Untidy(start, run))
    assert (raised.value.__cause__ is not None) == ("raised" in message)


def test_check_memory_blames_the_promise_in_which_a_model_raises():
    def run(state, xs):
        return state, widen(xs) if xs.dtype == jnp.float32 and len(xs) != 9 else grumble()

    memory = Untidy(jnp.zeros(2), run)
    with pytest.raises(ContractError, match=r"promise 6 .* scan of 9 inputs: raised TypeError: no"):
        check_memory(memory, promises=[6], longest=9)


def test_check_memory_of_something_else():
    with pytest.raises(
        ContractError, match="int is not a memory model: it has no initial_state, s"
    ):
        check_memory(3)
    with pytest.raises(ContractError, match="LeakySum is a class: check an instance"):
        check_memory(LeakySum)
    with pytest.raises(ContractError, match="output_size is 0, not a whole number"):
        check_memory(Untidy(None, None, output_size=0))


def test_check_memory_refuses_bad_arguments():
    memory = leaky_sum("no fault")
    with pytest.raises(ValueError, match="promises has 8; choose from"):
        check_memory(memory, promises=[1, 8])
    with pytest.raises(ValueError, match="steps=3 must be at least 4"):
        check_memory(memory, steps=3)
    with pytest.raises(ValueError, match="longest=1 must be at least 2"):
        check_memory(memory, longest=1)


# --- what the contract leaves open ----------------------------------------------------------------


@quick_rows
def test_prepared_for_inference_computes_the_same(row, compiled):
    memory, scan, steps = compiled(row)
    xs, resets = inputs(STEPS, seed=6)
    used, _ = scan(memory.initial_state(), *inputs(STEPS, seed=9))
    prepared = prepare_for_inference(memory)
    _, ys = repeated_step(prepared)(used, xs, resets)
    assert distance(ys, steps(used, xs, resets)[1]) < TOLERANCE
    shapes = [[x.shape for x in jax.tree.leaves(m)] for m in (prepared, memory)]
    assert shapes[0] != shapes[1]  # the layout of something did change


@quick_rows
def test_models_remember_and_feedforward_does_not(row, compiled):
    memory, scan, _ = compiled(row)
    xs, _ = inputs(STEPS, seed=2)
    never = np.zeros(STEPS, bool)
    changed = np.array(xs)
    changed[STEPS - 3] += 1.0
    a, b = (np.asarray(scan(memory.initial_state(), x, never)[1])[-1] for x in (xs, changed))
    assert (distance(a, b) > 1e-5) == (row != "feedforward")


@quick_rows
def test_gradient_stops_at_the_incoming_state_unless_asked(row, compiled):
    memory, scan, _ = compiled(row)
    state, _ = scan(memory.initial_state(), *inputs(STEPS, seed=1, often=0.0))
    floats, rest = eqx.partition(state, eqx.is_inexact_array)
    xs, resets = inputs(2, seed=7, often=0.0)

    def gradient(**options):
        def value(floats):
            _, ys = memory.scan(eqx.combine(floats, rest), xs, resets, **options)
            return jnp.sum(jnp.square(ys))

        leaves = jax.tree.leaves(jax.jit(jax.grad(value))(floats))
        return sum(np.abs(x).sum() for x in leaves)

    assert gradient() == 0
    assert (gradient(through_state=True) > 0) == (row != "feedforward")


@quick_rows
def test_batch_is_a_vmap(row, compiled):
    """Whichever axis the batch is on."""
    memory, scan, _ = compiled(row)
    start = memory.initial_state()
    each = [inputs(STEPS, seed=s) for s in (0, 10, 20)]
    xs, resets = (np.stack(x, axis=1) for x in zip(*each, strict=True))

    @eqx.filter_jit
    def both(memory, xs, resets):
        _, ys = jax.vmap(memory.scan, in_axes=(None, 1, 1), out_axes=(0, 1))(start, xs, resets)
        _, y = jax.vmap(memory.step, in_axes=(None, 0, 0))(start, xs[0], resets[0])
        return ys, y

    ys, y = map(np.asarray, both(memory, xs, resets))
    for i, (x, r) in enumerate(each):
        assert distance(ys[:, i], scan(start, x, r)[1]) < TOLERANCE
    assert distance(y, ys[0]) < TOLERANCE


@quick_rows
def test_refresh_with_the_same_weights_changes_nothing(row, compiled):
    memory, scan, steps = compiled(row)
    xs, resets = inputs(STEPS, seed=11)
    used, _ = scan(memory.initial_state(), xs, resets)
    fresh = memory.refresh(used)
    assert jax.tree.structure(fresh) == jax.tree.structure(used)
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, used)
    assert distance(steps(fresh, xs, resets)[1], steps(used, xs, resets)[1]) < TOLERANCE


def test_two_models_side_by_side_equal_each_alone():
    """Weights can be batched too: seeds trained in one program."""
    models = [build("agalite slots")]
    models.append(jax.tree.map(lambda x: 0.5 * np.asarray(x), models[0]))
    together = jax.tree.map(lambda *x: np.stack(x), *models)
    xs, resets = inputs(STEPS)

    def run(memory):
        start = memory.initial_state()
        return memory.scan(start, xs, resets)[1], memory.step(start, xs[0])[1]

    alone, found = jax.jit(run), jax.jit(jax.vmap(run))(together)
    for i, memory in enumerate(models):
        for a, b in zip(found, alone(memory), strict=True):
            assert distance(np.asarray(a)[i], b) < TOLERANCE


def test_weights_in_float64_compute_in_float64():
    memory = jax.tree.map(lambda x: np.asarray(x, np.float64), build("agalite"))
    with jax.enable_x64(True):
        _, ys = jax.eval_shape(lambda: memory.scan(memory.initial_state(), np.ones((4, INPUT))))
        assert ys.dtype == jnp.float64
