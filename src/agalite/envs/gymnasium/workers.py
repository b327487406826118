"""Gymnasium environments in processes of their own.

`SubprocVectorEnv` is Gymnasium's `AsyncVectorEnv` with bounded waits: a worker that fails, dies
or does not answer raises an `EnvError`, and no worker outlives it. `guarded` wraps each
environment, in whatever process it runs, with checks of what it returns.
"""

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

_CLOSE_TIMEOUT = 5.0  # seconds that workers have to close before they are stopped
_START_TIMEOUT = 120.0  # seconds that they have at least to import and make what they need
_NICENESS = 5  # workers yield the processor to acting and learning

# Forking this process would copy the locks of JAX's threads but not the threads. A worker that
# uses JAX, or anything else with threads, could then wait indefinitely.
_START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class EnvError(RuntimeError):
    """An environment raised, died, took too long or returned an invalid observation or reward."""


class EnvDescription(NamedTuple):
    """What Gymnasium's vector environments need to know before any environment is made."""

    observation_space: gym.Space
    action_space: gym.Space
    metadata: dict[str, Any]
    render_mode: str | None

    @classmethod
    def of(cls, env: gym.Env) -> "EnvDescription":
        return cls(env.observation_space, env.action_space, dict(env.metadata), env.render_mode)


class SubprocVectorEnv(AsyncVectorEnv):
    """Gymnasium's `AsyncVectorEnv`, whose workers never outlive a failure.

    **Arguments:**

    - `make`: makes one environment; it is sent to the workers.
    - `num_envs`: how many, one process each.
    - `name`: the environment's name, for messages.
    - `description`: of the environment, so that none has to be made here.
    - `timeout`: seconds that an environment may take to answer; None waits indefinitely.
    """

    def __init__(
        self,
        make: Callable[[], gym.Env],
        num_envs: int,
        name: str,
        description: EnvDescription,
        timeout: float | None = None,
    ) -> None:
        self._name, self._timeout = name, timeout
        self._traces = tempfile.mkdtemp(prefix="agalite-workers-")
        # Workers import what the main script does, mostly JAX and Gymnasium. The fork server does
        # it once for all of them; neither starts threads when imported.
        multiprocessing.set_forkserver_preload(["jax", "gymnasium.vector"])
        maker = _only_in_workers(make, os.getpid(), description, self._traces)
        try:
            super().__init__(
                [maker] * num_envs, context=_START_METHOD, autoreset_mode=AutoresetMode.SAME_STEP
            )
        except (EOFError, ConnectionError) as error:
            reason = self.exit_reason()
            self.close(terminate=True)
            raise EnvError(
                f"{name}: {reason} while starting; its own message is above. If that speaks of "
                'bootstrapping, put the script\'s work under `if __name__ == "__main__":`'
            ) from error
        except BaseException:
            self.close(terminate=True)
            raise

    def ready(self) -> bool:
        """Whether every worker has answered, or has died."""
        return len(connection.wait(self.parent_pipes, 0)) == len(self.parent_pipes)

    def _poll_pipe_envs(self, timeout: float | None = None) -> bool:
        """Wait for all workers; raise an `EnvError` with the stack of one that is too late."""
        timeout = self._timeout if timeout is None else timeout
        if timeout is None:
            return True
        end = time.perf_counter() + timeout
        waiting = list(self.parent_pipes)
        while waiting:
            # One call for all pipes: polling them one by one takes longer than many a step.
            answered = connection.wait(waiting, max(0.0, end - time.perf_counter()))
            if not answered:
                late = self.parent_pipes.index(waiting[0])
                stack = self._stack_of(late)
                self.close(terminate=True)
                raise EnvError(
                    f"environment {late} of {self._name} did not answer within {timeout:g} s; "
                    f"it was here:\n\n{stack}"
                )
            waiting = [pipe for pipe in waiting if pipe not in answered]
        return True

    def _check_spaces(self) -> None:
        # The first message that a worker answers, after all its imports: it has longer for it.
        if self._timeout is not None:
            kind = (self.observation_mode, self.single_observation_space, self.single_action_space)
            for pipe in self.parent_pipes:
                pipe.send(("_check_spaces", kind))
            self._poll_pipe_envs(max(self._timeout, _START_TIMEOUT))
            for pipe in self.parent_pipes:
                pipe.recv()
        super()._check_spaces()

    def _stack_of(self, index: int) -> str:
        """The Python stack of a worker that does not answer."""
        process = self.processes[index]
        path = Path(self._traces) / str(process.pid)
        with contextlib.suppress(OSError, TypeError):
            os.kill(process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and not path.stat().st_size:
                time.sleep(0.01)
            time.sleep(0.05)
            return path.read_text() or "(unknown)"
        return "(unknown)"

    def exit_reason(self) -> str:
        """Which worker died and how, after a connection to one broke."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            for index, process in enumerate(self.processes):
                code = process.exitcode
                if code is not None:
                    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                    return f"the worker process of environment {index} died ({how})"
            time.sleep(0.01)
        return "a worker process broke its connection"

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Let idle workers close, then terminate those that are left."""
        processes = getattr(self, "processes", [])
        pipes = [pipe for pipe in getattr(self, "parent_pipes", []) if pipe is not None]
        if not terminate and getattr(self, "_state", None) == AsyncState.DEFAULT:
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send(("close", None))
            deadline = time.monotonic() + (_CLOSE_TIMEOUT if timeout is None else timeout)
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
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
        """Raise the first worker's error. Gymnasium's own waits for it without a limit."""
        if all(successes):
            return
        try:
            index, _, value, trace = self.error_queue.get(timeout=_CLOSE_TIMEOUT)
        except queue.Empty:
            index = list(successes).index(False)
            value, trace = "it left no message", ""
        self.close(terminate=True)
        raise EnvError(f"environment {index} of {self._name} failed: {value}\n\n{trace}")


def _only_in_workers(
    build: Callable[[], gym.Env], main_process: int, description: EnvDescription, traces: str
) -> Callable[[], gym.Env]:
    """`build` in the workers; in the main process, which reads the spaces only, a stand-in.

    Like `guarded`, it is pickled by value, so that workers need not import agalite.
    """
    spaces = (
        description.observation_space,
        description.action_space,
        dict(description.metadata),
        description.render_mode,
    )

    class StandIn(gym.Env):
        observation_space, action_space, metadata, render_mode = spaces

    def make() -> gym.Env:
        if os.getpid() == main_process:
            return StandIn()
        # Ctrl-C reaches every process of a terminal; the main process ends its workers itself.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The process that acts for all environments must not wait for a core behind one of them,
        # nor be preempted by the first it wakes before it has sent the others their actions.
        os.nice(_NICENESS)
        if hasattr(os, "SCHED_BATCH"):  # Linux
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        file = open(os.path.join(traces, str(os.getpid())), "w")  # noqa: SIM115 - stays open
        faulthandler.register(signal.SIGUSR1, file=file)
        return build()

    return make


def guarded(make: Callable[[], gym.Env], name: str) -> Callable[[], gym.Env]:
    """`make` with checks of what the environment returns.

    Everything is defined inside the function, so that it is pickled by value and no worker has
    to import agalite, and with it JAX.
    """

    class Guard(gym.Wrapper):
        """Copies and checks observations, keeps the numbers of infos, makes errors picklable."""

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
            # A copy: an environment may write each observation into the same array, and the
            # final one must outlast the reset that follows it.
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
            # The error's own type may not be picklable.
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
