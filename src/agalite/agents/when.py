"""Do something only when it is needed, also for many seeds at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jaxtyping import Array, Bool


def when(needed: Bool[Array, ""], function: Callable[..., Any], otherwise: Any, *args: Any) -> Any:
    """`function(*args)` if needed, else `otherwise`.

    `vmap` turns a conditional into doing both always. Here it asks first whether any of the batch
    needs it.
    """

    @custom_batching.custom_vmap
    def call(needed: Array, otherwise: Any, args: Any) -> Any:
        return lax.cond(needed, lambda _, a: function(*a), lambda o, _: o, otherwise, args)

    @call.def_vmap
    def rule(size: int, batched: Any, needed: Array, otherwise: Any, args: Any) -> Any:
        def all_batched(tree: Any, which: Any) -> Any:
            return jax.tree.map(
                lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)), tree, which
            )

        needed, otherwise, args = (
            all_batched(*pair) for pair in zip((needed, otherwise, args), batched, strict=True)
        )
        done = when(jnp.any(needed), jax.vmap(lambda *a: function(*a)), otherwise, *args)

        def choose(yes: Array, no: Array) -> Array:
            return jnp.where(needed.reshape(size, *(1,) * (yes.ndim - 1)), yes, no)

        chosen = jax.tree.map(choose, done, otherwise)
        return chosen, jax.tree.map(lambda _: True, chosen)

    return call(needed, otherwise, args)
