"""The models' sizes, initialisation, caches and names, and their messages for bad input."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agalite
from agalite.memory import MODELS, AGaLiTeConfig, GaLiTeConfig, make_memory
from agalite.memory.agalite import AGaLiTeAttention
from agalite.memory.galite import GaLiTeAttention
from agalite.memory.registry import model_rows
from agalite.watch.gates import head_gates
from attention_cases import quick_jit
from memory_models import INPUT, SMALL, build, inputs, random_memory


def test_agalite_has_the_papers_parameter_count_at_t_maze_size():
    sizes = {name: (parameters, state) for name, parameters, state, *_ in model_rows(16)}
    assert round(sizes["agalite"][0] / 1e6, 1) == 1.7
    assert sizes["agalite"][1] == 4 * 4 * (1 // 2 + 1) * (4 * 64 + 64)
    assert sizes["galite"][0] == sizes["agalite"][0]
    assert set(sizes) == set(MODELS)


@pytest.mark.parametrize("r", [1, 2, 7])
def test_agalite_state_size(r):
    memory = random_memory("agalite", INPUT, **SMALL | {"layers": 2}, eta=3, r=r)
    heads, v = (SMALL[k] for k in ("heads", "head_size"))
    assert memory.state_size == 2 * heads * (r // 2 + 1) * (3 * v + v)
    integers = [x for x in jax.tree.leaves(memory.initial_state()) if x.dtype == jnp.int32]
    assert [x.shape for x in integers] == [()]


def test_weights_are_orthogonal():
    memory = make_memory("agalite", 16, layers=1)
    w = memory.blocks[0].attention_gate.candidate.weight
    np.testing.assert_allclose(w @ w.T, 2 * np.eye(128), atol=1e-4)
    heads_in = memory.blocks[0].attention.project.inputs.weight[:, :64].reshape(256, 128)
    np.testing.assert_allclose(heads_in.T @ heads_in, 2 * np.eye(128), atol=1e-4)
    np.testing.assert_array_equal(memory.blocks[0].mlp_gate.bias, 2.0)


@pytest.mark.parametrize(
    ("attention", "config"),
    [(AGaLiTeAttention, AGaLiTeConfig), (GaLiTeAttention, GaLiTeConfig)],
)
def test_fused_projections_start_smaller_than_separate_ones(attention, config):
    """At T-Maze size: the five wide projections of an input of unit variance."""
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    five = 5 * 64
    found = {}
    for init in ("separate", "fused"):
        made = attention(config(projection_init=init), key=jax.random.key(0))
        weight = np.asarray(made.project.inputs.weight)
        assert weight.shape == (4, five + 3 * 4, 128)
        found[init] = np.std(np.einsum("td,hnd->thn", x, weight[:, :five]))
        if init == "fused":
            for w in (weight[:, :five].reshape(-1, 128), weight[:, five:].reshape(-1, 128).T):
                np.testing.assert_allclose(w.T @ w, 2 * np.eye(w.shape[1]), atol=1e-4)
    np.testing.assert_allclose(found["separate"], 1.0, rtol=0.02)
    np.testing.assert_allclose(found["fused"], 0.45, rtol=0.02)


def test_a_gru_or_lstm_without_embedding_reads_its_input():
    for name, gates in (("gru", 3), ("lstm", 4)):
        memory = random_memory(name, 5, d_model=6, hidden_size=7, embedding=False)
        assert memory.parameter_count == gates * 7 * (5 + 7 + 2)
        expected = memory.from_input.weight.T + memory.from_input.bias[None]
        np.testing.assert_allclose(memory.input_part(jnp.eye(5)), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["agalite", "galite", "gtrxl", "linear", "transformer"])
def test_no_kernel_of_the_gradient_grows_with_the_layers(name):
    """The residual stream's gradient, added up anew in every kernel that reads it, would."""

    def most_inputs(layers):
        memory = random_memory(name, INPUT, **(SMALL | {"layers": layers}))
        weights, rest = eqx.partition(memory, eqx.is_inexact_array)

        def loss(weights, xs):
            scan = eqx.combine(weights, rest).scan
            return jnp.sum(jnp.square(scan(memory.initial_state(), xs)[1]))

        xs = jnp.ones((16, INPUT))
        program = quick_jit(jax.grad(loss)).lower(weights, xs).compile().as_text()
        return max(x.count("%") for x in re.findall(r"fusion\(([^)]*)\), kind=kLoop", program))

    assert most_inputs(3) == most_inputs(1)


@pytest.mark.parametrize("name", ["mlstm", "mlstm exp", "deltanet", "mamba2", "ffm"])
def test_horizon_of_the_models_of_other_papers(name):
    """What an input of zeros leaves of the state: 1 - 1 / tau, tau from 2 to 512."""
    options = {"forget_gate": "exp"} if name == "mlstm exp" else {}
    heads = {"d_model": 8, "layers": 1, "heads": 4, "head_size": 4, "ffn_size": 4}
    memory = make_memory(name.split()[0], 3, **heads, **options, horizon=(2, 512))
    attention = memory.blocks[0].attention
    zeros = jnp.zeros((1, 8))
    if name == "ffm":
        kept = jnp.exp(-attention.alpha)
    else:
        kept = head_gates(attention, zeros).kept[0]
        if "mlstm" in name:
            kept = jnp.exp(attention.inputs(zeros).log_f[0])
    tau = np.geomspace(2, 512, 16 if name == "ffm" else 4)
    np.testing.assert_allclose(np.sort(1 / (1 - np.asarray(kept, np.float64))), tau, rtol=1e-3)


@pytest.mark.parametrize("name", ["agalite", "galite", "gru", "lstm"])
def test_horizon_sets_the_half_life_of_a_written_input(name):
    """Change one input, then feed zeros: after how many steps has half of the change gone?"""

    def half_lives(horizon):
        sizes = (
            {"d_model": 16, "hidden_size": 64}
            if name in ("gru", "lstm")
            else {"d_model": 16, "layers": 1, "heads": 4, "head_size": 16, "ffn_size": 8}
        )
        memory = make_memory(name, 4, **sizes, horizon=horizon)
        # Only what the gates do by themselves: silence the recurrent and input weights after the
        # write by feeding zeros, which leave the gates at their biases.
        memory = _without_recurrence(memory)
        steps = 400
        xs = jnp.zeros((steps, 4)).at[0].set(jax.random.normal(jax.random.key(0), (4,)))
        step = jax.jit(lambda s, x: memory.step(s, x, False))
        state, path = memory.initial_state(), []
        for x in xs:
            state, _ = step(state, x)
            path.append(_written(name, state))
        path = np.abs(np.stack(path))
        path = path[:, path[0] > 1e-3 * path[0].max()]
        gone = path < path[0] / 2
        return np.where(gone.any(0), gone.argmax(0), steps)

    spread, zero = half_lives((2, 512)), half_lives(None)
    # sigmoid(0) = 1/2 is kept at each step: a half-life of one or two steps.
    assert np.median(zero) <= 3
    # tau log-uniform in [2, 512] means half-lives tau * log 2 from 1 to 355 steps.
    assert np.percentile(spread, 10) <= 8
    assert np.percentile(spread, 90) >= 100
    assert 8 <= np.median(spread) <= 50


def _without_recurrence(memory):
    if not hasattr(memory, "from_hidden"):
        return memory
    zeros = jnp.zeros_like(memory.from_hidden.weight)
    return eqx.tree_at(lambda m: m.from_hidden.weight, memory, zeros)


def _written(name, state):
    match name:
        case "agalite":
            return np.asarray(state.values[0]).ravel()
        case "galite":
            # C decays by both gates; its value side alone is seen where gamma is slowest.
            return np.asarray(state[0].s).ravel()
        case "gru":
            return np.asarray(state[0])
        case _:
            return np.asarray(state[1])


def test_gtrxl_sees_exactly_its_window():
    """One layer: the output at t depends on inputs t - M .. t and on none before."""
    memory = random_memory("gtrxl", INPUT, **SMALL, memory=4)
    xs, _ = inputs(12)

    def last(xs):
        return memory.scan(memory.initial_state(), xs)[1][-1].sum()

    reach = np.abs(jax.jit(jax.grad(last))(xs)).sum(-1)
    assert (reach[-5:] > 0).all()
    assert (reach[:-5] == 0).all()


@pytest.mark.parametrize("name", ["gtrxl", "transformer"])
def test_a_cache_from_other_weights_is_refused_and_refreshed(name):
    old = build(name)
    new = jax.tree.map(lambda x: np.asarray(x) * np.float32(1.01), old)
    xs, _ = inputs(9, often=0.0)
    scan = jax.jit(lambda memory, state: memory.scan(state, xs))
    step = jax.jit(lambda state, reset: new.step(state, xs[0], reset))
    state, _ = scan(old, old.initial_state())
    with pytest.raises(ValueError, match="refresh"):
        new.step(state, xs[0])
    _, poisoned = step(state, False)
    assert np.isnan(poisoned).all()
    # After a reset there is nothing old to read.
    assert np.isfinite(step(state, True)[1]).all()
    # Refreshed, stepping equals scanning from the same stored inputs.
    _, stepped = step(eqx.filter_jit(new.refresh)(state), False)
    _, scanned = scan(new, state)
    np.testing.assert_allclose(stepped, scanned[0], rtol=1e-4, atol=1e-5)


def test_the_gradient_reaches_the_projections_of_remembered_inputs():
    memory = build("gtrxl")
    xs, _ = inputs(9, often=0.0)
    state, _ = eqx.filter_jit(memory.scan)(memory.initial_state(), xs)
    weights, rest = eqx.partition(memory, eqx.is_inexact_array)

    def value(weights, state):
        return jnp.sum(jnp.square(eqx.combine(weights, rest).scan(state, xs[:2])[1]))

    gradient = jax.jit(jax.grad(value))
    with_memory, without = gradient(weights, state), gradient(weights, memory.initial_state())
    kv = [g.blocks[0].attention.key_value.weight for g in (with_memory, without)]
    assert float(jnp.abs(kv[0] - kv[1]).max()) > 1e-4


def test_make_memory_by_name():
    memory = agalite.make_memory("gtrxl", 16, memory=32, layers=1)
    assert memory.config.memory == 32
    for name in MODELS:
        with pytest.raises(ValueError, match=f"{name} has no option depth=3; it takes: "):
            make_memory(name, 16, depth=3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba", {}, "memory='mamba' is unknown; choose one of: agalite, deltanet, feedforward"),
        ("agalite", {"r": 0}, "r=0 must be a whole number >= 1"),
        ("agalite", {"eta": 0}, "eta=0 must be a whole number >= 1"),
        ("agalite", {"heads": 0}, "heads=0 must be a whole number >= 1"),
        ("agalite", {"layers": 2.0}, r"layers=2\.0 must be a whole number >= 1"),
        ("agalite", {"basis": "cosine"}, "basis='cosine' is unknown; choose one of: paper, pub"),
        ("agalite", {"method": "fast"}, "method='fast' is unknown; choose one of: associative"),
        ("agalite", {"feature": "exp"}, "feature='exp' is unknown; choose one of: dpfp, elu1"),
        ("agalite", {"horizon": (512, 2)}, r"horizon=\(512, 2\) must be None or"),
        ("galite", {"horizon": (0.5, 2)}, r"horizon=\(0\.5, 2\) must be None or"),
        ("gru", {"horizon": (2, float("inf"))}, r"horizon=\(2, inf\) must be None or"),
        ("lstm", {"horizon": (2, float("nan"))}, r"horizon=\(2, nan\) must be None or"),
        ("gru", {"horizon": 7}, "horizon=7 must be None or"),
        ("gru", {"horizon": ("2", "512")}, "horizon=.* must be None or"),
        ("agalite", {"gating": "no"}, "gating='no' must be True or False"),
        ("galite", {"decay": "slow"}, "decay='slow' is unknown; choose one of: paper, published"),
        (
            "agalite",
            {"projection_init": "one"},
            "projection_init='one' is unknown; choose one of: fused, separate",
        ),
        ("gru", {"embedding": 1}, "embedding=1 must be True or False"),
        ("gtrxl", {"cache": None}, "cache=None must be True or False"),
        ("gru", {"hidden_size": -1}, "hidden_size=-1 must be a whole number >= 1"),
        ("gtrxl", {"memory": 0}, "memory=0 must be a whole number >= 1"),
        ("transformer", {"context": 0}, "context=0 must be a whole number >= 1"),
        ("linear", {"nu": 0}, "nu=0 must be a whole number >= 1"),
        ("lru", {"hidden_size": 0}, "hidden_size=0 must be a whole number >= 1"),
        ("lru", {"layers": 0}, "layers=0 must be a whole number >= 1"),
        ("lru", {"r_min": 0.9, "r_max": 0.5}, r"r_min=0\.9 must be less than r_max=0\.5"),
        ("lru", {"r_max": 1.5}, r"r_max=1\.5 must be"),
        ("rtu", {"max_phase": 0.0}, r"max_phase=0\.0 must be"),
        ("rtu", {"variant": "gated"}, "variant='gated' is unknown; choose one of: linear, nonl"),
        ("rtu", {"activation": "gelu"}, "activation='gelu' is unknown; choose one of: relu, tanh"),
        ("s5", {"hidden_size": 100}, "blocks=8 does not divide hidden_size=100"),
        ("s5", {"step_min": 0.2}, r"step_min=0\.2 must be at most step_max=0\.1"),
        ("mingru", {"horizon": (1, 2)}, r"horizon=\(1, 2\) must be None or"),
        ("mlstm", {"forget_gate": "tanh"}, "forget_gate='tanh' is unknown; choose one of: exp"),
        (
            "mlstm",
            {"method": "associative"},
            "method='associative' is unknown; choose one of: auto",
        ),
        ("mamba2", {"d_state": 0}, "d_state=0 must be a whole number >= 1"),
        ("deltanet", {"d_conv": 0}, "d_conv=0 must be a whole number >= 1"),
        ("ffm", {"contexts": 0}, "contexts=0 must be a whole number >= 1"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_memory(name, 16, **options)


@pytest.mark.parametrize("name", list(MODELS))
def test_bad_input_size_is_named(name):
    with pytest.raises(ValueError, match="input_size=0 must be a whole number >= 1"):
        make_memory(name, 0)


def test_lists_are_arrays():
    memory = build("gru")
    _, ys = memory.scan(memory.initial_state(), [[1, 2, 3], [4, 5, 6]], [0, 1])
    _, y = memory.step(memory.initial_state(), [1, 2, 3])
    np.testing.assert_allclose(ys[0], y, rtol=1e-6)


def test_bad_calls_are_named():
    memory = build("agalite")
    state, (xs, resets) = memory.initial_state(), inputs(5)
    with pytest.raises(ValueError, match=r"xs has shape \(5, 4\); expected \(T, 3\)"):
        memory.scan(state, jnp.zeros((5, 4)))
    with pytest.raises(ValueError, match=r"xs has shape \(5,\); expected \(T, 3\)"):
        memory.scan(state, jnp.zeros(5))
    with pytest.raises(ValueError, match="xs has length 0"):
        memory.scan(state, jnp.zeros((0, 3)))
    with pytest.raises(ValueError, match=r"resets has shape \(4,\); expected \(5,\)"):
        memory.scan(state, xs, resets[:4])
    with pytest.raises(ValueError, match=r"x has shape \(5, 3\); expected \(3,\)"):
        memory.step(state, xs)
    with pytest.raises(ValueError, match=r"xs\[2, 1\] is nan"):
        memory.scan(state, xs.at[2, 1].set(jnp.nan))
    with pytest.raises(ValueError, match="xs has dtype complex64; expected real numbers"):
        memory.scan(state, xs.astype(jnp.complex64))
    with pytest.raises(ValueError, match="resets has dtype float32; expected bool"):
        memory.scan(state, xs, jnp.zeros(5))
    with pytest.raises(ValueError, match="reset='no' is not an array of numbers"):
        memory.step(state, xs[0], "no")
    with pytest.raises(ValueError, match=r"state\.phase has dtype float32; expected int32"):
        memory.scan(state._replace(phase=jnp.zeros(())), xs)
    with pytest.raises(ValueError, match="state does not belong to this model"):
        memory.scan(build("gru").initial_state(), xs)
    with pytest.raises(ValueError, match=r"xs has shape \(5, 4\)"):
        eqx.filter_jit(memory.scan)(state, jnp.zeros((5, 4)))


def test_lecun_weights_of_gtrxl():
    memory = make_memory("gtrxl", 64, layers=1, d_model=64, heads=2, head_size=32, init="lecun")
    attention = memory.blocks[0].attention
    for layer in (memory.embedding, attention.query, attention.out):  # all of 64 inputs
        np.testing.assert_allclose(np.asarray(layer.weight).std(), 1 / 8, rtol=0.05)
    assert (np.asarray(attention.out.bias) == 0).all()
    with pytest.raises(ValueError, match="init='zeros' is unknown"):
        make_memory("gtrxl", 4, init="zeros")


def test_a_bias_of_the_embedding_keeps_the_length_of_the_input():
    """Without, the first layer norm sees the same for x and 2 x."""

    def normed(bias):
        memory = make_memory("linear", 2, **SMALL | {"d_model": 32}, embedding_bias=bias)
        assert np.abs(memory.embedding.bias).max() <= bias
        norm = memory.blocks[0].attention.norm
        xs = jnp.array([[3.0, -2.0], [6.0, -4.0]])
        return np.asarray(norm(jax.nn.relu(memory.embedding(xs))))

    one, two = normed(0.0)
    np.testing.assert_allclose(one, two, atol=1e-2)
    one, two = normed(1.0)
    assert np.abs(one - two).max() > 0.1


def test_gate_bias_says_how_much_of_a_block_is_new():
    """The gate's z starts at sigmoid(-bias), for inputs of zero."""
    for bias, new in ((2.0, 0.1192), (0.0, 0.5)):
        memory = make_memory("linear", 2, **SMALL, gate_bias=bias)
        gate = memory.blocks[0].attention_gate
        np.testing.assert_allclose(jax.nn.sigmoid(-gate.bias), new, atol=1e-4)
    with pytest.raises(ValueError, match="gate_bias=nan must be a finite number"):
        make_memory("linear", 2, gate_bias=float("nan"))
