"""This library's environments in Gymnasium: a JAX environment as a `gymnasium.Env`.

    import agalite.envs
    env = gymnasium.make("agalite/TMaze-v0", corridor=10)

One environment at a time, one compiled call per step, for trainers written against Gymnasium. A
JAX trainer takes the JAX environment itself (`agalite.envs.vector.VectorEnv`).
"""

import copy
import hashlib
import importlib
import inspect
import math
import os
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnax.environments import spaces
from jaxtyping import Array, UInt8, UInt32

from agalite import validation
from agalite.envs.base import JaxEnvironment


class GymnasiumWrapper(gymnasium.Env[Any, Any]):
    """A JAX environment as a `gymnasium.Env`.

    Observations are NumPy arrays that the caller may write into, rewards are floats, and `info`
    holds Python numbers. There is no autoreset: after the end of an episode `reset` is due.
    `reset(seed=...)` determines this episode and all that follow.

    Workers of `AsyncVectorEnv` must not be forked, since JAX does not survive it: pass
    `context="spawn"`.

    **Arguments:**

    - `env`: a `JaxEnvironment`, or its class as "module:Class", which is made with `options`.
    - `render_mode`: None or "rgb_array".
    - `timeout_terminates`: report the time limit as terminated instead of truncated, as Memory
      Gym does.
    - `options`: of the environment's class, if `env` is a name. `reset(options={...})` changes
      them for one episode, as in `env.reset(options={"corridor": 20})`; the spaces must stay the
      same.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(
        self,
        env: JaxEnvironment[Any, Any] | str,
        *,
        render_mode: str | None = None,
        timeout_terminates: bool = False,
        **options: Any,
    ) -> None:
        if render_mode is not None:
            validation.check_one_of("render_mode", render_mode, self.metadata["render_modes"])
        validation.check_boolean("timeout_terminates", timeout_terminates)
        self._env_class: Callable[..., JaxEnvironment[Any, Any]] | None = None
        if isinstance(env, str):
            self._env_class = _load(env)
            env = _make(self._env_class, "option", options)
        elif options:
            names = ", ".join(sorted(options))
            raise ValueError(f"options {names} belong to the environment, which is made already")
        self.jax_env = env
        self._options = options
        self._timeout_terminates = timeout_terminates
        self._carry: Any = None  # the key and the state, packed; None before the first reset
        self._ended = self._closed = False
        self._default_programs: tuple[_Programs, Any] | None = None
        self.render_mode = render_mode
        self.observation_space = _observation_space(env)
        self.action_space = _action_space(env)
        # A copy: Gymnasium's vector environments write into it.
        fps = getattr(env, "render_fps", self.metadata["render_fps"])
        self.metadata = {**self.metadata, "render_fps": fps}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        _refuse_fork()
        if not isinstance(options, dict | None):
            raise ValueError(
                f"options={options!r} must be a dict of the environment's options, or None"
            )
        super().reset(seed=seed)
        if options:
            self._programs, self._params = _prepare(self._with_options(options))
        else:
            self._default_programs = self._default_programs or _prepare(self.jax_env)
            self._programs, self._params = self._default_programs
        key = self.np_random.integers(2**32, size=2, dtype=np.uint32)
        self._carry, obs = self._programs.reset(key, self._params)
        self._ended = self._closed = False
        return np.array(obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._require_reset("step()")
        if self._ended:
            raise ResetNeeded("step() after the end of an episode: call env.reset() to begin again")
        action = _check_action(action, self.action_space)
        self._carry, obs, rest = self._programs.step(self._carry, action, self._params)
        reward, terminated, truncated, info = self._programs.rest.from_host(np.asarray(rest))
        self._ended = terminated or truncated
        if self._timeout_terminates:
            terminated, truncated = self._ended, False
        return np.array(obs), reward, terminated, truncated, info

    def render(self) -> Any:
        """One RGB frame (height, width, 3) uint8, or None without a `render_mode`."""
        if self.render_mode is None:
            gymnasium.logger.warn('render() without a render_mode; make(..., "rgb_array") has one')
            return None
        self._require_reset("render()")
        return np.array(self._programs.render(self._carry, self._params))

    @property
    def state(self) -> Any:
        """A copy of the environment's state as NumPy arrays."""
        self._require_reset("state")
        return self._programs.carry.from_host(np.asarray(self._carry))[1]

    def close(self) -> None:
        """Drop the episode. `reset` may start another; a second call does nothing."""
        self._carry, self._closed = None, True

    def _require_reset(self, what: str) -> None:
        if self._closed:
            raise ClosedEnvironmentError(
                f"{what} after close(): call env.reset() to begin again, or make another"
            )
        if self._carry is None:
            raise ResetNeeded(f"{what} before the first reset(): call env.reset() to begin")

    def _with_options(self, options: dict[str, Any]) -> JaxEnvironment[Any, Any]:
        """The environment with other options and the same spaces."""
        if self._env_class is None:
            raise ValueError(
                f"reset(options={options!r}): this environment was given as an object; only one "
                'given by name, as in gymnasium.make("agalite/TMaze-v0"), takes other options'
            )
        env = _make(self._env_class, "reset option", {**self._options, **options})
        for mine, other in (
            (self.observation_space, _observation_space(env)),
            (self.action_space, _action_space(env)),
        ):
            if mine != other:
                raise ValueError(f"reset(options={options!r}) would change {mine} to {other}")
        return env


class _Packing:
    """A pytree of arrays as one array of bytes, and back, on the device and on the host.

    The cost of a compiled call from Python grows with the number of arrays that go in and come
    out. For environments of this size that is nearly all of the cost.
    """

    def __init__(self, like: Any) -> None:
        """`like` has the leaves' shapes and dtypes (`jax.eval_shape`)."""
        leaves, self._structure = jax.tree.flatten(like)
        self._leaves: list[tuple[int, int, tuple[int, ...], np.dtype[Any]]] = []
        end = 0
        for leaf in leaves:
            dtype = np.dtype(leaf.dtype)
            start, end = end, end + math.prod(leaf.shape) * dtype.itemsize
            self._leaves.append((start, end, leaf.shape, dtype))

    def pack(self, tree: Any) -> UInt8[Array, " bytes"]:
        def to_bytes(leaf: Array) -> Array:
            if leaf.dtype == bool:
                return leaf.astype(jnp.uint8).ravel()
            return jax.lax.bitcast_convert_type(leaf, jnp.uint8).ravel()

        return jnp.concatenate([to_bytes(leaf) for leaf in jax.tree.leaves(tree)])

    def unpack(self, packed: UInt8[Array, " bytes"]) -> Any:
        leaves = []
        for start, end, shape, dtype in self._leaves:
            width = (dtype.itemsize,) if dtype.itemsize > 1 else ()
            part = packed[start:end].reshape(shape + width)
            leaves.append(
                part.astype(bool)
                if dtype.kind == "b"
                else jax.lax.bitcast_convert_type(part, dtype)
            )
        return jax.tree.unflatten(self._structure, leaves)

    def from_host(self, packed: np.ndarray[Any, Any]) -> Any:
        """The pytree with Python numbers for scalars, and copies of the arrays."""
        leaves = []
        for start, end, shape, dtype in self._leaves:
            value = packed[start:end].view(dtype)
            leaves.append(value.reshape(shape).copy() if shape else value.item())
        return jax.tree.unflatten(self._structure, leaves)


class _Programs(NamedTuple):
    """The compiled functions of an environment. Observations are not packed: images are large."""

    reset: Callable[..., Any]  # key, params -> carry, obs
    step: Callable[..., Any]  # carry, action, params -> carry, obs, rest
    render: Callable[..., Any]  # carry, params -> frame
    carry: _Packing  # key, state
    rest: _Packing  # reward, terminated, truncated, info


_CACHE: dict[Any, _Programs] = {}


def _programs(env: JaxEnvironment[Any, Any]) -> _Programs:
    """The programs of `env`, shared with environments that differ in their parameters only.

    gymnax's own `step` is compiled again for every object. Here `params` is an argument, and all
    other attributes must be equal, compared by their pickles, for the programs to be shared. An
    environment that cannot be pickled has its own.
    """
    params = env.default_params
    rest = {name: value for name, value in vars(env).items() if name != "_params"}
    shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(params))
    try:
        digest = hashlib.sha256(pickle.dumps(rest)).digest()
    except (pickle.PicklingError, AttributeError, TypeError):
        return _compile(env)
    cache_key = (type(env), jax.tree.structure(params), shapes, digest)
    if cache_key not in _CACHE:
        _CACHE[cache_key] = _compile(env)
    return _CACHE[cache_key]


def _compile(env: JaxEnvironment[Any, Any]) -> _Programs:
    params = env.default_params
    # Without its own parameters: to read them anywhere but in the argument `params`, which may
    # be those of another object, is an error.
    env = copy.copy(env)
    del env._params

    def key_of(data: UInt32[Array, "2"]) -> Array:
        return jax.random.wrap_key_data(data, impl="threefry2x32")

    def reset(data: Any, params: Any) -> Any:
        next_key, reset_key = jax.random.split(key_of(data))
        obs, state = env.reset_env(reset_key, params)
        return (jax.random.key_data(next_key), state), obs

    def step(carry: Any, action: Any, params: Any) -> Any:
        data, state = carry
        next_key, step_key = jax.random.split(key_of(data))
        obs, state, reward, terminated, info = env.step_env(step_key, state, action, params)
        rest = (reward, terminated, env.is_truncated(state, params), info)
        return (jax.random.key_data(next_key), state), obs, rest

    start, _ = jax.eval_shape(reset, jax.ShapeDtypeStruct((2,), jnp.uint32), params)
    space = env.action_space(params)
    floats = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)
    action = jax.ShapeDtypeStruct(space.shape, space.dtype if floats else jnp.int32)
    after, _, result = jax.eval_shape(step, start, action, params)
    if not _same_arrays(start, after):
        raise ValueError(f"{env.name} begins with the state {start[1]} and steps to {after[1]}")
    carry_packing, rest_packing = _Packing(start), _Packing(result)

    @jax.jit
    def packed_reset(data: Any, params: Any) -> Any:
        carry, obs = reset(data, params)
        return carry_packing.pack(carry), obs

    @jax.jit
    def packed_step(packed: Any, action: Any, params: Any) -> Any:
        carry, obs, rest = step(carry_packing.unpack(packed), action, params)
        return carry_packing.pack(carry), obs, rest_packing.pack(rest)

    @jax.jit
    def render(packed: Any, params: Any) -> Any:
        return env.render(carry_packing.unpack(packed)[1], params)

    return _Programs(packed_reset, packed_step, render, carry_packing, rest_packing)


def _same_arrays(one: Any, other: Any) -> bool:
    def leaves(tree: Any) -> list[Any]:
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

    return leaves(one) == leaves(other)


def _load(entry_point: str) -> Callable[..., JaxEnvironment[Any, Any]]:
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name)


def _make(
    env_class: Callable[..., JaxEnvironment[Any, Any]], what: str, options: dict[str, Any]
) -> JaxEnvironment[Any, Any]:
    for name in options:
        validation.check_one_of(what, name, inspect.signature(env_class).parameters)
    return env_class(**options)


def _observation_space(env: JaxEnvironment[Any, Any]) -> gymnasium.Space[Any]:
    space = env.observation_space(env.default_params)
    if not isinstance(space, spaces.Box):
        raise ValueError(f"{env.name} observes {space!r}; only a Box can be passed on")
    dtype = np.dtype(space.dtype)
    low, high = (
        np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high)
    )
    return gymnasium.spaces.Box(low, high, tuple(space.shape), dtype.type)


def _action_space(env: JaxEnvironment[Any, Any]) -> gymnasium.Space[Any]:
    """Integers are int64, whatever the environment computes with: what trainers' argmax gives."""
    space = env.action_space(env.default_params)
    if isinstance(space, spaces.Discrete):
        return gymnasium.spaces.Discrete(space.n)
    integers = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer)
    if integers and len(space.shape) == 1 and not np.any(space.low):
        return gymnasium.spaces.MultiDiscrete(np.broadcast_to(space.high, space.shape) + 1)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        dtype = np.dtype(space.dtype)
        low, high = (
            np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high)
        )
        return gymnasium.spaces.Box(low, high, tuple(space.shape), dtype.type)
    raise ValueError(
        f"{env.name} acts in {space!r}; only whole numbers from 0 and a Box of floats can be "
        "passed on"
    )


def _check_action(action: Any, space: Any) -> Any:
    """`action` as int32, or as floats of the space. An invalid one raises before anything is
    computed."""
    value = np.asarray(action)
    if isinstance(space, gymnasium.spaces.Box):
        fits = value.dtype.kind in "fiu" and value.shape == space.shape
        # False for NaN. Trainers clip in their own precision, so compare in the space's.
        value = value.astype(space.dtype) if fits else value
        if not fits or not np.all((value >= space.low) & (value <= space.high)):
            raise ValueError(
                f"action={action!r} must have shape {space.shape}, from {space.low.tolist()} to "
                f"{space.high.tolist()}"
            )
        return value
    fits = value.dtype.kind in "iu" and value.shape == space.shape
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        if not fits or np.any(value < 0) or np.any(value >= space.nvec):
            most = (space.nvec - 1).tolist()
            raise ValueError(f"action={action!r} must be {len(most)} whole numbers, 0 to {most}")
        return value.astype(np.int32)
    if not fits or not 0 <= (number := value.item()) < space.n:
        raise ValueError(f"action={action!r} must be a whole number from 0 to {space.n - 1}")
    return np.int32(number)


def _prepare(env: JaxEnvironment[Any, Any]) -> tuple[_Programs, Any]:
    """The programs and the parameters of `env`.

    The parameters are on the CPU, where JAX has one, so that everything is computed there.
    """
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        host = None
    return _programs(env), jax.device_put(env.default_params, host)


# gymnax, imported above, starts JAX: from here on this process must not be forked.
_PROCESS = os.getpid()


def _refuse_fork() -> None:
    if os.getpid() != _PROCESS:
        raise RuntimeError(
            "this process was forked from one in which JAX was running, and JAX would hang "
            'here; let the workers start afresh: AsyncVectorEnv(..., context="spawn"), or '
            'make_vec(..., vectorization_mode="async", vector_kwargs={"context": "spawn"})'
        )
