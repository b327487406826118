"""Asynchronous runs: they learn, stop when asked, survive faults, and go on from a checkpoint."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from agalite.agents.a2c import A2C
from agalite.agents.appo import APPO
from agalite.cli import main
from agalite.training.asynchronous.worker import TooManyFaults
from agalite.training.checkpoint import Checkpoints
from agalite.training.command import parse
from agalite.training.config import HostConfig, TrainConfig, config_from
from agalite.training.evaluate import evaluate, evaluation
from agalite.training.logging import read_metrics
from agalite.training.policy import load, load_policy
from agalite.training.presets import preset
from agalite.training.train import Diverged, resume, train

TINY = {"memory": "gru", "memory_options": {"d_model": 16, "hidden_size": 16}, "hidden_size": 16}
CONFIG = {
    **TINY,
    "env": "gym:host_worlds:Diary-v0",
    "num_steps": 16,
    "num_workers": 2,
    "envs_per_worker": 2,
    "processes": False,
    "total_timesteps": 640,
    "log_every": 64,
    "checkpoint_every": 640,
}
WORDS = [
    "--memory",
    "gru",
    "--model.d-model",
    "16",
    "--model.hidden-size",
    "16",
    "--hidden-size",
    "16",
]


def config(**changes):
    return HostConfig(**{**CONFIG, **changes})


def log_of(folder):
    return (folder / "run.log").read_text()


def test_it_learns_to_remember(tmp_path):
    """A cue that is gone when it matters: without memory, and without learning, half is right."""
    agent = APPO(
        learning_rate=3e-3, ent_coef=1e-2, update_epochs=2, num_minibatches=2, clip_coef=0.2
    )
    run = train(
        config(
            env="gym:host_worlds:Recall-v0",
            agent=agent,
            total_timesteps=16_000,
            num_workers=4,
            num_steps=32,
            envs_per_worker=4,
            log_every=1600,
            checkpoint_every=16_000,
        ),
        tmp_path / "run",
        quiet=True,
    )
    table = read_metrics(run.folder)
    assert table["charts/success"][0] < 0.75
    assert table["charts/success"][-1] > 0.95
    assert table["step"][-1] >= 16_000
    assert (table["charts/policy_lag"] > 0).any()
    assert table["charts/policy_lag_max"].max() <= 4
    assert {p.name for p in run.folder.iterdir()} >= {
        "config.json",
        "metrics.csv",
        "tensorboard",
        "checkpoints",
        "curve.png",
        "summary.json",
        "run.log",
    }
    evaluation(
        run.folder,
        episodes=20,
        greedy=True,
        best=False,
        seed=1,
        seed_number=0,
        together=8,
        video=None,
    )
    loaded = load(run.folder)
    assert loaded.step == table["step"][-1]
    scores = evaluate(loaded.model, loaded.trainer.world, episodes=21, greedy=True, together=4)
    assert len(scores.returns) == 21
    assert scores.success is not None
    assert scores.success.mean() > 0.95
    assert (scores.lengths == 4).all()
    policy = load_policy(run.folder, greedy=True)
    action, _ = policy.act(np.zeros(3, np.float32), policy.initial_state(), reset=True)
    assert action in (0, 1)


def weights_at_the_end(folder):
    loaded = load(folder)
    return [np.asarray(x) for x in jax.tree.leaves(loaded.model) if hasattr(x, "dtype")]


def test_synchronously_no_policy_is_ever_old_and_runs_repeat(tmp_path):
    for name in ("one", "two"):
        run = train(config(synchronous=True), tmp_path / name, quiet=True)
        table = read_metrics(run.folder)
        assert (table["charts/policy_lag_max"] == 0).all()
        assert len(table["step"]) == 10
    for a, b in zip(*(weights_at_the_end(tmp_path / name) for name in ("one", "two")), strict=True):
        np.testing.assert_array_equal(a, b)


def test_actors_take_turns_where_they_must_and_share_the_work_where_not(tmp_path):
    for synchronous in (True, False):
        run = train(
            config(num_actors=2, synchronous=synchronous, total_timesteps=320),
            tmp_path / str(synchronous),
            quiet=True,
        )
        table = read_metrics(run.folder)
        assert table["step"][-1] == 320
        assert ((table["charts/policy_lag_max"] == 0) | (not synchronous)).all()


def test_synchronously_a_lost_rollout_does_not_stop_the_run(tmp_path):
    (tmp_path / "faults").mkdir()
    run = train(
        config(
            env="gym:host_worlds:Faulty-v0",
            synchronous=True,
            env_options={"how": "raise", "folder": str(tmp_path / "faults"), "at": 40},
        ),
        tmp_path / "run",
        quiet=True,
    )
    table = read_metrics(run.folder)
    assert table["step"][-1] == 640
    assert table["charts/faults"].sum() == 1
    assert table["charts/lost_rollouts"].sum() == 2  # a worker's environments fail together


def test_a_batch_need_not_be_a_rollout_of_everybody(tmp_path):
    run = train(config(batch_size=48, queue_size=2), tmp_path / "run", quiet=True)
    table = read_metrics(run.folder)
    assert table["step"].tolist() == [48 * i for i in range(1, 15)]


def test_too_many_faults_stop_the_run_with_a_checkpoint(tmp_path, capfd):
    (tmp_path / "faults").mkdir()
    folder = tmp_path / "run"
    words = [
        "train",
        "gym:host_worlds:Faulty-v0",
        *WORDS,
        "--no-processes",
        "--restarts",
        "3",
        "--set",
        "how=raise",
        f"folder={tmp_path / 'faults'}",
        "at=200",
        "times=99",
        "--steps",
        "1_000_000",
        "--num-steps",
        "16",
        "--out",
        str(folder),
    ]
    assert main(words) == 2
    said = capfd.readouterr().err
    assert "environments failed 4 times (restarts=3 are allowed)" in said
    assert f"what was learned is saved: agalite resume {folder}" in said
    text = log_of(folder)
    assert text.count("ZeroDivisionError: a bad day") >= 4
    assert "Traceback" in text
    assert "fault 4 in worker" in text
    assert "stopped at step" in text
    saved = Checkpoints(folder / "checkpoints").latest()
    assert saved is not None
    assert saved >= 512
    assert read_metrics(folder)["step"][-1] == saved


def test_what_was_learned_after_the_last_row_and_checkpoint_is_saved(tmp_path):
    """Rows every update, checkpoints never: a fault too many comes when there is no open row."""
    (tmp_path / "faults").mkdir()
    with pytest.raises(TooManyFaults):
        train(
            config(
                env="gym:host_worlds:Faulty-v0",
                restarts=0,
                log_every=64,
                total_timesteps=10**6,
                checkpoint_every=10**6,
                env_options={"how": "raise", "folder": str(tmp_path / "faults"), "at": 100},
            ),
            tmp_path / "run",
            quiet=True,
        )
    steps = read_metrics(tmp_path / "run")["step"]
    assert steps[-1] >= 256
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest() == steps[-1]


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    agent = APPO(learning_rate=1e30, max_grad_norm=1e30)
    with pytest.raises(Diverged, match="became nan by step"):
        train(config(agent=agent), tmp_path / "run", quiet=True)
    assert "A smaller learning rate" in log_of(tmp_path / "run")


def command(*words):
    here = str(Path(__file__).parent)
    environment = {**os.environ, "AGALITE_HUGE_PAGES": "0", "PYTHONPATH": here}
    return subprocess.Popen(
        [sys.executable, "-m", "agalite.cli", *words],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def children_of(pid):
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found | {grandchild for child in found for grandchild in children_of(child)}


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks into /proc")
def test_killed_or_stopped_it_goes_on_from_its_checkpoint(tmp_path):
    """SIGKILL leaves no worker behind either; then SIGTERM, which saves; then to the end."""
    folder = tmp_path / "run"
    process = command(
        "train",
        "gym:host_worlds:Diary-v0",
        *WORDS,
        "--num-steps",
        "16",
        "--num-workers",
        "2",
        "--envs-per-worker",
        "1",
        "--steps",
        "1_000_000",
        "--log-every",
        "320",
        "--checkpoint-every",
        "640",
        "--out",
        str(folder),
    )

    def wait_for(number):
        deadline = time.monotonic() + 120
        while (Checkpoints(folder / "checkpoints").latest() or 0) < number:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    wait_for(640)
    workers = children_of(process.pid)
    assert workers
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < deadline, "workers outlive the run"
        time.sleep(0.05)
    saved = Checkpoints(folder / "checkpoints").latest()
    process = command("resume", str(folder))
    wait_for(saved + 640)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    text = log_of(folder)
    assert f"resumed from step {saved}" in text
    assert "environments cannot be" in text
    assert "by SIGTERM; all is saved" in text
    steps = read_metrics(folder)["step"]
    assert steps[-1] == Checkpoints(folder / "checkpoints").latest()
    assert (np.diff(steps) > 0).all()


def test_a_run_that_is_over_can_be_resumed_and_read_back(tmp_path):
    run = train(config(), tmp_path / "run", quiet=True)
    assert config_from(
        {k: v for k, v in run.config.items() if k not in ("format", "versions")}
    ) == (config())
    again = resume(tmp_path / "run", quiet=True)
    assert read_metrics(again.folder)["step"][-1] == 640


def test_the_command_line_knows_which_options_there_are():
    words = [
        "gym:CartPole-v1",
        *WORDS,
        "--num-workers",
        "6",
        "--envs-per-worker",
        "3",
        "--num-actors",
        "2",
        "--set",
        "max_episode_steps=20",
        "--synchronous",
        "--learning-rate",
        "0.5",
    ]
    choices, found = parse(words, "agalite train")
    assert isinstance(found, HostConfig)
    assert found.num_envs == 18
    assert found.env_options == {"max_episode_steps": 20}
    assert found.synchronous
    assert found.agent.learning_rate == 0.5
    assert choices.ray is None
    for seeds in (["--seeds", "2"], ["--seeds=2"]):
        with pytest.raises(ValueError, match="start a run for each, with --seed"):
            parse(["gym:CartPole-v1", *seeds], "agalite train")


@pytest.mark.parametrize("memory", ["agalite", "gtrxl"])
def test_the_papers_memory_maze(memory):
    found = HostConfig(
        env="memory-maze-9x9", memory=memory, **preset("paper", "memory-maze-9x9", memory)
    )
    assert (found.workers, found.envs_per_worker, found.num_envs) == (32, 2, 64)
    assert (found.rollout, found.sequence_length, found.steps_per_update) == (200, 100, 3200)
    agent = found.agent
    assert (agent.update_epochs, agent.clip_coef, agent.vf_clip_coef, agent.max_grad_norm) == (
        1,
        0.1,
        1,
        4,
    )
    assert found.memory_options["d_model"] == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": "tmaze"}, r"env='tmaze' must be gym:<id>"),
        ({"num_actors": 3}, r"num_actors=3 must divide num_workers=2"),
        ({"batch_size": 20}, r"batch_size=20 must be a multiple of num_steps=16"),
        (
            {"batch_size": 16, "synchronous": True},
            r"batch_size=16 must be a rollout of every environment",
        ),
        ({"agent": A2C()}, r"algorithm='a2c' knows nothing .*'appo'"),
        ({"agent": APPO(num_minibatches=3)}, r"num_minibatches=3 must divide the 4 sequences"),
        ({"timeout": 0.0}, r"timeout=0.0 must be a finite number > 0"),
        ({"num_workers": 0}, r"num_workers=0 must be a whole number >= 1"),
        ({"seq_len": 5}, r"seq_len=5 must be at most num_steps=16, and divide it evenly"),
    ],
)
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_an_environment_of_gymnasium_has_a_configuration_of_its_own():
    with pytest.raises(ValueError, match=r"its configuration is a HostConfig"):
        TrainConfig(env="gym:CartPole-v1")


def test_what_cannot_be_made_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="unknown Gymnasium environment"):
        train(config(env="gym:CartPol-v1"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_is_told_who_failed(tmp_path):
    """In processes, the environment's own error reaches run.log and the caller."""
    (tmp_path / "faults").mkdir()
    with pytest.raises(TooManyFaults, match="bad day"):
        train(
            config(
                env="gym:host_worlds:Faulty-v0",
                processes=True,
                restarts=1,
                num_workers=1,
                envs_per_worker=2,
                env_options={"how": "raise", "times": 9, "folder": str(tmp_path / "faults")},
            ),
            tmp_path / "run",
            quiet=True,
        )
    # Both fail at their fifth step, in processes of their own: either may be the first.
    assert re.search("environment [01] of host_worlds:Faulty-v0 failed", log_of(tmp_path / "run"))
