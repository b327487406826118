"""A pytree as a list of named leaves and plain arrays, and back: what a checkpoint stores."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Leaf(NamedTuple):
    """What a leaf is, in terms that JSON can hold."""

    path: str
    """Where it is in the pytree: .weights.memory.layers[0].bias"""
    kind: str
    """array, key (a typed PRNG key), int, float or bool"""
    shape: list[int]
    dtype: str
    value: Any = None
    """Of an int or bool itself, of a float its hexadecimal digits, of a key its generator's name"""


def take_apart(tree: Any) -> tuple[list[Leaf], dict[str, np.ndarray]]:
    """The leaves, and the arrays among them by name; arrays without elements have none."""
    leaves, data = _describe_all(tree), {}
    for leaf, value in zip(leaves, jax.tree.leaves(tree), strict=True):
        if stored(leaf):
            data[name(leaf)] = jax.random.key_data(value) if leaf.kind == "key" else value
    # All at once, so that copies from several devices overlap.
    return leaves, {k: np.asarray(x) for k, x in jax.device_get(data).items()}


def difference(like: Any, leaves: list[Leaf]) -> str | None:
    """The first thing in which stored leaves are not those of `like`, in words."""
    wanted = {leaf.path: leaf for leaf in _describe_all(like)}
    found = {leaf.path: leaf for leaf in leaves}
    for path, want in wanted.items():
        leaf = f"leaf {path or 'at the top'}"
        if path not in found:
            return f"it has no {leaf}"
        for what in ("kind", "shape", "dtype"):
            have, expected = getattr(found[path], what), getattr(want, what)
            if have != expected:
                return f"its {leaf} has {what} {have}; expected {expected}"
    for path in found:
        if path not in wanted:
            return f"it has a leaf {path or 'at the top'}, which is not expected"
    return None


def rebuild(like: Any, leaves: list[Leaf], arrays: dict[str, np.ndarray]) -> Any:
    """The stored leaves in the structure of `like`, on its devices."""
    found = {leaf.path: leaf for leaf in leaves}

    def value(path: Any, model: Any) -> Any:
        leaf = found[jax.tree_util.keystr(path)]
        return _value(leaf, arrays.get(name(leaf)), model)

    return jax.tree_util.tree_map_with_path(value, like)


def stored(leaf: Leaf) -> bool:
    """Whether it is among the arrays (Orbax has no arrays without elements)."""
    return leaf.kind in ("array", "key") and 0 not in leaf.shape


def name(leaf: Leaf) -> str:
    return f"state{leaf.path}"


def _describe_all(tree: Any) -> list[Leaf]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [_describe(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]


def _describe(path: str, leaf: Any) -> Leaf:
    if isinstance(leaf, bool):
        return Leaf(path, "bool", [], "bool", leaf)
    if isinstance(leaf, int):
        return Leaf(path, "int", [], "int", leaf)
    # NumPy's float64 numbers are Python floats too, and are kept as what they are: NumPy's.
    if isinstance(leaf, float) and not isinstance(leaf, np.generic):
        return Leaf(path, "float", [], "float", leaf.hex())
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"leaf {path} is spread over several hosts; gather it before saving")
        shape, dtype = list(leaf.shape), str(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            known = isinstance(leaf, jax.Array)
            return Leaf(path, "key", shape, dtype, str(jax.random.key_impl(leaf)) if known else "")
        if leaf.dtype.kind not in "OUSMm":
            return Leaf(path, "array", shape, dtype)
        raise ValueError(f"leaf {path} is an array of {dtype}; only numbers can be saved")
    raise ValueError(
        f"leaf {path} is of type {type(leaf).__name__}; only arrays and numbers can be saved "
        "(eqx.filter(..., eqx.is_array) takes the arrays of a module)"
    )


def _value(leaf: Leaf, array: np.ndarray | None, like: Any) -> Any:
    if leaf.kind == "float":
        return float.fromhex(leaf.value)
    if leaf.kind in ("int", "bool"):
        return leaf.value
    if isinstance(like, np.ndarray | np.generic):
        whole = np.empty(leaf.shape, leaf.dtype) if array is None else array
        return whole[()] if isinstance(like, np.generic) else whole
    # Copies: the state will be donated, and JAX may otherwise use NumPy's memory in place.
    if array is None:
        value = jnp.empty(leaf.shape, like.dtype)
    elif leaf.kind == "key":
        value = jax.random.wrap_key_data(jnp.array(array), impl=leaf.value)
    else:
        value = jnp.array(array)
    # An array that JAX was free to place stays so: pinned to a device, it would compile anew.
    pinned = like.committed if isinstance(like, jax.Array) else like.sharding is not None
    return jax.device_put(value, like.sharding) if pinned else value
