"""Sessions of training: stop signals, summaries, warnings, and runs that have ended."""

import dataclasses
import importlib
import os
import re
import signal
import time
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from agalite.agents.a2c import A2C
from agalite.agents.ppo import PPO
from agalite.system import Stopped, available_memory
from agalite.training import session
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import HostConfig, TrainConfig
from agalite.training.logging import MetricsWriter
from agalite.training.run import Run
from agalite.training.session import (
    Diverged,
    already_finished,
    check_losses,
    finish,
    log_warnings,
    stop_signals,
)
from agalite.training.train import Trainer

# `agalite.training.train` is the function too.
train = importlib.import_module("agalite.training.train")


def test_a_run_without_a_finished_episode_has_no_curve(tmp_path):
    rows = [{"charts/episodic_return": np.nan, "charts/SPS": 3.0}]
    with Run.create(tmp_path / "run", {}) as run, MetricsWriter(run, 1) as metrics:
        metrics.write(100, rows)
        config = SimpleNamespace(num_seeds=1, steps_per_update=100)
        finish(run, config, parameters=7, seconds=1.0, updates=1)  # pyright: ignore
        assert run.read_summary()["last_tenth"] == {"charts/SPS": 3.0}
        assert not run.curve_path.exists()
        assert "no episode has ended" in (run.folder / "run.log").read_text()
        metrics.write(200, [{"charts/episodic_return": 1.0, "charts/SPS": 3.0}])
        finish(run, config, parameters=7, seconds=1.0, updates=1)  # pyright: ignore
        assert run.curve_path.exists()


def test_a_finished_run_is_recognised(tmp_path, capsys):
    config = SimpleNamespace(updates=5)
    with Run.create(tmp_path / "run", {}) as run:
        assert not already_finished(run, config, np.array([5]))  # pyright: ignore - no summary
        run.write_summary({"steps": 500})
        assert not already_finished(run, config, np.array([4]))  # pyright: ignore
        assert already_finished(run, config, np.array([5, 5]))  # pyright: ignore
        assert capsys.readouterr().err == ""
        assert already_finished(run, config, np.array([5]), quiet=False)  # pyright: ignore
        assert "nothing left to do" in capsys.readouterr().err


def test_warnings_are_logged_and_shown(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        with pytest.warns(UserWarning, match="one is damaged"), log_warnings(run):
            warnings.warn("one is damaged", stacklevel=1)

        def fail():
            warnings.warn("two is damaged", stacklevel=1)
            raise ValueError("all are")

        shown = pytest.warns(UserWarning, match="two is damaged")
        with shown, pytest.raises(ValueError, match="all are"), log_warnings(run):
            fail()
        log = (run.folder / "run.log").read_text()
        assert "one is damaged" in log
        assert "two is damaged" in log


def test_stopped_says_how_to_resume():
    assert str(Stopped(2, "runs/mine")).endswith("all is saved: agalite resume runs/mine")
    assert str(Stopped(15)) == "stopped by SIGTERM; all is saved"


def test_signals_close_together_are_one_request_and_a_later_one_interrupts(monkeypatch):
    """`timeout` signals a process and then its group."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with stop_signals() as received:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += 0.3
        assert received == [signal.SIGTERM]
        now[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_loss_that_is_not_finite_is_an_error(tmp_path):
    good = {"losses/policy_loss": 1.0, "losses/entropy": 0.5, "charts/episodic_return": np.nan}
    with Run.create(tmp_path / "run", {}) as run:
        checkpoints = Checkpoints(run.checkpoints_folder)
        check_losses(run, [good, good], 64, checkpoints)
        with pytest.raises(Diverged, match="losses/entropy of seed number 1 became nan by step 64"):
            check_losses(run, [good, {**good, "losses/entropy": np.nan}], 64, checkpoints)
        assert "All of step 64: {'losses/policy_loss': 1.0" in (run.folder / "run.log").read_text()


def test_observations_that_do_not_fit_into_memory_are_refused(monkeypatch):
    monkeypatch.setattr(session, "available_memory", lambda: 2**30)
    settings = {"env": "mystery-path-grid", "num_steps": 64, "agent": PPO(num_minibatches=64)}
    config = TrainConfig(**settings, num_envs=256, seeds=3)
    Trainer(config)  # one seed after another
    # 84 * 84 * 3 bytes, 256 * 64 of them, for two seeds at a time, twice.
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    words = r"16,384 steps and 2 seeds at a time .* 1.3 GiB, and 1.0 GiB .* at most 12,681 steps"
    with pytest.raises(ValueError, match=words):
        Trainer(config)
    Trainer(TrainConfig(**settings, num_envs=128, seeds=2))


def test_a_gradient_step_that_does_not_fit_into_memory_is_refused(monkeypatch):
    monkeypatch.setattr(session, "available_memory", lambda: 2**30)
    few = {"d_model": 8, "hidden_size": 8}
    settings = {"env": "tmaze", "memory": "gru", "memory_options": few, "num_steps": 128}
    Trainer(TrainConfig(**settings, num_envs=512, agent=PPO(num_minibatches=64)))
    words = (
        r"a gradient step on 1,048,576 environment steps keeps (\d+).\d GiB .* 1.0 GiB of memory .*"
        r"at most ([\d,]+) steps fit: take fewer environments, a smaller num_steps or more minib"
    )
    with pytest.raises(ValueError, match=words) as error:
        Trainer(TrainConfig(**settings, num_envs=2**15, agent=PPO(num_minibatches=4)))
    gib, fitting = re.search(words, str(error.value)).groups()
    # What a step keeps does not depend on the number of steps.
    fitting = int(fitting.replace(",", "")) // 128 * 128
    assert fitting < 1_048_576 / float(gib)
    Trainer(TrainConfig(**settings, num_envs=fitting // 128, agent=A2C()))


def test_a_few_steps_of_a_large_encoder_that_do_not_fit_are_refused(monkeypatch):
    """24 frames are 0.5 MB, and what residual convolutions keep of them is a hundred times that."""
    monkeypatch.setattr(session, "available_memory", lambda: 2**25)
    settings = {"env": "mystery-path-grid", "memory": "gru", "num_steps": 4, "num_envs": 6}
    few = {"d_model": 8, "hidden_size": 8}
    with pytest.raises(ValueError, match=r"step on 24 environment steps keeps 0\.\d GiB"):
        Trainer(TrainConfig(**settings, encoder="impala", memory_options=few))


def test_a_run_that_has_ended_and_lost_its_checkpoints_is_not_begun_anew(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        checkpoints = Checkpoints(run.checkpoints_folder)
        assert session.restore_latest(run, checkpoints, {}) is None
        run.write_summary({"steps": 500})
        with pytest.raises(ValueError, match=r"has ended, .* but its checkpoints are gone"):
            session.restore_latest(run, checkpoints, {})


def test_more_seeds_than_fit_into_memory_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "available_memory", lambda: 2**30)
    small = {"memory": "gru", "memory_options": {"d_model": 8, "hidden_size": 8}}
    config = TrainConfig(env="tmaze", **small, num_envs=2, num_steps=8, seeds=100_000)
    words = r"100,000 seeds of 0\.\d MiB each need .* 1.0 GiB of memory .* at most [\d,]+ fit"
    with pytest.raises(ValueError, match=words):
        train.train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    train.Trainer(dataclasses.replace(config, seeds=10)).check_state_memory()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"encoder": "patch"}, r"expects \(x, y, channel\)"),
        ({"batch_size": 2**20}, "take a smaller batch_size"),
    ],
)
def test_what_does_not_fit_a_gymnasium_environment_leaves_no_run(
    settings, words, monkeypatch, tmp_path
):
    monkeypatch.setattr(session, "available_memory", lambda: 2**20)
    config = HostConfig(env="gym:CartPole-v1", num_workers=1, processes=False, **settings)
    with pytest.raises(ValueError, match=words):
        train.train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_available_memory_is_that_of_this_machine():
    memory = available_memory()
    assert memory is None or 2**20 < memory < 2**50
