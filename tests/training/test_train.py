"""Training: seeds, devices, a run's folder, stopping and resuming, configurations."""

import contextlib
import csv
import dataclasses
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from agalite.agents.a2c import A2C
from agalite.agents.ppo import PPO
from agalite.cli import main
from agalite.training import diagnostics
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import TrainConfig, config_from_dict
from agalite.training.evaluate import evaluate
from agalite.training.logging import read_metrics
from agalite.training.policy import load, load_policy
from agalite.training.run import Run
from agalite.training.seeds import Seeds
from agalite.training.session import Diverged
from agalite.training.train import Trainer, resume, train

SMALL = {"d_model": 16, "layers": 1, "heads": 2, "head_size": 8, "ffn_size": 16, "eta": 2}
CONFIG = {
    "env": "tmaze",
    "env_options": {"corridor": 3},
    "memory": "gru",
    "memory_options": {"d_model": 16, "hidden_size": 16},
    "num_envs": 4,
    "num_steps": 8,
    "hidden_size": 16,
    "total_timesteps": 1920,
    "log_every": 64,
    "checkpoint_every": 64,
}


def states(numbers):
    """The state and the metrics of these seeds after three updates."""
    trainer, seeds = Trainer(TrainConfig(**CONFIG)), Seeds(len(numbers))
    state = seeds.init(trainer.init, np.array(numbers, np.uint32))
    return seeds.compile(trainer.advance, shared=1, donate=True)(state, np.int32(3))


def test_several_seeds_at_once_equal_each_alone():
    at_once, metrics = states([0, 1])
    alone, own = states([1])
    for name, value in own.items():
        np.testing.assert_allclose(metrics[name][1], value[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(at_once.weights), jax.tree.leaves(alone.weights), strict=True):
        np.testing.assert_allclose(a[1], b[0], atol=1e-7)


SHARES = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
from agalite.training.seeds import Seeds

seeds = Seeds(3, uneven=True)
assert len(seeds.devices) == 2, seeds.devices
first = lambda seed: {"key": jax.random.key(seed), "number": seed + jnp.uint32(1)}
state = seeds.init(first, np.array([5, 6, 7], np.uint32))
assert state["number"].tolist() == [6, 7, 8, 0], state  # the fourth only fills up
taken = seeds.take(state)
assert taken["number"].tolist() == [6, 7, 8]
want = jax.vmap(jax.random.key_data)(jax.vmap(jax.random.key)(jnp.arange(5, 8)))
assert (jax.random.key_data(taken["key"]) == want).all()
again = seeds.put(taken)  # as after a resume
add = seeds.compile(lambda state, n: state["number"] + n, shared=1)
assert seeds.take(add(again, jnp.uint32(10))).tolist() == [16, 17, 18]
assert seeds.shapes(first, np.zeros(3, np.uint32))["number"].shape == (3,)
assert len(Seeds(3).devices) == 1
assert len(Seeds(1, uneven=True).devices) == 1
"""


def test_seeds_that_devices_do_not_divide():
    done = subprocess.run(
        [sys.executable, "-c", SHARES], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


DEVICES = """
import importlib.util, jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
spec = importlib.util.spec_from_file_location("test_train", {path!r})
test_train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test_train)
state, _ = test_train.states(range(4))
print(len(test_train.Seeds(4).devices))
print([float(np.abs(np.asarray(x)).sum(dtype=np.float64)) for x in jax.tree.leaves(state.weights)])
"""


@pytest.mark.slow
def test_two_devices_give_the_same_as_one():
    """Two seeds on each; in its own process, since devices are fixed before JAX starts."""
    done = subprocess.run(
        [sys.executable, "-c", DEVICES.format(path=__file__)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    devices, numbers = done.stdout.strip().splitlines()[-2:]
    assert int(devices) == 2
    state, _ = states(range(4))
    want = [np.abs(np.asarray(x)).sum(dtype=np.float64) for x in jax.tree.leaves(state.weights)]
    np.testing.assert_allclose(eval(numbers), want, rtol=1e-5)


def rows_without_speed(folder):
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k != "charts/SPS"} for row in rows]


def final_leaves(folder):
    config = config_from_dict(Run.open(folder).settings)
    like = Seeds(1).shapes(Trainer(config).init, np.zeros(1, np.uint32))
    step, state = Checkpoints(folder / "checkpoints").restore(like)
    leaves = [
        x for x in jax.tree.leaves(state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    return step, leaves


WORDS = """
tmaze --algorithm a2c --corridor 3 --num-envs 4 --num-steps 8 --hidden-size 16 --steps 1920
--log-every 64 --checkpoint-every 64 --memory gru --model.d-model 16 --model.hidden-size 16
"""
COMMAND = WORDS.split()


def start(*words):
    environment = {**os.environ, "AGALITE_HUGE_PAGES": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "agalite.cli", *words],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def wait_for_checkpoint(folder, process):
    deadline = time.monotonic() + 240
    while not list(folder.glob("checkpoints/step_*")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never interrupted. All of its gradients count as clipped too far."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch, open(folder.parent / "stderr", "w") as shown:
        patch.setattr(diagnostics, "WINDOW", (0.125, 1))
        patch.setattr(diagnostics, "CLIPPED", 0.0)
        with contextlib.redirect_stderr(shown):
            assert main(["train", *COMMAND, "--out", str(folder)]) == 0
    return folder


def test_a_failing_run_is_warned_of_once(whole):
    warning = "the gradients are clipped"
    assert (whole.parent / "stderr").read_text().count(f"warning: {warning}") == 1
    assert (whole / "run.log").read_text().count(f"warning (clipped gradients): {warning}") == 1


def test_a_run_leaves_its_files(whole):
    names = {p.name for p in whole.iterdir()}
    assert {
        "config.json",
        "metrics.csv",
        "tensorboard",
        "checkpoints",
        "curve.png",
        "summary.json",
        "run.log",
    } <= names
    table = read_metrics(whole)
    assert table["step"][-1] == 1920
    assert len(table["step"]) == 30


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_stopped_and_resumed_a_run_ends_the_same_to_the_bit(number, whole, tmp_path):
    folder = tmp_path / "killed"
    process = start("train", *COMMAND, "--out", str(folder))
    wait_for_checkpoint(folder, process)
    time.sleep(0.15)
    process.send_signal(number)
    process.wait(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    assert len(rows_without_speed(folder)) < 30, "it ended before it was stopped"
    assert main(["resume", str(folder)]) == 0
    assert rows_without_speed(folder) == rows_without_speed(whole)
    (step, got), (whole_step, want) = final_leaves(folder), final_leaves(whole)
    assert step == whole_step == 1920
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_trained_run_can_be_used(whole, tmp_path, capsys):
    policy = load_policy(whole, greedy=True)
    state, obs = policy.initial_state(), np.zeros(16, np.float32)
    action, state = policy.act(obs, state, reset=True)
    assert 0 <= int(action) < 4
    video = tmp_path / "episode.gif"
    assert main(["eval", str(whole), "--episodes", "7", "--video", str(video)]) == 0
    assert "success" in capsys.readouterr().out
    assert video.stat().st_size > 0
    out = tmp_path / "curve.svg"
    assert main(["plot", str(whole), "--out", str(out)]) == 0
    assert out.stat().st_size > 0


def test_evaluate_plays_whole_episodes(whole):
    model, trainer, _ = load(whole)
    scores = evaluate(model, trainer.env, episodes=10, num_envs=4)
    assert scores.returns.shape == scores.lengths.shape == (10,)
    assert set(np.unique(scores.success)) <= {0.0, 1.0}
    # T-Maze: -0.1 for each step but the last, and 4 or -1 for the turn.
    paid = np.where(scores.success == 1, 4, -1) - 0.1 * (scores.lengths - 1)
    short = scores.lengths < 1000
    np.testing.assert_allclose(scores.returns[short], paid[short], atol=1e-3)


@pytest.mark.slow
def test_a_run_stops_at_a_loss_that_is_not_finite(tmp_path):
    agent = A2C(learning_rate=1e30, max_grad_norm=1e30)
    with pytest.raises(Diverged, match=r"losses/\w+ of seed number 0 became .* by step"):
        train(
            TrainConfig(**{**CONFIG, "agent": agent, "total_timesteps": 640}),
            tmp_path / "bad",
            quiet=True,
        )
    log = (tmp_path / "bad" / "run.log").read_text()
    assert "losses/policy_loss" in log.split("became")[0]
    assert "'charts/" in log


@pytest.mark.parametrize(
    ("memory", "options", "least", "most"),
    [
        ("agalite", {**SMALL, "horizon": (2, 32)}, 0.9, 1.0),
        pytest.param("feedforward", {"d_model": 32}, 0.0, 0.6, marks=pytest.mark.slow),
    ],
)
def test_only_with_memory_an_agent_learns_to_remember(memory, options, least, most, tmp_path):
    config = TrainConfig(
        env="tmaze",
        env_options={"corridor": 5},
        memory=memory,
        memory_options=options,
        num_envs=32,
        num_steps=16,
        hidden_size=32,
        total_timesteps=100_000,
        log_every=10_000,
        agent=A2C(3e-3, ent_coef=1e-2),
        stop_at_success=0.95,
    )
    run = train(config, tmp_path / "run", quiet=True)
    summary = run.read_summary()
    assert least < summary["last_tenth"]["charts/success"] <= most
    # What has succeeded ends early, and is not trained further when it is resumed.
    assert summary.get("stopped_at_success", False) == (memory == "agalite")
    assert (summary["steps"] < 100_000) == (memory == "agalite")
    resume(run.folder, quiet=True)
    assert Run.open(run.folder).read_summary() == summary


def test_a_run_cannot_stop_at_success_where_there_is_none():
    config = TrainConfig(**{**CONFIG, "env": "masked-cartpole", "env_options": {}})
    config = dataclasses.replace(config, stop_at_success=0.9)
    with pytest.raises(ValueError, match=r"stop_at_success=0\.9: masked-cartpole reports no suc"):
        Trainer(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env": "nowhere"}, "env='nowhere' is unknown"),
        ({"env": "tmaz"}, "env='tmaz' is unknown; .*; did you mean tmaze?"),
        ({"total_timesteps": 10**17}, "total_timesteps=1000.* must be a whole number <= 9007199"),
        (
            {"total_timesteps": 3 * 10**12},
            r"total_timesteps=3000000000000 are [\d,]+ gradient steps, and at most 2,147,483,647",
        ),
        ({"noise_steps": 10**20}, "noise_steps=1000.* must be a whole number <= 2147483647"),
        ({"env": "gym:CartPole-v1"}, "its configuration is a HostConfig"),
        ({"memory": "elephant"}, "memory='elephant' is unknown"),
        ({"total_timesteps": 0}, "total_timesteps=0"),
        ({"seq_len": 3}, "seq_len=3 must be at most num_steps=8, and divide it evenly"),
        ({"seq_len": 16}, "seq_len=16 must be at most num_steps=8"),
        ({"num_envs": 10**9}, "num_envs=1000000000 times num_steps=8 is more than the"),
        ({"agent": PPO(num_minibatches=3)}, "num_minibatches=3 must divide the 4 sequences"),
        ({"seed": -1}, "seed=-1"),
        ({"stop_at_success": 1.5}, "stop_at_success=1.5 must be"),
        ({"gradient": "rtl"}, "gradient='rtl' is unknown; choose one of: bptt, rtrl"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_compiled(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{**CONFIG, **change})


def test_a_number_that_is_zero_in_float32_is_refused_where_zero_is():
    with pytest.raises(ValueError, match="adam_eps=1e-300 is too small for float32, where it is 0"):
        A2C(adam_eps=1e-300)
    assert A2C(gamma=1e-300).gamma == 1e-300


def test_a_configuration_goes_to_a_dictionary_and_back():
    for agent in (A2C(1e-3), PPO(vf_clip_coef=0.2, num_minibatches=2)):
        config = TrainConfig(**{**CONFIG, "agent": agent})
        assert config_from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "older",
    [
        {"environments": 4, "rollout": 8},
        {"agent": {"learning_rate": 1e-3, "lam": 0.9, "discount": 0.99}},
        {"agent": {"epochs": 3, "minibatches": 8}, "algorithm": "ppo"},
    ],
)
def test_a_run_of_an_older_version_is_refused(older, tmp_path, capsys):
    values = {"env": "tmaze", "memory": "gru", "algorithm": "a2c", "agent": {}, **older}
    with pytest.raises(ValueError, match="written by an older version of agalite"):
        config_from_dict(values)
    with Run.create(tmp_path / "run", values):
        pass
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "config.json: this run was written by an older version" in capsys.readouterr().err
