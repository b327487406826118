"""A study on a real Ray cluster of two nodes, one of which is killed half-way. About a minute."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from agalite.studies import catalogue, report, runner, trials
from agalite.studies.runner import OnRay
from agalite.studies.trials import expand
from agalite.system import Stopped
from agalite.training.logging import read_metrics

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
    # 15 otherwise, which on a busy machine is for ever.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - this is its name
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def test_ctrl_c_saves_runs_on_the_cluster_too(cluster, tmp_path):
    """A trial that would take long is asked to stop, saves its run on its node, and can go on."""
    (trial,) = expand(catalogue.find("horizon"), "cpu", tmp_path, ["agent=gru", "horizon=spread"])

    def stop():
        deadline = time.monotonic() + 300
        while not trials.progress(trial) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        runner.run([trial], OnRay(cluster.address), quiet=True)
    thread.join()
    assert trial.state() == "half-finished"
    assert "stopped at step" in (trial.folder / "run.log").read_text()
    assert any((trial.folder / "checkpoints").iterdir())


def test_a_study_outlives_a_node(cluster, tmp_path):
    """The smoke T-Maze study: both of its trials are at work, each on a node, when one node is
    lost; its trial goes on, on the other."""
    study = catalogue.find("tmaze")
    trials = expand(study, "smoke", tmp_path)
    killed = []

    def kill():
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            begun = [trial for trial in trials if (trial.folder / "config.json").exists()]
            if len(begun) == 2:
                cluster.remove_node(cluster.second, allow_graceful=False)
                killed.extend(trial.state() for trial in trials)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    outcomes = runner.run(trials, OnRay(cluster.address), quiet=True)
    thread.join()
    assert "half-finished" in killed, "the node was killed too late"
    assert [outcome.state for outcome in outcomes] == ["finished"] * 2, outcomes
    assert [trial.state() for trial in trials] == ["finished"] * 2
    logs = [(trial.folder / "run.log").read_text() for trial in trials]
    assert sum("resumed" in log for log in logs) >= 1, logs
    for trial in trials:
        table = read_metrics(trial.folder)
        assert table["step"].max() >= trial.settings["steps"]
        rows = list(zip(table["step"], table["seed"], strict=True))
        assert len(set(rows)) == len(rows)  # nothing was written twice
        assert np.isfinite(table["losses/entropy"]).all()
    assert trials.stored(trials[0]) == trials.asked(trials[0])
    assert "2 trials: 2 finished" in report.write(study, "smoke", tmp_path).read_text()
    # Everything is there: nothing is left to be run.
    assert runner.run(trials, OnRay(cluster.address), quiet=True) == []
