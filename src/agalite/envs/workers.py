"""Environments in processes of their own, which never outlive a failure or keep one waiting."""

import contextlib
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState

_PATIENCE = 5.0  # seconds that workers have to close before they are stopped

# Forking this process would copy the locks of JAX's threads but not the threads: a worker that
# touches JAX, or anything else with threads, could wait for ever.
_START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class Workers(AsyncVectorEnv):
    """Gymnasium's workers, which here never outlive a failure and never keep one waiting."""

    def __init__(self, make: Callable[[], gym.Env], count: int, name: str) -> None:
        self._name = name
        # Workers import what the script at hand does, mostly JAX and Gymnasium: once for all of
        # them, in the process they are forked from, and neither starts threads when imported.
        multiprocessing.set_forkserver_preload(["jax", "gymnasium.vector"])
        try:
            super().__init__([make] * count, context=_START, autoreset_mode=AutoresetMode.SAME_STEP)
        except (EOFError, ConnectionError) as error:
            fate = self.fate()
            self.close()
            raise RuntimeError(
                f"{name}: {fate} while starting; its own message is above. If that speaks of "
                'bootstrapping, put the script\'s work under `if __name__ == "__main__":`'
            ) from error
        except BaseException:
            self.close()
            raise

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
        raise RuntimeError(f"environment {index} of {self._name} failed: {value}\n\n{trace}")


def guarded(make: Callable[[], gym.Env], name: str, home: int) -> Callable[[], gym.Env]:
    """`make`, with what every environment must do, in whatever process it runs.

    All of it is defined inside the function, so that it is sent to the workers whole and none
    of them needs to import agalite, and with it JAX.
    """

    class Guard(gym.Wrapper):
        """Observations are the caller's to keep, infos are numbers, errors can be sent."""

        def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
            obs, info = attempt(self.env.reset, seed=seed, options=options)
            return np.copy(obs), only_numbers(info)

        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = attempt(self.env.step, action)
            # An environment may write each observation into the same array: the last one must
            # survive the reset that follows it.
            return (
                np.copy(obs),
                float(reward),
                bool(terminated),
                bool(truncated),
                only_numbers(info),
            )

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
        if os.getpid() != home:
            # Ctrl-C goes to every process of a terminal; the parent ends its workers itself.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        env = make()
        if not isinstance(env, gym.Env):
            raise ValueError(f"{name} made a {type(env).__name__}, not a gymnasium.Env")
        return Guard(env)

    return build
