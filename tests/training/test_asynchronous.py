"""Asynchronous runs: they learn, stop when asked, survive faults and resume from a checkpoint."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from agalite.agents.a2c import A2C
from agalite.agents.appo import APPO
from agalite.cli import main
from agalite.system import Stopped
from agalite.training import diagnostics
from agalite.training.asynchronous.learner import Learner
from agalite.training.asynchronous.worker import TooManyFaults
from agalite.training.checkpoint import Checkpoints
from agalite.training.command import parse
from agalite.training.config import HostConfig, TrainConfig, config_from_dict
from agalite.training.evaluate import evaluate, report
from agalite.training.logging import read_metrics
from agalite.training.policy import load, load_policy
from agalite.training.presets import preset
from agalite.training.session import Diverged
from agalite.training.train import resume, train
from host_envs import small_config as config

OPTIONS = {
    "--memory": "gru",
    "--model.d-model": "16",
    "--model.hidden-size": "16",
    "--hidden-size": "16",
    "--num-steps": "16",
    "--num-workers": "2",
    "--num-minibatches": "2",
}


def words(options):
    return [word for pair in options.items() for word in pair]


def log_of(folder):
    return (folder / "run.log").read_text()


def weights_of(folder):
    return [np.asarray(x) for x in jax.tree.leaves(load(folder).model) if hasattr(x, "dtype")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that has ended. All of its gradients count as clipped too far."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnostics, "WINDOW", (0.125, 1))
        patch.setattr(diagnostics, "CLIPPED", 0.0)
        return train(config(), tmp_path_factory.mktemp("runs") / "run", quiet=True)


def test_a_run_has_metrics_and_files(finished):
    table = read_metrics(finished.folder)
    assert table["step"].tolist() == list(range(64, 641, 64))
    for name in ("losses/grad_norm", "charts/episodic_return", "charts/odd", "charts/SPS"):
        assert np.isfinite(table[name]).any(), name
    assert 0 <= table["charts/policy_lag_max"].max() <= 4
    assert table["charts/faults"].sum() == 0
    assert {p.name for p in finished.folder.iterdir()} >= {
        "config.json",
        "metrics.csv",
        "tensorboard",
        "checkpoints",
        "curve.png",
        "summary.json",
        "run.log",
    }


def test_a_failing_run_is_warned_of_once(finished):
    assert log_of(finished.folder).count("warning (clipped gradients):") == 1


def test_a_trained_agent_is_loaded_and_evaluated(finished):
    loaded = load(finished.folder)
    assert loaded.step == 640
    scores = evaluate(loaded.model, loaded.trainer.env, episodes=5, greedy=True, num_envs=4)
    assert len(scores.returns) == 5
    assert scores.success is None
    assert ((scores.lengths >= 2) & (scores.lengths <= 6)).all()
    policy = load_policy(finished.folder, greedy=True)
    action, _ = policy.act(np.zeros(4, np.float32), policy.initial_state(), reset=True)
    assert action in (0, 1, 2)


def test_a_run_that_has_ended_is_resumed_and_its_config_read_back(finished):
    assert config_from_dict(finished.settings) == config()
    before = finished.metrics_path.read_bytes()
    resume(finished.folder, quiet=True)
    assert finished.metrics_path.read_bytes() == before
    assert "there is nothing left to do" in log_of(finished.folder)


@pytest.mark.slow
def test_it_learns_to_remember(tmp_path):
    """The cue is gone when the action counts: without memory half of the actions are right."""
    agent = APPO(
        learning_rate=3e-3, ent_coef=1e-2, update_epochs=2, num_minibatches=2, clip_coef=0.2
    )
    run = train(
        config(
            env="gym:host_envs:Recall-v0",
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
    report(
        run.folder,
        episodes=20,
        greedy=True,
        best=False,
        seed=1,
        seed_number=0,
        num_envs=8,
        video=None,
    )
    loaded = load(run.folder)
    scores = evaluate(loaded.model, loaded.trainer.env, episodes=21, greedy=True, num_envs=4)
    assert scores.success is not None
    assert scores.success.mean() > 0.95
    assert (scores.lengths == 4).all()


def test_synchronous_runs_have_no_policy_lag_and_repeat(tmp_path):
    for name in ("one", "two"):
        run = train(config(synchronous=True), tmp_path / name, quiet=True)
        table = read_metrics(run.folder)
        assert (table["charts/policy_lag_max"] == 0).all()
        assert len(table["step"]) == 10
    for a, b in zip(*(weights_of(tmp_path / name) for name in ("one", "two")), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("synchronous", [True, False])
def test_several_actors(synchronous, tmp_path):
    run = train(config(num_actors=2, synchronous=synchronous), tmp_path / "run", quiet=True)
    table = read_metrics(run.folder)
    assert table["step"][-1] == 640
    assert ((table["charts/policy_lag_max"] == 0) | (not synchronous)).all()


def test_a_lost_trajectory_does_not_stop_a_synchronous_run(tmp_path):
    (tmp_path / "faults").mkdir()
    run = train(
        config(
            env="gym:host_envs:Faulty-v0",
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


def test_a_batch_need_not_be_a_rollout_of_every_environment(tmp_path):
    run = train(config(batch_size=48, queue_size=2), tmp_path / "run", quiet=True)
    table = read_metrics(run.folder)
    assert table["step"].tolist() == [48 * i for i in range(1, 15)]


def test_too_many_faults_stop_the_run_with_a_checkpoint(tmp_path, capfd):
    (tmp_path / "faults").mkdir()
    folder = tmp_path / "run"
    options = {**OPTIONS, "--restarts": "3", "--steps": "6400", "--out": str(folder)}
    faulty = ["--set", "how=raise", f"folder={tmp_path / 'faults'}", "at=60", "times=99"]
    line = ["train", "gym:host_envs:Faulty-v0", *words(options), "--no-processes", *faulty]
    assert main(line) == 2
    message = capfd.readouterr().err
    assert "environments failed 4 times (restarts=3 are allowed)" in message
    assert f"what was learned is saved: agalite resume {folder}" in message
    text = log_of(folder)
    assert text.count("ZeroDivisionError: a bad day") >= 4
    assert "Traceback" in text
    assert "fault 4 in worker" in text
    assert "stopped at step" in text
    saved = Checkpoints(folder / "checkpoints").latest()
    assert saved is not None
    assert saved >= 64
    assert read_metrics(folder)["step"][-1] == saved


def test_updates_after_the_last_checkpoint_are_saved_when_a_run_stops(tmp_path):
    """A row after every update, and no checkpoint: there is no open row when the fault comes."""
    (tmp_path / "faults").mkdir()
    with pytest.raises(TooManyFaults):
        train(
            config(
                env="gym:host_envs:Faulty-v0",
                restarts=0,
                env_options={"how": "raise", "folder": str(tmp_path / "faults"), "at": 100},
            ),
            tmp_path / "run",
            quiet=True,
        )
    steps = read_metrics(tmp_path / "run")["step"]
    assert steps[-1] >= 256
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest() == steps[-1]


def test_a_run_is_stopped_by_a_signal_and_resumed(tmp_path):
    folder = tmp_path / "run"

    def stop():
        metrics = folder / "metrics.csv"
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    slow_steps = {"seconds": 0.002, "log": str(tmp_path / "steps")}
    with pytest.raises(Stopped, match="stopped by SIGTERM; all is saved: agalite resume"):
        train(config(env="gym:host_envs:Slow-v0", env_options=slow_steps), folder, quiet=True)
    thread.join()
    saved = Checkpoints(folder / "checkpoints").latest()
    assert saved is not None
    assert read_metrics(folder)["step"][-1] == saved < 640
    resume(folder, quiet=True)
    text = log_of(folder)
    assert f"resumed from step {saved}; environments cannot be restored" in text
    assert "by SIGTERM; all is saved" in text
    steps = read_metrics(folder)["step"]
    assert steps[-1] == 640
    assert (np.diff(steps) > 0).all()


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    class Diverging(Learner):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            update = self.update

            def diverge(*batch):
                state, losses = update(*batch)
                return state, {**losses, "losses/value_loss": np.float32("nan")}

            self.update = diverge

    monkeypatch.setattr("agalite.training.asynchronous.train.Learner", Diverging)
    with pytest.raises(Diverged, match=r"losses/value_loss .* became nan by step 64"):
        train(config(), tmp_path / "run", quiet=True)
    assert "A smaller learning rate" in log_of(tmp_path / "run")


def command(*arguments):
    tests = str(Path(__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-m", "agalite.cli", *arguments],
        env={**os.environ, "AGALITE_HUGE_PAGES": "0", "PYTHONPATH": tests},
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


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_a_killed_process_leaves_no_worker_and_is_resumed(tmp_path):
    folder = tmp_path / "run"
    options = {
        **OPTIONS,
        "--envs-per-worker": "1",
        "--steps": "1_000_000",
        "--log-every": "320",
        "--checkpoint-every": "640",
        "--out": str(folder),
    }
    process = command("train", "gym:host_envs:Diary-v0", *words(options))

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
    assert f"resumed from step {saved}" in log_of(folder)
    steps = read_metrics(folder)["step"]
    assert steps[-1] == Checkpoints(folder / "checkpoints").latest()
    assert (np.diff(steps) > 0).all()


def test_the_command_line_has_the_options_of_asynchronous_runs():
    options = {
        **OPTIONS,
        "--num-workers": "6",
        "--envs-per-worker": "3",
        "--num-actors": "2",
        "--set": "max_episode_steps=20",
        "--learning-rate": "0.5",
    }
    choices, found = parse(["gym:CartPole-v1", *words(options), "--synchronous"], "agalite train")
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
def test_the_memory_maze_of_the_paper(memory):
    found = HostConfig(
        env="memory-maze-9x9", memory=memory, **preset("paper", "memory-maze-9x9", memory)
    )
    assert (found.num_workers, found.envs_per_worker, found.num_envs) == (32, 2, 64)
    assert (found.num_steps, found.sequence_length, found.steps_per_update) == (200, 100, 3200)
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
        ({"agent": A2C()}, r"algorithm='a2c' cannot learn from policies .*'appo'"),
        ({"agent": APPO(num_minibatches=3)}, r"num_minibatches=3 must divide the 4 sequences"),
        ({"timeout": 0.0}, r"timeout=0.0 must be a finite number > 0"),
        ({"num_workers": 0}, r"num_workers=0 must be a whole number >= 1"),
        ({"seq_len": 5}, r"seq_len=5 must be at most num_steps=16, and divide it evenly"),
    ],
)
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_gymnasium_environment_needs_a_host_config():
    with pytest.raises(ValueError, match=r"its configuration is a HostConfig"):
        TrainConfig(env="gym:CartPole-v1")


def test_an_unknown_environment_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="unknown Gymnasium environment"):
        train(config(env="gym:CartPol-v1"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_error_of_an_environment_reaches_the_log_and_the_caller(tmp_path):
    (tmp_path / "faults").mkdir()
    with pytest.raises(TooManyFaults, match="bad day"):
        train(
            config(
                env="gym:host_envs:Faulty-v0",
                processes=True,
                restarts=1,
                num_workers=1,
                envs_per_worker=2,
                env_options={"how": "raise", "times": 9, "folder": str(tmp_path / "faults")},
            ),
            tmp_path / "run",
            quiet=True,
        )
    # Both environments fail at their fifth step; either may be the first.
    assert re.search("environment [01] of host_envs:Faulty-v0 failed", log_of(tmp_path / "run"))
