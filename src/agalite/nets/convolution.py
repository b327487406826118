"""Convolutions and pooling of one image (x, y, channel), fast on a CPU in forward and backward.

XLA's own convolution is fine alone, but inside a compiled loop, where all training happens, its
gradient is some thirty times slower on a CPU (docs/performance.md). So there a convolution is a
matrix product of patches; on an accelerator it is XLA's.
"""

from functools import partial
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from agalite.memory.layers import Dense
from agalite.ops.recurrence import on_accelerator

Padding = Literal["VALID", "SAME"]


class Convolution(eqx.Module):
    """(X, Y, C), scaled, -> (x, y, out). The kernel is a multiple of the stride.

    The weight's inputs are in the order (kernel / stride, kernel / stride, stride, stride, C).
    """

    dense: Dense
    kernel: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)
    padding: Padding = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(
        self, channels: int, outputs: int, kernel: int, stride: int = 1,
        padding: Padding = "VALID", *, scale: float = 1.0, key: PRNGKeyArray,
    ) -> None:  # fmt: skip
        self.dense = Dense(kernel * kernel * channels, [outputs], key=key)
        self.kernel, self.stride, self.padding, self.scale = kernel, stride, padding, scale

    def __call__(
        self, image: Shaped[Array, "X Y C"], *, patches: bool | None = None
    ) -> Float[Array, "x y out"]:
        """`patches` chooses the way; None leaves it to the backend. Both give the same."""
        if not (not on_accelerator() if patches is None else patches):
            return self._direct(image)
        # The patches are several times the image: made again for the gradient, never kept.
        return jax.checkpoint(lambda dense, image: dense(self._patches(image)))(self.dense, image)

    def _patches(self, image: Shaped[Array, "X Y C"]) -> Float[Array, "x y inputs"]:
        image = image.astype(self.dense.weight.dtype) * self.scale
        if self.padding == "SAME":
            before = (self.kernel - 1) // 2
            image = jnp.pad(image, [(before, self.kernel - 1 - before)] * 2 + [(0, 0)])
        image = _gather_stride(image, self.stride)
        size = self.kernel // self.stride
        x, y = (n - size + 1 for n in image.shape[:2])
        parts = [image[i : i + x, j : j + y] for i in range(size) for j in range(size)]
        return jnp.concatenate(parts, axis=-1)

    def _direct(self, image: Array) -> Array:
        weight, s = self.dense.weight, self.stride
        size = self.kernel // s
        weight = weight.reshape(-1, size, size, s, s, image.shape[-1]).transpose(1, 3, 2, 4, 5, 0)
        out = jax.lax.conv_general_dilated(
            image[None].astype(weight.dtype) * self.scale,
            weight.reshape(self.kernel, self.kernel, image.shape[-1], -1),
            (s, s), self.padding, dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return out[0] + self.dense.bias


def _gather_stride(image: Float[Array, "X Y C"], stride: int) -> Float[Array, "x y c"]:
    """Squares of stride x stride pixels become channels, so that the stride becomes 1."""
    if stride == 1:
        return image
    x, y = (n // stride for n in image.shape[:2])
    image = image[: x * stride, : y * stride].reshape(x, stride, y, -1)
    return image.transpose(0, 2, 1, 3).reshape(x, y, -1)


def max_pool(image: Float[Array, "X Y C"]) -> Float[Array, "x y C"]:
    """The largest of every 3 x 3, at every second place: as many as half of X and Y, rounded up."""
    # Maxima of slices, since the gradient of XLA's window maximum is slow on a CPU.
    for axis in (0, 1):
        image = _max_along(image, axis)
    return image


def _max_along(image: Array, axis: int) -> Array:
    places = -(-image.shape[axis] // 2)
    missing = 2 * places + 1 - image.shape[axis]
    widths = [(0, 0)] * 3
    widths[axis] = (missing // 2, missing - missing // 2)
    padded = jnp.pad(image, widths, constant_values=-jnp.inf)
    take = partial(jax.lax.slice_in_dim, padded, stride=2, axis=axis)
    first, second, third = (take(i, i + 2 * places - 1) for i in range(3))
    return jnp.maximum(jnp.maximum(first, second), third)
