"""Our models in Flax, and our environments in gymnax's own rollouts: the same numbers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnax.experimental import RolloutWrapper
from gymnax.wrappers.purerl import LogWrapper

import memory_models as models
from agalite import extras
from agalite.envs import make

nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")

from agalite.interop import flax as interop  # noqa: E402
from agalite.interop.flax import LinenMemory, NNXMemory  # noqa: E402

T, B = 9, 3
XS = jax.random.normal(jax.random.key(1), (T, B, models.INPUT))
RESETS = jnp.zeros((T, B), bool).at[4, 1].set(True).at[6, 2].set(True)


def ours(memory, xs=XS, resets=RESETS):
    start = jax.tree.map(lambda x: jnp.stack([x] * B), memory.initial_state())
    return jax.vmap(memory.scan, in_axes=(0, 1, 1), out_axes=(0, 1))(start, xs, resets)


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def loss(ys):
    return jnp.mean(jnp.square(ys - 0.3))


@pytest.mark.parametrize(
    "row",
    ["agalite r=5", *(pytest.param(row, marks=pytest.mark.slow) for row in ("gtrxl", "gru"))],
)
def test_nnx_gives_our_numbers_and_gradients(row):
    memory = models.build(row)
    module = NNXMemory(memory)

    @eqx.filter_jit
    def by_us(memory):
        return ours(memory), eqx.filter_grad(lambda m: loss(ours(m)[1]))(memory)

    @nnx.jit
    def by_flax(module):
        state = module.initial_state(B)
        return module(state, XS, RESETS), nnx.grad(lambda m: loss(m(state, XS, RESETS)[1]))(module)

    (state, ys), gradient = by_us(memory)
    (their_state, their_ys), theirs = by_flax(module)
    close(their_ys, ys)
    close(their_state, state)
    back = interop._Rebuild(memory)({name: x[...] for name, x in theirs["weights"].items()})
    close(jax.tree.leaves(back), jax.tree.leaves(gradient))
    assert any(np.abs(x).max() > 1e-4 for x in jax.tree.leaves(back))
    close(jax.tree.leaves(module.to_equinox()), jax.tree.leaves(memory))


@pytest.mark.parametrize(
    "row", [pytest.param("agalite rank1", marks=pytest.mark.slow), "feedforward"]
)
def test_linen_gives_our_numbers_and_gradients(row):
    name, options = models.ROWS[row]
    module = LinenMemory(name, options)
    params = jax.jit(module.init)(jax.random.key(5), None, XS, RESETS)
    weights = params["params"]["weights"]
    shapes = models.build(row)
    memory = interop._Rebuild(shapes)(weights)

    @jax.jit
    def by_flax(params):
        gradient = jax.grad(lambda p: loss(module.apply(p, None, XS, RESETS)[1]))(params)
        return module.apply(params, None, XS, RESETS), gradient["params"]["weights"]

    (state, ys), gradient = by_flax(params)
    our_state, our_ys = eqx.filter_jit(ours)(memory)
    close(ys, our_ys)
    close(state, our_state)
    our_gradient = eqx.filter_jit(eqx.filter_grad(lambda m: loss(ours(m)[1])))(memory)
    close(jax.tree.leaves(interop._Rebuild(shapes)(gradient)), jax.tree.leaves(our_gradient))


def test_a_sequence_is_its_inputs_one_by_one_in_both():
    module = NNXMemory(models.build("agalite r=5"))
    params = {"params": {"weights": {n: p[...] for n, p in module.weights.items()}}}
    same = LinenMemory(*models.ROWS["agalite r=5"])
    by_nnx = nnx.jit(lambda m, s, x, r: m.step(s, x, r))
    whole = nnx.jit(lambda m, s, xs, r: m(s, xs, r))
    by_linen = jax.jit(lambda s, x, r: same.apply(params, s, x, r, method="step"))
    _, ys = whole(module, None, XS, RESETS)
    one = other = module.initial_state(B)
    for t in range(T):
        one, y = by_nnx(module, one, XS[t], RESETS[t])
        other, z = by_linen(other, XS[t], RESETS[t])
        close(y, ys[t])
        close(z, ys[t])
    # and without the batch
    _, alone = whole(module, None, XS[:, 0], RESETS[:, 0])
    close(alone, ys[:, 0])
    close(by_nnx(module, None, XS[0, 0], None)[1], ys[0, 0])


@pytest.mark.slow  # its sister: tests/memory/test_models.py, a cache from other weights
def test_the_state_of_gtrxl_is_refreshed():
    module = NNXMemory(models.build("gtrxl"))
    both = nnx.jit(lambda m, s: (m.refresh(s), jax.tree.map(lambda x: x[0], s)))
    state, _ = nnx.jit(lambda m: m(None, XS, RESETS))(module)
    for param in module.weights.values():
        param[...] = 1.1 * param[...]
    new, first = both(module, state)
    close(new, jax.vmap(module.to_equinox().refresh)(state))
    close(module.refresh(first), jax.tree.map(lambda x: x[0], new))
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (new, state)), strict=True)]
    assert max(moved) > 1e-3


@pytest.mark.slow
def test_it_learns_inside_a_network_of_linen():
    """To say, at every step, what the first input of the episode was: the sign of a number.

    Without memory only the first of twelve answers can be known: an error of 11/12. Where it ends
    is a matter of rounding, so the margin is wide: ten runs (five seeds, two ways to round) ended
    between 0.001 and 0.42.
    """
    xs = jax.random.normal(jax.random.key(7), (12, 32, 2))
    target = jnp.broadcast_to(jnp.sign(xs[0, :, 0]), (12, 32))

    class Network(linen.Module):
        @linen.compact
        def __call__(self, state, xs, resets=None):
            h = linen.relu(linen.Dense(16)(xs))
            state, h = LinenMemory("agalite", models.SMALL | {"horizon": (2, 50)})(state, h, resets)
            return state, linen.Dense(1)(h)[..., 0]

    network = Network()
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    params = jax.jit(network.init)(jax.random.key(0), None, xs)
    start = jnp.zeros((12, 32), bool)

    def error(params):
        return jnp.mean(jnp.square(network.apply(params, None, xs, start)[1] - target))

    @jax.jit
    def learn(params, state):
        def step(carry, _):
            params, state = carry
            value, gradient = jax.value_and_grad(error)(params)
            change, state = optimiser.update(gradient, state)
            return (optax.apply_updates(params, change), state), value

        return jax.lax.scan(step, (params, state), None, 150)[1]

    values = learn(params, optimiser.init(params))
    assert values[0] > 1
    assert jnp.median(values[-30:]) < 0.6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NNXMemory("agalite"), r"needs input_size and rngs=nnx.Rngs\(seed\)"),
        (lambda: NNXMemory("agilte", 3, rngs=nnx.Rngs(0)), "choose one of: agalite"),
        (lambda: NNXMemory(models.build("gru"), 3), "takes no input_size"),
        (lambda: NNXMemory(models.build("gru"))(None, XS[..., :2]), r"xs has shape .* \(T, B, 3\)"),
        (lambda: NNXMemory(models.build("gru"))(None, XS, RESETS[0]), "resets has shape"),
        (lambda: NNXMemory(models.build("gru")).initial_state(0), "batch=0 must be"),
        (
            lambda: LinenMemory("gru", {"width": 3}).init(jax.random.key(0), None, XS),
            "gru has no option width",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_flax_it_says_what_to_install(monkeypatch):
    import importlib

    monkeypatch.setattr(extras, "installed", lambda name: name != "flax")
    with pytest.raises(ImportError, match=r'needs flax: pip install "agalite\[flax\]"'):
        importlib.reload(interop)


def test_gymnax_rolls_our_environments_out():
    """A cart pushed to where its pole leans stays up longer than one pushed anywhere."""

    def lean(_params, obs, _key):
        return (obs[1] > 0).astype(jnp.int32)

    env = make("masked-cartpole")
    keys = jax.random.split(jax.random.key(0), 16)
    lengths = {}
    for name, forward in (("random", None), ("lean", lean)):
        rollout = RolloutWrapper(forward, num_env_steps=120, env=env)
        obs, _, reward, next_obs, done, total = rollout.batch_rollout(keys, None)
        assert obs.shape == next_obs.shape == (16, 120, 2)
        first = np.where(done.any(1), np.argmax(np.asarray(done), axis=1) + 1, 120)
        np.testing.assert_allclose(total[:, 0], first)  # one point a step
        np.testing.assert_allclose(reward, 1.0)
        lengths[name] = first.mean()
    assert lengths["lean"] > 1.5 * lengths["random"]


def test_gymnax_rolls_a_tmaze_out():
    """Always right: the reward of a step, up to the time limit and past it."""
    env = make("tmaze", corridor=5, max_steps=20)
    rollout = RolloutWrapper(lambda *_: jnp.int32(3), num_env_steps=50, env=env)
    *_, reward, _, done, total = rollout.batch_rollout(jax.random.split(jax.random.key(0), 4), None)
    assert np.argwhere(np.asarray(done)[0]).ravel().tolist() == [19, 39]
    np.testing.assert_allclose(reward, -0.1, rtol=1e-6)
    np.testing.assert_allclose(total, -2.0, rtol=1e-5)


def test_the_wrapper_of_purejaxrl_counts_our_episodes():
    env = LogWrapper(make("masked-cartpole"))
    params = env.default_params

    @jax.jit
    def play(key):
        obs, state = env.reset(key, params)

        def step(carry, key):
            obs, state = carry
            action = (obs[1] > 0).astype(jnp.int32)
            obs, state, _, terminated, truncated, info = env.step(key, state, action, params)
            return (obs, state), (terminated | truncated, info["returned_episode_returns"])

        return jax.lax.scan(step, (obs, state), jax.random.split(key, 300))[1]

    done, returns = (np.asarray(x) for x in play(jax.random.key(2)))
    ends = np.flatnonzero(done)
    assert len(ends) > 2
    np.testing.assert_allclose(returns[ends], np.diff(ends, prepend=-1))
