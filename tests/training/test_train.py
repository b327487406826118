"""Runs: the same whether interrupted or not, alone or with other seeds; and they learn."""

import csv
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
from agalite.training.checkpoint import Checkpoints
from agalite.training.command import parse
from agalite.training.config import TrainConfig
from agalite.training.evaluate import evaluate
from agalite.training.logging import read_metrics
from agalite.training.policy import load, load_policy
from agalite.training.run import Run
from agalite.training.seeds import Seeds
from agalite.training.train import Diverged, Trainer, train

SMALL = {"d_model": 16, "layers": 1, "heads": 2, "head_size": 8, "ffn_size": 16, "eta": 2}
CONFIG = {
    "env": "tmaze",
    "env_options": {"corridor": 3},
    "memory_options": SMALL,
    "num_envs": 4,
    "num_steps": 8,
    "hidden_size": 16,
    "total_timesteps": 640,
    "log_every": 64,
    "checkpoint_every": 64,
}


def states(config, count):
    """The state after three updates, of seeds 0 ... count - 1 together."""
    trainer, seeds = Trainer(config), Seeds(count)
    numbers = np.arange(count, dtype=np.uint32)
    state = seeds.begin(trainer.begin, numbers)
    return seeds.compile(trainer.advance, shared=1)(state, np.int32(3))


def test_seeds_together_are_as_each_alone():
    config = TrainConfig(**CONFIG)
    together, metrics = states(config, 3)
    trainer = Trainer(config)
    begin, advance = jax.jit(trainer.begin), jax.jit(trainer.advance)
    for seed in range(3):
        alone, own = advance(begin(np.uint32(seed)), np.int32(3))
        for name, value in own.items():
            np.testing.assert_allclose(metrics[name][seed], value, rtol=2e-4, atol=1e-5)
        for a, b in zip(
            jax.tree.leaves(together.weights), jax.tree.leaves(alone.weights), strict=True
        ):
            np.testing.assert_allclose(a[seed], b, atol=1e-5)


def test_devices_change_nothing():
    """Two seeds on each of two devices; a process of its own, as they must be there before JAX."""
    code = (
        "import jax; jax.config.update('jax_num_cpu_devices', {devices})\n"
        "import numpy as np\n"
        "from test_training import *\n"
        "state, _ = states(TrainConfig(**CONFIG), 4)\n"
        "print(len(Seeds(4).devices), [float(np.abs(np.asarray(x)).sum(dtype=np.float64))"
        " for x in jax.tree.leaves(state.weights)])\n"
    )
    out = []
    for devices in (1, 2):
        done = subprocess.run(
            [sys.executable, "-c", code.format(devices=devices)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            cwd=os.path.dirname(__file__),
        )
        count, _, numbers = done.stdout.strip().splitlines()[-1].partition(" ")
        assert int(count) == devices
        out.append(np.array(eval(numbers)))
    np.testing.assert_allclose(out[0], out[1], rtol=1e-5)


def rows_without_speed(folder):
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k != "charts/SPS"} for row in rows]


def final_leaves(folder):
    config = TrainConfig.from_dict(
        {k: v for k, v in Run.open(folder).config.items() if k not in ("format", "versions")}
    )
    like = jax.eval_shape(Seeds(1).over(Trainer(config).begin), np.zeros(1, np.uint32))
    step, state = Checkpoints(folder / "checkpoints").restore(like)
    leaves = [
        x for x in jax.tree.leaves(state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    return step, leaves


COMMAND = [
    "tmaze",
    "--corridor",
    "3",
    "--num-envs",
    "4",
    "--num-steps",
    "8",
    "--hidden-size",
    "16",
    "--log-every",
    "64",
    "--checkpoint-every",
    "64",
    "--steps",
    "1920",
    "--model.d-model",
    "16",
    "--model.layers",
    "1",
    "--model.heads",
    "2",
    "--model.head-size",
    "8",
    "--model.ffn-size",
    "16",
    "--model.eta",
    "2",
]


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
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["train", *COMMAND, "--out", str(folder)]) == 0
    return folder


def test_a_run_leaves_what_it_promises(whole):
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_and_resumed_it_ends_the_same_to_the_bit(number, whole, tmp_path):
    folder = tmp_path / "killed"
    process = start("train", *COMMAND, "--out", str(folder))
    wait_for_checkpoint(folder, process)
    time.sleep(0.15)
    process.send_signal(number)
    process.wait(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    assert len(rows_without_speed(folder)) < 30, "it was to be stopped before its end"
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


def test_every_environment_counts_the_same_number_of_episodes(whole):
    model, trainer, _ = load(whole)
    scores = evaluate(model, trainer.world, episodes=10, together=4)
    assert scores.returns.shape == scores.lengths.shape == (10,)
    assert set(np.unique(scores.success)) <= {0.0, 1.0}
    # T-Maze: -0.1 for each step but the last, and 4 or -1 for the turn.
    paid = np.where(scores.success == 1, 4, -1) - 0.1 * (scores.lengths - 1)
    short = scores.lengths < 1000
    np.testing.assert_allclose(scores.returns[short], paid[short], atol=1e-3)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    agent = A2C(learning_rate=1e30, max_grad_norm=1e30)
    with pytest.raises(Diverged, match=r"losses/\w+ of seed number 0 became .* by step"):
        train(TrainConfig(**{**CONFIG, "agent": agent}), tmp_path / "bad", quiet=True)
    # Everything that went wrong, and all that was measured.
    log = (tmp_path / "bad" / "run.log").read_text()
    assert "losses/policy_loss" in log.split("became")[0]
    assert "'charts/" in log


def test_it_learns_to_remember_and_without_memory_it_does_not(tmp_path):
    common = {
        "env": "tmaze",
        "env_options": {"corridor": 5},
        "num_envs": 32,
        "num_steps": 16,
        "hidden_size": 32,
        "total_timesteps": 100_000,
        "log_every": 10_000,
        "agent": A2C(3e-3, ent_coef=1e-2),
    }
    success = {}
    for memory, options in (
        ("agalite", {**SMALL, "d_model": 32, "head_size": 16, "horizon": (2, 32)}),
        ("feedforward", {"d_model": 32}),
    ):
        folder = tmp_path / memory
        config = TrainConfig(memory=memory, memory_options=options, **common)
        summary = train(config, folder, quiet=True).read_summary()
        success[memory] = summary["last_tenth"]["charts/success"]
    assert success["agalite"] > 0.9
    assert success["feedforward"] < 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env": "nowhere"}, "env='nowhere' is unknown"),
        ({"env": "gym:CartPole-v1"}, "its configuration is a HostConfig"),
        ({"memory": "elephant"}, "memory='elephant' is unknown"),
        ({"total_timesteps": 0}, "total_timesteps=0"),
        ({"seq_len": 3}, "seq_len=3 must be at most num_steps=8, and divide it evenly"),
        ({"seq_len": 16}, "seq_len=16 must be at most num_steps=8"),
        ({"num_envs": 10**12}, "num_envs=1000000000000 times num_steps=8 is more than the"),
        ({"agent": PPO(num_minibatches=3)}, "num_minibatches=3 must divide the 4 sequences"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_compiled(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{**CONFIG, **change})


def test_a_configuration_comes_back_as_it_was():
    for agent in (A2C(1e-3), PPO(vf_clip_coef=0.2, num_minibatches=2)):
        config = TrainConfig(**{**CONFIG, "agent": agent})
        assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["tmaze", "--update-epochs", "2"],
            "--update-epochs is an option of ppo and appo; the algorithm",
        ),
        (["masked-cartpole", "--corridor=5"], "--corridor is an option of tmaze; the environment"),
    ],
)
def test_an_option_in_the_wrong_place_says_where_it_belongs(words, message):
    with pytest.raises(ValueError, match=message):
        parse(words, "agalite train")


def test_an_option_that_nothing_knows_leads_to_the_right_help(capsys):
    with pytest.raises(SystemExit):
        parse(["tmaze", "--memory", "gru", "--nonsense", "2"], "agalite train")
    assert "agalite train tmaze --memory gru --help" in " ".join(capsys.readouterr().err.split())


def test_the_command_line_is_made_of_the_parts():
    choices, config = parse(
        [
            "tmaze",
            "--memory",
            "gtrxl",
            "--corridor",
            "20",
            "--model.memory",
            "64",
            "--preset",
            "paper",
            "--steps",
            "5_000_000",
            "--learning-rate",
            "1e-3",
            "--out",
            "x",
        ],
        "agalite train",
    )
    assert str(choices.out) == "x"
    assert config.env_options == {"corridor": 20}
    assert config.memory_options == {"memory": 64}
    assert (config.num_envs, config.num_steps) == (8, 256)
    assert config.agent == A2C(learning_rate=1e-3, ent_coef=1e-3)
    assert config.steps == 5_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere"], "env='nowhere' is unknown; choose one of: tmaze"),
        (["train", "tmaze", "--memory", "x"], "memory='x' is unknown"),
        (["train", "tmaze", "--corridor", "1"], "corridor=1"),
        (["train", "tmaze", "--preset", "best"], "preset='best' is unknown"),
        (["resume", "/nowhere"], "/nowhere"),
        (["eval", "/nowhere"], "/nowhere"),
        (["plot", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_done_is_explained(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
