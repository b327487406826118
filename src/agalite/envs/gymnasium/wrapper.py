"""Our worlds as Gymnasium environments, for trainers written against Gymnasium.

    import agalite.envs
    env = gymnasium.make("agalite/TMaze-v0", corridor=10)

One environment at a time, one compiled call a step. A JAX trainer has no use for this: it
takes the world itself, thousands at once (`agalite.envs.vector`).
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
from agalite.envs.base import World

_WORLDS = {
    "agalite/TMaze-v0": "agalite.envs.tmaze:TMaze",
    "agalite/MaskedCartPole-v0": "agalite.envs.cartpole:MaskedCartPole",
    "agalite/NoisyMaskedCartPole-v0": "agalite.envs.cartpole:NoisyMaskedCartPole",
    "agalite/MysteryPathGrid-v0": "agalite.envs.mystery_path.env:MysteryPathGrid",
    "agalite/MysteryPath-v0": "agalite.envs.mystery_path.env:MysteryPath",
}


def register() -> None:
    """Make the worlds known to `gymnasium.make`; again and again does no harm."""
    for name, world in _WORLDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, f"{__name__}:WorldEnv", kwargs={"world": world})
    for size in (9, 11, 13, 15):
        name = f"agalite/MemoryMaze-{size}x{size}-v0"
        if name not in gymnasium.registry:
            maze = "agalite.envs.memory_maze.env:MemoryMaze"
            gymnasium.register(name, maze, kwargs={"size": size})


class WorldEnv(gymnasium.Env[Any, Any]):
    """A `gymnasium.Env` around a world, or around what "module:Class" makes of `options`.

    Observations are NumPy arrays, yours to write into; rewards are floats; info holds Python
    numbers. An episode that ends waits for `reset`. The time limit is the world's and ends an
    episode with truncated; `timeout_terminates=True` says terminated instead, as Memory Gym
    does.

    `reset(seed=...)` fixes this episode and all that follow. `reset(options={...})` takes the
    world's own options, for one episode: `env.reset(options={"corridor": 20})`. They may not
    change the spaces, and need a world that was given by name.

    Workers of `AsyncVectorEnv` must not be forked, since JAX does not survive it: give it
    `context="spawn"`.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(
        self,
        world: World[Any, Any] | str,
        *,
        render_mode: str | None = None,
        timeout_terminates: bool = False,
        **options: Any,
    ) -> None:
        if render_mode is not None:
            validation.one_of("render_mode", render_mode, self.metadata["render_modes"])
        validation.boolean("timeout_terminates", timeout_terminates)
        if isinstance(world, str):
            self._maker: Callable[..., World[Any, Any]] | None = _load(world)
            world = _made(self._maker, "option", options)
        elif options:
            names = ", ".join(sorted(options))
            raise ValueError(f"options {names} belong to the world, which is made already")
        else:
            self._maker = None
        self._options = options
        self._timeout_terminates = timeout_terminates
        self.world = world
        self._kept: Any = None  # the key and the state, packed; None before the first reset
        self._ended = self._closed = False
        self._own: tuple[_Programs, Any] | None = None
        self.render_mode = render_mode
        self.observation_space = _observation_space(world)
        self.action_space = _action_space(world)
        # A dict of its own: Gymnasium's vector environments write into it.
        speed = getattr(world, "frames_a_second", self.metadata["render_fps"])
        self.metadata = {**self.metadata, "render_fps": speed}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        _refuse_fork()
        if not isinstance(options, dict | None):
            raise ValueError(f"options={options!r} must be a dict of the world's options, or None")
        super().reset(seed=seed)
        if options:
            self._programs, self._params = _ready(self._other_world(options))
        else:
            self._own = self._own or _ready(self.world)
            self._programs, self._params = self._own
        key = self.np_random.integers(2**32, size=2, dtype=np.uint32)
        self._kept, obs = self._programs.begin(key, self._params)
        self._ended = self._closed = False
        return np.array(obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._require_begun("step()")
        if self._ended:
            raise ResetNeeded("step() after the end of an episode: call env.reset() to begin again")
        action = _checked(action, self.action_space)
        self._kept, obs, rest = self._programs.step(self._kept, action, self._params)
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
        self._require_begun("render()")
        return np.array(self._programs.picture(self._kept, self._params))

    @property
    def state(self) -> Any:
        """The world's state, as NumPy arrays: to look at, not to change."""
        self._require_begun("state")
        return self._programs.kept.from_host(np.asarray(self._kept))[1]

    def close(self) -> None:
        """Lets go of the episode; `reset` would begin another. Again and again does no harm."""
        self._kept, self._closed = None, True

    def _require_begun(self, what: str) -> None:
        if self._closed:
            raise ClosedEnvironmentError(
                f"{what} after close(): call env.reset() to begin again, or make another"
            )
        if self._kept is None:
            raise ResetNeeded(f"{what} before the first reset(): call env.reset() to begin")

    def _other_world(self, options: dict[str, Any]) -> World[Any, Any]:
        if self._maker is None:
            raise ValueError(
                f"reset(options={options!r}): this world was made before it came here; only one "
                'given by name, as in gymnasium.make("agalite/TMaze-v0"), takes other options'
            )
        world = _made(self._maker, "reset option", {**self._options, **options})
        for mine, other in (
            (self.observation_space, _observation_space(world)),
            (self.action_space, _action_space(world)),
        ):
            if mine != other:
                raise ValueError(f"reset(options={options!r}) would change {mine} to {other}")
        return world


class _Packing:
    """A pytree of arrays as one array of bytes, and back, on the device and on the host.

    What a call costs from Python grows with the number of arrays that go in and come out; at
    this size it is nearly all of the cost.
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
        """Numbers become Python's; arrays are copies."""
        leaves = []
        for start, end, shape, dtype in self._leaves:
            value = packed[start:end].view(dtype)
            leaves.append(value.reshape(shape).copy() if shape else value.item())
        return jax.tree.unflatten(self._structure, leaves)


class _Programs(NamedTuple):
    """What a world compiles to. Observations go alone: pixels would be dear to pack."""

    begin: Callable[..., Any]  # key, params -> kept, obs
    step: Callable[..., Any]  # kept, action, params -> kept, obs, rest
    picture: Callable[..., Any]  # kept, params -> frame
    kept: _Packing  # key, state
    rest: _Packing  # reward, terminated, truncated, info


_KNOWN: dict[Any, _Programs] = {}


def _programs(world: World[Any, Any]) -> _Programs:
    """Worlds of one class share their programs unless they differ in more than numbers.

    gymnax's own `step` is compiled again for every object. Here `params` is an argument, and
    what else a world keeps must be equal, byte for byte, for the program to serve it; if that
    cannot be told, the world has its own.
    """
    params = world.default_params
    rest = {name: value for name, value in vars(world).items() if name != "_params"}
    shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(params))
    try:
        digest = hashlib.sha256(pickle.dumps(rest)).digest()
    except (pickle.PicklingError, AttributeError, TypeError):
        return _compile(world)
    known = (type(world), jax.tree.structure(params), shapes, digest)
    if known not in _KNOWN:
        _KNOWN[known] = _compile(world)
    return _KNOWN[known]


def _compile(world: World[Any, Any]) -> _Programs:
    params = world.default_params
    # Without options of its own: reading them anywhere but in `params`, where they may be
    # another's, is a mistake that must not pass.
    world = copy.copy(world)
    del world._params

    def key_of(data: UInt32[Array, "2"]) -> Array:
        return jax.random.wrap_key_data(data, impl="threefry2x32")

    def begin(data: Any, params: Any) -> Any:
        later, now = jax.random.split(key_of(data))
        obs, state = world.reset_env(now, params)
        return (jax.random.key_data(later), state), obs

    def step(kept: Any, action: Any, params: Any) -> Any:
        data, state = kept
        later, now = jax.random.split(key_of(data))
        obs, state, reward, terminated, info = world.step_env(now, state, action, params)
        rest = (reward, terminated, world.is_truncated(state, params), info)
        return (jax.random.key_data(later), state), obs, rest

    start, _ = jax.eval_shape(begin, jax.ShapeDtypeStruct((2,), jnp.uint32), params)
    action = jax.ShapeDtypeStruct(world.action_space(params).shape, jnp.int32)
    after, _, result = jax.eval_shape(step, start, action, params)
    if not _alike(start, after):
        raise ValueError(f"{world.name} begins with the state {start[1]} and steps to {after[1]}")
    kept, rest = _Packing(start), _Packing(result)

    @jax.jit
    def packed_begin(data: Any, params: Any) -> Any:
        state, obs = begin(data, params)
        return kept.pack(state), obs

    @jax.jit
    def packed_step(packed: Any, action: Any, params: Any) -> Any:
        state, obs, result = step(kept.unpack(packed), action, params)
        return kept.pack(state), obs, rest.pack(result)

    @jax.jit
    def picture(packed: Any, params: Any) -> Any:
        return world.render(kept.unpack(packed)[1], params)

    return _Programs(packed_begin, packed_step, picture, kept, rest)


def _alike(one: Any, other: Any) -> bool:
    def leaves(tree: Any) -> list[Any]:
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

    return leaves(one) == leaves(other)


def _load(place: str) -> Callable[..., World[Any, Any]]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _made(
    maker: Callable[..., World[Any, Any]], what: str, options: dict[str, Any]
) -> World[Any, Any]:
    for name in options:
        validation.one_of(what, name, inspect.signature(maker).parameters)
    return maker(**options)


def _observation_space(world: World[Any, Any]) -> gymnasium.Space[Any]:
    space = world.observation_space(world.default_params)
    if not isinstance(space, spaces.Box):
        raise ValueError(f"{world.name} observes {space!r}; only a Box can be passed on")
    dtype = np.dtype(space.dtype)
    low, high = (
        np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high)
    )
    return gymnasium.spaces.Box(low, high, tuple(space.shape), dtype.type)


def _action_space(world: World[Any, Any]) -> gymnasium.Space[Any]:
    """Whole numbers are int64, whatever the world computes with: what trainers' argmax gives."""
    space = world.action_space(world.default_params)
    if isinstance(space, spaces.Discrete):
        return gymnasium.spaces.Discrete(space.n)
    whole = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer)
    if whole and len(space.shape) == 1 and not np.any(space.low):
        return gymnasium.spaces.MultiDiscrete(np.broadcast_to(space.high, space.shape) + 1)
    raise ValueError(f"{world.name} acts in {space!r}; only whole numbers from 0 can be passed on")


def _checked(action: Any, space: Any) -> Any:
    """`action` as int32, or an error, before anything is computed."""
    value = np.asarray(action)
    whole = value.dtype.kind in "iu" and value.shape == space.shape
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        if not whole or np.any(value < 0) or np.any(value >= space.nvec):
            most = (space.nvec - 1).tolist()
            raise ValueError(f"action={action!r} must be {len(most)} whole numbers, 0 to {most}")
        return value.astype(np.int32)
    if not whole or not 0 <= (number := value.item()) < space.n:
        raise ValueError(f"action={action!r} must be a whole number from 0 to {space.n - 1}")
    return np.int32(number)


def _ready(world: World[Any, Any]) -> tuple[_Programs, Any]:
    """The world's programs and its parameters: on the CPU, where JAX has it, so that all that
    meets them is computed there."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        host = None
    return _programs(world), jax.device_put(world.default_params, host)


# JAX runs from the moment gymnax is imported, which has happened above.
_PROCESS = os.getpid()


def _refuse_fork() -> None:
    if os.getpid() != _PROCESS:
        raise RuntimeError(
            "this process was forked from one in which JAX was running, and JAX would hang "
            'here; let the workers start afresh: AsyncVectorEnv(..., context="spawn"), or '
            'make_vec(..., vectorization_mode="async", vector_kwargs={"context": "spawn"})'
        )
