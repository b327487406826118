"""The Python API: `agalite.train`, `resume`, `load_policy` and `Policy`."""

import subprocess
import sys
from functools import partial

import equinox as eqx
import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import agalite
from agalite.agents.ppo import PPO
from agalite.cli import main
from agalite.networks.actor_critic import ActorCritic
from agalite.training.config import TrainConfig
from agalite.training.policy import Policy, State
from agalite.training.presets import new_folder
from modules import random_weights

SMALL = {"d_model": 16, "layers": 1, "heads": 2, "head_size": 8, "ffn_size": 16, "eta": 2}
GRU = {"memory": "gru", "memory_options": {"d_model": 16, "hidden_size": 16}}
TINY = {
    "num_envs": 4,
    "num_steps": 8,
    "hidden_size": 16,
    "total_timesteps": 64,
    "log_every": 64,
    "checkpoint_every": 64,
}
# One of each kind of state: sums, a cache, a vector, no arrays.
SIZES = {
    "agalite": SMALL,
    "gtrxl": {"d_model": 16, "layers": 1, "heads": 2, "head_size": 8, "memory": 4},
    "gru": {"d_model": 16},
    "feedforward": {"d_model": 16},
}


def new_policy(memory="agalite", space=None, actions=None, **options):
    space = space or Box(-1.0, 1.0, (5,), np.float32)
    make = partial(
        ActorCritic.make,
        space,
        actions or Discrete(3),
        memory=memory,
        memory_options=SIZES[memory],
        hidden_size=16,
    )
    model = random_weights(lambda key: make(key=key))
    return Policy(model, dtype=space.dtype, **options)


@pytest.fixture(scope="module")
def policy():
    return new_policy(greedy=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    maze = agalite.train(
        TrainConfig(env="tmaze", env_options={"corridor": 3}, **GRU, **TINY),
        folder / "maze",
        quiet=True,
    )
    pole = agalite.train(
        "masked-cartpole",
        folder / "pole",
        agent=PPO(num_minibatches=2),
        quiet=True,
        **GRU,
        **TINY,
    )
    return {"agalite/TMaze-v0": maze, "agalite/MaskedCartPole-v0": pole}


@pytest.mark.parametrize("name", ["agalite/TMaze-v0", "agalite/MaskedCartPole-v0"])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_policy_acts_in_gymnasium_environments(runs, name, greedy):
    env = gymnasium.make(name, **({"corridor": 3} if "TMaze" in name else {}))
    policy = agalite.load_policy(runs[name], greedy=greedy)
    state = policy.initial_state()
    for episode in range(2):
        obs, _ = env.reset(seed=episode)
        for step in range(30):
            action, state = policy.act(obs, state, reset=step == 0)
            assert env.action_space.contains(action)
            assert {action: "found"}[action] == "found", "actions can be dictionary keys"
            obs, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
    env.close()


def test_eval_writes_a_video(runs, tmp_path, capsys):
    out = tmp_path / "episode.mp4"
    folder = str(runs["agalite/MaskedCartPole-v0"].folder)
    assert main(["eval", folder, "--episodes", "3", "--video", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert out.read_bytes()[4:8] == b"ftyp"


def test_a_policy_computes_what_its_model_does(runs):
    folder = runs["agalite/TMaze-v0"].folder
    policy, model = agalite.load_policy(folder), agalite.load_policy(folder).model
    generator = np.random.default_rng(0)
    state, memory, step = policy.initial_state(), model.initial_state(), eqx.filter_jit(model.step)
    for i in range(8):
        obs, reset = generator.integers(2, size=16).astype(np.float32), i in (0, 5)
        expected, value = policy.probabilities(obs, state, reset), policy.value(obs, state, reset)
        memory, distribution, model_value = step(memory, obs, np.asarray(reset))
        np.testing.assert_allclose(expected, jax.nn.softmax(distribution.logits), atol=1e-6)
        np.testing.assert_allclose(value, model_value, atol=1e-5)
        _, state = policy.act(obs, state, reset)


@pytest.mark.parametrize(
    "memory", [pytest.param(m, marks=pytest.mark.slow) if m == "gtrxl" else m for m in SIZES]
)
def test_a_batch_equals_each_alone(memory):
    policy = new_policy(memory, greedy=True)
    generator = np.random.default_rng(0)
    obs = generator.normal(size=(6, 3, 5)).astype(np.float32)
    resets = np.zeros((6, 3), bool)
    resets[0], resets[2, 1], resets[4, 0] = True, True, True
    together, alone = policy.initial_state(batch=3), [policy.initial_state() for _ in range(3)]
    for t in range(6):
        values = policy.value(obs[t], together, resets[t])
        chances = policy.probabilities(obs[t], together, resets[t])
        assert chances.shape == (3, 3)
        actions, together = policy.act(obs[t], together, resets[t])
        assert actions.shape == values.shape == (3,)
        for i in range(3):
            single = (obs[t, i], alone[i], bool(resets[t, i]))
            np.testing.assert_allclose(values[i], policy.value(*single), atol=1e-5)
            np.testing.assert_allclose(chances[i], policy.probabilities(*single), atol=1e-5)
            action, alone[i] = policy.act(*single)
            for chosen in (action, actions[i]):  # of two that are equally likely, either
                assert chances[i, chosen] >= chances[i].max() - 1e-6


def test_a_reset_clears_the_memory(policy):
    obs, other = np.linspace(-1, 1, 5), np.ones(5)
    _, used = policy.act(other, policy.initial_state())
    fresh = policy.value(obs, policy.initial_state())
    assert policy.value(obs, used) != fresh
    assert policy.value(obs, used, reset=True) == fresh


def test_sampled_actions_follow_the_probabilities_and_the_seed():
    obs = np.ones((2000, 5), np.float32)
    first, second, other = (new_policy(seed=seed) for seed in (4, 4, 5))
    state = first.initial_state(batch=2000)
    a, b, c = (policy.act(obs, state)[0] for policy in (first, second, other))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    assert (first.act(obs, state)[0] != a).any(), "a second call is another draw"
    shares = np.bincount(a, minlength=3) / 2000
    np.testing.assert_allclose(shares, first.probabilities(obs, state)[0], atol=0.05)


@pytest.mark.parametrize(
    ("actions", "shape"), [(MultiDiscrete([2, 5]), (2,)), (Box(-3.0, 3.0, (4,)), (4,))]
)
def test_other_action_spaces(actions, shape):
    policy = new_policy(actions=actions)
    action, _ = policy.act(np.zeros(5), policy.initial_state())
    assert action.shape == shape
    assert actions.contains(action.astype(actions.dtype))
    action, _ = policy.act(np.zeros((3, 5)), policy.initial_state(batch=3))
    assert action.shape == (3, *shape)
    with pytest.raises(ValueError, match="only Discrete action spaces have probabilities"):
        policy.probabilities(np.zeros(5), policy.initial_state())


@pytest.mark.parametrize(
    ("obs", "batch", "reset", "message"),
    [
        (np.zeros(4), None, False, r"obs has shape \(4,\); expected \(5,\)"),
        (np.zeros((1, 5)), None, False, r"obs has shape \(1, 5\); expected \(5,\)"),
        (np.zeros(5), 2, False, r"obs has shape \(5,\); expected \(2, 5\)"),
        (np.zeros((3, 5)), 2, False, r"obs has shape \(3, 5\); expected \(2, 5\)"),
        (np.zeros((2, 5)), 2, [True] * 3, "reset=.* must be True or False, or 2 of them"),
        (np.zeros(5), None, [True], r"reset=\[True\] must be True or False$"),
        (np.zeros(5), None, 0.5, "reset=0.5"),
        (np.zeros(5), None, None, "reset=None"),
        ("left", None, False, "obs has dtype <U4; expected float32"),
        ([[1.0], [1.0, 2.0]], None, False, "obs is not an array"),
        ([0, 0, np.nan, 0, 0], None, False, r"obs\[2\] is nan"),
    ],
)
def test_wrong_inputs_are_refused(policy, obs, batch, reset, message):
    with pytest.raises(ValueError, match=message):
        policy.act(obs, policy.initial_state(batch), reset)


def test_wrong_states_are_refused(policy):
    with pytest.raises(ValueError, match="batch=0 must be a whole number >= 1"):
        policy.initial_state(batch=0)
    with pytest.raises(ValueError, match="state is a NoneType; it must come from"):
        policy.act(np.zeros(5), None)
    with pytest.raises(ValueError, match="state"):
        policy.act(np.zeros(5), new_policy("gru").initial_state())
    with pytest.raises(ValueError, match="seed=-1"):
        new_policy(seed=-1)


def test_pixels_must_be_integers():
    policy = new_policy("feedforward", Box(0, 255, (36, 36, 3), np.uint8))
    state = policy.initial_state()
    assert isinstance(state, State)
    pixels = np.random.default_rng(0).integers(256, size=(36, 36, 3))
    value = policy.value(pixels.astype(np.uint8), state)
    assert value == policy.value(pixels, state), "integers of another width are accepted"
    with pytest.raises(ValueError, match="obs has dtype float64; expected uint8"):
        policy.act(pixels / 255, state)
    with pytest.raises(ValueError, match="obs goes from -1 to 254; expected uint8"):
        policy.act(np.minimum(pixels, 255) - 1, state)


def test_a_new_folder_is_not_used_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(env="tmaze")
    folder = new_folder(config)
    folder.mkdir(parents=True)
    assert new_folder(config) != folder
    assert folder.parent.name == "runs"


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["nowhere"], {}, "env='nowhere' is unknown"),
        ([], {}, "env=None must be one of: tmaze"),
        (["tmaze"], {"preset": "best"}, "preset='best' is unknown"),
        (["tmaze"], {"memory": "elephant"}, "memory='elephant' is unknown"),
        (["tmaze"], {"corridor": 3}, "setting='corridor' is unknown; choose one of: .*env_options"),
        ([{"env": "tmaze"}], {}, "must be a TrainConfig, or the name of an environment"),
        (
            [TrainConfig(env="tmaze")],
            {"total_timesteps": 3},
            "config is given, and total_timesteps besides",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(arguments, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        agalite.train(*arguments, folder=tmp_path / "x", **settings)
    assert not (tmp_path / "x").exists()


def test_resume_takes_a_run_or_a_folder(runs):
    run = runs["agalite/TMaze-v0"]
    for what in (run, run.folder, str(run.folder)):
        assert agalite.resume(what, quiet=True).read_summary()["steps"] == 64


def test_importing_is_light_and_missing_packages_are_named():
    code = (
        "import sys, agalite\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert set(dir(agalite)) >= {'train', 'resume', 'load_policy', 'TrainConfig'}\n"
        "assert callable(agalite.train) and 'jax' not in sys.modules\n"
        "agalite.TrainConfig; import agalite.training.train, agalite.training.presets\n"
        "assert 'tyro' not in sys.modules, 'the API does not need the command-line parser'\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n in ('optax', 'orbax') else find(n, *a)\n"
        "for use in (lambda: agalite.train('tmaze'), lambda: agalite.load_policy('x'),\n"
        "            lambda: agalite.resume('x'), lambda: agalite.TrainConfig):\n"
        "    try: use()\n"
        "    except ValueError as e: print(e)\n"
        "from agalite.cli import main\n"
        "for words in (['train', 'tmaze'], ['resume', 'x'], ['eval', 'x']):\n"
        "    assert main(words) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    needs = 'needs optax: pip install "agalite[envs,train]"'
    for name in ("train", "load_policy", "resume", "TrainConfig"):
        assert f"agalite.{name} {needs}" in done.stdout
    for name in ("train", "resume", "eval"):
        assert f"agalite {name}: agalite {name} {needs}" in done.stderr
