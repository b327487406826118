"""Encoders: from an observation to the vector that a memory model reads.

An encoder handles one environment, one observation or T of them at once. The memory models begin
with a dense layer and ReLU of their own (their embedding), so `VectorEncoder` needs no weights.
"""

import abc
import math
from functools import partial
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from agalite import kernels, validation
from agalite.memory.layers import Dense
from agalite.ops.activations import relu
from agalite.ops.bits import Bits, bits_matmul, pack
from agalite.ops.convolution import Window, convolve
from agalite.ops.matmul import broadcast_like, in_bfloat16
from agalite.ops.sparse import sparse_matmul

WIDE = 1000  # numbers in an observation beyond which "auto" chooses "symbolic"
_SMALLEST_IMAGE = 36  # the smallest input that the Atari convolutions accept


class Encoder(eqx.Module):
    """`encoder(obs)` encodes one observation (...) -> (N,), `over_time` T of them."""

    shape: eqx.AbstractVar[tuple[int, ...]]
    """Shape of an observation."""
    output_size: eqx.AbstractVar[int]
    """N, the length of the vector."""

    def __call__(self, obs: Shaped[Array, "..."]) -> Float[Array, " N"]:
        """One observation (...) -> (N,)."""
        return self.over_time(jnp.asarray(obs)[None])[0]

    def pack(self, obs: Shaped[Array, "..."]) -> PyTree[Shaped[Array, "..."]]:
        """Observations as they are kept between acting and learning; `over_time` takes them too."""
        return obs

    def over_time(self, obs: PyTree[Shaped[Array, "T ..."]]) -> Float[Array, "T N"]:
        """A sequence (T, ...) -> (T, N)."""
        obs = jnp.asarray(obs)
        validation.check_shape("obs", obs, ("T", *self.shape))
        return self._encode(obs)

    @abc.abstractmethod
    def _encode(self, obs: Shaped[Array, "T ..."]) -> Float[Array, "T N"]: ...


class VectorEncoder(Encoder):
    """Flattens: (...) -> (N,) float32. An observation of a Discrete space of n becomes one-hot."""

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
    """A dense layer and ReLU: (...) -> (width,), as in the paper's code for Craftax.

    Such observations are mostly zeros, and the weight is laid out for that: (inputs, width). Where
    the first `binary` numbers are 0 or 1, learning reads them as bits.
    """

    weight: Float[Array, "inputs width"]
    bias: Float[Array, " width"]
    shape: tuple[int, ...] = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    binary: int = eqx.field(static=True)

    def __init__(
        self, shape: tuple[int, ...], *, width: int = 128, binary: int = 0, key: PRNGKeyArray
    ) -> None:
        validation.check_integer("width", width, minimum=1)
        validation.check_integer_between("binary", binary, 0, math.prod(shape))
        self.weight = Dense(math.prod(shape), [width], key=key).weight.T
        self.bias = jnp.zeros(width)
        self.shape, self.output_size, self.binary = shape, width, binary

    def pack(self, obs: Shaped[Array, "..."]) -> PyTree[Shaped[Array, "..."]]:
        if not self.binary:
            return obs
        batch = obs.shape[: obs.ndim - len(self.shape)]
        return pack(obs.reshape(*batch, -1).astype(self.weight.dtype), self.binary)

    def over_time(self, obs: PyTree[Shaped[Array, "T ..."]]) -> Float[Array, "T N"]:
        if isinstance(obs, Bits):
            return self._activate(bits_matmul(obs, self.weight))
        return super().over_time(obs)

    def _encode(self, obs: Shaped[Array, "T ..."]) -> Float[Array, "T N"]:
        return self._activate(sparse_matmul(_flat(obs).astype(self.weight.dtype), self.weight))

    def _activate(self, y: Float[Array, "T N"]) -> Float[Array, "T N"]:
        return relu(y + broadcast_like(self.bias, y))


Padding = Literal["VALID", "SAME"]
Method = Literal["kernels", "patches", "direct"]


class _Patches(Dense):
    """A row for each patch of an image."""

    few_rows: ClassVar[bool] = False

    def __init__(self, inputs: int, outputs: int, *, key: PRNGKeyArray) -> None:
        super().__init__(inputs, [outputs], key=key)


class Convolution(eqx.Module):
    """A 2D convolution of images: (*rows, X, Y, C), multiplied by `scale`, -> (*rows, x, y, out).

    The kernel size is a multiple of the stride. The weight's inputs are in the order (kernel /
    stride, kernel / stride, stride, stride, C).
    """

    dense: Dense
    kernel: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)
    padding: Padding = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(
        self,
        channels: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        padding: Padding = "VALID",
        *,
        scale: float = 1.0,
        key: PRNGKeyArray,
    ) -> None:
        if kernel % stride:
            raise ValueError(f"kernel={kernel} must be a multiple of stride={stride}")
        self.dense = _Patches(kernel * kernel * channels, outputs, key=key)
        self.kernel, self.stride, self.padding, self.scale = kernel, stride, padding, scale

    def __call__(
        self, images: Shaped[Array, "*rows X Y C"], *, method: Method | None = None
    ) -> Float[Array, "*rows x y out"]:
        """All methods give the same numbers up to rounding.

        **Arguments:**

        - `images`: (*rows, X, Y, C).
        - `method`: "kernels", the custom ones; "patches", one matrix product over patches, fast on
            a CPU without them; "direct", XLA's convolution; None chooses by the backend.
        """
        method = _fastest(self) if method is None else method
        if method == "kernels":
            images = images if images.dtype == jnp.uint8 else images.astype(self.dense.weight.dtype)
            y = convolve(images, self.dense.weight, self._window(images.shape[-3:]))
            return y + broadcast_like(self.dense.bias, y)
        one = self._direct if method == "direct" else self._by_patches
        for _ in images.shape[:-3]:
            one = jax.vmap(one)
        return one(images)

    def _window(self, shape: tuple[int, ...]) -> Window:
        return Window(shape, self.kernel, self.stride, self._around(), self.scale)

    def _around(self) -> tuple[int, int]:
        """Zeros before and after a line."""
        if self.padding == "VALID":
            return 0, 0
        before = (self.kernel - 1) // 2
        return before, self.kernel - 1 - before

    def _by_patches(self, image: Shaped[Array, "X Y C"]) -> Float[Array, "x y out"]:
        # Patches are several times as large as the image, so they are recomputed for the gradient.
        return jax.checkpoint(lambda dense, image: dense(self._patches(image)))(self.dense, image)

    def _patches(self, image: Shaped[Array, "X Y C"]) -> Float[Array, "x y inputs"]:
        image = image.astype(self.dense.weight.dtype) * self.scale
        image = jnp.pad(image, [self._around()] * 2 + [(0, 0)])
        image = _gather_stride(image, self.stride)
        size = self.kernel // self.stride
        x, y = (n - size + 1 for n in image.shape[:2])
        parts = [image[i : i + x, j : j + y] for i in range(size) for j in range(size)]
        return jnp.concatenate(parts, axis=-1)

    def _direct(self, image: Array) -> Array:
        weight, s = self.dense.weight, self.stride
        weight = weight.astype(jnp.bfloat16) if in_bfloat16() else weight
        size = self.kernel // s
        weight = weight.reshape(-1, size, size, s, s, image.shape[-1]).transpose(1, 3, 2, 4, 5, 0)
        out = jax.lax.conv_general_dilated(
            image[None].astype(weight.dtype) * self.scale,
            weight.reshape(self.kernel, self.kernel, image.shape[-1], -1),
            (s, s),
            [self._around()] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return out[0].astype(self.dense.bias.dtype) + self.dense.bias


def _fastest(layers: Any) -> Method:
    """The method for these layers on this machine."""
    if kernels.on_accelerator():
        return "direct"
    weights = (x for x in jax.tree.leaves(layers) if eqx.is_inexact_array(x))
    return "kernels" if kernels.usable(*weights) and not in_bfloat16() else "patches"


def _one_vector(images: Float[Array, "*rows x y out"]) -> Float[Array, "*rows M"]:
    return images.reshape(*images.shape[:-3], -1)


def _gather_stride(image: Float[Array, "X Y C"], stride: int) -> Float[Array, "x y c"]:
    """Turns squares of stride x stride pixels into channels, so that the stride becomes 1."""
    if stride == 1:
        return image
    x, y = (n // stride for n in image.shape[:2])
    image = image[: x * stride, : y * stride].reshape(x, stride, y, -1)
    return image.transpose(0, 2, 1, 3).reshape(x, y, -1)


def max_pool(images: Float[Array, "*rows X Y C"]) -> Float[Array, "*rows x y C"]:
    """Max pooling of 3 x 3 with stride 2 and padding: x and y are half of X and Y, rounded up."""
    # Maxima of slices, because the gradient of XLA's reduce_window is slow on a CPU.
    for axis in (-3, -2):
        images = _max_along(images, axis % images.ndim)
    return images


def _max_along(images: Array, axis: int) -> Array:
    size = -(-images.shape[axis] // 2)
    missing = 2 * size + 1 - images.shape[axis]
    widths = [(0, 0)] * images.ndim
    widths[axis] = (missing // 2, missing - missing // 2)
    padded = jnp.pad(images, widths, constant_values=-jnp.inf)
    take = partial(jax.lax.slice_in_dim, padded, stride=2, axis=axis)
    first, second, third = (take(i, i + 2 * size - 1) for i in range(3))
    return jnp.maximum(jnp.maximum(first, second), third)


class ImageEncoder(Encoder):
    """Base of the image encoders: `_pictures` of images, then an optional dense layer."""

    dense: eqx.AbstractVar[Dense | None]
    steps_at_once: ClassVar[int | None] = None
    """Time steps whose images the custom kernels encode together; None: all."""

    @abc.abstractmethod
    def _pictures(self, images: Shaped[Array, "*rows X Y C"]) -> Float[Array, "*rows M"]: ...

    def _encode(self, obs: Shaped[Array, "T ..."]) -> Float[Array, "T N"]:
        method = _fastest(self)
        at_once = {"kernels": self.steps_at_once, "patches": 1, "direct": None}[method]
        if at_once is None or obs.shape[0] <= at_once:
            features = self._pictures(obs)
        else:
            # Some time steps after another (under vmap, all environments of a step together), so
            # that the intermediate images stay in the cache.
            features = jax.lax.map(self._pictures, obs, batch_size=at_once if at_once > 1 else None)
        return features if self.dense is None else relu(self.dense(features))


class AtariConv(ImageEncoder):
    """Three convolutions, (X, Y, C) -> (N,): 3136 numbers for 84 x 84 pixels, 1024 for 64 x 64.

    These numbers are the memory's input, as in the paper's code for Mystery Path. With `width`, a
    dense layer of that width and ReLU follow (512 in Mnih et al., 2015).
    """

    convolutions: tuple[Convolution, ...]
    dense: Dense | None
    shape: tuple[int, ...] = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        scale: float = 1 / 255,
        width: int | None = None,
        key: PRNGKeyArray,
    ) -> None:
        _check_image(shape, _SMALLEST_IMAGE)
        a, b, c, d = jax.random.split(key, 4)
        self.shape = shape
        self.convolutions = (
            Convolution(shape[-1], 32, 8, 4, scale=scale, key=a),
            Convolution(32, 64, 4, 2, key=b),
            Convolution(64, 64, 3, 1, key=c),
        )
        self.dense, self.output_size = _last_layer(self._pictures, shape, width, key=d)

    def _pictures(self, images: Shaped[Array, "*rows X Y C"]) -> Float[Array, "*rows M"]:
        for convolution in self.convolutions:
            images = relu(convolution(images))
        return _one_vector(images)


class ResidualBlock(eqx.Module):
    """x + convolution(relu(convolution(relu(x)))), (*rows, X, Y, C) -> (*rows, X, Y, C)."""

    first: Convolution
    second: Convolution

    def __init__(self, channels: int, *, key: PRNGKeyArray) -> None:
        a, b = jax.random.split(key)
        self.first = Convolution(channels, channels, 3, padding="SAME", key=a)
        self.second = Convolution(channels, channels, 3, padding="SAME", key=b)

    def __call__(self, images: Float[Array, "*rows X Y C"]) -> Float[Array, "*rows X Y C"]:
        return images + self.second(relu(self.first(relu(images))))


class Stage(eqx.Module):
    """Convolution, max pooling and two residual blocks: (X, Y, C) -> (X / 2, Y / 2, channels)."""

    convolution: Convolution
    blocks: tuple[ResidualBlock, ...]

    def __init__(
        self, inputs: int, channels: int, *, scale: float = 1.0, key: PRNGKeyArray
    ) -> None:
        a, *rest = jax.random.split(key, 3)
        self.convolution = Convolution(inputs, channels, 3, padding="SAME", scale=scale, key=a)
        self.blocks = tuple(ResidualBlock(channels, key=k) for k in rest)

    def __call__(self, images: Shaped[Array, "*rows X Y C"]) -> Float[Array, "*rows x y c"]:
        images = max_pool(self.convolution(images))
        for block in self.blocks:
            images = block(images)
        return images


class ImpalaResNet(ImageEncoder):
    """IMPALA's residual network (Espeholt et al., 2018), (X, Y, C) -> (width,).

    Stages of 16, 32 and 32 channels, two residual blocks each. The default width is Sample
    Factory's, with which the paper's Memory Maze agents were trained; IMPALA's own is 256.
    """

    steps_at_once: ClassVar[int | None] = 4

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
        self.dense, self.output_size = _last_layer(self._pictures, shape, width, key=d)

    def _pictures(self, images: Shaped[Array, "*rows X Y C"]) -> Float[Array, "*rows M"]:
        for stage in self.stages:
            # For the gradient all but convolutions by kernels is computed again: everything would
            # be 2 MB for an image of 64 x 64. The lambda is new in every trace: JAX would reuse the
            # trace of a named function even after kernels were switched off.
            run = jax.checkpoint(lambda s, x: s(x), policy=_saves_convolutions)
            images = run(stage, images)
        return _one_vector(relu(images))


def _saves_convolutions(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name.startswith("convolution")


class PatchEncoder(ImageEncoder):
    """Patches that do not overlap, a few numbers of each, a dense layer: (X, Y, C) -> (width,).

    The numbers of a patch are one matrix product and ReLU, so that a frame costs a fraction of what
    convolutions do.

    **Arguments:**

    - `shape`: (X, Y, C).
    - `patch_size`: side of a patch in pixels, a divisor of X and Y; None: the largest one up to 12,
        which is a tile of Mystery Path and 8 for frames of 64 x 64.
    - `channels`: numbers per patch.
    - `width`: of the dense layer.
    - `scale`: pixels are multiplied by it.
    - `key`: for the initial weights.
    """

    patches: Convolution
    dense: Dense | None
    shape: tuple[int, ...] = eqx.field(static=True)
    output_size: int = eqx.field(static=True)

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        patch_size: int | None = None,
        channels: int = 16,
        width: int = 128,
        scale: float = 1 / 255,
        key: PRNGKeyArray,
    ) -> None:
        _check_image(shape, 2)
        validation.check_integer("channels", channels, minimum=1)
        a, b = jax.random.split(key)
        size = _patch_size(shape, patch_size)
        self.shape = shape
        self.patches = Convolution(shape[-1], channels, size, size, scale=scale, key=a)
        self.dense, self.output_size = _last_layer(self._pictures, shape, width, key=b)

    def _pictures(self, images: Shaped[Array, "*rows X Y C"]) -> Float[Array, "*rows M"]:
        return _one_vector(relu(self.patches(images)))


_LARGEST_PATCH = 12


def _patch_size(shape: tuple[int, ...], size: int | None) -> int:
    """The side of a patch, which divides both sides of the image."""
    side = math.gcd(*shape[:2])
    divisors = [n for n in range(2, side + 1) if side % n == 0]
    if size is None:
        fitting = [n for n in divisors if n <= _LARGEST_PATCH]
        if not fitting:
            sides = f"observations of {shape[0]} x {shape[1]} pixels"
            fixes = [f"set patch_size to one of: {', '.join(map(str, divisors))}"] * bool(divisors)
            fixes += ["take encoder='atari'"] * (min(shape[:2]) >= _SMALLEST_IMAGE)
            raise ValueError(
                f"patch_size: no number from 2 to {_LARGEST_PATCH} divides both sides of {sides}; "
                f"{' or '.join(fixes) or 'take another size of observations'}"
            )
        return fitting[-1]
    validation.check_integer("patch_size", size, minimum=2)
    if size not in divisors:
        raise ValueError(
            f"patch_size={size} must divide both sides of observations of {shape[0]} x {shape[1]} "
            f"pixels; {', '.join(map(str, divisors)) or 'no number'} would"
        )
    return size


ENCODERS = ("auto", "atari", "impala", "patch", "patch-large", "symbolic", "vector")


def make_encoder(
    name: str, observation_space: Any, *, patch_size: int | None = None, key: PRNGKeyArray
) -> Encoder:
    """Makes an encoder by its name.

    **Arguments:**

    - `name`: "vector", "symbolic", "atari", "impala", "patch", "patch-large" (the capacity of
        "atari": 64 numbers per patch) or "auto", which chooses "atari" for
        images (x, y, channel), "symbolic" for more than 1000 numbers and "vector" otherwise.
    - `observation_space`: a Box or Discrete space of gymnax or Gymnasium.
    - `patch_size`: of "patch" and "patch-large"; None chooses.
    - `key`: for the initial weights.
    """
    validation.check_one_of("encoder", name, ENCODERS)
    if patch_size is not None and not name.startswith("patch"):
        raise ValueError(
            f"patch_size={patch_size} is for encoder='patch' and 'patch-large'; this is {name!r}"
        )
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
        return SymbolicEncoder(shape, binary=getattr(observation_space, "binary", 0), key=key)
    scale = _pixel_scale(observation_space)
    if name.startswith("patch"):
        size = _LARGE_PATCHES if name == "patch-large" else {}
        return PatchEncoder(shape, patch_size=patch_size, **size, scale=scale, key=key)
    image = AtariConv if name == "atari" else ImpalaResNet
    return image(shape, scale=scale, key=key)


def observation_bytes(name: str, observation_space: Any) -> int:
    """What an observation takes that is kept for learning, with the encoder of this name."""
    shape = tuple(int(n) for n in observation_space.shape or ())
    numbers, size = math.prod(shape), np.dtype(observation_space.dtype).itemsize
    binary = getattr(observation_space, "binary", 0)
    if binary and (_choose(shape) if name == "auto" else name) == "symbolic":
        return 4 * -(-binary // 32) + size * (numbers - binary)
    return size * numbers


# 64 numbers of each of the 49 tiles of Mystery Path: the 3136 that the Atari convolutions end with.
_LARGE_PATCHES = {"channels": 64, "width": 512}


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
    """Scales pixels up to 255 to numbers up to 1, and leaves those up to 1 as they are."""
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
    """The optional dense layer after the convolutions, and the size of the encoder's output."""
    image = jax.ShapeDtypeStruct(shape, jnp.float32)
    found = jax.eval_shape(lambda x: picture(x), image).shape[0]
    if width is None:
        return None, found
    validation.check_integer("width", width, minimum=1)
    return Dense(found, [width], key=key), width


def _flat(obs: Shaped[Array, "T ..."]) -> Shaped[Array, "T N"]:
    # No reshape where none is needed: under vmap it would move the batch axis in front of time.
    return obs if obs.ndim == 2 else obs.reshape(obs.shape[0], -1)
