"""Feature maps: how a head's keys and queries become the (wider, positive) vectors of the memory.

`outer` is the paper's learned map (Equations for k_t, q_t and gamma_t with W_p1, W_p2, W_p3);
`elu1` is the linear transformer's, `dpfp` the parameter-free projection of Schlag et al. (2021),
both used in the paper's ablation; `relu` is the plainest.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agalite import validation

FEATURES = ("outer", "elu1", "dpfp", "relu")


class Outer(NamedTuple):
    """f(narrow (x) wide): the flattened outer product, not yet formed.

    narrow: (T, H, E); wide: (T, H, W); stands for an array (T, H, K) with K = E * W. The operators
    of `agalite.ops` take it wherever they take q, k or gamma, and then never write K-wide arrays
    of the whole sequence to memory.
    """

    narrow: Float[Array, "T H E"]
    wide: Float[Array, "T H W"]

    def expand(self) -> Float[Array, "T H K"]:
        product = self.narrow[..., :, None] * self.wide[..., None, :]
        return product.reshape(*self.wide.shape[:-1], -1)


def as_outer(x: "Float[Array, 'T H K'] | Outer") -> Outer:
    """An ordinary array is the outer product of a one with itself."""
    return x if isinstance(x, Outer) else Outer(jnp.ones_like(x[..., :1]), x)


def elu1(x: Float[Array, "... V"]) -> Float[Array, "... V"]:
    return jax.nn.elu(x) + 1


def relu(x: Float[Array, "... V"]) -> Float[Array, "... V"]:
    return jax.nn.relu(x)


def dpfp(x: Float[Array, "... V"], nu: int = 1) -> Float[Array, "... K"]:
    """(..., V) -> (..., 2 * nu * V): products of rectified coordinates nu places apart."""
    validation.integer("nu", nu, minimum=1)
    both = jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)
    rolled = [both * jnp.roll(both, shift, axis=-1) for shift in range(1, nu + 1)]
    return jnp.concatenate(rolled, axis=-1)


def feature_width(feature: str, head_size: int, *, eta: int, nu: int) -> int:
    """K, the width of keys and queries after the feature map."""
    validation.one_of("feature", feature, FEATURES)
    return {"outer": eta, "elu1": 1, "relu": 1, "dpfp": 2 * nu}[feature] * head_size
