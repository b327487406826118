"""The acting loop: an actor collects rollouts in its own environments with the newest weights.

The actor's workers form two groups. While the environments of one group step, the network acts for
the other, so that neither waits:

    group 0   step ......  act  step ......  act  step ......
    group 1        act  step ......  act  step ......  act

Weights are exchanged between sequences, never inside one, and memory states that depend on the
weights (caches) are refreshed. An environment that fails loses the trajectory it was in; it joins
its group again with the next rollout.

The same actor runs in a thread (threads.py) and in a Ray actor (ray.py).
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from agalite.envs.gymnasium.vector import GymnasiumVector
from agalite.training.asynchronous.learner import Network
from agalite.training.asynchronous.queue import (
    ActorStats,
    ParameterStore,
    RolloutBuffer,
    RolloutResult,
)
from agalite.training.asynchronous.worker import (
    EnvGroup,
    FaultCounter,
    make_worker,
    split_workers,
    worker_seed,
)
from agalite.training.config import HostConfig


class Actor:
    """`for result in actor.rollouts(): ...`, then `close`.

    **Arguments:**

    - `config`: of the run.
    - `index`: the actor's number among those of the run.
    - `parameters`: where the newest weights are.
    - `start_update`: the update at which this session of training started.
    - `log`: takes lines for the run's log.
    - `network`: made if not given.
    - `first_worker`: made if not given.
    """

    def __init__(
        self,
        config: HostConfig,
        index: int,
        parameters: ParameterStore,
        *,
        start_update: int,
        log: Callable[[str], None],
        network: Network | None = None,
        first_worker: GymnasiumVector | None = None,
    ) -> None:
        self._faults = FaultCounter(config.restarts, log)
        self._stopped = False

        def seed(worker: int, restart: int) -> int:
            return worker_seed(config, start_update, index, worker, restart)

        num_workers = config.num_workers // config.num_actors
        num_groups = 1 if config.synchronous else min(2, num_workers)
        first = first_worker or make_worker(config, seed(0, 0))
        self.groups: list[EnvGroup] = []
        self._collectors: list[_Collector] = []
        try:
            for indices in split_workers(num_workers, num_groups):
                start = indices[0]
                self.groups.append(
                    EnvGroup(
                        first if start == 0 else first.recreate(seed(start, 0)),
                        indices,
                        actor=f"actor {index}",
                        seed=seed,
                        faults=self._faults,
                    )
                )
            network = network or Network(config, first.observation_space, first.action_space)
            key = jax.random.key(seed(num_workers, 0))
            self._collectors = [
                _Collector(config, network, group, parameters, jax.random.fold_in(key, i))
                for i, group in enumerate(self.groups)
            ]
        except BaseException:
            self.close()
            raise

    def rollouts(self) -> Iterator[RolloutResult]:
        """One result for each rollout of each group. Acting pauses between two `next` calls."""
        faults, stalled = 0, 0.0
        began = last_busy = time.perf_counter()
        for collector in self._collectors:
            collector.reset()
            collector.act()
            collector.send()
        collectors = self._collectors
        following = dict(zip(collectors, [*collectors[1:], collectors[0]], strict=True))
        single = len(collectors) == 1
        while True:
            for collector in collectors:
                if self._stopped:
                    return
                if not single and collector.group.ready():
                    # The environments have been waiting since some time after `last_busy`, when a
                    # group was last known to step.
                    stalled += time.perf_counter() - last_busy
                collector.receive()
                last_busy = time.perf_counter()
                finish = collector.start_next_rollout() if collector.complete else None
                if not single:
                    # The environments continue before the finished rollout is processed.
                    collector.act()
                    if not following[collector].group.ready():
                        last_busy = time.perf_counter()
                    collector.send()
                if finish is not None:
                    buffer, last_values = finish()
                    trajectories = buffer.trajectories(last_values)
                    now = time.perf_counter()
                    new_faults = self._faults.count - faults
                    stats = ActorStats(
                        buffer.episodes, buffer.lost, new_faults, stalled, now - began
                    )
                    yield RolloutResult(trajectories, stats)
                    faults, stalled, began = self._faults.count, 0.0, now
                if single:  # act after the learner's update, with its weights
                    collector.act()
                    collector.send()
                    stalled += time.perf_counter() - last_busy

    def stop(self) -> None:
        """End `rollouts` soon. May be called from any thread."""
        self._stopped = self._faults.stopping = True

    def close(self) -> None:
        """Close all environments, also those that are stepping."""
        self.stop()
        for group in self.groups:
            group.close()


class _Collector:
    """Collects the rollouts of one group: `reset`, then `act`, `send` and `receive` in turn."""

    def __init__(
        self,
        config: HostConfig,
        network: Network,
        group: EnvGroup,
        parameters: ParameterStore,
        key: Any,
    ) -> None:
        self.group = group
        self._num_steps, self._seq_len = config.num_steps, config.sequence_length
        self._bootstraps = config.agent.bootstraps
        self._network, self._parameters, self._key = network, parameters, key
        self._version, weights = parameters.latest
        self._prepared = network.prepare(weights)
        self._memory_state = network.initial_state(weights, group.num_envs)
        self._act_count = 0
        self._buffer = RolloutBuffer(group.num_envs)

    @property
    def complete(self) -> bool:
        return len(self._buffer.env_steps) == self._num_steps

    def reset(self) -> None:
        self._obs = self._network.inputs(_to_float32(self.group.reset()))
        self._resets = np.ones(self.group.num_envs, bool)

    def act(self) -> None:
        """Sample actions for the current observations."""
        buffer = self._buffer
        if len(buffer.env_steps) % self._seq_len == 0:
            self._update_weights()
            buffer.initial_states.append(self._memory_state)
            buffer.versions.append(self._version)
        step = self._network.act(
            self._prepared,
            self._memory_state,
            self._obs,
            self._resets,
            self._key,
            np.uint32(self._act_count % 2**32),
        )
        self._act_count += 1
        self._memory_state = step.memory_state
        self._actions, self._env_actions = step.actions, np.asarray(step.env_actions)
        buffer.policy_steps.append(
            (self._obs, self._resets, step.actions, step.log_probs, step.values)
        )

    def send(self) -> None:
        """Start a step of the environments with the sampled actions."""
        self.group.send(self._env_actions)

    def receive(self) -> None:
        """Wait for the environments and record the step."""
        step = self.group.receive()
        ends = step.terminated | step.truncated
        final_values = np.zeros(self.group.num_envs, np.float32)
        if step.truncated.any() and self._bootstraps:
            no_resets = np.zeros(self.group.num_envs, bool)
            final_obs = self._network.inputs(
                _to_float32(step.final_obs), self._actions, step.rewards
            )
            values = np.asarray(
                self._network.value(self._prepared, self._memory_state, final_obs, no_resets)
            )
            final_values[step.truncated] = values[step.truncated]
        self._buffer.env_steps.append((step.rewards, ends, final_values))
        self._buffer.count_episodes(step.metrics, ends, step.restarted)
        self._obs = self._network.inputs(_to_float32(step.obs), self._actions, step.rewards)
        self._resets = ends

    def start_next_rollout(self) -> Callable[[], tuple[RolloutBuffer, np.ndarray]]:
        """Begin an empty buffer.

        **Returns:**

        A function that gives the complete buffer and the values of the observations after its last
        step. It computes those with the present weights and memory state, and does not advance the
        memory: the next rollout begins with the same observations.
        """
        buffer = self._buffer
        inputs = (self._prepared, self._memory_state, self._obs, self._resets)
        self._buffer = RolloutBuffer(self.group.num_envs)
        return lambda: (buffer, np.asarray(self._network.value(*inputs)))

    def _update_weights(self) -> None:
        version, weights = self._parameters.latest
        if version != self._version:
            self._version, self._prepared = version, self._network.prepare(weights)
            self._memory_state = self._network.refresh(
                self._prepared, self._memory_state, self._resets
            )


def _to_float32(obs: np.ndarray) -> np.ndarray:
    """float64 as float32, which JAX would make of it anyway: half the bytes to keep."""
    return obs.astype(np.float32) if obs.dtype == np.float64 else obs
