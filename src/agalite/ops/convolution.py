"""`convolve`: a 2D convolution of images by custom kernels (`kernels/convolution.h`).

A JAX primitive, because only a primitive sees the batch before it is differentiated: a batch is
more images, and the gradient of the weights sums over all of them. The convolution and its two
gradients are bilinear, and the gradient of each is one of the other two.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jaxtyping import Array, Float, Shaped

from agalite import kernels
from agalite.ops._batching import kernel_primitive, one_by_one


class Window(NamedTuple):
    """What slides over an image (X, Y, C)."""

    shape: tuple[int, ...]
    """Of an image: (X, Y, C)."""
    kernel: int
    stride: int
    padding: tuple[int, int]
    """Zeros before and after each of the axes X and Y."""
    scale: float
    """Pixels are multiplied by it."""

    @property
    def out(self) -> tuple[int, int]:
        """How many positions it has: (x, y)."""
        x, y = ((n + sum(self.padding) - self.kernel) // self.stride + 1 for n in self.shape[:2])
        return x, y

    @property
    def inputs(self) -> int:
        """Numbers below it."""
        return self.kernel**2 * self.shape[2]


def convolve(
    images: Shaped[Array, "*rows X Y C"], weights: Float[Array, "out inputs"], window: Window
) -> Float[Array, "*rows x y out"]:
    """Images by weights, without a bias. `kernels.usable(weights)` must hold.

    **Arguments:**

    - `images`: (*rows, X, Y, C), uint8 or as the weights.
    - `weights`: (out, inputs), the inputs in the order (kernel / stride, kernel / stride, stride,
        stride, C).
    - `window`: of shape (X, Y, C); its kernel is a multiple of its stride.

    **Returns:**

    (*rows, x, y, out), of the type of the weights.
    """
    _check(images, weights, window)
    return _forward.bind(weights, images, window=window)


def _check(images: Any, weights: Any, window: Window) -> None:
    """The kernels trust what they are given."""
    if window.kernel % window.stride:
        raise ValueError(
            f"kernel={window.kernel} must be a multiple of stride={window.stride} in a convolution"
        )
    if tuple(images.shape[-3:]) != tuple(window.shape) or min(window.out) < 1:
        raise ValueError(
            f"images have shape {images.shape}; expected (..., {', '.join(map(str, window.shape))})"
            f" with at least {window.kernel} x {window.kernel} pixels, padding included"
        )
    if weights.shape[1:] != (window.inputs,):
        raise ValueError(f"weights have shape {weights.shape}; expected (out, {window.inputs})")
    if images.dtype not in (jnp.uint8, weights.dtype):
        raise ValueError(f"images are {images.dtype}; expected uint8 or {weights.dtype}")


def _rows(x: Any) -> tuple[int, ...]:
    return x.shape[:-3]


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[-3:])


def _call(name: str, shape: tuple[int, ...], x: Array, y: Array, window: Window) -> Array:
    (out,) = kernels.call(
        f"convolution_{name}",
        [shape],
        x,
        y,
        kernel=window.kernel,
        stride=window.stride,
        before=window.padding[0],
        padding=sum(window.padding),
        scale=float(window.scale),
    )
    return out


def _forward_shape(weights: Any, images: Any, *, window: Window) -> tuple[int, ...]:
    return (*_rows(images), *window.out, weights.shape[0])


def _forward_call(weights: Array, images: Array, *, window: Window) -> Array:
    flat = _flat(images)
    shape = (flat.shape[0], *window.out, weights.shape[0])
    out = _call("forward", shape, weights, flat, window)
    return out.reshape(*_rows(images), *shape[1:])


def _images_shape(_: Any, d: Any, *, window: Window) -> tuple[int, ...]:
    return (*_rows(d), *window.shape)


def _images_call(weights: Array, d: Array, *, window: Window) -> Array:
    flat = _flat(d)
    shape = (flat.shape[0], *window.shape)
    return _call("images", shape, weights, flat, window).reshape(*_rows(d), *window.shape)


def _weights_shape(d: Any, _: Any, *, window: Window) -> tuple[int, ...]:
    return (d.shape[-1], window.inputs)


def _weights_call(d: Array, images: Array, *, window: Window) -> Array:
    return _call("weights", (d.shape[-1], window.inputs), _flat(d), _flat(images), window)


def _batch_rows(primitive: Primitive, args: Any, axes: Any, *, window: Window) -> tuple[Any, int]:
    """A batch of images or of d is more rows; a batch of weights is one call after another."""
    (weights, x), (weights_axis, axis) = args, axes
    if weights_axis is not None:
        return one_by_one(primitive, args, axes, window=window)
    # Among the rows, wherever it is: no copy.
    axis_now = min(axis, x.ndim - 4)
    x = jnp.moveaxis(x, axis, axis_now)
    return primitive.bind(weights, x, window=window), axis_now


_forward = kernel_primitive("convolution_forward", _forward_shape, _forward_call, ["window"])
_images = kernel_primitive("convolution_images", _images_shape, _images_call, ["window"])
_weights = kernel_primitive("convolution_weights", _weights_shape, _weights_call, ["window"])


def _gradient(primitive: Primitive, *order: int) -> Any:
    """`primitive` of two of (cotangent, first argument, second argument), by their numbers."""

    def bind(*values: Any, window: Window) -> Any:
        return primitive.bind(*(values[i] for i in order), window=window)

    return bind


# Arguments: _forward(weights, images), _images(weights, d), _weights(d, images).
ad.defbilinear(_forward, _gradient(_weights, 0, 2), _gradient(_images, 1, 0))
ad.defbilinear(_images, _gradient(_weights, 2, 0), _gradient(_forward, 1, 0))
ad.defbilinear(_weights, _gradient(_forward, 0, 2), _gradient(_images, 0, 1))
batching.primitive_batchers[_forward] = partial(_batch_rows, _forward)
batching.primitive_batchers[_images] = partial(_batch_rows, _images)
batching.primitive_batchers[_weights] = partial(one_by_one, _weights)
