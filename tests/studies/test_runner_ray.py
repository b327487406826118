"""A study on a real Ray cluster of two nodes, one of which is killed. About a minute.

`test_runner.py` tests the scheduling loop with a fake executor.
"""

import os
import signal
import threading
import time

import numpy as np
import pytest

from agalite.studies import catalogue, report, runner
from agalite.studies.runner import RayTasks
from agalite.studies.trials import expand, requested, stored
from agalite.system import Stopped
from agalite.training.logging import read_metrics

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
    # Ray's default is 15, at which a busy machine hardly runs its workers.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - this is its name
    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    started.second = started.add_node(num_cpus=1)
    try:
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


def test_a_signal_saves_runs_on_the_cluster(cluster, tmp_path):
    """A long trial is asked to stop, saves its run on its node, and can be resumed."""
    (trial,) = expand(
        catalogue.find("horizon"),
        "cpu",
        tmp_path,
        ["agent=gru", "horizon=spread", "corridor=120", "seed=0"],
    )

    def stop():
        deadline = time.monotonic() + 300
        while not trial.progress() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        runner.run([trial], RayTasks(cluster.address), quiet=True)
    thread.join()
    assert trial.state() == "unfinished"
    assert "stopped at step" in (trial.folder / "run.log").read_text()
    assert any((trial.folder / "checkpoints").iterdir())


def test_a_study_survives_the_loss_of_a_node(cluster, tmp_path):
    """Both trials of the smoke T-Maze study run, each on a node, when one node is lost. Its trial
    resumes on the other node."""
    study = catalogue.find("tmaze")
    trials = expand(study, "smoke", tmp_path)
    states_at_kill = []

    def kill():
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if all((trial.folder / "config.json").exists() for trial in trials):
                cluster.remove_node(cluster.second, allow_graceful=False)
                states_at_kill.extend(trial.state() for trial in trials)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    outcomes = runner.run(trials, RayTasks(cluster.address), quiet=True)
    thread.join()
    assert "unfinished" in states_at_kill, "the node was killed too late"
    assert [outcome.state for outcome in outcomes] == ["finished"] * 2, outcomes
    assert [trial.state() for trial in trials] == ["finished"] * 2
    logs = [(trial.folder / "run.log").read_text() for trial in trials]
    assert sum("resumed" in log for log in logs) >= 1, logs
    for trial in trials:
        table = read_metrics(trial.folder)
        assert table["step"].max() >= trial.settings["total_timesteps"]
        rows = list(zip(table["step"], table["seed"], strict=True))
        assert len(set(rows)) == len(rows)  # nothing was written twice
        assert np.isfinite(table["losses/entropy"]).all()
    assert stored(trials[0]) == requested(trials[0])
    assert "2 trials: 2 finished" in report.write(study, "smoke", tmp_path).read_text()
    # Nothing is left to run.
    assert runner.run(trials, RayTasks(cluster.address), quiet=True) == []
