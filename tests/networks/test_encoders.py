"""Encoders of observations: which one is chosen, what it computes, and its convolutions."""

import contextlib
from functools import partial

import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces

from agalite import kernels
from agalite.envs.base import BinaryBox
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.encoders import (
    AtariConv,
    Convolution,
    ImpalaResNet,
    PatchEncoder,
    SymbolicEncoder,
    VectorEncoder,
    make_encoder,
    max_pool,
    observation_bytes,
)
from modules import assert_close, random_weights

KEY = jax.random.key(0)
VECTOR = spaces.Box(-1.0, 1.0, (5,), jnp.float32)
PIXELS = spaces.Box(0, 255, (84, 84, 3), jnp.uint8)


def _images(*shape):
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, shape), jnp.uint8)


@pytest.mark.parametrize(
    ("space", "kind", "size"),
    [
        (VECTOR, VectorEncoder, 5),
        (spaces.Box(0, 1, (10, 10, 4), jnp.bool_), VectorEncoder, 400),
        (spaces.Discrete(7), VectorEncoder, 7),
        (gym.spaces.Box(-np.inf, np.inf, (), np.float64), VectorEncoder, 1),
        (gym.spaces.Box(0.0, 1.0, (1345,), np.float32), SymbolicEncoder, 128),
        (PIXELS, AtariConv, 3136),
        (gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), AtariConv, 1024),
    ],
)
def test_auto_chooses_by_the_space(space, kind, size):
    encoder = make_encoder("auto", space, key=KEY)
    assert type(encoder) is kind
    assert encoder.output_size == size
    dtype = jnp.uint8 if kind is AtariConv else jnp.int32 if hasattr(space, "n") else jnp.float32
    out = jax.eval_shape(lambda x: encoder(x), jax.ShapeDtypeStruct(space.shape, dtype))
    assert (out.shape, out.dtype) == ((size,), jnp.float32)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("vector", (5,), jnp.float32),
        ("vector", (2, 3), jnp.int32),
        ("symbolic", (6,), jnp.float32),
        ("atari", (36, 40, 3), jnp.uint8),
        ("patch", (12, 8, 3), jnp.uint8),
        pytest.param("impala", (9, 16, 2), jnp.uint8, marks=pytest.mark.slow),
    ],
)
def test_over_time_equals_one_observation_at_a_time(name, shape, dtype):
    space = spaces.Box(0, 255, shape, dtype)
    encoder = random_weights(lambda key: make_encoder(name, space, key=key))
    obs = _images(3, 2, *shape).astype(dtype)
    at_once = jax.jit(lambda x: jax.vmap(encoder.over_time, 1, 1)(x))(obs)
    one_by_one = jax.jit(lambda x: jax.vmap(jax.vmap(lambda y: encoder(y)))(x))(obs)
    assert at_once.shape == (3, 2, encoder.output_size)
    assert at_once.dtype == jnp.float32
    assert_close(at_once, one_by_one, 1e-4 * float(jnp.abs(one_by_one).max()))
    assert not np.allclose(at_once[0, 0], at_once[1, 1])


def test_the_vector_encoder_flattens_and_makes_one_hot():
    obs = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    np.testing.assert_array_equal(VectorEncoder((2, 3))(obs), np.arange(6.0))
    one_hot = make_encoder("vector", spaces.Discrete(4), key=KEY)
    np.testing.assert_array_equal(one_hot(jnp.int32(2)), [0, 0, 1, 0])


def test_pixels_are_scaled_to_1():
    image = _images(40, 40, 3)

    def encoder(high, dtype):
        space = spaces.Box(0, high, (40, 40, 3), dtype)
        return random_weights(lambda key: make_encoder("atari", space, key=key))

    in_bytes, in_floats = encoder(255, jnp.uint8), encoder(255.0, jnp.float32)
    in_units = encoder(1.0, jnp.float32)
    run = jax.jit(lambda encoder, image: encoder(image))
    want = run(in_units, image.astype(jnp.float32) / 255)
    assert_close(run(in_bytes, image), want, 1e-4)
    assert_close(run(in_floats, image.astype(jnp.float32)), want, 1e-4)
    assert 0.01 < float(jnp.abs(want).mean()) < 10


@pytest.mark.slow  # its sister: every weight of a network for pixels, test_actor_critic.py
def test_impala_has_the_size_of_the_paper_and_a_gradient_everywhere():
    encoder = eqx.filter_eval_shape(lambda key: ImpalaResNet((64, 64, 3), key=key), KEY)
    convolutions = 3 * 9 * 16 + 4 * 144 * 16 + 16 * 9 * 32 + 4 * 288 * 32 + 5 * 288 * 32
    biases = 5 * 16 + 5 * 32 + 5 * 32
    leaves = [x for x in jax.tree.leaves(encoder) if hasattr(x, "shape")]
    assert sum(x.size for x in leaves) == convolutions + biases + 8 * 8 * 32 * 512 + 512

    small = random_weights(lambda key: ImpalaResNet((8, 9, 3), width=8, key=key))
    assert small.stages[0].convolution.scale == 1 / 255
    gradient = eqx.filter_grad(lambda e, x: jnp.sum(jnp.square(e.over_time(x))))
    gradients = jax.tree.leaves(eqx.filter_jit(gradient)(small, _images(2, 8, 9, 3)))
    assert all(np.isfinite(g).all() and np.any(g != 0) for g in gradients)


@pytest.mark.parametrize(
    ("shape", "patch_size", "patches"),
    [((84, 84, 3), None, 49), ((64, 64, 3), None, 64), ((12, 8, 1), 2, 24)],
)
def test_each_patch_has_numbers_of_its_own(shape, patch_size, patches):
    encoder = PatchEncoder(shape, patch_size=patch_size, channels=4, key=KEY)
    image = _images(*shape)
    before = encoder._pictures(image).reshape(patches, 4)
    after = encoder._pictures(image.at[0, 0].set(255 - image[0, 0])).reshape(patches, 4)
    changed = np.any(np.asarray(before != after), axis=1)
    assert changed[0]
    assert not changed[1:].any()


@pytest.mark.parametrize(
    ("name", "shape", "patch_size", "words"),
    [
        (
            "patch",
            (84, 84, 3),
            10,
            "patch_size=10 must divide .* 84 x 84 pixels; 2, 3, 4, 6, 7",
        ),
        ("patch", (84, 62, 3), 12, "patch_size=12 .* 84 x 62 pixels; 2 would"),
        ("patch-large", (17, 17, 3), None, "no number .* of 17 x 17 pixels; set patch_size to one"),
        ("patch", (39, 26, 3), None, "to one of: 13$"),
        ("patch", (39, 39, 3), 2, "patch_size=2 must divide"),
        ("patch", (37, 38, 3), None, "divides both .* pixels; take encoder='atari'$"),
        ("patch", (7, 9, 3), None, "pixels; take another size of observations$"),
        ("atari", (84, 84, 3), 12, "patch_size=12 is for encoder='patch'"),
        ("patch", (84,), None, "expects [(]x, y, channel[)]"),
    ],
)
def test_patches_that_do_not_fit_are_refused(name, shape, patch_size, words):
    with pytest.raises(ValueError, match=words):
        make_encoder(name, gym.spaces.Box(0, 255, shape, np.uint8), patch_size=patch_size, key=KEY)


@pytest.mark.parametrize("name", ["atari", "patch", "symbolic"])
def test_weights_start_orthogonal(name):
    encoder = make_encoder(name, spaces.Box(0, 255, (36, 36, 3), jnp.uint8), key=KEY)
    for w in jax.tree.leaves(eqx.filter(encoder, lambda x: eqx.is_array(x) and x.ndim == 2)):
        w = np.asarray(w)
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        assert_close(gram, 2 * np.eye(len(gram)), 1e-4)


def test_unsuitable_observation_spaces_are_refused():
    with pytest.raises(ValueError, match="encoder='atary' is unknown"):
        make_encoder("atary", PIXELS, key=KEY)
    with pytest.raises(ValueError, match=r"observation_space has shape \(5,\); this encoder"):
        make_encoder("atari", VECTOR, key=KEY)
    with pytest.raises(ValueError, match=r"\(20, 84, 3\); this encoder .* x and y >= 36"):
        make_encoder("atari", spaces.Box(0, 255, (20, 84, 3), jnp.uint8), key=KEY)
    with pytest.raises(ValueError, match="channel first"):
        make_encoder("auto", gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), key=KEY)
    with pytest.raises(ValueError, match="supported are Box and Discrete"):
        make_encoder("auto", gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), key=KEY)
    with pytest.raises(ValueError, match="cannot read Discrete"):
        make_encoder("symbolic", spaces.Discrete(3), key=KEY)
    with pytest.raises(ValueError, match=r"obs has shape \(T, 4\)|obs has shape \(1, 4\)"):
        make_encoder("auto", VECTOR, key=KEY)(jnp.zeros(4))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [
        (4, 2, "VALID", (9, 8)),
        (3, 1, "SAME", (5, 7)),
        (4, 4, "VALID", (8, 13)),
    ],
)
@pytest.mark.parametrize("method", ["patches", "kernels"])
def test_every_method_is_xlas_convolution_with_its_gradients(method, kernel, stride, padding, size):
    layer = random_weights(
        lambda key: Convolution(3, 6, kernel, stride, padding, scale=0.5, key=key)
    )
    if method == "kernels" and kernels.why_not():
        pytest.skip(kernels.why_not())
    images = jax.random.normal(jax.random.key(1), (4, *size, 3))

    def loss(method, layer, images):
        out = jax.vmap(partial(layer, method=method))(images)
        return jnp.sum(jnp.sin(out)), out

    a, b = (
        jax.jit(jax.value_and_grad(partial(loss, m), (0, 1), has_aux=True))(layer, images)
        for m in (method, "direct")
    )
    assert_close(a, b, 2e-5)


def test_a_convolution_by_hand():
    """Position, scale and bias: a kernel with one weight that is not zero reads one pixel."""
    layer = Convolution(1, 1, 4, 2, scale=10.0, key=KEY)
    one = jnp.zeros((1, 2, 2, 2, 2, 1)).at[0, 1, 0, 1, 1, 0].set(1.0)  # row 2+1, column 0+1
    layer = eqx.tree_at(lambda c: c.dense.weight, layer, one.reshape(1, 16))
    layer = eqx.tree_at(lambda c: c.dense.bias, layer, jnp.array([7.0]))
    image = jnp.arange(64.0).reshape(8, 8, 1)
    want = 7 + 10 * image[3::2, 1::2][:3, :3]
    for method in ("patches", "direct", *([] if kernels.why_not() else ["kernels"])):
        assert_close(layer(image, method=method), want)


@pytest.mark.parametrize("size", [(7, 8), (5, 9)])
def test_max_pool_is_that_of_xla(size):
    def windows(image):
        return jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (3, 3, 1), (2, 2, 1), "SAME")

    def with_gradient(pool):
        return jax.jit(lambda x: (pool(x), jax.grad(lambda y: jnp.sum(jnp.sin(pool(y))))(x)))

    image = np.random.default_rng(0).normal(size=(*size, 2)).astype(np.float32)
    assert_close(with_gradient(max_pool)(image), with_gradient(windows)(image))


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


@pytest.mark.parametrize("native", [True, False])
def test_under_vmap_a_convolution_is_one_product(native):
    if native and kernels.why_not():
        pytest.skip(kernels.why_not())
    encoder = make_encoder("atari", PIXELS, key=KEY)
    weights, rest = eqx.partition(encoder, eqx.is_array)
    obs = jax.ShapeDtypeStruct((2, 7, 84, 84, 3), jnp.uint8)

    def features(weights, obs):
        with contextlib.nullcontext() if native else kernels.switched_off():
            return jax.vmap(eqx.combine(weights, rest).over_time, 1, 1)(obs)

    name = "convolution_forward" if native else "row_product"
    found = _equations(jax.make_jaxpr(features)(weights, obs).jaxpr)
    shapes = [[v.aval.shape for v in e.invars] for e in found if e.primitive.name == name]
    assert shapes == (
        [
            [(32, 192), (2, 7, 84, 84, 3)],
            [(64, 512), (2, 7, 20, 20, 32)],
            [(64, 576), (2, 7, 9, 9, 64)],
        ]
        if native
        else [
            [(7, 20, 20, 192), (32, 192)],
            [(7, 9, 9, 512), (64, 512)],
            [(7, 7, 7, 576), (64, 576)],
        ]
    )
    # The gradient of a weight must not exist once for every environment before they are summed.
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.square(features(w, x))))
    sizes = {tuple(w.shape) for w in jax.tree.leaves(weights) if w.ndim == 2}
    for equation in _equations(jax.make_jaxpr(gradient)(weights, obs).jaxpr):
        for out in equation.outvars:
            shape = tuple(out.aval.shape)
            assert not (len(shape) > 2 and shape[-2:] in sizes and 7 in shape[:-2]), equation


def test_observations_kept_as_bits_are_the_same_observations():
    """A network learns from packed observations what it learns from whole ones."""
    space = BinaryBox(0.0, 1.0, (1040,), jnp.float32, binary=1030)
    model = ActorCritic.make(
        space,
        spaces.Discrete(3),
        memory="feedforward",
        memory_options={"d_model": 8, "layers": 1, "ffn_size": 8},
        hidden_size=8,
        previous_action=True,
        key=KEY,
    )
    first = jax.random.bernoulli(KEY, 0.05, (5, 1030)).astype(jnp.float32)
    obs = jnp.concatenate([first, jax.random.uniform(KEY, (5, 10))], axis=1)
    inputs = model.inputs(obs, jnp.arange(5) % 3, jnp.zeros(5))
    packed = model.pack(inputs)
    assert packed.obs.bits.shape == (5, 33)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(packed.obs))
    assert size == 5 * observation_bytes("auto", space) == 5 * (33 * 4 + 10 * 4)
    assert observation_bytes("vector", space) == 1040 * 4
    assert observation_bytes("auto", PIXELS) == 84 * 84 * 3

    def loss(model, inputs):
        _, policy, values = model.scan(model.initial_state(), inputs)
        return jnp.sum(values**2) + jnp.sum(policy.logits[:, 0])

    found, expected = (eqx.filter_value_and_grad(loss)(model, x) for x in (packed, inputs))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )
    # An encoder that knows of no binary numbers keeps observations as they are.
    assert make_encoder("symbolic", spaces.Box(0, 1, (6,)), key=KEY).pack(obs) is obs
