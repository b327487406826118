"""How a run begins and ends, whatever its algorithm."""

import os
import signal
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from agalite.system import Stopped
from agalite.training.logging import MetricsWriter
from agalite.training.run import Run
from agalite.training.session import asked_to_stop, ended, finish, warnings_logged


def test_a_run_in_which_no_episode_ended_ends_well(tmp_path):
    rows = [{"charts/episodic_return": np.nan, "charts/SPS": 3.0}]
    with Run.create(tmp_path / "run", {}) as run, MetricsWriter(run, 1) as metrics:
        metrics.write(100, rows)
        config = SimpleNamespace(seeds_in_all=1, steps_per_update=100)
        finish(run, config, parameters=7, seconds=1.0, updates=1)  # pyright: ignore
        assert run.read_summary()["last_tenth"] == {"charts/SPS": 3.0}
        assert not run.curve_path.exists()
        assert "no episode has ended" in (run.folder / "run.log").read_text()
        metrics.write(200, [{"charts/episodic_return": 1.0, "charts/SPS": 3.0}])
        finish(run, config, parameters=7, seconds=1.0, updates=1)  # pyright: ignore
        assert run.curve_path.exists()


def test_what_has_ended_is_left_alone(tmp_path, capsys):
    config = SimpleNamespace(updates=5)
    with Run.create(tmp_path / "run", {}) as run:
        assert not ended(run, config, np.array([5]))  # pyright: ignore - killed before its summary
        run.write_summary({"total_timesteps": 500})
        assert not ended(run, config, np.array([4]))  # pyright: ignore
        assert ended(run, config, np.array([5, 5]))  # pyright: ignore
        assert capsys.readouterr().err == ""
        assert ended(run, config, np.array([5]), quiet=False)  # pyright: ignore
        assert "nothing left to do" in capsys.readouterr().err


def test_warnings_are_in_the_log_too(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        with pytest.warns(UserWarning, match="one is damaged"), warnings_logged(run):
            warnings.warn("one is damaged", stacklevel=1)

        def nothing_is_whole():
            warnings.warn("two is damaged", stacklevel=1)
            raise ValueError("all are")

        told = pytest.warns(UserWarning, match="two is damaged")
        with told, pytest.raises(ValueError, match="all are"), warnings_logged(run):
            nothing_is_whole()
        log = (run.folder / "run.log").read_text()
        assert "one is damaged" in log
        assert "two is damaged" in log


def test_stopped_says_how_to_go_on():
    assert str(Stopped(2, "runs/mine")).endswith("all is saved: agalite resume runs/mine")
    assert str(Stopped(15)) == "stopped by SIGTERM; all is saved"


def test_signals_close_together_are_one_request_and_a_later_one_is_impatient(monkeypatch):
    """`timeout` signals a process and then its group; only a person comes back to ask again."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with asked_to_stop() as asked:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            now[0] += 0.3
        assert asked == [signal.SIGTERM]
        now[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
