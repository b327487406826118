"""Environments in processes of their own, which never outlive a failure or keep one waiting."""

import contextlib
import faulthandler
import math
import multiprocessing
import os
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState

_PATIENCE = 5.0  # seconds that workers have to close before they are stopped
_NICE = 5  # how far environments stand back from acting and learning
_START_PATIENCE = 120.0  # seconds that they have at least to import and make what they need

# Forking this process would copy the locks of JAX's threads but not the threads: a worker that
# touches JAX, or anything else with threads, could wait for ever.
_START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class Fault(RuntimeError):
    """An environment failed: it raised, died, took too long or gave what is no observation."""


class Facts(NamedTuple):
    """What must be known of an environment before there are any."""

    observation_space: gym.Space
    action_space: gym.Space
    metadata: dict[str, Any]
    render_mode: str | None

    @classmethod
    def of(cls, env: gym.Env) -> "Facts":
        return cls(env.observation_space, env.action_space, dict(env.metadata), env.render_mode)


class Workers(AsyncVectorEnv):
    """Gymnasium's workers, which here never outlive a failure and never keep one waiting.

    `timeout` is how many seconds an environment may take for anything that it is asked for, None
    for ever.
    """

    def __init__(
        self,
        make: Callable[[], gym.Env],
        count: int,
        name: str,
        facts: Facts,
        timeout: float | None = None,
    ) -> None:
        self._name, self._timeout = name, timeout
        self._traces = tempfile.mkdtemp(prefix="agalite-workers-")
        # Workers import what the script at hand does, mostly JAX and Gymnasium: once for all of
        # them, in the process they are forked from, and neither starts threads when imported.
        multiprocessing.set_forkserver_preload(["jax", "gymnasium.vector"])
        maker = _away(make, os.getpid(), facts, self._traces)
        try:
            super().__init__(
                [maker] * count, context=_START, autoreset_mode=AutoresetMode.SAME_STEP
            )
        except (EOFError, ConnectionError) as error:
            fate = self.fate()
            self.close(terminate=True)
            raise Fault(
                f"{name}: {fate} while starting; its own message is above. If that speaks of "
                'bootstrapping, put the script\'s work under `if __name__ == "__main__":`'
            ) from error
        except BaseException:
            self.close(terminate=True)
            raise

    def ready(self) -> bool:
        """Whether all that was asked for is there, or will never be."""
        return len(connection.wait(self.parent_pipes, 0)) == len(self.parent_pipes)

    def _poll_pipe_envs(self, timeout: float | None = None) -> bool:
        """Wait for all; say who kept us waiting."""
        timeout = self._timeout if timeout is None else timeout
        if timeout is None:
            return True
        end = time.perf_counter() + timeout
        waiting = list(self.parent_pipes)
        while waiting:
            # All at once: asking one after the other takes longer than many a step.
            there = connection.wait(waiting, max(0.0, end - time.perf_counter()))
            if not there:
                late = self.parent_pipes.index(waiting[0])
                where = self._whereabouts(late)
                self.close(terminate=True)
                raise Fault(
                    f"environment {late} of {self._name} did not answer within {timeout:g} s; "
                    f"it was here:\n\n{where}"
                )
            waiting = [pipe for pipe in waiting if pipe not in there]
        return True

    def _check_spaces(self) -> None:
        # The first question that a worker answers: it may have to import a lot before it can.
        if self._timeout is not None:
            kind = (self.observation_mode, self.single_observation_space, self.single_action_space)
            for pipe in self.parent_pipes:
                pipe.send(("_check_spaces", kind))
            self._poll_pipe_envs(max(self._timeout, _START_PATIENCE))
            for pipe in self.parent_pipes:
                pipe.recv()
        super()._check_spaces()

    def _whereabouts(self, index: int) -> str:
        """The Python stack of a worker that does not answer."""
        process = self.processes[index]
        path = Path(self._traces) / str(process.pid)
        with contextlib.suppress(OSError, TypeError):
            os.kill(process.pid, signal.SIGUSR1)
            patience = time.monotonic() + 1.0
            while time.monotonic() < patience and not path.stat().st_size:
                time.sleep(0.01)
            time.sleep(0.05)
            return path.read_text() or "(it did not say)"
        return "(it did not say)"

    def fate(self) -> str:
        """Which worker died and how; to be asked when a connection broke."""
        patience = time.monotonic() + 1.0
        while time.monotonic() < patience:
            for index, process in enumerate(self.processes):
                code = process.exitcode
                if code is not None:
                    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                    return f"the worker process of environment {index} died ({how})"
            time.sleep(0.01)
        return "a worker process broke its connection"

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask the workers to close if they are idle; stop those that do not."""
        processes = getattr(self, "processes", [])
        pipes = [pipe for pipe in getattr(self, "parent_pipes", []) if pipe is not None]
        if not terminate and getattr(self, "_state", None) == AsyncState.DEFAULT:
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send(("close", None))
            patience = time.monotonic() + (_PATIENCE if timeout is None else timeout)
            for process in processes:
                process.join(max(0.0, patience - time.monotonic()))
        for stop in ("terminate", "kill"):
            alive = [process for process in processes if process.is_alive()]
            for process in alive:
                getattr(process, stop)()
            for process in alive:
                process.join(1.0)
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(self._traces, ignore_errors=True)

    def _raise_if_errors(self, successes: list[bool] | tuple[bool, ...]) -> None:
        """Gymnasium waits here without end for messages that a dying worker need not send."""
        if all(successes):
            return
        try:
            index, _, value, trace = self.error_queue.get(timeout=_PATIENCE)
        except queue.Empty:
            index = list(successes).index(False)
            value, trace = "it left no message", ""
        self.close(terminate=True)
        raise Fault(f"environment {index} of {self._name} failed: {value}\n\n{trace}")


def _away(
    build: Callable[[], gym.Env], home: int, facts: Facts, traces: str
) -> Callable[[], gym.Env]:
    """`build` for the workers; in the process that only wants to know the spaces, a stand-in.

    Like `guarded`, sent to the workers whole.
    """
    spaces = facts.observation_space, facts.action_space, dict(facts.metadata), facts.render_mode

    class StandIn(gym.Env):
        observation_space, action_space, metadata, render_mode = spaces

    def make() -> gym.Env:
        if os.getpid() == home:
            return StandIn()
        # Ctrl-C goes to every process of a terminal; the parent ends its workers itself.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Whoever acts for all of them must not queue for a core behind one of them, nor lose its
        # own core to the first that it wakes before the others have their actions.
        os.nice(_NICE)
        if hasattr(os, "SCHED_BATCH"):  # Linux
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        file = open(os.path.join(traces, str(os.getpid())), "w")  # noqa: SIM115 - for ever
        faulthandler.register(signal.SIGUSR1, file=file)
        return build()

    return make


def guarded(make: Callable[[], gym.Env], name: str) -> Callable[[], gym.Env]:
    """`make`, with what every environment must do, in whatever process it runs.

    All of it is defined inside the function, so that it is sent to the workers whole and none
    of them needs to import agalite, and with it JAX.
    """

    class Guard(gym.Wrapper):
        """Observations are the caller's to keep, infos are numbers, errors can be sent."""

        def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
            obs, info = attempt(self.env.reset, seed=seed, options=options)
            return self.checked(obs), only_numbers(info)

        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = attempt(self.env.step, action)
            reward = float(reward)
            if not math.isfinite(reward):
                raise RuntimeError(f"{name} gave a reward of {reward}")
            return (
                self.checked(obs),
                reward,
                bool(terminated),
                bool(truncated),
                only_numbers(info),
            )

        def checked(self, obs: Any) -> np.ndarray:
            # An environment may write each observation into the same array: the last one must
            # survive the reset that follows it.
            obs, expected = np.copy(obs), self.env.observation_space.shape
            if obs.shape != expected:
                raise RuntimeError(
                    f"{name} gave an observation of shape {obs.shape}; its space says {expected}"
                )
            if obs.dtype.kind == "f" and not np.isfinite(obs).all():
                raise RuntimeError(f"{name} gave an observation with NaN or infinity: {obs}")
            return obs

        def render(self) -> Any:
            return attempt(self.env.render)

    def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            # Its own type may be one that cannot be pickled.
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error

    def only_numbers(info: dict[str, Any]) -> dict[str, float]:
        return {
            key: float(value)
            for key, value in info.items()
            if isinstance(value, int | float | np.number | np.bool_) and not key.startswith("_")
        }

    def build() -> gym.Env:
        env = make()
        if not isinstance(env, gym.Env):
            raise ValueError(f"{name} made a {type(env).__name__}, not a gymnasium.Env")
        return Guard(env)

    return build
