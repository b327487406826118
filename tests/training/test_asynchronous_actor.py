"""Actors: trajectories hold what happened, complete, also when environments fail."""

import itertools
import os
import re
import signal
import threading
import time

import equinox as eqx
import jax
import numpy as np
import pytest

from agalite.agents.appo import APPO
from agalite.agents.base import evaluate_actions, make_batch
from agalite.envs.gymnasium.vector import from_gymnasium
from agalite.envs.gymnasium.workers import EnvError
from agalite.training.asynchronous.actor import Actor
from agalite.training.asynchronous.learner import Network
from agalite.training.asynchronous.queue import ParameterStore, QueueClosed, TrajectoryQueue, stack
from agalite.training.asynchronous.worker import TooManyFaults
from host_envs import small_config

SHAPES = {"num_steps": 12, "seq_len": 6, "timeout": 2.0, "agent": APPO(num_minibatches=1)}


def config(**changes):
    return small_config(**{**SHAPES, **changes})


def network_of(config):
    with from_gymnasium("host_envs:Diary-v0", 1, seed=0) as vector:
        return Network(config, vector.observation_space, vector.action_space)


@pytest.fixture(scope="module")
def network():
    return network_of(config())


def weights_of(network, seed=0):
    return eqx.filter(eqx.filter_jit(network.make)(jax.random.key(seed)), eqx.is_array)


def actor(network, log=None, parameters=None, **changes):
    parameters = parameters or ParameterStore(0, weights_of(network))
    return Actor(
        config(**changes),
        0,
        parameters,
        start_update=0,
        log=(log if log is not None else []).append,
        network=network,
    )


def check_consistent(trajectory):
    """Nothing is missing in the middle: within an episode the time goes on step by step."""
    r = trajectory.rollout
    number, _, clock, action = r.obs.T
    assert len(set(number)) == 1
    np.testing.assert_array_equal(r.resets[1:], r.ends[:-1])
    clock = np.rint(clock * 4)
    np.testing.assert_array_equal(clock[r.resets], 0)
    going = ~r.resets[1:]
    np.testing.assert_array_equal(clock[1:][going], clock[:-1][going] + 1)
    np.testing.assert_array_equal(r.rewards, clock + 1)
    np.testing.assert_array_equal(np.rint(action[1:][going] * 2), r.actions[:-1][going])
    assert np.isfinite(r.next_values).all()


def collect(playing, rollouts):
    return list(itertools.islice(playing.rollouts(), rollouts))


def test_what_is_handed_over_is_what_happened(network):
    """The learner, with the same weights, sees the same policy and values, and what came after."""
    playing = actor(network)
    got = collect(playing, 6)
    playing.close()
    trajectories = [t for result in got for t in result.trajectories]
    assert len(trajectories) == 12
    for trajectory in trajectories:
        check_consistent(trajectory)
    rollout, initial_states, versions = stack(trajectories)
    assert (versions == 0).all()
    assert versions.shape == (2, 12)
    model = network.model(weights_of(network))
    batch = make_batch(rollout, initial_states, np.zeros_like(rollout.rewards), 6)
    new = eqx.filter_jit(evaluate_actions)(model, batch)
    np.testing.assert_allclose(new.log_probs, batch.log_probs, atol=2e-5)
    np.testing.assert_allclose(new.values, batch.values, atol=2e-5)

    # After an episode that terminated there is nothing, after a truncated one the value of its
    # final observation, else that of the next observation, whichever rollout has it.
    terminated = rollout.ends & (np.rint(rollout.obs[..., 1] * 8) % 2 == 0)
    truncated = rollout.ends & ~terminated
    assert terminated.any()
    assert truncated.any()
    assert (rollout.next_values[terminated] == 0).all()
    inside = ~rollout.ends[:-1]
    np.testing.assert_array_equal(rollout.next_values[:-1][inside], rollout.values[1:][inside])
    by_number = {}
    for trajectory in trajectories:  # in the order in which they were acted
        by_number.setdefault(float(trajectory.rollout.obs[0, 0]), []).append(trajectory.rollout)
    assert len(by_number) == 4
    for of_one in by_number.values():
        for before, after in itertools.pairwise(of_one):
            assert after.resets[0] == before.ends[-1]
            if not before.ends[-1]:
                np.testing.assert_allclose(before.next_values[-1], after.values[0], atol=2e-5)
    t, b = np.argwhere(truncated)[0]
    n = t // 6
    memory_state = jax.tree.map(lambda x: x[n, b], initial_states)
    step = eqx.filter_jit(model.step)
    for i in range(n * 6, t + 1):
        memory_state, _, _ = step(memory_state, rollout.obs[i, b], rollout.resets[i, b])
    final = rollout.obs[t, b] + np.array([0, 0, 0.25, 0], np.float32)
    final[3] = rollout.actions[t, b] / 2
    value = step(memory_state, final, np.array(False))[2]
    np.testing.assert_allclose(rollout.next_values[t, b], value, atol=2e-5)


def test_noise_is_held_for_some_steps():
    network = network_of(config(noise_steps=4))
    weights = weights_of(network)
    prepared = network.prepare(weights)
    obs = network.inputs(np.zeros((32, 4), np.float32))
    resets = np.ones(32, bool)
    state = network.initial_state(weights, 32)

    def actions(count):
        return np.asarray(
            network.act(prepared, state, obs, resets, jax.random.key(0), np.uint32(count)).actions
        )

    for count in (5, 6, 7):
        np.testing.assert_array_equal(actions(count), actions(4))
    assert (actions(8) != actions(7)).any()
    assert (actions(3) != actions(4)).any()


def test_episodes_are_counted_once_and_whole(network):
    playing = actor(network)
    got = collect(playing, 4)
    playing.close()
    episodes = [r.stats.episodes for r in got]
    ends = sum(int(t.rollout.ends.sum()) for r in got for t in r.trajectories)
    assert sum(e["episodic_return"][1] for e in episodes) == ends
    lengths = sum(e["episodic_length"][0] for e in episodes) / ends
    assert 2 <= lengths <= 6
    assert {"odd", "episodic_return", "episodic_length"} == set(episodes[0])


def test_new_weights_come_between_sequences_and_caches_with_them():
    """GTrXL keeps keys and values that belong to the weights: with stale ones it gives NaN."""
    sizes = {"d_model": 16, "layers": 1, "heads": 2, "head_size": 8, "ffn_size": 16, "memory": 6}
    gtrxl = config(memory="gtrxl", memory_options=sizes)
    network = network_of(gtrxl)
    old, new = weights_of(network, 0), weights_of(network, 1)
    parameters = ParameterStore(0, old)
    playing = Actor(gtrxl, 0, parameters, start_update=0, log=print, network=network)
    rollouts = playing.rollouts()
    first = next(rollouts).trajectories
    parameters.publish(5, new)
    second = next(rollouts).trajectories  # the other group: in the middle of its last sequence
    third = next(rollouts).trajectories  # had begun before the first was handed over
    fourth = next(rollouts).trajectories
    playing.close()
    assert [t.versions.tolist() for t in first] == [[0, 0]] * 2
    assert [t.versions.tolist() for t in second] == [[0, 0]] * 2
    assert [t.versions.tolist() for t in third] == [[0, 5]] * 2
    assert [t.versions.tolist() for t in fourth] == [[5, 5]] * 2
    rollout, initial_states, _ = stack(fourth)
    batch = make_batch(rollout, initial_states, np.zeros_like(rollout.rewards), 6)
    again = eqx.filter_jit(evaluate_actions)
    np.testing.assert_allclose(
        again(network.model(new), batch).log_probs, batch.log_probs, atol=2e-5
    )
    assert not np.allclose(again(network.model(old), batch).log_probs, batch.log_probs, atol=1e-3)


FAULTS = {
    "raise": "failed: .*ZeroDivisionError: a bad day.*Traceback",
    "exit": r"the worker process of environment 0 died \(exit code 7\)",
    "kill": r"the worker process of environment 0 died \(SIGKILL\)",
    "hang": "did not answer within 1 s; it was here:.*_fall_asleep",
    "nan": "gave an observation with NaN or infinity.*Traceback",
    "reward": "gave a reward of nan.*Traceback",
    "shape": r"gave an observation of shape \(3,\); its space says \(4,\).*Traceback",
    "reset": "RuntimeError: no new beginning.*Traceback",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_costs_one_rollout_and_is_reported(how, network, tmp_path):
    """Four workers of one environment each, in processes: one fails, is replaced, joins again."""
    log = []
    playing = actor(
        network,
        log,
        env="gym:host_envs:Faulty-v0",
        num_workers=4,
        envs_per_worker=1,
        processes=True,
        env_options={"how": how, "folder": str(tmp_path)},
        timeout=1.0,
    )
    got = collect(playing, 6)
    pids = [w._envs.processes[0].pid for group in playing.groups for w in group.workers]
    playing.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    text = "\n".join(log)
    assert re.search(r"fault 1 in worker \d of actor 0", text), text
    assert "Faulty-v0" in text
    assert re.search(FAULTS[how].replace("environment 0", r"environment \d"), text, re.DOTALL), text
    assert [r.stats.lost for r in got] in ([1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0])
    assert sum(r.stats.faults for r in got) == 1
    trajectories = [t for r in got for t in r.trajectories]
    assert len(trajectories) == 11
    for trajectory in trajectories:
        check_consistent(trajectory)
        assert trajectory.rollout.obs.shape == (12, 4)


def test_an_environment_killed_from_outside(network):
    log = []
    playing = actor(network, log, num_workers=4, envs_per_worker=1, processes=True)
    rollouts = playing.rollouts()
    next(rollouts)
    os.kill(playing.groups[1].workers[0]._envs.processes[0].pid, signal.SIGKILL)
    got = list(itertools.islice(rollouts, 4))
    playing.close()
    assert sum(r.stats.lost for r in got) == 1
    assert "died (SIGKILL)" in log[0]
    for trajectory in (t for r in got for t in r.trajectories):
        check_consistent(trajectory)


def test_enough_is_enough(network, tmp_path):
    log = []
    playing = actor(
        network,
        log,
        env="gym:host_envs:Faulty-v0",
        restarts=2,
        env_options={"how": "raise", "folder": str(tmp_path), "times": 99},
    )
    with pytest.raises(TooManyFaults, match=r"failed 3 times \(restarts=2 are allowed\).*bad day"):
        collect(playing, 50)
    playing.close()
    assert sum("fault" in line for line in log) == 3


def test_an_environment_that_fails_at_the_same_step_every_time(network, tmp_path):
    log = []
    faulty = {"how": "raise", "folder": str(tmp_path), "times": 99}
    playing = actor(network, log, env="gym:host_envs:Faulty-v0", env_options=faulty, restarts=90)
    same = r"worker \d of actor 0 failed 5 times in the same way, each time 4 steps after .*bad day"
    with pytest.raises(TooManyFaults, match=same):
        collect(playing, 200)
    playing.close()
    assert len(list(tmp_path.iterdir())) < 20


def test_two_groups_step_at_the_same_time(network, tmp_path):
    """While one group's environments are busy, those of the other are given something to do."""
    log = tmp_path / "steps"
    playing = actor(
        network,
        env="gym:host_envs:Slow-v0",
        processes=True,
        envs_per_worker=1,
        env_options={"seconds": 0.02, "log": str(log)},
    )
    for _ in itertools.islice(playing.rollouts(), 4):
        pass
    playing.close()
    steps = [line.split() for line in log.read_text().splitlines()]
    one, other = (
        [(float(a), float(b)) for pid, a, b in steps if pid == which]
        for which in sorted({pid for pid, _, _ in steps})
    )
    together = [(a, b) for a, b in one if any(a < d and c < b for c, d in other)]
    assert len(together) > len(one) / 2


def test_send_and_receive_must_alternate():
    with from_gymnasium("host_envs:Diary-v0", 1, seed=0) as vector:
        vector.reset()
        with pytest.raises(RuntimeError, match=r"call send\(\) before receive\(\)"):
            vector.receive()
        vector.send([0])
        with pytest.raises(RuntimeError, match=r"call receive\(\) before the next step"):
            vector.send([0])
        assert vector.receive().reward.tolist() == [1.0]


def test_another_worker_is_the_same_but_for_its_seed():
    with (
        from_gymnasium("host_envs:Diary-v0", 2, seed=0, asynchronous=True, timeout=9) as one,
        one.recreate(1) as two,
    ):
        assert not np.array_equal(one.reset(), two.reset())
        assert np.array_equal(one.reset(seed=3), two.reset(seed=3))


def test_a_worker_that_hangs_at_its_start_is_a_fault(monkeypatch):
    monkeypatch.setattr("agalite.envs.gymnasium.workers._START_TIMEOUT", 0.3)
    home = os.getpid()

    def make():
        if os.getpid() != home:
            time.sleep(100)
        import gymnasium

        return gymnasium.make("CartPole-v1")

    with pytest.raises(EnvError, match=r"environment 0 of make did not answer within 0\.3 s"):
        from_gymnasium(make, 1, seed=0, asynchronous=True, timeout=0.1)


def test_the_queue_is_bounded_and_first_come_first_served():
    queue = TrajectoryQueue(limit=3)
    items = [object() for _ in range(6)]
    queue.put(items[:2])
    queue.put(items[2:4])  # below the limit: what was finished together comes in together
    entered = threading.Event()

    def late():
        queue.put(items[4:])
        entered.set()

    thread = threading.Thread(target=late)
    thread.start()
    assert queue.take(5, timeout=0.05) is None
    assert not entered.is_set()
    assert queue.take(3, timeout=1) == items[:3]
    assert entered.wait(5)
    assert queue.take(3, timeout=1) == items[3:]
    queue.close()
    with pytest.raises(QueueClosed):
        queue.put(items)
    thread.join()
