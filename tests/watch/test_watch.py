"""The numbers of `agalite watch`: gates, attention weights, gradients, episodes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from agalite.memory import make_memory
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.heads import Categorical, DiagonalNormal, MultiCategorical
from agalite.ops import agalite_attention
from agalite.ops.features import as_outer
from agalite.training.asynchronous.evaluate import HostTrainer
from agalite.training.config import HostConfig
from agalite.watch import gates
from agalite.watch.episode import play
from agalite.watch.gates import attention_weights
from agalite.watch.page import action_record
from agalite.watch.saliency import axis_limit, chosen_logit, saliency
from memory_models import INPUT, build, inputs

T = 9


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@eqx.filter_jit
def scan(memory, xs):
    resets = jnp.zeros(T, bool).at[0].set(True)
    return memory.scan(memory.initial_state(), xs, resets)


@eqx.filter_jit
def layers_of(memory, xs):
    """beta, gamma, k and v of each layer."""
    found = []
    for block, h in zip(memory.blocks, gates.attention_inputs(memory, xs), strict=True):
        attention = block.attention
        projected = attention.projections(attention.project(attention.norm(h)))
        both = gates.gates(attention, h)
        found.append((*both, as_outer(projected.k).expand(), projected.v))
    return found


def episode(row):
    """A model, inputs (T, input) from the first of an episode, and its final state and outputs."""
    memory, xs = build(row), np.asarray(inputs(T)[0])
    return memory, xs, *jax.tree.map(np.asarray, scan(memory, xs))


@pytest.mark.parametrize("row", ["agalite", *slow("agalite published r=4", "agalite elu1")])
def test_gates_give_the_state_of_agalite(row):
    memory, xs, state, _ = episode(row)
    basis = memory.blocks[0].attention.basis
    for layer, arrays in enumerate(layers_of(memory, xs)):
        beta, gamma, k, v = (np.asarray(x) for x in arrays)
        keys, values = np.zeros_like(state.keys[layer]), np.zeros_like(state.values[layer])
        for t in range(T):
            wave = basis.table[(t + 1) % basis.period][None, :, None]
            keys = (1 - gamma[t])[:, None] * keys + wave * (gamma * k)[t][:, None]
            wave = wave[:, : values.shape[1]]
            values = (1 - beta[t])[:, None] * values + wave * (beta * v)[t][:, None]
        np.testing.assert_allclose(keys, state.keys[layer], atol=1e-5)
        np.testing.assert_allclose(values, state.values[layer], atol=1e-5)


def matrix_kept(row, beta, gamma):
    """(T, V, K) of one head: the fraction of each element of C that a step keeps."""
    if row == "galite published decay":
        return 1 - beta[:, :, None] * gamma[:, None]
    return (1 - beta)[:, :, None] * (1 - gamma)[:, None]


@pytest.mark.parametrize("row", ["galite", *slow("galite dpfp", "galite published decay")])
def test_gates_give_the_state_of_galite(row):
    memory, xs, state, _ = episode(row)
    for own, arrays in zip(state, layers_of(memory, xs), strict=True):
        beta, gamma, k, v = (np.asarray(x) for x in arrays)
        C = np.zeros_like(own.C)
        for t in range(T):
            kept = matrix_kept(row, beta[t], gamma[t])
            C = kept * C + (beta * v)[t][:, :, None] * (gamma * k)[t][:, None]
        np.testing.assert_allclose(C, own.C, atol=1e-5)


@pytest.mark.parametrize("row", ["gru", "gru without embedding", *slow("gru horizon"), "lstm"])
def test_gates_give_the_state_of_units(row):
    """state = kept * state + written * candidate."""
    memory, xs, state, ys = episode(row)
    gate = gates.unit_gates(memory, jnp.asarray(xs))
    before = jnp.concatenate([jnp.zeros_like(ys[:1]), ys[:-1]])
    embedded = xs if memory.embedding is None else jnp.maximum(memory.embedding(xs), 0)
    x = memory.from_input(embedded)
    h = memory.from_hidden(before)
    size = memory.config.hidden_size
    if row == "lstm":
        cell = jnp.zeros(size)
        for t in range(T):
            candidate = jnp.tanh((x + h)[t, 2 * size : 3 * size])
            cell = gate.kept[t] * cell + gate.written[t] * candidate
        np.testing.assert_allclose(cell, state[1], atol=1e-5)
    else:
        r = jax.nn.sigmoid((x + h)[:, :size])
        candidate = jnp.tanh(x[:, 2 * size :] + r * h[:, 2 * size :])
        made = gate.kept * before + gate.written * candidate
        np.testing.assert_allclose(made, ys, atol=1e-5)


def test_what_is_left_is_the_gradient_of_the_state():
    """Of AGaLiTe's values, summed over a head's units, by what was written."""
    memory, xs, _, _ = episode("agalite")
    beta, gamma, k, v = layers_of(memory, xs)[0]
    rows = [x for x in gates.inspect_memory(memory, xs)[0].rows if x.name.endswith("values")]

    @jax.jit
    def gradient(v):
        def values(v):
            return agalite_attention(k, k, v, beta, gamma)[0].values[:, 0].sum(axis=1)

        return jax.jacrev(values)(v)  # (H, T, H, V)

    found = np.asarray(gradient(v))
    for head, row in enumerate(rows):
        left = found[head, :, head].sum(axis=1) / beta[:, head].sum(axis=1)
        np.testing.assert_allclose(row.past[T - 1], left, atol=1e-5)
        np.testing.assert_allclose(row.written, beta[:, head].mean(axis=1), atol=1e-6)
        np.testing.assert_allclose(np.diag(row.past), 1, atol=1e-6)
        between = np.asarray(beta[3, head] * (1 - beta[4, head])).sum() / beta[3, head].sum()
        np.testing.assert_allclose(row.past[4, 3], between, atol=1e-5)


@pytest.mark.parametrize("name", ["galite", "galite published decay"])
def test_matrix_is_written_and_kept_by_both_gates(name):
    memory, xs, _, _ = episode(name)
    beta, gamma, _, _ = (np.asarray(x) for x in layers_of(memory, xs)[0])
    row = gates.inspect_memory(memory, xs)[0].rows[1]
    both = matrix_kept(name, beta[:, 1], gamma[:, 1])
    np.testing.assert_allclose(row.kept, both.mean(axis=(1, 2)), atol=1e-6)
    written = beta[2, 1][:, None] * gamma[2, 1][None]
    left = (written * both[3] * both[4]).sum() / written.sum()
    np.testing.assert_allclose(row.past[4, 2], left, atol=1e-5)


@pytest.mark.parametrize("row", ["rtu", *slow("lru", "s5", "mingru")])
def test_elements_of_a_diagonal_recurrence(row):
    """Each has four elements: a quarter is one of them."""
    memory, xs, _, _ = episode(row)
    (layer,) = gates.inspect_memory(memory, xs)
    assert (layer.name, layer.reads, len(layer.rows)) == ("layer 1", False, 4)
    mixer, h = memory.blocks[0].attention, gates.attention_inputs(memory, jnp.asarray(xs))[0]
    written, kept = (np.asarray(x) for x in gates.element_gates(mixer, h))
    slowest = kept.mean(axis=0).argmax()
    np.testing.assert_allclose(layer.rows[-1].past[4, 2], kept[3:5, slowest].prod(), rtol=1e-5)
    np.testing.assert_allclose(layer.rows[-1].written, written[:, slowest], rtol=1e-6)
    decays, drives = mixer.recurrence(mixer.norm(h))
    assert jax.tree.leaves(decays)[0].shape == jax.tree.leaves(drives)[0].shape == (T, 4)


def test_horizons_are_those_of_the_initial_biases():
    """With weights of zero the gates are their biases: time constants from 2 to 50."""
    memory = make_memory("gru", INPUT, d_model=6, hidden_size=400, horizon=(2, 50))
    still = eqx.tree_at(
        lambda m: (m.from_input.weight, m.from_hidden.weight), memory, replace_fn=jnp.zeros_like
    )
    rows = gates.inspect_memory(still, inputs(T)[0])[0].rows
    assert [row.name for row in rows] == [
        "fastest quarter",
        "second quarter",
        "third quarter",
        "slowest quarter",
    ]
    expected = np.split(np.geomspace(2, 50, 400), 4)
    for row, taus in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row.horizon, np.percentile(taus, [10, 50, 90]), rtol=0.02)


@pytest.mark.parametrize("row", ["mlstm", *slow("deltanet", "mamba2")])
def test_one_gate_per_head(row):
    memory, xs, state, _ = episode(row)
    attention = memory.blocks[0].attention
    h = eqx.filter_jit(gates.attention_inputs)(memory, xs)[0]
    written, kept = eqx.filter_jit(gates.head_gates)(attention, h)
    (layer,) = gates.inspect_memory(memory, xs)
    assert [x.name for x in layer.rows] == ["head 1", "head 2"]
    for i, head in enumerate(layer.rows):
        np.testing.assert_allclose(head.kept, kept[:, i], rtol=1e-6)
        np.testing.assert_allclose(head.past[-1, 0], np.prod(kept[1:, i]), rtol=1e-4)
    if row == "mlstm":  # the normaliser is a sum of keys by these gates
        k, n = np.asarray(eqx.filter_jit(attention.inputs)(h).k), np.zeros_like(state[0].n)
        for t in range(T):
            n = kept[t][:, None] * n + written[t][:, None] * k[t]
        np.testing.assert_allclose(n, state[0].n, rtol=1e-4, atol=1e-6)


def test_gates_of_ffm():
    memory, xs, state, _ = episode("ffm")
    attention = memory.blocks[0].attention
    h = eqx.filter_jit(gates.attention_inputs)(memory, xs)[0]
    written, kept = eqx.filter_jit(gates.trace_gates)(attention, h)
    x = np.asarray(eqx.filter_jit(attention.columns)(h)[0])
    turn = np.exp(-1j * np.asarray(attention.omega, np.float64))
    S = np.zeros(state[0].real.shape, complex)
    for t in range(T):
        S = np.asarray(kept)[t][:, None] * turn * S + (np.asarray(written)[t] * x[t])[:, None]
    np.testing.assert_allclose(S, state[0].real + 1j * state[0].imag, rtol=1e-4, atol=1e-5)
    (layer,) = gates.inspect_memory(memory, xs)
    assert len(layer.rows) == 4


@pytest.mark.parametrize("row", ["gtrxl", *slow("gtrxl memory 1", "transformer")])
def test_attention_weights_give_the_output_of_the_attention(row):
    @eqx.filter_jit
    def read(memory, xs):
        found = []
        for block, h in zip(memory.blocks, gates.attention_inputs(memory, xs), strict=True):
            attention = block.attention
            weights = attention_weights(attention, h)
            values = jnp.split(attention.key_value(attention.norm(h)), 2, axis=-1)[1]
            out = attention.out(jnp.einsum("hts,shv->thv", weights, values))
            resets = jnp.zeros(T, bool).at[0].set(True)
            expected = attention(attention.initial_state(), h, resets)[1]
            found.append((weights, out, expected))
        return found

    memory, xs = build(row), inputs(T)[0]
    layers = gates.inspect_memory(memory, xs)
    for layer, (weights, out, expected) in zip(layers, read(memory, xs), strict=True):
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        np.testing.assert_allclose(layer.rows[1].past, weights[1], atol=1e-6)
        assert layer.reads


@pytest.mark.parametrize(
    "row", ["feedforward", "agalite ungated", *slow("linear", "galite ungated")]
)
def test_models_without_gates(row):
    assert gates.inspect_memory(build(row), inputs(T)[0]) == []


# --- gradients ------------------------------------------------------------------------------------

SIZES = {
    "agalite": {"d_model": 6, "layers": 1, "heads": 2, "head_size": 4, "ffn_size": 5, "eta": 2},
    "gtrxl": {"d_model": 6, "layers": 1, "heads": 2, "head_size": 4, "ffn_size": 5, "memory": 3},
    "gru": {"d_model": 6, "hidden_size": 7},
    "feedforward": {"d_model": 6, "layers": 1, "ffn_size": 5},
}


def agent(memory, observations=None, action_space=None):
    return ActorCritic.make(
        observations or Box(-1.0, 1.0, (INPUT,), np.float32),
        action_space or Discrete(4),
        memory=memory,
        memory_options=SIZES[memory],
        hidden_size=8,
        key=jax.random.key(2),
    )


@pytest.mark.parametrize("memory", ["agalite", "feedforward", *slow("gtrxl", "gru")])
def test_saliency_is_the_gradient_through_single_steps(memory):
    model = agent(memory)
    obs = np.asarray(jax.random.normal(jax.random.key(0), (4, INPUT)))
    taken = np.array([0, 3, 1, 2], np.int32)
    found = saliency(model, obs, taken, np.zeros(4, np.float32))

    def logit(obs, t):
        state = model.initial_state()
        for i in range(t + 1):
            state, policy, _ = model.step(state, obs[i], i == 0)
        p = jax.nn.softmax(policy.logits)[taken[t]]
        return jnp.log(p / (1 - p))

    gradient = jax.jit(jax.grad(logit), static_argnums=1)(obs, 2)
    np.testing.assert_allclose(found[2], np.linalg.norm(gradient, axis=1), rtol=1e-3, atol=1e-7)
    past = found[np.tril_indices(4, -1)]
    assert (past == 0).all() if memory == "feedforward" else (past > 0).all()


SPACES = {
    "category": (Discrete(5), MultiDiscrete([2, 3])),
    "image": (Box(0, 255, (36, 36, 3), np.uint8), Discrete(1)),
    "continuous": (Box(-1.0, 1.0, (INPUT,), np.float32), Box(-1.0, 1.0, (2,), np.float32)),
}


@pytest.mark.parametrize("name", ["category", *slow("image", "continuous")])
def test_saliency_of_other_spaces(name):
    observations, actions = SPACES[name]
    observations.seed(0)
    obs = np.stack([np.asarray(observations.sample()) for _ in range(3)])
    taken = np.zeros((3, *actions.shape), actions.dtype)
    found = saliency(agent("gru", observations, actions), obs, taken, np.zeros(3, np.float32))
    assert found.shape == (3, 3)
    assert (found[np.tril_indices(3)] > 0).all()
    assert (found[np.triu_indices(3, 1)] == 0).all()


def test_chosen_logit_is_that_of_the_probability():
    logits = jax.random.normal(jax.random.key(0), (3, 4))
    taken = jnp.array([0, 1, 2])
    found = chosen_logit(Categorical(logits), taken)
    p = jax.nn.softmax(logits)[jnp.arange(3), taken]
    np.testing.assert_allclose(found, np.log(p / (1 - p)), atol=1e-5)
    np.testing.assert_allclose(found, chosen_logit(Categorical(logits + 100), taken), atol=1e-4)
    both = MultiCategorical(jnp.concatenate([logits, logits], axis=1), (4, 4))
    pairs = jnp.stack([taken, taken], axis=1)
    np.testing.assert_allclose(chosen_logit(both, pairs), 2 * found, atol=1e-5)


def test_axis_limit_ignores_outliers():
    assert axis_limit(np.array([0.2, 0.1, 0.5])) == 0.5
    assert axis_limit(np.array([0.2, 60.0, 0.1, 0.5, 0.01])) == 0.5
    assert axis_limit(np.array([0.2, 60.0, 9.0, 0.5, 0.01])) == 0.5
    assert axis_limit(np.array([7.0])) == 7.0
    assert axis_limit(np.array([7.0, 1.0])) == 7.0
    assert axis_limit(np.zeros(4)) == 0.0


# --- episodes -------------------------------------------------------------------------------------


def test_episode_in_a_gymnasium_environment():
    config = HostConfig(
        env="gym:CartPole-v1",
        memory="gru",
        memory_options={"d_model": 6, "hidden_size": 7},
        hidden_size=8,
        num_steps=8,
        num_workers=1,
        envs_per_worker=2,
        processes=False,
        total_timesteps=64,
    )
    trainer = HostTrainer(config)
    model = trainer.network.make(jax.random.key(0))
    played = play(model, trainer.env, seed=3, steps=500, greedy=True)
    assert played.ending == "ended"
    assert played.total == len(played.steps) == len(played.frames) < 500
    again = play(model, trainer.env, seed=3, steps=4, greedy=True)
    assert again.ending == "stopped before its end"
    np.testing.assert_array_equal(again.obs, played.obs[:4])
    _, policy, values = model.scan(model.initial_state(), played.obs)
    np.testing.assert_allclose(played.values, values, atol=1e-4)
    np.testing.assert_array_equal(played.sampled, policy.mode())


def test_record_of_actions():
    policy = MultiCategorical(jnp.array([0.0, 1.0, 2.0, 0.0, 1.0]), (2, 3))
    choices = action_record(policy, np.array([1, 2]))["choices"]
    assert [len(x["chances"]) for x in choices] == [2, 3]
    assert [x["taken"] for x in choices] == [1, 2]
    assert sum(choices[1]["chances"]) == pytest.approx(1, abs=1e-3)
    policy = DiagonalNormal(jnp.array([0.5, 1.0]), jnp.zeros(2))
    number = action_record(policy, np.array([0.25, -1.5]))["numbers"][1]
    assert number["taken"] == -1.5
    assert number["high"] - number["mean"] == pytest.approx(1, abs=1e-3)
