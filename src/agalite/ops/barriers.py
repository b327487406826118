"""Holding the compiler back: results that are computed once and kept."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def fusion_barrier(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function behind a wall that the compiler does not fuse across.

    XLA's CPU fuser repeats cheap producers inside each of their consumers. Down a chain of levels
    that turns linear work into quadratic. A call that must not be inlined keeps every level's
    results in memory, computed once. Where XLA does not know the mark, it is only slower.
    """

    def inside(*args: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # what is called from here fuses as usual
            return function(*args)

    with set_xla_metadata(inlineable="false"):
        return jax.jit(inside)(*args)
