"""Feature maps: how a head's keys and queries become the wider, positive vectors of the memory.

`Outer` is the paper's learned map (Section 3: k_t, q_t and gamma_t as outer products with W_p1,
W_p2, W_p3). `elu1` is the linear transformer's map, `dpfp` the deterministic parameter-free
projection of Schlag et al. (2021); the paper's ablation compares the three. `relu` is the plainest.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from agalite import validation

FEATURES = ("outer", "elu1", "dpfp", "relu")

# Algorithms 2 to 4 divide by s . q, which relu features can make zero. The published code adds the
# same constant.
EPSILON = 1e-5


def epsilon(dtype: jnp.dtype) -> float:
    """EPSILON, or in float16, which rounds it to zero, the smallest normal number."""
    return max(EPSILON, float(jnp.finfo(dtype).tiny))


class Outer(NamedTuple):
    """f(narrow (x) wide): a flattened outer product that is not formed yet.

    narrow (T, H, E) and wide (T, H, W) stand for an array (T, H, K) with K = E * W. The operators
    of `agalite.ops` take it in place of q, k or gamma, and then never write K-wide arrays of a
    whole sequence to memory.
    """

    narrow: Float[Array, "T H E"]
    wide: Float[Array, "T H W"]

    def expand(self) -> Float[Array, "T H K"]:
        """The outer product itself, flattened."""
        product = self.narrow[..., :, None] * self.wide[..., None, :]
        return product.reshape(*self.wide.shape[:-1], -1)


def as_outer(x: "Float[Array, 'T H K'] | Outer") -> Outer:
    """`x` itself, or for an array (T, H, K) its outer product with a one: E = 1, W = K."""
    return x if isinstance(x, Outer) else Outer(jnp.ones_like(x[..., :1]), x)


def elu1(x: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """elu(x) + 1 (Katharopoulos et al., 2020)."""
    return jax.nn.elu(x) + 1


def relu(x: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """max(x, 0)."""
    return jax.nn.relu(x)


def dpfp(x: Float[Array, "... V"], nu: int = 1) -> Float[Array, "... K"]:
    """(..., V) -> (..., 2 * nu * V): products of rectified coordinates 1 to nu apart."""
    validation.check_integer("nu", nu, minimum=1)
    both = jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)
    rolled = [both * jnp.roll(both, shift, axis=-1) for shift in range(1, nu + 1)]
    return jnp.concatenate(rolled, axis=-1)


def feature_width(feature: str, head_size: int, *, eta: int, nu: int) -> int:
    """K, the width of keys and queries after the feature map."""
    validation.check_one_of("feature", feature, FEATURES)
    return {"outer": eta, "elu1": 1, "relu": 1, "dpfp": 2 * nu}[feature] * head_size


# The layout of a fused projection, which the custom kernels read: N = 3 W + 2 V + 3 E columns per
# head, in the order q, k (wide), v, beta, gamma (wide), p1 (of k), p2 (of q), p3 (of gamma).


def join_columns(
    q: Outer, k: Outer, v: Float[Array, "T H V"], beta: Float[Array, "T H V"], gamma: Outer
) -> Float[Array, "T H N"]:
    """(T, H, N): activated queries, keys, values and gates in the layout of a projection."""
    parts = (q.wide, k.wide, v, beta, gamma.wide, k.narrow, q.narrow, gamma.narrow)
    return jnp.concatenate(parts, axis=-1)


def columns_shape(q: Outer, v: Float[Array, "T H V"]) -> tuple[int, ...]:
    """(T, H, N) of the projection that gave q and v."""
    width = 3 * q.wide.shape[-1] + 2 * v.shape[-1] + 3 * q.narrow.shape[-1]
    return (*v.shape[:2], width)
