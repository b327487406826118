"""What the matrix memories share whose heads decay by one number a step: chunks and decays.

The chunked forms need, for every pair (j, t) of a chunk, the product of the decays after j up to t.
Here it is the exponential of a sum of logarithms that are all at most zero. Each sum has its own
terms and is not a difference of running sums: nothing cancels, nothing is divided, and after a
reset no number depends on what was before it.
Shapes: T time, H heads, N chunks of t steps, K width of keys, V of values.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite import validation
from agalite.ops._batching import batched_as_lanes

Method = Literal["auto", "sequential", "chunked"]
METHODS = ("auto", "sequential", "chunked")


def choose(method: Method, steps: int) -> Method:
    """What "auto" stands for: a plain step if T = 1, else "chunked"."""
    validation.check_one_of("method", method, METHODS)
    if method != "auto":
        return method
    return "sequential" if steps == 1 else "chunked"


def as_keep(resets: Bool[Array, " T"], like: Float[Array, "T H *_"]) -> Float[Array, "T H"]:
    """0 at a reset, else 1, for every head."""
    keep = 1 - resets.astype(like.dtype)
    return jnp.einsum("t,h->th", keep, jnp.ones(like.shape[1], like.dtype))


def over_lanes(
    function: Callable[..., Any], lane_axes: tuple[Any, ...], out_axes: Any
) -> Callable[..., Any]:
    """`function` of floating-point arrays whose `vmap` widens the lanes (`batched_as_lanes`).

    Its gradient keeps the arguments only and computes the function again: that costs less than the
    transposes that `vmap` leaves around the products of a gradient with several batch axes.
    """
    forward = batched_as_lanes(function, lane_axes, out_axes)

    def gradient(d: Any, *args: Any) -> Any:
        return jax.vjp(function, *args)[1](d)

    backward = batched_as_lanes(gradient, (out_axes, *lane_axes), lane_axes)

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return forward(*args)

    call.defvjp(lambda *args: (forward(*args), args), lambda args, d: backward(d, *args))
    return call


def into_chunks(x: Float[Array, "T H *_"], size: int, fill: float = 0) -> Float[Array, "N H t *_"]:
    """Chunks of `size` steps; `fill` pads the last one."""
    padding = [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(x.reshape(-1, size, *x.shape[1:]), 1, 2)


def out_of_chunks(x: Float[Array, "N H t *_"], steps: int) -> Float[Array, "T H *_"]:
    """The inverse of `into_chunks`."""
    x = jnp.moveaxis(x, 2, 1)
    return x.reshape(-1, *x.shape[2:])[:steps]


def pass_on(
    start: Float[Array, "H K V"], kept: Float[Array, "N H"], written: Float[Array, "N H K V"]
) -> tuple[Float[Array, "H K V"], Float[Array, "N H K V"]]:
    """The state after the last chunk, and the one that each chunk finds.

    A chunk leaves `kept` of the state that it finds, and adds `written`.
    """

    def one(S: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        kept, written = x
        return kept[:, None, None] * S + written, S

    return lax.scan(one, start, (kept, written))


def chunk_size(steps: int, most: int) -> int:
    """`most`, or the power of two that holds a shorter sequence."""
    return min(most, 1 << (steps - 1).bit_length())


class Decays(NamedTuple):
    """Logarithms of the decays inside chunks, and who can be seen from where."""

    between: Float[Array, "N H t t"]
    """[t, j]: the sum over the steps after j up to t; at most 0, and 0 where j >= t."""
    seen: Bool[Array, "N H t t"]
    """[t, j]: whether j <= t, in the same episode."""
    since: Float[Array, "N H t"]
    """[t]: the sum over the steps up to t of its episode in this chunk."""
    fresh: Bool[Array, "N H t"]
    """[t]: whether no episode has begun in this chunk, so that t sees the state before it."""


def decays(log_decay: Float[Array, "N H t"], keep: Float[Array, "N H t"]) -> Decays:
    """The decays between all pairs of steps of each chunk.

    **Arguments:**

    - `log_decay`: at most 0; what is decayed at a reset is forgotten anyway.
    - `keep`: 0 where an episode begins, else 1.
    """
    size = log_decay.shape[-1]
    episode = jnp.cumsum(1 - keep, axis=-1)
    seen = (episode[..., :, None] == episode[..., None, :]) & np.tri(size, dtype=bool)
    # [t, s]: the terms up to t. One product then leaves those after j.
    terms = jnp.where(np.tri(size, dtype=bool), log_decay[..., None, :], 0)
    between = terms @ jnp.asarray(np.tri(size, k=-1), log_decay.dtype)
    since = jnp.where(seen, terms, 0).sum(-1)
    return Decays(between, seen, since, episode == 0)
