"""Any Gymnasium environment, many copies of it, stepping together on the host.

Gymnasium's vector environments have three ways to begin again after an end. This one runs them
in SAME_STEP mode: every step is one transition of every environment, and where an episode
ended the observation is already the first of the next one, as in `vector.Vector`. What
Gymnasium leaves to its caller is done here: final observations are gathered into one array,
an end is either a termination or a truncation, and a worker that dies is an error, not a wait.

An environment that raises, dies, takes longer than `timeout` or gives a NaN or a wrong shape is a
`Fault` that says which one and where. The whole vector is closed then; `another` makes a new one.
"""

import contextlib
import difflib
import functools
import importlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from jaxtyping import Bool, Float, Shaped, UInt8

from agalite import validation
from agalite.envs.gymnasium import spaces
from agalite.envs.gymnasium.workers import Facts, Fault, Workers, guarded


class Step(NamedTuple):
    """obs (B, ...), reward (B,), terminated (B,), truncated (B,), info.

    Where an episode ended, `obs` is the first of the next one and `info["final_observation"]`
    (B, ...) the last of the old one; elsewhere the two are the same (and may share memory).
    Never terminated and truncated both: an environment that says both has terminated.

    `info` further holds `episode_return` and `episode_length` (B,): of the episode so far, and
    where it ended, of the whole. Numbers that the environments themselves report are (B,)
    float32 under their own names, NaN where one reported nothing.
    """

    obs: Shaped[np.ndarray, "B ..."]
    reward: Float[np.ndarray, " B"]
    terminated: Bool[np.ndarray, " B"]
    truncated: Bool[np.ndarray, " B"]
    info: dict[str, Any]


def from_gymnasium(
    env: str | Callable[..., gym.Env],
    /,
    count: int,
    *,
    seed: int,
    asynchronous: bool = False,
    timeout: float | None = None,
    **kwargs: Any,
) -> "GymnasiumVector":
    """`count` copies of a Gymnasium environment.

    env: a registered id ("CartPole-v1", or "module:ID-v0" to import the module first), or a
    function that makes one environment. kwargs go to `gymnasium.make` or to the function; with
    render_mode="rgb_array" the result can `render`. With `asynchronous` each copy runs in a
    process of its own, which pays when a step takes longer than the messages about it (0.1 ms);
    a script must then be guarded by `if __name__ == "__main__":`. One that takes longer than
    `timeout` seconds for a step or a reset has failed; None waits for ever.
    """
    if isinstance(env, str):
        name, make = env, functools.partial(gym.make, _find(env), **kwargs)
    elif callable(env):
        name = getattr(env, "__name__", type(env).__name__)
        make = functools.partial(env, **kwargs)
    else:
        raise ValueError(f"env={env!r} must be a Gymnasium id or a function that makes one")
    return GymnasiumVector(
        make, count, name=name, seed=seed, asynchronous=asynchronous, timeout=timeout
    )


class GymnasiumVector:
    """See `from_gymnasium`. `observation_space` and `action_space` are of one environment, as
    this class gives and takes them: see `spaces.observations` and `spaces.actions`."""

    def __init__(
        self,
        make: Callable[[], gym.Env],
        count: int,
        *,
        name: str,
        seed: int,
        asynchronous: bool = False,
        timeout: float | None = None,
        facts: Facts | None = None,
    ) -> None:
        """facts: what is known of the environment; None: one is made to find out."""
        validation.integer("count", count, minimum=1)
        validation.integer("seed", seed, minimum=0)
        validation.boolean("asynchronous", asynchronous)
        if timeout is not None:
            validation.number("timeout", timeout, minimum=0.0, above=True)
        self.name = name
        self.count = int(count)
        self.asynchronous = bool(asynchronous)
        self._timeout = timeout
        self._seed: int | None = int(seed)
        self._began = False
        self._sent: Any = None
        self._returns = np.zeros(self.count)
        self._lengths = np.zeros(self.count, np.int32)

        self._make = make
        build = guarded(make, name)
        first = None
        if facts is None:
            first = _first(build, name)
            facts = Facts.of(first)
        self._facts = facts
        try:
            self.observation_space, self._observe = spaces.observations(
                facts.observation_space, name
            )
            self.action_space, self._act = spaces.actions(facts.action_space, name, self.count)
        except ValueError:
            if first is not None:
                first.close()
            raise
        self.render_mode = facts.render_mode
        self._envs: SyncVectorEnv | Workers
        if self.asynchronous:
            if first is not None:
                first.close()
            self._envs = Workers(build, self.count, name, facts, timeout)
        else:
            makers = [build] * self.count
            if first is not None:
                makers[0] = lambda: first
            self._envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)

    def another(self, seed: int) -> "GymnasiumVector":
        """As many more of the same environments, without making one to look at first."""
        return GymnasiumVector(
            self._make,
            self.count,
            name=self.name,
            seed=seed,
            asynchronous=self.asynchronous,
            timeout=self._timeout,
            facts=self._facts,
        )

    def reset(self, seed: int | None = None) -> Shaped[np.ndarray, "B ..."]:
        """obs (B, ...): a new episode everywhere.

        The first call, and any with a seed, seeds environment i with `seeds(seed, count)[i]`;
        without a seed later calls go on with the environments' own random numbers.
        """
        self._usable()
        if seed is not None:
            validation.integer("seed", seed, minimum=0)
            self._seed = int(seed)
        fresh: list[int | None] | None = None
        if self._seed is not None:
            fresh = list(seeds(self._seed, self.count))
        with self._watched("reset"):
            raw, _ = self._envs.reset(seed=fresh)
            obs = self._observe(raw)
        self._seed, self._began, self._sent = None, True, None
        self._returns[:] = 0.0
        self._lengths[:] = 0
        return obs

    def step(self, actions: Any) -> Step:
        """actions (B, ...) -> Step."""
        self.send(actions)
        return self.receive()

    def send(self, actions: Any) -> None:
        """The first half of `step`: workers begin, and the caller can do something else."""
        self._usable()
        if not self._began:
            raise RuntimeError(f"{self.name}: call reset() before step()")
        if self._sent is not None:
            raise RuntimeError(f"{self.name}: call receive() before the next step")
        self._sent = self._act(actions)
        if isinstance(self._envs, Workers):
            with self._watched("step"):
                self._envs.step_async(self._sent)

    def ready(self) -> bool:
        """Whether `receive` would not have to wait."""
        self._usable()
        return self._envs.ready() if isinstance(self._envs, Workers) else True

    def receive(self) -> Step:
        """The second half of `step`."""
        self._usable()
        if self._sent is None:
            raise RuntimeError(f"{self.name}: call send() before receive()")
        actions, self._sent = self._sent, None
        with self._watched("step"):
            envs = self._envs
            stepped = envs.step_wait() if isinstance(envs, Workers) else envs.step(actions)
            raw, reward, terminated, truncated, infos = stepped
            ended = terminated | truncated
            obs = final = self._observe(raw)
            if ended.any():
                raw = raw.copy()
                for row in np.flatnonzero(ended):
                    raw[row] = infos["final_obs"][row]
                final = self._observe(raw)

        self._returns += reward
        self._lengths += 1
        truncated = truncated & ~terminated
        info = {
            **_numbers(infos, ended),
            "terminated": terminated,
            "truncated": truncated,
            "final_observation": final,
            "episode_return": self._returns.astype(np.float32),
            "episode_length": self._lengths.copy(),
        }
        self._returns[ended] = 0.0
        self._lengths[ended] = 0
        return Step(obs, reward.astype(np.float32), terminated, truncated, info)

    def render(self) -> UInt8[np.ndarray, "height width 3"]:
        """The first environment as an RGB frame. Where an episode has just ended, this is
        already the next one's first."""
        self._usable()
        if self.render_mode != "rgb_array":
            raise ValueError(
                f"{self.name} has render_mode={self.render_mode!r}; "
                'make it with render_mode="rgb_array" to render'
            )
        if not self._began:
            raise RuntimeError(f"{self.name}: call reset() before render()")
        with self._watched("render"):
            envs = self._envs
            frame = envs.call("render")[0] if isinstance(envs, Workers) else envs.envs[0].render()
        return np.asarray(frame, np.uint8)

    def close(self) -> None:
        """Close the environments and end the workers; a second call does nothing."""
        self._envs.close()

    def __enter__(self) -> "GymnasiumVector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _usable(self) -> None:
        if self._envs.closed:
            raise RuntimeError(f"{self.name} is closed")

    @contextlib.contextmanager
    def _watched(self, doing: str) -> Iterator[None]:
        """After any failure, Ctrl-C included, no worker is left running."""
        try:
            yield
        except Fault:
            self.close()
            raise
        except (EOFError, ConnectionError) as error:
            fate = self._envs.fate() if isinstance(self._envs, Workers) else "a connection broke"
            self.close()
            raise Fault(f"{self.name}: {fate} during {doing}") from error
        except Exception as error:
            self.close()
            trace = "".join(traceback.format_exception(error))
            raise Fault(f"{error}\n\n{trace}") from error.__cause__ or error
        except BaseException:
            self.close()
            raise


def seeds(seed: int, count: int) -> tuple[int, ...]:
    """The seeds of `count` environments. Unlike seed, seed + 1, ..., those of neighbouring
    seeds have nothing in common, so that runs compared with each other are independent."""
    return tuple(int(x) for x in np.random.SeedSequence(seed).generate_state(count))


def _first(make: Callable[[], gym.Env], name: str) -> gym.Env:
    try:
        return make()
    except gym.error.DependencyNotInstalled as error:
        raise ModuleNotFoundError(f"{name} needs a package more: {error}") from error
    except TypeError as error:
        raise ValueError(f"{name} cannot be made with these arguments: {error}") from error


def _find(env_id: str) -> EnvSpec:
    """The entry of Gymnasium's registry: workers, whose registry may lack it, are sent it."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"the module of {env_id!r} cannot be imported ({error}); install it, or put the folder "
            f"it is in on PYTHONPATH: PYTHONPATH=. for this one"
        ) from error
    try:
        return gym.spec(name)
    except (gym.error.Error, ImportError, ValueError) as error:
        known = {key.lower(): key for key in gym.registry}
        close = difflib.get_close_matches(name.lower(), known, n=3)
        hint = ", ".join(known[key] for key in close) or "gymnasium.pprint_registry() lists all"
        raise ValueError(
            f"unknown Gymnasium environment {env_id!r}; close to it: {hint} ({error})"
        ) from error


def _numbers(infos: dict[str, Any], ended: Bool[np.ndarray, " B"]) -> dict[str, np.ndarray]:
    """Gymnasium's infos -> name: (B,) float32. Where an episode ended it is the last info of
    that episode that counts, not the first of the next one."""
    last = infos.get("final_info", {})
    names = {key for key in (*infos, *last) if not key.startswith("_")}
    numbers = {}
    for name in sorted(names - {"final_obs", "final_info"}):
        numbers[name] = np.full(len(ended), np.nan, np.float32)
        for source, rows in ((infos, ~ended), (last, ended)):
            if name in source:
                told = rows & source[f"_{name}"]
                numbers[name][told] = source[name][told]
    return numbers
