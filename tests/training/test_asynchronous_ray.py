"""Actors on a real Ray cluster of two nodes, which lose an actor and then a node."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from test_asynchronous import config, log_of

from agalite.training.logging import read_metrics
from agalite.training.train import train

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
    # 15 otherwise: beside another worker's tests its actors would get no turn.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - this is its name
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    try:
        yield made
    finally:
        made.shutdown()


def steps_of(folder):
    table = read_metrics(folder) if (folder / "metrics.csv").exists() else {"step": []}
    return int(table["step"][-1]) if len(table["step"]) else 0


def test_a_run_outlives_an_actor_and_a_node(cluster, tmp_path):
    folder, done = tmp_path / "run", []
    trouble = []

    def make_trouble():
        try:
            wait(lambda: steps_of(folder) >= 64)
            pids = [pid for pid in map(actor_process, os.listdir("/proc")) if pid]
            assert len(pids) == 2, pids
            os.kill(pids[0], signal.SIGKILL)
            wait(lambda: "actor" in log_of(folder) and "was lost" in log_of(folder))
            at = steps_of(folder)
            wait(lambda: steps_of(folder) >= at + 640)
            cluster.remove_node(cluster.second)
            wait(lambda: log_of(folder).count("was lost") >= 2)
            at = steps_of(folder)
            wait(lambda: steps_of(folder) >= at + 640)
            done.append(True)
        except BaseException as error:
            trouble.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # as somebody would who has seen enough

    def wait(until):
        deadline = time.monotonic() + 400
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    from agalite.system import Stopped

    thread = threading.Thread(target=make_trouble)
    thread.start()
    with pytest.raises(Stopped):
        train(
            config(num_actors=2, total_timesteps=10_000_000),
            folder,
            quiet=True,
            ray=cluster.address,
        )
    thread.join()
    assert done, trouble
    table = read_metrics(folder)
    assert table["charts/faults"].sum() >= 2
    assert table["charts/lost_rollouts"].sum() >= 4
    assert (table["charts/policy_lag"] >= 0).all()
    assert table["charts/policy_lag_max"].max() <= 8
    assert "is begun again, with 2 environments" in log_of(folder)


def actor_process(name):
    """The process number, if it is one of our actors'; Ray names its processes after them."""
    if not name.isdigit():
        return None
    try:
        title = Path(f"/proc/{name}/cmdline").read_bytes()
    except OSError:
        return None
    return int(name) if title.startswith(b"ray::ActorOnRay") else None


def test_what_ray_cannot_do_is_said(tmp_path):
    with pytest.raises(ValueError, match="synchronous=True is for comparisons on one machine"):
        train(config(synchronous=True), tmp_path / "run", quiet=True, ray="auto")
    assert not (tmp_path / "run").exists()
