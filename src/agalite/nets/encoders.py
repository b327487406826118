"""From an observation to the features a memory model reads: one observation at a time, or T.

The memory models begin with a dense layer and ReLU of their own (their embedding).
"""

import abc
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from agalite import errors
from agalite.memory.layers import Dense
from agalite.memory.lean import relu
from agalite.nets.convolution import Convolution, max_pool

WIDE = 1000  # numbers in a vector beyond which "auto" puts a dense layer of its own before memory
_SMALLEST_IMAGE = 36  # what the Atari convolutions can make something of


class Encoder(eqx.Module):
    """`encoder(obs) -> (N,)`; `over_time` does T at once: (T, ...) -> (T, N)."""

    shape: eqx.AbstractVar[tuple[int, ...]]
    """Of an observation."""
    output_size: eqx.AbstractVar[int]

    def __call__(self, obs: Shaped[Array, "..."]) -> Float[Array, " N"]:
        return self.over_time(jnp.asarray(obs)[None])[0]

    def over_time(self, obs: Shaped[Array, "T ..."]) -> Float[Array, "T N"]:
        obs = jnp.asarray(obs)
        errors.shape("obs", obs, ("T", *self.shape))
        return self._encode(obs)

    @abc.abstractmethod
    def _encode(self, obs: Shaped[Array, "T ..."]) -> Float[Array, "T N"]: ...


class VectorEncoder(Encoder):
    """The numbers as they are, (...) -> (N,) float32; for a Discrete space of n, one-hot (n,)."""

    shape: tuple[int, ...] = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    categories: bool = eqx.field(static=True)

    def __init__(self, shape: tuple[int, ...], categories: int | None = None) -> None:
        self.shape, self.categories = shape, categories is not None
        self.output_size = math.prod(shape) if categories is None else categories

    def _encode(self, obs: Shaped[Array, "T ..."]) -> Float[Array, "T N"]:
        if self.categories:
            return jax.nn.one_hot(obs, self.output_size)
        return _flat(obs).astype(jnp.float32)


class SymbolicEncoder(Encoder):
    """A dense layer and ReLU: (...) -> (width,), as in the published code for Craftax."""

    dense: Dense
    shape: tuple[int, ...] = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def __init__(self, shape: tuple[int, ...], *, width: int = 128, key: PRNGKeyArray) -> None:
        errors.integer("width", width, minimum=1)
        self.dense = Dense(math.prod(shape), [width], key=key)
        self.shape, self.output_size = shape, width

    def _encode(self, obs: Shaped[Array, "T ..."]) -> Float[Array, "T N"]:
        return relu(self.dense(_flat(obs).astype(self.dense.weight.dtype)))


class ImageEncoder(Encoder):
    """What the two for images share: pictures one by one, then perhaps a dense layer and ReLU."""

    dense: eqx.AbstractVar[Dense | None]

    @abc.abstractmethod
    def _picture(self, image: Shaped[Array, "X Y C"]) -> Float[Array, " M"]: ...

    def _encode(self, obs: Shaped[Array, "T ..."]) -> Float[Array, "T N"]:
        # Step by step, all environments of a step together: what a convolution needs meanwhile then
        # stays in the cache, a sixth of the memory and two thirds of the time of all at once.
        once = obs.shape[0] == 1
        features = self._picture(obs[0])[None] if once else jax.lax.map(self._picture, obs)
        return features if self.dense is None else relu(self.dense(features))


class AtariConv(ImageEncoder):
    """Three convolutions, (X, Y, C) -> (N,): 3136 numbers for 84 x 84 pixels, 1024 for 64 x 64.

    These are the memory's input, as in the published code for Mystery Path; with `width` there is
    another dense layer and ReLU in between (512 in Mnih et al., 2015).
    """

    convolutions: tuple[Convolution, ...]
    dense: Dense | None
    shape: tuple[int, ...] = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def __init__(
        self, shape: tuple[int, ...], *, scale: float = 1 / 255, width: int | None = None,
        key: PRNGKeyArray,
    ) -> None:  # fmt: skip
        _check_image(shape, _SMALLEST_IMAGE)
        a, b, c, d = jax.random.split(key, 4)
        self.shape = shape
        self.convolutions = (
            Convolution(shape[-1], 32, 8, 4, scale=scale, key=a),
            Convolution(32, 64, 4, 2, key=b),
            Convolution(64, 64, 3, 1, key=c),
        )
        self.dense, self.output_size = _last_layer(self._picture, shape, width, key=d)

    def _picture(self, image: Shaped[Array, "X Y C"]) -> Float[Array, " M"]:
        for convolution in self.convolutions:
            image = relu(convolution(image))
        return image.reshape(-1)


class ResidualBlock(eqx.Module):
    first: Convolution
    second: Convolution

    def __init__(self, channels: int, *, key: PRNGKeyArray) -> None:
        a, b = jax.random.split(key)
        self.first = Convolution(channels, channels, 3, padding="SAME", key=a)
        self.second = Convolution(channels, channels, 3, padding="SAME", key=b)

    def __call__(self, image: Float[Array, "X Y C"]) -> Float[Array, "X Y C"]:
        return image + self.second(relu(self.first(relu(image))))


class Stage(eqx.Module):
    """(X, Y, C) -> (X / 2, Y / 2, channels)."""

    convolution: Convolution
    blocks: tuple[ResidualBlock, ...]

    def __init__(
        self, inputs: int, channels: int, *, scale: float = 1.0, key: PRNGKeyArray
    ) -> None:
        a, *rest = jax.random.split(key, 3)
        self.convolution = Convolution(inputs, channels, 3, padding="SAME", scale=scale, key=a)
        self.blocks = tuple(ResidualBlock(channels, key=k) for k in rest)

    def __call__(self, image: Shaped[Array, "X Y C"]) -> Float[Array, "x y c"]:
        image = max_pool(self.convolution(image))
        for block in self.blocks:
            image = block(image)
        return image


class ImpalaResNet(ImageEncoder):
    """IMPALA's residual network (Espeholt et al., 2018), (X, Y, C) -> (width,).

    Stages of 16, 32 and 32 channels, two residual blocks each. The width is Sample Factory's, with
    which the paper's Memory Maze agents were trained; IMPALA's own is 256.
    """

    stages: tuple[Stage, ...]
    dense: Dense | None
    shape: tuple[int, ...] = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def __init__(
        self, shape: tuple[int, ...], *, scale: float = 1 / 255, width: int = 512, key: PRNGKeyArray
    ) -> None:
        _check_image(shape, 8)
        a, b, c, d = jax.random.split(key, 4)
        self.shape = shape
        self.stages = (
            Stage(shape[-1], 16, scale=scale, key=a),
            Stage(16, 32, key=b),
            Stage(32, 32, key=c),
        )
        self.dense, self.output_size = _last_layer(self._picture, shape, width, key=d)

    def _picture(self, image: Shaped[Array, "X Y C"]) -> Float[Array, " M"]:
        for stage in self.stages:
            # Made again for the gradient: kept, they would be 2 MB for an image of 64 x 64.
            image = jax.checkpoint(lambda s, x: s(x))(stage, image)
        return relu(image).reshape(-1)


ENCODERS = ("auto", "atari", "impala", "symbolic", "vector")


def make_encoder(name: str, observation_space: Any, *, key: PRNGKeyArray) -> Encoder:
    """An encoder by name for a space of gymnax or Gymnasium.

    "auto" takes "atari" for images (x, y, channel), "symbolic" for more than 1000 numbers and
    "vector" otherwise.
    """
    errors.one_of("encoder", name, ENCODERS)
    shape = getattr(observation_space, "shape", None)
    if shape is None or getattr(observation_space, "dtype", None) is None:
        raise ValueError(
            f"observation_space={observation_space!r} is not supported; supported are Box and "
            "Discrete"
        )
    shape = tuple(int(n) for n in shape)
    if name == "auto":
        name = _choose(shape)
    if hasattr(observation_space, "n") and shape == ():
        if name != "vector":
            raise ValueError(f"encoder={name!r} cannot read {observation_space!r}; use 'vector'")
        return VectorEncoder(shape, int(observation_space.n))
    if name == "vector":
        return VectorEncoder(shape)
    if name == "symbolic":
        return SymbolicEncoder(shape, key=key)
    image = AtariConv if name == "atari" else ImpalaResNet
    return image(shape, scale=_pixel_scale(observation_space), key=key)


def _choose(shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and min(shape[:2]) >= _SMALLEST_IMAGE:
        return "atari"
    if len(shape) == 3 and min(shape[1:]) >= _SMALLEST_IMAGE:
        raise ValueError(
            f"observation_space has shape {shape}, which looks like an image with the channel "
            "first; expected (x, y, channel): transpose it, or choose encoder='vector'"
        )
    return "symbolic" if math.prod(shape) > WIDE else "vector"


def _pixel_scale(space: Any) -> float:
    """Pixels up to 255 become numbers up to 1; those that are, stay."""
    high = np.max(np.asarray(getattr(space, "high", 255), np.float64))
    return 1 / 255 if np.isfinite(high) and high > 1 else 1.0


def _check_image(shape: tuple[int, ...], smallest: int) -> None:
    if len(shape) != 3 or min(shape[:2]) < smallest:
        raise ValueError(
            f"observation_space has shape {shape}; this encoder expects (x, y, channel) with "
            f"x and y >= {smallest}"
        )


def _last_layer(
    picture: Any, shape: tuple[int, ...], width: int | None, *, key: PRNGKeyArray
) -> tuple[Dense | None, int]:
    """The dense layer after the convolutions, if there is to be one, and its width or theirs."""
    image = jax.ShapeDtypeStruct(shape, jnp.float32)
    found = jax.eval_shape(lambda x: picture(x), image).shape[0]
    if width is None:
        return None, found
    errors.integer("width", width, minimum=1)
    return Dense(found, [width], key=key), width


def _flat(obs: Shaped[Array, "T ..."]) -> Shaped[Array, "T N"]:
    # No reshape where none is needed: under `vmap` it would move the batch in front of time.
    return obs if obs.ndim == 2 else obs.reshape(obs.shape[0], -1)
