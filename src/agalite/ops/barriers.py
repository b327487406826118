"""Barriers that keep XLA's CPU compiler from repeating work."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float


def fusion_barrier(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, computed once and kept: the compiler does not fuse across the call.

    XLA's CPU fuser repeats cheap producers inside each of their consumers. Down a chain of levels
    that turns linear work into quadratic work. A call that must not be inlined keeps the results of
    every level in memory. Where XLA does not know the mark, the program is only slower.
    """

    def inside(*args: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # what is called from here fuses as usual
            return function(*args)

    with set_xla_metadata(inlineable="false"):
        return jax.jit(inside)(*args)


@jax.custom_vjp
def grad_barrier(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x; its gradient is summed once, here, and kept.

    The gradient of a residual stream has many readers in every layer. XLA's fuser would sum it
    again inside each of them, from the last layer on.
    """
    return x


grad_barrier.defvjp(lambda x: (x, None), lambda _, d: (fusion_barrier(lambda d: d, d),))
