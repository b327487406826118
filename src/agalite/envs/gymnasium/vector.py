"""Gymnasium's here: any Gymnasium environment, many copies of it, stepped together on the host.

The copies run in Gymnasium's SAME_STEP autoreset mode: every step is one transition of every
environment, and where an episode ended the observation is the first of the next one, as in
`agalite.envs.vector.VectorEnv`. On top of that, final observations are gathered into one array,
an end is either a termination or a truncation, and a worker that dies raises instead of being
waited for.

An environment that raises, dies, takes longer than `timeout` or gives a NaN or a wrong shape
raises an `EnvError` that names it and shows where it was. All copies are closed then;
`recreate` makes new ones.
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
from agalite.envs.gymnasium.workers import EnvDescription, EnvError, SubprocVectorEnv, guarded


class Step(NamedTuple):
    """What `GymnasiumVector.step` returns, for B environments.

    Where an episode ended, `obs` is the first observation of the next one and
    `info["final_observation"]` (B, ...) the last of the one that ended; elsewhere the two are the
    same and may share memory. `terminated` and `truncated` are never both true: an environment
    that reports both has terminated.

    `info` also holds `episode_return` and `episode_length` (B,), of the episode so far and, where
    it ended, of all of it. Numbers in the environments' own infos are (B,) float32 under their
    names, NaN where an environment reported nothing.
    """

    obs: Shaped[np.ndarray, "B ..."]
    reward: Float[np.ndarray, " B"]
    terminated: Bool[np.ndarray, " B"]
    truncated: Bool[np.ndarray, " B"]
    info: dict[str, Any]


def from_gymnasium(
    env: str | Callable[..., gym.Env],
    /,
    num_envs: int,
    *,
    seed: int,
    asynchronous: bool = False,
    timeout: float | None = None,
    **kwargs: Any,
) -> "GymnasiumVector":
    """Make copies of a Gymnasium environment.

    **Arguments:**

    - `env`: a registered id ("CartPole-v1", or "package:ID-v0" to import the package first), or a
      function that makes one environment.
    - `num_envs`: how many copies, B.
    - `seed`: environment i is seeded with `seeds(seed, num_envs)[i]` at the first reset.
    - `asynchronous`: run each copy in a process of its own. It pays when a step takes longer than
      the messages about it (0.1 ms). A script must then be guarded by
      `if __name__ == "__main__":`.
    - `timeout`: seconds that a step or a reset may take in a process of its own before it is an
      `EnvError`; None waits indefinitely.
    - `kwargs`: for `gymnasium.make` or the function. `render_mode="rgb_array"` makes the result
      able to `render`.

    **Returns:**

    A `GymnasiumVector`.
    """
    if isinstance(env, str):
        name, make = env, functools.partial(gym.make, _find(env), **kwargs)
    elif callable(env):
        name = getattr(env, "__name__", type(env).__name__)
        make = functools.partial(env, **kwargs)
    else:
        raise ValueError(f"env={env!r} must be a Gymnasium id or a function that makes one")
    return GymnasiumVector(
        make, num_envs, name=name, seed=seed, asynchronous=asynchronous, timeout=timeout
    )


class GymnasiumVector:
    """Copies of a Gymnasium environment, stepped together with autoreset.

    Made by `from_gymnasium` or `make("gym:<id>")`; a context manager that closes the environments.
    `observation_space` and `action_space` are those of one environment as this class gives
    observations and takes actions (`spaces.observations`, `spaces.actions`).

    **Arguments:**

    - `make`: makes one environment.
    - `name`: the environment's name, for messages.
    - `num_envs`, `seed`, `asynchronous`, `timeout`: as for `from_gymnasium`.
    - `description`: the environment's spaces and metadata. If None, an environment is made to
      read them.
    """

    def __init__(
        self,
        make: Callable[[], gym.Env],
        num_envs: int,
        *,
        name: str,
        seed: int,
        asynchronous: bool = False,
        timeout: float | None = None,
        description: EnvDescription | None = None,
    ) -> None:
        validation.check_integer("num_envs", num_envs, minimum=1)
        validation.check_integer("seed", seed, minimum=0, maximum=validation.LARGEST_COUNT)
        validation.check_boolean("asynchronous", asynchronous)
        if timeout is not None:
            validation.check_number("timeout", timeout, minimum=0.0, above=True)
        self.name = name
        self.num_envs = int(num_envs)
        self.asynchronous = bool(asynchronous)
        self._timeout = timeout
        self._seed: int | None = int(seed)
        self._was_reset = False
        self._pending_actions: Any = None
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int32)

        self._make = make
        build = guarded(make, name)
        first = None
        if description is None:
            first = _make_first(build, name)
            description = EnvDescription.of(first)
        self._description = description
        try:
            self.observation_space, self._encode_obs = spaces.observations(
                description.observation_space, name
            )
            self.action_space, self._decode_actions = spaces.actions(
                description.action_space, name, self.num_envs
            )
        except ValueError:
            if first is not None:
                first.close()
            raise
        self.render_mode = description.render_mode
        self._envs: SyncVectorEnv | SubprocVectorEnv
        if self.asynchronous:
            if first is not None:
                first.close()
            self._envs = SubprocVectorEnv(build, self.num_envs, name, description, timeout)
        else:
            makers = [build] * self.num_envs
            if first is not None:
                makers[0] = lambda: first
            self._envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)

    def recreate(self, seed: int) -> "GymnasiumVector":
        """As many new copies of the environment with another seed."""
        return GymnasiumVector(
            self._make,
            self.num_envs,
            name=self.name,
            seed=seed,
            asynchronous=self.asynchronous,
            timeout=self._timeout,
            description=self._description,
        )

    def reset(self, seed: int | None = None) -> Shaped[np.ndarray, "B ..."]:
        """Start an episode in every environment.

        **Arguments:**

        - `seed`: seeds environment i with `seeds(seed, num_envs)[i]`. If None, the first call
          uses the seed given at construction, and later calls go on with the environments' own
          random numbers.

        **Returns:**

        `obs` (B, ...).
        """
        self._check_open()
        if seed is not None:
            validation.check_integer("seed", seed, minimum=0, maximum=validation.LARGEST_COUNT)
            self._seed = int(seed)
        fresh: list[int | None] | None = None
        if self._seed is not None:
            fresh = list(seeds(self._seed, self.num_envs))
        with self._closing_on_error("reset"):
            raw, _ = self._envs.reset(seed=fresh)
            obs = self._encode_obs(raw)
        self._seed, self._was_reset, self._pending_actions = None, True, None
        self._returns[:] = 0.0
        self._lengths[:] = 0
        return obs

    def step(self, actions: Any) -> Step:
        """Step every environment, and reset those whose episode ended.

        **Arguments:**

        - `actions`: (B, ...), one action of `action_space` per environment.

        **Returns:**

        A `Step`.
        """
        self.send(actions)
        return self.receive()

    def send(self, actions: Any) -> None:
        """The first half of `step`: start the workers and return at once."""
        self._check_open()
        if not self._was_reset:
            raise RuntimeError(f"{self.name}: call reset() before step()")
        if self._pending_actions is not None:
            raise RuntimeError(f"{self.name}: call receive() before the next step")
        self._pending_actions = self._decode_actions(actions)
        if isinstance(self._envs, SubprocVectorEnv):
            with self._closing_on_error("step"):
                self._envs.step_async(self._pending_actions)

    def ready(self) -> bool:
        """Whether `receive` would return at once."""
        self._check_open()
        return self._envs.ready() if isinstance(self._envs, SubprocVectorEnv) else True

    def receive(self) -> Step:
        """The second half of `step`: wait for the workers and collect their results."""
        self._check_open()
        if self._pending_actions is None:
            raise RuntimeError(f"{self.name}: call send() before receive()")
        actions, self._pending_actions = self._pending_actions, None
        with self._closing_on_error("step"):
            envs = self._envs
            stepped = envs.step_wait() if isinstance(envs, SubprocVectorEnv) else envs.step(actions)
            raw, reward, terminated, truncated, infos = stepped
            ended = terminated | truncated
            obs = final = self._encode_obs(raw)
            if ended.any():
                raw = raw.copy()
                for row in np.flatnonzero(ended):
                    raw[row] = infos["final_obs"][row]
                final = self._encode_obs(raw)

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
        """An RGB frame of the first environment; at the end of an episode, of the next one."""
        self._check_open()
        if self.render_mode != "rgb_array":
            raise ValueError(
                f"{self.name} has render_mode={self.render_mode!r}; "
                'make it with render_mode="rgb_array" to render'
            )
        if not self._was_reset:
            raise RuntimeError(f"{self.name}: call reset() before render()")
        with self._closing_on_error("render"):
            envs = self._envs
            frame = (
                envs.call("render")[0]
                if isinstance(envs, SubprocVectorEnv)
                else envs.envs[0].render()
            )
        return np.asarray(frame, np.uint8)

    def close(self) -> None:
        """Close the environments and end the workers; a second call does nothing."""
        self._envs.close()

    def __enter__(self) -> "GymnasiumVector":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._envs.closed:
            raise RuntimeError(f"{self.name} is closed")

    @contextlib.contextmanager
    def _closing_on_error(self, doing: str) -> Iterator[None]:
        """Close the environments on any failure, so that no worker is left running."""
        try:
            yield
        except EnvError:
            self.close()
            raise
        except (EOFError, ConnectionError) as error:
            reason = (
                self._envs.exit_reason()
                if isinstance(self._envs, SubprocVectorEnv)
                else "a connection broke"
            )
            self.close()
            raise EnvError(f"{self.name}: {reason} during {doing}") from error
        except Exception as error:
            self.close()
            trace = "".join(traceback.format_exception(error))
            raise EnvError(f"{error}\n\n{trace}") from error.__cause__ or error
        except BaseException:
            self.close()
            raise


def seeds(seed: int, num_envs: int) -> tuple[int, ...]:
    """The seeds of the environments.

    Unlike seed, seed + 1, ..., those of neighbouring seeds do not overlap, so that runs which are
    compared with each other are independent.
    """
    return tuple(int(x) for x in np.random.SeedSequence(seed).generate_state(num_envs))


def _make_first(make: Callable[[], gym.Env], name: str) -> gym.Env:
    try:
        return make()
    except gym.error.DependencyNotInstalled as error:
        raise ModuleNotFoundError(f"{name} needs another package: {error}") from error
    except TypeError as error:
        raise ValueError(f"{name} cannot be made with these arguments: {error}") from error


def _find(env_id: str) -> EnvSpec:
    """The row of Gymnasium's registry. It is sent to workers, whose own registry may lack it."""
    package, _, name = env_id.rpartition(":")
    if package:
        _import_package(package, env_id)
    try:
        return gym.spec(name)
    except (gym.error.Error, ImportError, ValueError) as error:
        known = {key.lower(): key for key in gym.registry}
        close = [known[key] for key in difflib.get_close_matches(name.lower(), known, n=3)]
        hint = "gymnasium.pprint_registry() lists all that are known"
        if close:
            hint = f"close to it: {', '.join(close)}"
        if package:
            where = f"{package} was imported and does not register it"
        else:
            where = (
                f"if a package registers it, name the package: gym:PACKAGE:{name} imports it "
                "first, and so does the option --import PACKAGE"
            )
        raise ValueError(
            f"unknown Gymnasium environment {env_id!r}; {hint}; {where} ({error})"
        ) from error


def _import_package(package: str, env_id: str) -> None:
    try:
        importlib.import_module(package)
    except Exception as error:  # an import runs the package's own code, which may raise anything
        what = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        fix = "install it, or put the folder it is in on PYTHONPATH: PYTHONPATH=. for this one"
        lacking = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if lacking and not f"{package}.".startswith(f"{lacking}."):
            fix = f"it needs the module {lacking!r}: install that"
        raise ValueError(
            f"the package {package!r} of {env_id!r} cannot be imported ({what}); {fix}"
        ) from error


def _numbers(infos: dict[str, Any], ended: Bool[np.ndarray, " B"]) -> dict[str, np.ndarray]:
    """The numbers in Gymnasium's infos, each (B,) float32, NaN where not reported.

    Where an episode ended, they are of its last step and not of the reset that follows it.
    """
    last = infos.get("final_info", {})
    names = {key for key in (*infos, *last) if not key.startswith("_")}
    numbers = {}
    for name in sorted(names - {"final_obs", "final_info"}):
        numbers[name] = np.full(len(ended), np.nan, np.float32)
        for source, rows in ((infos, ~ended), (last, ended)):
            if name in source:
                reported = rows & source[f"_{name}"]
                numbers[name][reported] = source[name][reported]
    return numbers
