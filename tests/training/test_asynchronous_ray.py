"""Actors on Ray: their logic with a stand-in for Ray, and a real cluster of two nodes (slow)."""

import os
import signal
import threading
import time
import types
from pathlib import Path

import equinox as eqx
import jax
import pytest

from agalite.system import Stopped
from agalite.training.asynchronous import ray as ray_actors
from agalite.training.asynchronous.queue import ActorStats, RolloutResult
from agalite.training.asynchronous.ray import RayActors, RemoteActor, RemoteResult
from agalite.training.asynchronous.worker import TooManyFaults
from agalite.training.logging import read_metrics
from agalite.training.train import train
from host_envs import small_config as config


class StubActor:
    """Returns numbers in place of trajectories."""

    def __init__(self, _, index):
        self.index, self.count = index, 0

    def spaces(self):
        return "observations", "actions"

    def start(self, version, _):
        self.version = version

    def publish(self, version, _):
        self.version = version

    def next(self):
        self.count += 1
        trajectories = [(self.index, self.count, self.version)] * 2
        stats = ActorStats({}, 0, 0, 0.0, 1.0)
        return RemoteResult(RolloutResult(trajectories, stats), [f"actor {self.index} acts"])


class FakeRay:
    """As much of Ray as `RayActors` uses; `next` runs when its result is fetched."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

        class GetTimeoutError(RayError): ...

    def __init__(self):
        self.dead, self.killed, self.made = set(), [], []

    def is_initialized(self):
        return True

    def remote(self, **_):
        def wrap(kind):
            return types.SimpleNamespace(options=lambda **_: self._maker(kind))

        return wrap

    def _maker(self, kind):
        def make(*arguments):
            actor = kind(*arguments)
            self.made.append(actor)
            names = ("spaces", "start", "publish", "next")
            return types.SimpleNamespace(actor=actor, **{n: self._method(actor, n) for n in names})

        return types.SimpleNamespace(remote=make)

    def _method(self, actor, name):
        def call(*arguments):
            return Ref(actor) if name == "next" else getattr(actor, name)(*arguments)

        return types.SimpleNamespace(remote=call)

    def put(self, value):
        return value

    def wait(self, refs, *, num_returns=1, **_):
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref, **_):
        if not isinstance(ref, Ref):
            return ref
        if ref.actor in self.dead:
            raise self.exceptions.RayError("the actor died\nadvice for administrators")
        return ref.actor.next()

    def kill(self, actor):
        self.killed.append(actor.actor)


class Ref:
    """A call of `next`."""

    newest: "Ref"

    def __init__(self, actor):
        self.actor = actor
        Ref.newest = self


@pytest.fixture
def fake(monkeypatch):
    made = FakeRay()
    monkeypatch.setattr(ray_actors, "import_ray", lambda: made)
    monkeypatch.setattr(ray_actors, "_ray_actor_class", lambda _: StubActor)
    return made


def test_rollouts_of_all_actors_are_taken_in_order(fake):
    log = []
    actors = RayActors(config(num_actors=2), "auto")
    assert actors.spaces == ("observations", "actions")
    actors.start(None, 7, {}, log.append)  # pyright: ignore[reportArgumentType]
    assert actors.take(5, 1.0) == [(0, 1, 7), (0, 1, 7), (0, 2, 7), (0, 2, 7), (1, 1, 7)]
    assert actors.queued == 1
    assert len(actors.pop_stats()) == 3
    assert actors.pop_stats() == []
    actors.publish(8, {})
    assert [actor.version for actor in fake.made] == [8, 8]
    assert log == ["actor 0 acts", "actor 0 acts", "actor 1 acts"]
    actors.close()
    assert fake.killed == fake.made


def test_answers_of_an_actor_are_taken_in_its_order(fake, monkeypatch):
    """Of the requests waited for, the newest is answered first, as it may be on another node."""
    made, answered = [], []
    actors = RayActors(config(num_actors=2), "auto")
    request = actors._request
    monkeypatch.setattr(actors, "_request", lambda i: (request(i), made.append(Ref.newest)))

    def wait(refs, **_):
        answered.append(max(refs, key=made.index))
        return [answered[-1]], []

    monkeypatch.setattr(fake, "wait", wait)
    actors.start(None, 7, {}, lambda _: None)  # pyright: ignore[reportArgumentType]
    actors.take(8, 1.0)
    for actor in fake.made:
        requests = [ref for ref in made if ref.actor is actor]
        answers = [ref for ref in answered if ref.actor is actor]
        assert answers == requests[: len(answers)]
    assert len(answered) == 4


def test_an_actor_that_dies_is_restarted_with_another_seed(fake):
    log = []
    actors = RayActors(config(num_actors=2, restarts=1), "auto")
    actors.start(None, 0, {}, log.append)  # pyright: ignore[reportArgumentType]
    fake.dead.add(fake.made[0])
    taken = actors.take(8, 1.0)
    assert {index for index, _, _ in taken} == {1, 2}  # 2 is the second of the first actor
    assert "actor 0 was lost: the actor died" in log
    assert "actor 0 is restarted with 2 environments" in log
    stats = actors.pop_stats()
    assert (sum(s.faults for s in stats), sum(s.lost for s in stats)) == (1, 2)
    fake.dead.add(fake.made[1])
    with pytest.raises(TooManyFaults, match=r"actors were lost 2 times \(restarts=1 are allowed\)"):
        actors.take(8, 1.0)


def test_a_remote_actor_returns_rollouts_its_log_and_its_failure(tmp_path):
    """The class that Ray runs, in this process."""
    faulty = {"how": "raise", "folder": str(tmp_path), "at": 20, "times": 9}
    remote = RemoteActor(
        config(env="gym:host_envs:Faulty-v0", env_options=faulty, restarts=0), index=1
    )
    network = ray_actors.Network(config(), *remote.spaces())
    weights = eqx.filter(eqx.filter_jit(network.make)(jax.random.key(0)), eqx.is_array)
    remote.publish(4, weights)  # Ray runs it beside `start`, which may be later
    remote.start(3, weights)
    first = remote.next()
    assert first.rollout is not None
    assert first.failure is None
    assert [t.versions.tolist() for t in first.rollout.trajectories] == [[4], [4]]
    remote.next()
    failed = remote.next()
    assert failed.rollout is None
    assert failed.failure is not None
    assert "restarts=0 are allowed" in failed.failure
    assert any("a bad day" in line for line in failed.log)


def test_synchronous_training_is_refused(tmp_path):
    with pytest.raises(ValueError, match="synchronous=True is for comparisons on one machine"):
        train(config(synchronous=True), tmp_path / "run", quiet=True, ray="auto")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
    # The default is 15: beside other tests the actors would hardly run.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - this is its name
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_survives_the_loss_of_an_actor_and_of_a_node(cluster, tmp_path):
    folder, done, errors = tmp_path / "run", [], []

    def log():
        return (folder / "run.log").read_text()

    def last_step():
        steps = read_metrics(folder)["step"] if (folder / "metrics.csv").exists() else []
        return int(steps[-1]) if len(steps) else 0

    def wait(until):
        deadline = time.monotonic() + 400
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_training():
        at = last_step()
        wait(lambda: last_step() >= at + 640)

    def break_things():
        try:
            wait(lambda: last_step() >= 64)
            pids = [pid for pid in map(actor_process, os.listdir("/proc")) if pid]
            assert len(pids) == 2, pids
            os.kill(pids[0], signal.SIGKILL)
            wait(lambda: "was lost" in log())
            wait_for_training()
            cluster.remove_node(cluster.second)
            wait(lambda: log().count("was lost") >= 2)
            wait_for_training()
            done.append(True)
        except BaseException as error:
            errors.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=break_things)
    thread.start()
    with pytest.raises(Stopped):
        train(
            config(num_actors=2, total_timesteps=10_000_000),
            folder,
            quiet=True,
            ray=cluster.address,
        )
    thread.join()
    assert done, errors
    table = read_metrics(folder)
    assert table["charts/faults"].sum() >= 2
    assert table["charts/lost_rollouts"].sum() >= 4
    assert (table["charts/policy_lag"] >= 0).all()
    assert table["charts/policy_lag_max"].max() <= 8
    assert "is restarted with 2 environments" in log()


def actor_process(name):
    """The process id, if it is that of one of our actors; Ray puts the class into the title."""
    if not name.isdigit():
        return None
    try:
        title = Path(f"/proc/{name}/cmdline").read_bytes()
    except OSError:
        return None
    return int(name) if title.startswith(b"ray::ActorOnRay") else None
