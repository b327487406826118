"""An actor: environments of its own, the newest weights, and rollouts that it hands over.

Its workers form two groups. While one group's environments step, the network looks at what the
other's have answered, so that neither waits for the other:

    group 0   step ......  look  step ......  look  step ......
    group 1        look  step ......  look  step ......  look

Weights are exchanged between sequences, never inside one, and what the memory has cached is made
anew for them. A group is sent on before its last rollout is handed over. An environment that fails
costs the rollout that it was in and nothing else: the other environments of its group go on, and it
joins them again with the next rollout.

This is the only actor there is. A thread runs it on one machine (`local.py`), an actor of Ray on
many (`cluster.py`).
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool

from agalite.envs import registry
from agalite.envs.gymnasium.vector import GymnasiumVector
from agalite.training.asynchronous.learner import Network
from agalite.training.asynchronous.queue import Delivery, Handover, Notes, Parameters
from agalite.training.asynchronous.worker import Faults, Group, split
from agalite.training.config import HostConfig


def make_worker(config: HostConfig, seed: int, **more: Any) -> GymnasiumVector:
    """A worker of a run: its environments, each in a process of its own or all in this one."""
    options = {
        "count": config.envs_per_worker,
        "asynchronous": config.processes,
        "timeout": config.timeout if config.processes else None,
        "seed": seed,
    }
    made = registry.make(config.env, **{**config.env_options, **options, **more})
    assert isinstance(made, GymnasiumVector)
    return made


def seed_for(config: HostConfig, begun: int, actor: int, worker: int, life: int = 0) -> int:
    """Of a worker's environments. `begun` is the update at which the run was begun or resumed: no
    episode is played twice."""
    entropy = [config.seed, begun, actor, worker, life]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


class Actor:
    """`for delivery in actor.deliveries(): ...`, then `close`.

    `index` is its number among the run's actors; `begun` see `seed_for`; `tell` takes lines for the
    run's log.
    """

    def __init__(
        self,
        config: HostConfig,
        index: int,
        parameters: Parameters,
        *,
        begun: int,
        tell: Callable[[str], None],
        network: Network | None = None,
        first: GymnasiumVector | None = None,
    ) -> None:
        """`network` and `first`, a worker, are made if not given."""
        self._faults = Faults(config.restarts, tell)
        self._stopped = False

        def seed(worker: int, life: int) -> int:
            return seed_for(config, begun, index, worker, life)

        own = config.num_workers // config.num_actors
        first = first or make_worker(config, seed(0, 0))
        self.groups: list[Group] = []
        self._tracks: list[_Track] = []
        try:
            for numbers in split(own, 1 if config.synchronous else min(2, own)):
                start = numbers[0]
                self.groups.append(
                    Group(
                        first if start == 0 else first.another(seed(start, 0)),
                        numbers,
                        actor=f"actor {index}",
                        seed=seed,
                        faults=self._faults,
                    )
                )
            network = network or Network(config, first.observation_space, first.action_space)
            key = jax.random.key(seed(own, 0))
            self._tracks = [
                _Track(config, network, group, parameters, jax.random.fold_in(key, i))
                for i, group in enumerate(self.groups)
            ]
        except BaseException:
            self.close()
            raise

    def deliveries(self) -> Iterator[Delivery]:
        """One for each rollout of each group. Acting goes on only while somebody asks for more."""
        faults, stalled = 0, 0.0
        began = last = time.perf_counter()
        for track in self._tracks:
            track.begin()
            track.look()
            track.send()
        following = dict(zip(self._tracks, [*self._tracks[1:], self._tracks[0]], strict=True))
        alone = len(self._tracks) == 1
        while True:
            for track in self._tracks:
                if self._stopped:
                    return
                if not alone and track.group.ready():
                    # They have waited, it is not known for how long: at most since one of them was
                    # last seen at work.
                    stalled += time.perf_counter() - last
                track.receive()
                last = time.perf_counter()
                finished = track.set_aside() if track.whole else None
                if not alone:
                    # Environments go on before anything is written down of what they did.
                    track.look()
                    if not following[track].group.ready():
                        last = time.perf_counter()
                    track.send()
                if finished is not None:
                    trajectories, episodes, lost = finished()
                    now = time.perf_counter()
                    yield Delivery(
                        trajectories,
                        episodes,
                        lost,
                        self._faults.count - faults,
                        stalled,
                        now - began,
                    )
                    faults, stalled, began = self._faults.count, 0.0, now
                if alone:  # the learner comes first: the next look is with what it learned
                    track.look()
                    track.send()
                    stalled += time.perf_counter() - last

    def stop(self) -> None:
        """Ends the deliveries soon; from any thread."""
        self._stopped = self._faults.over = True

    def close(self) -> None:
        """Ends the environments, whatever they are doing."""
        self.stop()
        for group in self.groups:
            group.close()


class _Track:
    """A group's place in its rollout, and what is written down of it."""

    def __init__(
        self, config: HostConfig, network: Network, group: Group, parameters: Parameters, key: Any
    ) -> None:
        self.group = group
        self._steps, self._length = config.num_steps, config.sequence_length
        self._network, self._parameters, self._key = network, parameters, key
        self._version, weights = parameters.latest
        self._weights = network.prepare(weights)
        self._memory = network.initial_memory(weights, group.count)
        self._acted = 0
        self._notes = Notes(group.count)

    @property
    def whole(self) -> bool:
        return len(self._notes.answers) == self._steps

    def begin(self) -> None:
        self._obs = _narrow(self.group.reset())
        self._resets = np.ones(self.group.count, bool)

    def look(self) -> None:
        """Decide what to do about the observations, and wait for the decision."""
        notes = self._notes
        if len(notes.answers) % self._length == 0:
            self._exchange_weights()
            notes.starts.append(self._memory)
            notes.versions.append(self._version)
        acted = self._network.act(
            self._weights,
            self._memory,
            self._obs,
            self._resets,
            self._key,
            np.uint32(self._acted % 2**32),
        )
        self._acted += 1
        self._memory = acted.memory
        self._actions = np.asarray(acted.actions)
        notes.looks.append((self._obs, self._resets, acted.sampled, acted.log_probs, acted.values))

    def send(self) -> None:
        """Let the environments go on."""
        self.group.send(self._actions)

    def receive(self) -> None:
        """Wait for the environments and write down what they did."""
        got = self.group.receive()
        ends = got.terminated | got.truncated
        after = np.zeros(self.group.count, np.float32)
        if got.truncated.any():
            final = self._expect(_narrow(got.final), np.zeros(self.group.count, bool))
            after[got.truncated] = final[got.truncated]
        self._notes.answers.append((got.rewards, ends, after))
        self._notes.count(got.charts, ends, got.torn)
        self._obs, self._resets = _narrow(got.obs), ends

    def set_aside(self) -> Callable[[], Handover]:
        """Room for the next rollout. What it gives makes the last one ready to be handed over."""
        notes, seen = self._notes, (self._weights, self._memory, self._obs, self._resets)
        self._notes = Notes(self.group.count)
        # What follows the last step is seen but not yet remembered: the next rollout begins so.
        return lambda: notes.handover(np.asarray(self._network.expect(*seen)))

    def _exchange_weights(self) -> None:
        version, weights = self._parameters.latest
        if version != self._version:
            self._version, self._weights = version, self._network.prepare(weights)
            self._memory = self._network.refresh(self._weights, self._memory, self._resets)

    def _expect(self, obs: np.ndarray, resets: Bool[np.ndarray, " B"]) -> np.ndarray:
        return np.asarray(self._network.expect(self._weights, self._memory, obs, resets))


def _narrow(obs: np.ndarray) -> np.ndarray:
    """As JAX will have it: half the bytes to keep."""
    return obs.astype(np.float32) if obs.dtype == np.float64 else obs
