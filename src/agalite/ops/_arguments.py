"""What the operators share: checks on their arguments, the choice of a method, layouts."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from agalite import kernels, validation
from agalite.ops.features import Outer, columns_shape, join_columns
from agalite.ops.recurrence import METHODS, Method

Features = Float[Array, "T H K"] | Outer
"""Keys, queries or gates: an array, or the factors of an outer product."""


def as_resets(resets: Array | None, steps: int) -> Bool[Array, " T"]:
    """(T,) bool; all false for `None`."""
    return jnp.zeros(steps, bool) if resets is None else jnp.asarray(resets).astype(bool)


def both_or_neither(beta: Any, gamma: Any) -> bool:
    """Whether there are gates; one without the other is an error."""
    if (beta is None) != (gamma is None):
        missing = "beta" if beta is None else "gamma"
        raise ValueError(f"{missing}=None but the other gate is given; pass both or neither")
    return beta is not None


def check_heads(**arrays: Any) -> None:
    """Shapes agree with v (T, H, V) and, for k and gamma, with the features of q."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    v, q = arrays["v"], arrays["q"]
    validation.check_shape("v", v, ("T", "H", "V"))
    validation.check_nonempty("v", v)
    time, heads, head_size = v.shape
    steps = (q.wide if isinstance(q, Outer) else q).shape[0]
    expected = {
        "beta": (time, heads, head_size),
        "relative": ("M+1", heads, head_size),
        "content_bias": (heads, head_size),
        "position_bias": (heads, head_size),
        "resets": (steps,),
        "starts": (steps,),
    }
    for name, x in arrays.items():
        if name in ("q", "k", "gamma"):
            _check_features(name, x, q, steps if name == "q" else time, heads)
        elif name in expected:
            validation.check_shape(name, x, expected[name])
        for leaf in jax.tree.leaves(x):
            if name not in ("resets", "starts"):
                _check_floating(name, leaf)
            validation.check_finite(name, leaf)


def _check_floating(name: str, x: Any) -> None:
    if not jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating):
        raise ValueError(f"{name} has type {jnp.asarray(x).dtype}; it must be floating-point")


def _check_features(name: str, x: Any, q: Any, steps: int, heads: int) -> None:
    if isinstance(x, Outer) != isinstance(q, Outer):
        raise ValueError(f"{name} and q must both be arrays (T, H, K) or both be Outer")
    if isinstance(x, Outer):
        validation.check_shape(f"{name}.narrow", x.narrow, (steps, heads, q.narrow.shape[-1]))
        validation.check_shape(f"{name}.wide", x.wide, (steps, heads, q.wide.shape[-1]))
    else:
        width = x.shape[-1] if x is q and x.ndim == 3 else q.shape[-1]
        validation.check_shape(name, x, (steps, heads, width))


def choose_method(method: Method, v: Float[Array, "T H V"], *, accelerator: Method) -> Method:
    """What "auto" stands for: a plain step if T = 1, else `accelerator`, or "chunked" on a CPU."""
    validation.check_one_of("method", method, METHODS)
    if method != "auto":
        return method
    if v.shape[0] == 1:
        return "sequential"
    return accelerator if kernels.on_accelerator() else "chunked"


def kernel_columns(
    columns: Array | None, q: Outer, k: Outer, v: Array, beta: Array, gamma: Outer
) -> tuple[Float[Array, "T H N"], bool]:
    """The columns that custom kernels read, and whether they are still to be activated."""
    if columns is None:
        return join_columns(q, k, v, beta, gamma), False
    if columns.shape != columns_shape(q, v):
        raise ValueError(
            f"columns of shape {columns.shape} are not the projection of q and v: expected "
            f"(T, H, 3 W + 2 V + 3 E) = {columns_shape(q, v)}"
        )
    return columns, True


def per_head(x: Array, like: Float[Array, "T H V"]) -> Array:
    """(T, ...) -> (T, H, ...)."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], like.shape[1], *x.shape[1:]))


def feature_size(q: Outer) -> int:
    """K = E * W."""
    return q.narrow.shape[-1] * q.wide.shape[-1]
