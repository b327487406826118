"""Streaming agents: their equations, gradients and step sizes; that they resume and learn."""

import shutil
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from agalite.agents import rollout
from agalite.agents.step_size import Limit, step_size
from agalite.agents.stream import Predictions, StreamAC, StreamQ
from agalite.cli import main
from agalite.envs.registry import make
from agalite.envs.vector import VectorEnv
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.flat import weight_groups
from agalite.ops.eligibility import split
from agalite.training.checkpoint import Checkpoints
from agalite.training.command import parse
from agalite.training.config import TrainConfig
from agalite.training.evaluate import evaluate
from agalite.training.policy import load, load_policy
from agalite.training.train import Trainer

GRU = {"memory": "gru", "memory_options": {"d_model": 4, "hidden_size": 4}}
AGALITE = {
    "memory": "agalite",
    "memory_options": {
        **{"d_model": 6, "layers": 1, "heads": 2, "head_size": 3, "ffn_size": 4, "eta": 2},
        **{"gate_bias": 0.0, "horizon": (2.0, 8.0)},
    },
}


def start(agent, num_envs=1, length=4, traced=False, **network):
    """The network, the environments, and the states before the first step."""
    env = make("memory-chain", length=length)
    params = env.default_params
    model = ActorCritic.make(
        env.observation_space(params),
        env.action_space(params),
        **{"hidden_size": 5, "hidden_norm": True, "actor_gain": 1.0, **network},
        epsilon=agent.epsilon,
        key=jax.random.key(0),
    )
    envs = VectorEnv(env, num_envs)
    runner_state = rollout.init(model, envs, jax.random.key(1))
    return model, envs, agent.init(model, runner_state, traced=traced), runner_state


def stepper(agent, envs):
    """One step, compiled; it also returns the action keys and the environments' key."""
    run = partial(agent.run, envs=envs, remaining=jnp.ones(()), num_steps=1)

    @eqx.filter_jit
    def step(model, state, runner_state, key):
        return run(model=model, state=state, runner_state=runner_state, key=key)[:3]

    return step


def keys_of(key):
    """As `run` derives them for its only step."""
    return jax.random.split(jax.random.split(key, 1)[0])


# --- the equations --------------------------------------------------------------------------------


def reference(agent, model, envs, runner_state, keys):
    """A plain loop over one environment, with the equations as they are in the papers.

    Statistics are computed anew from all samples; the gradients of value and policy are taken one
    by one, weight by weight; everything between them is NumPy.
    """
    gamma, decay = agent.gamma, agent.gamma * agent.trace_lambda
    seen, returns, so_far = [], [], 0.0
    groups = 2 if isinstance(agent, StreamAC) else 1
    where = [
        lambda m: (m.encoder, m.memory, m.hidden, m.actor),
        lambda m: (m.critic, m.critic_memory, m.critic_hidden),
    ][:groups]
    z = [jax.tree.map(np.zeros_like, eqx.filter(w(model), eqx.is_inexact_array)) for w in where]
    squares, mean_square, errors = [0.0] * groups, 0.0, []

    @eqx.filter_jit
    def outputs(model, state, obs, reset, action, sign):
        def score(model, part):
            _, policy, value = model.step(state, obs, reset)
            if isinstance(agent, StreamQ):
                return policy.values[action]
            bonus = agent.ent_coef * sign * policy.entropy()
            return policy.log_prob(action) + bonus if part == 0 else value

        return [eqx.filter_grad(score)(model, part) for part in range(groups)]

    look = eqx.filter_jit(lambda model, state, obs, reset: model.step(state, obs, reset))
    for t, key in enumerate(keys, 1):
        action_key, env_key = keys_of(key)
        state, obs, reset = jax.tree.map(
            lambda x: x[0], (runner_state.memory_state, runner_state.obs, runner_state.resets)
        )
        seen.append(np.asarray(obs, np.float64))
        statistics = model.obs_statistics
        statistics = eqx.tree_at(
            lambda s: (s.mean, s.variance, s.count),
            statistics,
            tuple(jnp.asarray(x) for x in (np.mean(seen, 0), np.var(seen, 0), float(len(seen)))),
        )
        model = eqx.tree_at(lambda m: m.obs_statistics, model, statistics)
        memory_state, policy, value = look(model, state, obs, reset)
        action, continues = agent.act(
            Predictions(policy, value), jax.random.split(action_key, 1)[0], jnp.ones(())
        )
        obs, env_state, reward, terminated, _, info = envs.step(
            env_key, runner_state.env_state, action[None]
        )
        reward, over = float(reward[0]), bool(terminated[0])
        _, _, following = look(model, memory_state, info["final_observation"][0], False)
        so_far = gamma * so_far + reward
        returns.append(so_far)
        # One more sample: that of mean 0 and variance 1.
        count, mean = 1 + len(returns), np.sum(returns) / (1 + len(returns))
        scale = np.sqrt((1 + np.sum(np.square(returns))) / count - mean**2 + 1e-8)
        predicted = policy.values[action] if isinstance(agent, StreamQ) else value
        error = reward / scale + gamma * (1 - over) * float(following) - float(predicted)
        errors.append(error)
        mean_square = 0.999 * mean_square + 0.001 * error**2
        typical = np.sqrt(mean_square / (1 - 0.999**t))
        for i, gradient in enumerate(
            outputs(model, state, obs_of(runner_state), reset, action, np.sign(error))
        ):
            g = eqx.filter(where[i](gradient), eqx.is_inexact_array)
            kept = decay * bool(continues)
            z[i] = jax.tree.map(lambda z, g, k=kept: k * z + np.asarray(g), z[i], g)
            own = sum(np.sum(np.square(x)) for x in jax.tree.leaves(g))
            squares[i] = 0.999 * squares[i] + 0.001 * own
            longest = max(own, squares[i] / (1 - 0.999**t))
            flat = np.concatenate([x.ravel() for x in jax.tree.leaves(z[i])])
            actor = isinstance(agent, StreamAC) and i == 0
            size = agent.actor_step_size if actor else agent.step_size
            if agent.step_rule == "obgd":
                kappa = agent.actor_kappa if actor else agent.kappa
                bound = size * kappa * max(abs(error), 1) * np.abs(flat).sum()
                alpha = min(size, size / bound)
            else:
                size = size / (max(abs(error), typical) + 1e-12) if actor else size
                alpha = size / np.sqrt(longest * np.sum(flat**2) + 1e-12)
            new = jax.tree.map(
                lambda w, z, change=alpha * error: w + change * z,
                eqx.filter(where[i](model), eqx.is_inexact_array),
                z[i],
            )
            model = eqx.tree_at(
                where[i], model, eqx.combine(new, where[i](model)), is_leaf=lambda x: x is None
            )
        if over:
            z, so_far = [jax.tree.map(np.zeros_like, x) for x in z], 0.0
        runner_state = runner_state._replace(
            env_state=env_state, obs=obs, resets=terminated,
            memory_state=jax.tree.map(lambda x: x[None], memory_state),
        )  # fmt: skip
    return model


def obs_of(runner_state):
    return runner_state.obs[0]


@pytest.mark.parametrize(
    ("agent", "network"),
    [
        (StreamAC(actor_step_size=0.2, step_size=0.3), {"separate_critic": True}),
        (StreamQ(step_rule="obgd", step_size=1.0, epsilon_start=0.3), {}),
    ],
    ids=["actor-critic, intentional", "Q, obgd"],
)
def test_a_plain_loop_of_the_equations_gives_the_same_weights(agent, network):
    with jax.enable_x64(True):
        model, envs, state, runner_state = start(agent, norm_obs=True, **GRU, **network)
        step, keys = stepper(agent, envs), jax.random.split(jax.random.key(2), 12)
        expected = reference(agent, model, envs, runner_state, keys)
        first = model
        for key in keys:
            model, state, runner_state = step(model, state, runner_state, key)
        moved = 0.0
        for a, b, c in zip(
            *(
                jax.tree.leaves(eqx.filter(m, eqx.is_inexact_array))
                for m in (model, expected, first)
            ),
            strict=True,
        ):
            if a.size:
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
                moved = max(moved, float(jnp.abs(a - c).max()))
        assert moved > 1e-3, "nothing was learned, so that nothing was compared"


# --- the gradient through the memory --------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradient", "k", "network"),
    [("tbptt", 3, GRU), ("rtrl", None, AGALITE)],
    ids=["three steps", "rtrl"],
)
def test_the_gradient_is_that_of_an_explicit_window(gradient, k, network):
    """With weights that hardly move, the eligibility trace is the sum of the decayed gradients of
    the windows; with rtrl the window is the episode, for the weights that the trace is of."""
    agent = StreamQ(
        truncation=k or 1, trace_lambda=0.7, epsilon_start=0.0, epsilon_end=0.0,
        step_rule="obgd", step_size=1e-30,
    )  # fmt: skip
    with jax.enable_x64(True):
        traced = gradient == "rtrl"
        model, envs, state, runner_state = start(agent, traced=traced, **network)
        step = stepper(agent, envs)
        steps, inputs, states = 8, [], []  # the second episode begins with step 5
        for key in jax.random.split(jax.random.key(3), steps):
            inputs.append((runner_state.obs[0], runner_state.resets[0]))
            states.append(jax.tree.map(lambda x: x[0], runner_state.memory_state))
            model, state, runner_state = step(model, state, runner_state, key)
        obs, resets = (jnp.stack(x) for x in zip(*inputs, strict=True))
        assert np.flatnonzero(resets).tolist() == [0, 5]

        def expected(weights):
            total, rebuilt = 0.0, groups.rebuild(weights, None)
            for t in range(5, steps):
                begin = 5 if k is None else max(t - k + 1, 0)
                scanned = rebuilt.scan(states[begin], obs[begin : t + 1], resets[begin : t + 1])
                weight = (agent.gamma * agent.trace_lambda) ** (steps - 1 - t)
                total += weight * scanned[1].values[-1].max()
            return total

        weights, groups = weight_groups(model)
        want, got = jax.jit(jax.grad(expected))(weights), split(state.eligibility[0], weights)
        if gradient == "rtrl":
            of = lambda x: groups.rebuild(x, None).memory.blocks[0].attention.project  # noqa: E731
            want, got = (eqx.filter(of(x), eqx.is_array) for x in (want, got))
        want, got = (ravel_pytree(x)[0] for x in (want, got))
        assert np.abs(want).max() > 1e-4
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_environments_have_traces_of_their_own_and_their_updates_are_averaged():
    """Two environments with the same episodes learn what one does."""
    agent = StreamQ(epsilon_start=0.0, epsilon_end=0.0, norm_reward=False)
    with jax.enable_x64(True):
        model, envs, state, runner_state = start(agent, **GRU)
        two = VectorEnv(envs.env, 2)
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), runner_state)
        state_of_two, model_of_two = agent.init(model, twice), model
        one, other = stepper(agent, envs), stepper(agent, two)
        for key in jax.random.split(jax.random.key(3), 5):  # one episode, before new ones are drawn
            model, state, runner_state = one(model, state, runner_state, key)
            model_of_two, state_of_two, twice = other(model_of_two, state_of_two, twice, key)
        assert state_of_two.eligibility.shape == (2, state.eligibility.shape[1])
        for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(model_of_two), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)


# --- step sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["intentional", "obgd"])
def test_an_update_does_not_overshoot(rule):
    """A linear value: after the update the TD error of the same transition has the same sign."""
    limit = Limit(change=0.5, largest=1.0, kappa=2.0)

    def errors(key):
        a, b, c = jax.random.split(key, 3)
        x = jax.random.normal(a, (12, 7))
        if rule == "intentional":
            x /= jnp.linalg.norm(x, axis=-1, keepdims=True)
        else:
            x /= jnp.abs(x).max(-1, keepdims=True)
        decay = 0.99 ** jnp.arange(11)[::-1]
        z = jnp.sum(decay[:, None] * x[:-1], axis=0)
        w, reward = 3 * jax.random.normal(b, (7,)), 10 * jax.random.normal(c, ())
        before = reward + 0.99 * x[-1] @ w - x[-2] @ w
        length = jnp.sum(jnp.square(z) if rule == "intentional" else jnp.abs(z))
        alpha = step_size(rule, limit, before, jnp.sum(jnp.square(x[-2])), length, jnp.zeros(()))
        w = w + alpha * before * z
        return before, reward + 0.99 * x[-1] @ w - x[-2] @ w

    before, after = jax.jit(jax.vmap(errors))(jax.random.split(jax.random.key(0), 2000))
    assert (before * after >= -1e-6).all()
    assert (np.abs(after) < 0.9 * np.abs(before)).mean() > 0.02, "no update was of any size"


# --- runs -----------------------------------------------------------------------------------------

RUN = {
    "env": "memory-chain",
    "env_options": {"length": 6},
    "num_steps": 10,
    "num_envs": 1,
    "hidden_size": 8,
    "hidden_norm": True,
    "norm_obs": True,
    "total_timesteps": 60,
    "log_every": 20,
    "checkpoint_every": 20,
    "keep_checkpoints": 3,
}


@pytest.mark.slow  # its quick sister is in tests/training/test_rtrl.py
def test_stopped_and_resumed_a_run_ends_the_same_to_the_bit(tmp_path):
    """And its agent is loaded, evaluated and acts; eligibility and rtrl traces are saved."""
    from agalite.training.train import train

    config = TrainConfig(**RUN, **AGALITE, agent=StreamQ(), gradient="rtrl")
    whole = train(config, tmp_path / "run", quiet=True)
    checkpoints = Checkpoints(whole.checkpoints_folder, 3)
    like = jax.eval_shape(jax.vmap(Trainer(config).init), config.seed_numbers)
    _, end = checkpoints.restore(like, None)
    assert jnp.abs(end.opt_state.eligibility).max() > 0
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(end.opt_state.trace))
    for folder in whole.checkpoints_folder.iterdir():
        if "20" not in folder.name:
            shutil.rmtree(folder)
    assert checkpoints.latest() == 20
    assert main(["resume", str(whole.folder)]) == 0
    _, again = checkpoints.restore(like, None)
    for a, b in zip(jax.tree.leaves(end), jax.tree.leaves(again), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)
    model, trainer, _ = load(whole.folder)
    assert len(evaluate(model, trainer.env, episodes=2, greedy=True).returns) == 2
    policy = load_policy(whole.folder)
    obs = np.array([1, 0, 1], np.float32)
    chances = policy.probabilities(obs, policy.initial_state(), reset=True)
    np.testing.assert_allclose(np.sort(chances), [0.005, 0.995], rtol=1e-5)


def returns_after(agent, steps, **settings):
    """The mean return of the last tenth of a run."""
    config = TrainConfig(**{**RUN, "num_steps": 500, "hidden_size": 64, **settings,
                            "total_timesteps": steps}, agent=agent)  # fmt: skip
    trainer = Trainer(config)
    advance = jax.jit(trainer.advance)
    state, _ = advance(jax.jit(trainer.init)(np.uint32(0)), np.int32(config.updates * 9 // 10))
    return float(advance(state, np.int32(config.updates // 10))[1]["charts/episodic_return"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "settings"),
    [
        (StreamQ(gamma=0.999), {}),
        (StreamAC(gamma=0.999), {"separate_critic": True}),
    ],
    ids=["stream-q", "stream-ac"],
)
def test_they_learn_a_chain(agent, settings):
    options = {"d_model": 32, "layers": 1, "heads": 2, "head_size": 16, "ffn_size": 32}
    options |= {"gate_bias": 0.0, "horizon": (2.0, 64.0)}
    settings = {**settings, "memory_options": options, "env_options": {"length": 8}}
    assert returns_after(agent, 40_000, memory="agalite", gradient="rtrl", **settings) > 0.8


# --- the command line and bad input ---------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "kind"), [("stream-ac", StreamAC), ("stream-q", StreamQ)])
def test_the_command_has_defaults_for_streams(algorithm, kind):
    words = ["memory-chain", "--algorithm", algorithm, "--length", "8"]
    _, config = parse(words, "agalite train")
    assert isinstance(config.agent, kind)
    assert (config.num_envs, config.gradient, config.norm_obs) == (1, "rtrl", True)
    assert config.env_options == {"length": 8}
    _, gru = parse([*words, "--memory", "gru"], "agalite train")
    assert gru.gradient == "bptt"  # it has no traces


@pytest.mark.parametrize(
    ("make_agent", "words"),
    [
        (lambda: StreamQ(step_size=0.7), "step_size=0.7 must be at most 0.5"),
        (lambda: StreamQ(truncation=0), "truncation=0"),
        (lambda: StreamQ(epsilon_end=1.5), "epsilon_end=1.5"),
        (lambda: StreamAC(trace_lambda=-0.1), "trace_lambda=-0.1"),
        (lambda: StreamAC(actor_step_size=0.0), "actor_step_size=0.0"),
    ],
)
def test_bad_settings_are_explained(make_agent, words):
    with pytest.raises(ValueError, match=words):
        make_agent()


def test_bad_combinations_are_explained():
    def trainer(agent, **settings):
        return Trainer(TrainConfig(**{**RUN, **GRU, **settings}, agent=agent))

    with pytest.raises(ValueError, match=r"gradient='rtrl' needs .* gru has none"):
        trainer(StreamQ(), gradient="rtrl")
    with pytest.raises(ValueError, match=r"truncation=4 is for gradient='bptt'"):
        trainer(StreamQ(truncation=4), gradient="rtrl")
    with pytest.raises(ValueError, match=r"seq_len=5 is for agents that learn from rollouts"):
        trainer(StreamQ(), seq_len=5)
    with pytest.raises(ValueError, match=r"stream-q has no critic"):
        trainer(StreamQ(), separate_critic=True)
