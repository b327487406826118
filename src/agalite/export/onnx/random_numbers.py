"""JAX's random primitives (threefry) as additions, shifts and exclusive ors.

Of the memory models only AGaLiTe's basis "rank1" draws random numbers while it acts, from a key
that is part of its state. A key is represented by its two words, uint32 (..., 2).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.random import threefry_prng_impl
from jaxtyping import Array, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_CONSTANT = 0x1BD11BDA


def _threefry(
    key_0: UInt32[Array, "..."],
    key_1: UInt32[Array, "..."],
    x_0: UInt32[Array, "..."],
    x_1: UInt32[Array, "..."],
) -> list[UInt32[Array, "..."]]:
    """Threefry-2x32 with twenty rounds (Salmon et al., 2011)."""
    keys = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(_CONSTANT))
    x_0, x_1 = x_0 + keys[0], x_1 + keys[1]
    for i in range(5):
        for shift in _ROTATIONS[i % 2]:
            x_0 = x_0 + x_1
            x_1 = x_0 ^ ((x_1 << jnp.uint32(shift)) | (x_1 >> jnp.uint32(32 - shift)))
        x_0 = x_0 + keys[(i + 1) % 3]
        x_1 = x_1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return [x_0, x_1]


def _fold_in() -> Callable[..., list[Array]]:
    fold = jnp.vectorize(threefry_prng_impl.fold_in, signature="(k),()->(k)")
    return lambda key, number: [fold(key, number)]


def _bits(*, bit_width: int, shape: tuple[int, ...]) -> Callable[..., list[Array]]:
    def draw(key: UInt32[Array, "2"]) -> Array:
        return threefry_prng_impl.random_bits(key, bit_width, shape)

    axes = ",".join(f"a{i}" for i in range(len(shape)))
    return lambda key: [jnp.vectorize(draw, signature=f"(k)->({axes})")(key)]


# By primitive: called with its parameters, each returns a function of its inputs' words.
FUNCTIONS: dict[str, Callable[..., Callable[..., list[Array]]]] = {
    "random_wrap": lambda **_: lambda words: [words],
    "random_unwrap": lambda **_: lambda words: [words],
    "random_fold_in": _fold_in,
    "random_bits": _bits,
    "threefry2x32": lambda **_: _threefry,
}


def is_key(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def on_words(
    primitive: Primitive, params: dict[str, Any], keyed: Sequence[bool]
) -> Callable[..., list[Array]]:
    """A primitive on keys as a function of words; `keyed` tells which inputs are keys."""
    if primitive.name in FUNCTIONS:
        return FUNCTIONS[primitive.name](**params)
    # A primitive that only moves keys acts alike on each of their words.
    axes = [-1 if key else None for key in keyed]
    return jax.vmap(lambda *x: [primitive.bind(*x, **params)], axes, out_axes=-1)
