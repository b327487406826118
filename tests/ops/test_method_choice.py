"""What method "auto" stands for, on a CPU and on an accelerator.

Accelerators are faked: the programs are traced and not run.
"""

import jax
import jax.numpy as jnp
import pytest
from gymnax.environments import spaces
from jax.extend.core import jaxprs_in_params

from agalite import kernels
from agalite.networks.encoders import make_encoder
from agalite.ops import (
    Outer,
    agalite_attention,
    galite_attention,
    linear_attention,
    recurrence,
)
from agalite.training.seeds import Seeds

T, H, V, E, W = 96, 2, 3, 2, 5
K = E * W

OPERATORS = {
    "linear": lambda x, method: linear_attention(*x[:3], method=method),
    "galite": lambda x, method: galite_attention(*x, method=method),
    "galite published decay": lambda x, method: galite_attention(
        *x, decay="published", method=method
    ),
    "agalite": lambda x, method: agalite_attention(*x, r=3, method=method),
}


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def program(name, method, steps=T):
    """The jaxpr of an operator and of its gradient, for outer products."""

    def shape(width):
        return jax.ShapeDtypeStruct((steps, H, width), jnp.float32)

    features = Outer(shape(E), shape(W))
    inputs = (features, features, shape(V), shape(V), features)

    def loss(inputs):
        return jnp.sum(OPERATORS[name](inputs, method)[1])

    return jax.make_jaxpr(jax.value_and_grad(loss))(inputs)


def arrays(jaxpr):
    """The shapes of all intermediate arrays, those of inner programs included."""
    shapes = set()
    for equation in jaxpr.eqns:
        shapes |= {x.aval.shape for x in equation.outvars if hasattr(x.aval, "shape")}
        for inner in jaxprs_in_params(equation.params):
            shapes |= arrays(inner)
    return shapes


def has_matrix_per_step(jaxpr):
    """Whether an array holds a V x K matrix for every time step."""
    return any(shape[-2:] in ((V, K), (K, V)) and T in shape[:-2] for shape in arrays(jaxpr.jaxpr))


def test_associative_attention_holds_a_matrix_per_step():
    """So that the tests below would find one."""
    for name in ("linear", "galite", "galite published decay"):
        assert has_matrix_per_step(program(name, "associative"))


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", ["linear", "galite", "galite published decay"])
def test_accelerators_never_hold_a_matrix_per_step(name):
    auto = program(name, "auto")
    assert not has_matrix_per_step(auto)
    assert same(auto, program(name, "chunked"))


@pytest.mark.usefixtures("accelerator")
def test_agalite_is_associative_on_accelerators():
    auto = program("agalite", "auto")
    assert same(auto, program("agalite", "associative"))
    assert not has_matrix_per_step(auto)


@pytest.mark.parametrize("name", ["galite", "agalite"])
def test_cpus_use_custom_kernels(name):
    text = str(program(name, "auto"))
    assert f"agalite_{name}_forward" in text
    assert f"agalite_{name}_backward" in text
    for method in ("sequential", "associative", "chunked"):
        assert "ffi_call" not in str(program(name, method))


@pytest.mark.parametrize("name", OPERATORS)
def test_cpus_without_kernels_use_the_chunked_form(name):
    with kernels.switched_off():
        assert same(program(name, "auto"), program(name, "chunked"))


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("name", OPERATORS)
def test_one_step_is_sequential(name, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert same(program(name, "auto", 1), program(name, "sequential", 1))


def test_recurrence_is_associative_on_accelerators_only(monkeypatch):
    sizes = {(300, 8): "chunked", (20, 8): "sequential", (300, 600): "sequential"}
    assert {size: recurrence._choose(*size) for size in sizes} == sizes
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert {recurrence._choose(*size) for size in sizes} == {"associative"}


def test_programs_can_be_traced_as_on_an_accelerator(monkeypatch):
    with kernels.as_on_accelerator():
        pretended = program("agalite", "auto")
    assert not same(pretended, program("agalite", "auto"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert same(pretended, program("agalite", "auto"))


def same(a, b):
    """Whether two programs have the same operations. Addresses of functions in them differ."""
    return operations(a.jaxpr) == operations(b.jaxpr)


def operations(jaxpr):
    return [
        (
            equation.primitive.name,
            [str(x.aval) for x in equation.outvars],
            [operations(inner) for inner in jaxprs_in_params(equation.params)],
        )
        for equation in jaxpr.eqns
    ]


def _primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from _primitives(inner)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", ["atari", "impala", "patch", "symbolic"])
def test_encoders_on_an_accelerator_are_xlas(name):
    """All frames at once, by XLA's convolution or product: no loop over time, no custom kernel."""
    shape = (1345,) if name == "symbolic" else (64, 64, 3)
    encoder = make_encoder(name, spaces.Box(0, 255, shape, jnp.uint8), key=jax.random.key(0))
    obs = jax.ShapeDtypeStruct((6, 2, *shape), jnp.uint8)
    program = jax.make_jaxpr(jax.vmap(encoder.over_time, 1, 1))(obs)
    found = set(_primitives(program.jaxpr))
    assert ("conv_general_dilated" in found) == (name != "symbolic")
    assert not found & {"scan", "while", "convolution_forward", "sparse_forward"}


def _seeds_program():
    program = jax.make_jaxpr(Seeds(3).map(lambda x: x * 2))(jnp.arange(3))
    return set(_primitives(program.jaxpr))


@pytest.mark.usefixtures("accelerator")
def test_seeds_on_an_accelerator_are_a_batch():
    assert "scan" not in _seeds_program()


def test_seeds_on_a_cpu_run_one_after_another():
    assert "scan" in _seeds_program()
