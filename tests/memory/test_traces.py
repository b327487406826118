"""Traces: gradients past the beginning of a sequence, in float64 (docs/rtrl.md)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.memory import make_memory
from agalite.memory.agalite import AGaLiTe
from agalite.memory.diagonal import DiagonalMixer
from agalite.memory.layers import prepare_for_inference
from agalite.memory.mingru import MinGRUMixer
from agalite.memory.registry import models_with_traces
from agalite.memory.s5 import S5Mixer

INPUT, STEPS, LAST = 3, 11, 3  # the loss reads the last steps: the last chunk
SMALL = {"d_model": 6, "layers": 1, "heads": 2, "head_size": 4, "ffn_size": 5, "eta": 2}
VARIANTS = {
    "paper": {"r": 5},
    "published": {"basis": "published", "r": 2},
    "slots": {"basis": "slots", "r": 3},
    "rank1": {"basis": "rank1", "r": 2, "method": "sequential"},
    "elu1": {"feature": "elu1", "r": 2, "method": "sequential"},
    "ungated": {"gating": False, "r": 2, "method": "sequential"},
}
OTHERS = {
    "r=1": {"r": 1},
    "relu": {"feature": "relu", "r": 2},
    "associative": {"method": "associative", "r": 2},
    "chunked": {"method": "chunked", "basis": "slots", "r": 2},
    "ungated elu1": {"gating": False, "feature": "elu1", "r": 2},
}
SMALL_DIAGONAL = {"d_model": 6, "layers": 1, "ffn_size": 5, "hidden_size": 4}
DIAGONAL = {
    "lru": ("lru", {}),
    "s5": ("s5", {"blocks": 2}),
    "rtu": ("rtu", {"activation": "tanh"}),
    "mingru": ("mingru", {}),
}
OTHER_DIAGONAL = {
    "rtu relu": ("rtu", {"method": "associative"}),
    "lru chunked": ("lru", {"method": "chunked"}),
    "s5 associative": ("s5", {"blocks": 1, "method": "associative"}),
    "mingru chunked": ("mingru", {"method": "chunked"}),
}
SPLITS = ((4, 1, 3), (8,), (1,) * 8, (2, 6))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def random_model(kind=None, **options):
    """A model with NumPy's weights in float64; norm, biases and projections are all random."""
    make = (lambda: make_memory("agalite", INPUT, **options)) if kind is None else kind
    rng = np.random.default_rng(1)

    def draw(path, x):
        mean = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        width = 0.3 if x.ndim == 1 else x.shape[-1] ** -0.5
        return jnp.asarray(mean + width * rng.normal(size=x.shape))

    model = jax.tree_util.tree_map_with_path(draw, jax.eval_shape(make))
    # Gates around 0.1: what was written before the last chunk counts.
    for block in model.blocks:
        slow_down(block.attention)
    return model


def slow_down(attention):
    """Gates and rates around 0.1."""
    if isinstance(attention, MinGRUMixer):
        gates = jnp.arange(attention.into.bias.size) < attention.config.hidden_size
        object.__setattr__(attention.into, "bias", attention.into.bias - 2.0 * gates)
    elif isinstance(attention, S5Mixer):
        object.__setattr__(attention, "log_step", attention.log_step - 2.0)
    elif isinstance(attention, DiagonalMixer):
        object.__setattr__(attention.eigenvalues, "nu", attention.eigenvalues.nu - 2.0)
    else:
        project = attention.project
        names = np.concatenate([[name] * width for name, width in project.widths])
        shift = jnp.where(np.isin(names, ("beta", "gamma")), -2.0, 0.0)
        object.__setattr__(project, "bias", project.bias + shift)


def random_diagonal(row, **options):
    name, of_row = (DIAGONAL | OTHER_DIAGONAL)[row]
    options = SMALL_DIAGONAL | of_row | options
    return random_model(lambda: make_memory(name, INPUT, **options))


def data(seed, often=0.1):
    rng = np.random.default_rng(seed)
    resets = rng.random(STEPS) < often
    resets[-LAST - 2 :] = False  # the last steps depend on the past
    return jnp.asarray(rng.normal(size=(STEPS, INPUT))), jnp.asarray(resets)


def loss_of(ys):
    return jnp.sum(jnp.sin(3 * ys + jnp.arange(ys.size, dtype=ys.dtype).reshape(ys.shape)))


def at_end(model, xs, resets, lengths):
    """State and trace after the sequence, taken in chunks of these lengths."""
    state, trace, at = model.initial_state(), model.initial_trace(), 0
    for length in lengths:
        part = slice(at, at + length)
        state, _, trace = model.scan_and_advance(state, xs[part], resets[part], trace)
        at += length
    return state, trace


def gradients(model, xs, resets, lengths):
    """Of the last chunk: by full backpropagation, with the trace, and without it."""
    past, last = slice(STEPS - LAST), slice(STEPS - LAST, None)
    state, trace = at_end(model, xs[past], resets[past], lengths)

    def full(model):
        return loss_of(model.scan(model.initial_state(), xs, resets)[1][last])

    def traced(model):
        return loss_of(model.scan(state, xs[last], resets[last], trace=trace)[1])

    def truncated(model):
        return loss_of(model.scan(state, xs[last], resets[last])[1])

    return [jax.grad(f)(model) for f in (full, traced, truncated)]


def recurrent(gradient, layer=0):
    """What the trace is exact for: the attention's norm, and its projections or constants."""
    attention = gradient.blocks[layer].attention
    if isinstance(attention, DiagonalMixer):
        above = ("out", "skip", "bias", "config")
        return [x for name, x in vars(attention).items() if name not in above]
    project, norm = attention.project, attention.norm
    return [project.inputs.weight, project.bias, norm.scale, norm.bias]


def apart(found, expected):
    """The largest distance between two lists of arrays, relative to the size of each."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def check_one_layer(model, splits):
    compiled = jax.jit(gradients, static_argnums=3)
    for seed, split in enumerate(splits):
        full, traced, truncated = compiled(model, *data(seed, 0.1 * seed), split)
        assert apart(recurrent(traced), recurrent(full)) < 1e-10
        # All above the recurrence is exact without a trace, and stays so.
        for gradient in (traced, truncated):
            assert apart(gradient.blocks[0].mlp, full.blocks[0].mlp) < 1e-10
        if isinstance(model.blocks[0].attention, DiagonalMixer):  # none of its gradients are zero
            assert apart(traced.blocks, full.blocks) < 1e-10
        assert apart(recurrent(truncated), recurrent(full)) > 0.2


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_layer_is_full_backpropagation(variant):
    model = random_model(**SMALL | VARIANTS[variant])
    check_one_layer(model, SPLITS[:1])


class Unfolded(AGaLiTe):
    fold = False


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*VARIANTS, *OTHERS])
def test_one_layer_is_full_backpropagation_however_it_is_split(variant):
    options = SMALL | (VARIANTS | OTHERS)[variant]
    check_one_layer(random_model(**options), SPLITS)
    key = jax.random.key(0)
    check_one_layer(random_model(lambda: Unfolded(INPUT, key=key, **options)), SPLITS[:1])


@pytest.mark.parametrize("row", DIAGONAL)
def test_one_layer_of_a_diagonal_recurrence_is_full_backpropagation(row):
    check_one_layer(random_diagonal(row), SPLITS[:1] * 2)  # without resets, and with them


@pytest.mark.slow
@pytest.mark.parametrize("row", DIAGONAL | OTHER_DIAGONAL)
def test_one_layer_of_a_diagonal_recurrence_however_it_is_split(row):
    check_one_layer(random_diagonal(row), SPLITS)


@pytest.mark.parametrize(
    "row", ["agalite", "s5", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lru", "mingru"))]
)
def test_a_stack_has_each_layers_own_past(row):
    """Its definition: the past inputs of every layer are constants."""
    if row == "agalite":
        model = random_model(**SMALL | {"layers": 2, "method": "sequential", "r": 2})
    else:
        model = random_diagonal(row, layers=2, method="sequential")
    past, last = slice(STEPS - LAST), slice(STEPS - LAST, None)

    def defined(model, xs, resets):
        start = model._layer_states(model.initial_state())
        h = jax.nn.relu(model.embedding(xs[past]))
        states = []
        for block, state in zip(model.blocks, start, strict=True):
            h = jax.lax.stop_gradient(h)
            new, h = block(state, h, resets[past])
            states.append(new)
        state = model._join_states(model.initial_state(), tuple(states))
        return loss_of(model.scan(state, xs[last], resets[last], through_state=True)[1])

    @jax.jit
    def both(model, xs, resets):
        expected = jax.grad(defined)(model, xs, resets)
        return expected, *gradients(model, xs, resets, (5, 3))

    expected, full, traced, _ = both(model, *data(0, often=0.0))
    assert apart(traced, expected) < 1e-10  # all weights, not only the projections
    # The last layer has nothing above it; the first one's effect on the second's state is left out.
    assert apart(recurrent(traced, 1), recurrent(full, 1)) < 1e-10
    assert apart(recurrent(traced, 0), recurrent(full, 0)) > 1e-3


def test_a_prepared_model_takes_traces_too():
    model = random_model(**SMALL)
    packed = prepare_for_inference(model)
    assert packed.blocks is not model.blocks
    xs, resets = data(0)

    @jax.jit
    def run(memory):
        state, trace = at_end(memory, xs[:4], resets[:4], (4,))
        plain, traced = (memory.step(state, xs[4], resets[4], trace=t)[1] for t in (None, trace))
        return trace, plain, traced

    expected, plain, traced = run(model)
    np.testing.assert_allclose(traced, plain, rtol=1e-12)
    found, plain, traced = run(packed)
    np.testing.assert_allclose(traced, plain, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), found, expected)


def shapes_of(name, **options):
    """A model of shapes: no weights are drawn."""
    return jax.eval_shape(lambda: make_memory(name, INPUT, **options))


def test_models_without_traces_say_so():
    gru = shapes_of("gru", d_model=4, hidden_size=4)
    assert not gru.has_traces
    assert gru.trace_size == 0
    with pytest.raises(ValueError, match=r"GRU has no traces .* models with traces: .*agalite"):
        gru.initial_trace()
    dpfp = shapes_of("agalite", **SMALL | {"feature": "dpfp"})
    assert not dpfp.has_traces
    with pytest.raises(ValueError, match="feature='dpfp' has no traces"):
        dpfp.initial_trace()
    rtu = shapes_of("rtu", **SMALL_DIAGONAL | {"variant": "nonlinear"})
    assert not rtu.has_traces
    assert rtu.trace_size == 0
    with pytest.raises(ValueError, match="variant='nonlinear' has no traces"):
        rtu.initial_trace()
    assert models_with_traces() == ["agalite", *DIAGONAL]


def test_sizes_of_the_traces_of_diagonal_recurrences():
    """For each of four elements a complex constant and the row of six inputs and one that is a
    bias; or two real rows."""
    for row in DIAGONAL:
        name, options = DIAGONAL[row]
        model = shapes_of(name, **SMALL_DIAGONAL | options | {"layers": 3})
        assert model.has_traces
        assert model.trace_size == 3 * 4 * 2 * (7 if row == "mingru" else 1 + 7)


def test_arguments_that_do_not_fit_are_refused():
    model = random_model(**SMALL)
    xs, state, trace = jnp.zeros((2, INPUT)), model.initial_state(), model.initial_trace()
    assert model.trace_size == 2 * 6 * (2 * 4 + 4 * 8) + 2 * (2 * 4 + 4 * 8)
    with pytest.raises(ValueError, match="would count the past twice"):
        model.scan(state, xs, through_state=True, trace=trace)
    with pytest.raises(ValueError, match=r"trace does not belong .* start from initial_trace\(\)"):
        model.scan(state, xs, trace=trace[0])
