"""Checks on arguments.

`check_*` raises `ValueError` for a value that is not allowed, `as_*` also converts it. Every
message names the argument, the value it has and what is allowed. Checks read shapes and Python
values, never traced numbers: they run once, while JAX traces, and cost nothing in compiled code.
"""

import difflib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# The largest float32. A larger number would silently become infinite in an array.
_LARGEST = float(np.finfo(np.float32).max)
# The smallest one with all its digits: a smaller number may become 0.
_SMALLEST = float(np.finfo(np.float32).tiny)
# The largest int32: compiled programs count in it.
LARGEST_INTEGER = 2**31 - 1
# The largest integer that is exact as a float, of numbers that only Python counts.
LARGEST_COUNT = 2**53


def check_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """`value` is one of the strings `allowed`."""
    names = sorted(allowed)
    if value not in names:
        separator = "; " if any("," in n for n in names) else ", "
        raise ValueError(
            f"{name}={value!r} is unknown; choose one of: {separator.join(names)}"
            f"{near_match(value, names)}"
        )


def near_match(value: object, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar one, if there is any."""
    by_lower = {n.lower(): n for n in names}
    close = difflib.get_close_matches(str(value).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def check_boolean(name: str, value: object) -> None:
    """`value` is True or False, of Python or NumPy."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_options(name: str, value: object) -> None:
    """`value` is a dictionary of values by name, as keyword arguments are given."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name}={value!r} must be a dictionary of values by name")


def check_integer(name: str, value: Any, *, minimum: int, maximum: int = LARGEST_INTEGER) -> None:
    """`value` is an integer, of Python or NumPy, from `minimum` to `maximum`."""
    if not _is_integer(value) or int(value) < minimum:
        raise ValueError(f"{name}={value!r} must be a whole number >= {minimum}")
    if int(value) > maximum:
        raise ValueError(f"{name}={value!r} must be a whole number <= {maximum}")


def check_integer_between(name: str, value: Any, low: int, high: int) -> None:
    """`value` is an integer from `low` to `high`, both included."""
    if not _is_integer(value) or not low <= int(value) <= high:
        raise ValueError(f"{name}={value!r} must be a whole number from {low} to {high}")


def check_number(
    name: str, value: Any, *, minimum: float, maximum: float = _LARGEST, above: bool = False
) -> float:
    """`value` as a float; finite, from `minimum` (excluded if `above`) to `maximum`."""
    fits = _is_real(value) and minimum <= value <= maximum
    if not fits or (above and value == minimum):
        sign = ">" if above else ">="
        limit = "" if maximum == _LARGEST else f" and <= {maximum:g}"
        raise ValueError(
            f"{name}={_short(value)} must be a finite number {sign} {minimum:g}{limit}"
        )
    if above and abs(value) < _SMALLEST:
        raise ValueError(
            f"{name}={_short(value)} is too small for float32, where it is 0; the smallest number "
            f"other than 0 is {_SMALLEST:.3g}"
        )
    return float(value)


def check_finite_number(name: str, value: Any) -> float:
    """`value` as a float; a finite real number of either sign."""
    if not _is_real(value) or not -_LARGEST <= value <= _LARGEST:
        raise ValueError(
            f"{name}={_short(value)} must be a finite number from {-_LARGEST:g} to {_LARGEST:g}"
        )
    return float(value)


def as_horizon(value: Any) -> tuple[float, float] | None:
    """`horizon` is None or (shortest, longest) with 1 < shortest <= longest, both finite."""
    if value is None:
        return None
    try:
        numbers = not isinstance(value, str) and not any(isinstance(x, str) for x in value)
        shortest, longest = (float(x) for x in value) if numbers else (math.nan, math.nan)
    except (TypeError, ValueError):
        shortest = longest = math.nan
    if not (1.0 < shortest <= longest < math.inf):
        raise ValueError(
            f"horizon={value!r} must be None or (shortest, longest) in steps with "
            "1 < shortest <= longest, both finite, for example (2, 512)"
        )
    return shortest, longest


def as_real(name: str, value: Any) -> jax.Array:
    """`value` as an array of real numbers; lists are converted, text and objects are refused."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} is not an array of numbers") from error
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise ValueError(f"{name} has dtype {array.dtype}; expected real numbers")
    return array


def as_bool(name: str, value: Any) -> jax.Array:
    """`value` as an array of booleans; integers are converted, floats are refused."""
    array = as_real(name, value)
    if jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {array.dtype}; expected bool")
    return array.astype(bool)


def check_shape(name: str, array: Any, expected: Sequence[int | str]) -> None:
    """`expected` has a number for an axis of fixed length, a letter for one of any length."""
    got = np.shape(array)
    fits = len(got) == len(expected) and all(
        not isinstance(want, int) or have == want for have, want in zip(got, expected, strict=True)
    )
    if not fits:
        want = "(" + ", ".join(str(x) for x in expected) + ("," if len(expected) == 1 else "") + ")"
        raise ValueError(f"{name} has shape {tuple(got)}; expected {want}")


def check_nonempty(name: str, array: Any) -> None:
    """`array` (T, ...) has at least one time step."""
    if np.shape(array)[0] == 0:
        raise ValueError(f"{name} has length 0 along time; expected at least one step")


def check_finite(name: str, array: object) -> None:
    """`array` has neither NaN nor infinity. Traced arrays have no values and are accepted."""
    if isinstance(array, Tracer):
        return
    values = np.asarray(array)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return
    bad = ~np.isfinite(values.astype(np.float64))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name}{list(where)} is {values[where]}; all values must be finite")


def check_structure(
    name: str, value: object, expected: object, *, start: str = "initial_state()"
) -> None:
    """`value` is a pytree like `expected`: the same leaves, shapes and dtypes.

    start: what makes a right one, for the message.
    """

    def describe(tree: object) -> list[str]:
        return [
            f"{jax.tree_util.keystr(path)}{np.shape(leaf)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]

    got, want = describe(value), describe(expected)
    if got != want:
        differs = next(
            ((a, b) for a, b in itertools.zip_longest(got, want, fillvalue="nothing") if a != b),
            (got, want),
        )
        raise ValueError(
            f"{name} does not belong to this model: found {differs[0]}, expected {differs[1]}; "
            f"start from {start}"
        )
    for (path, have), wanted in zip(
        jax.tree_util.tree_leaves_with_path(value), jax.tree.leaves(expected), strict=True
    ):
        dtype = jnp.asarray(have).dtype
        if dtype != wanted.dtype:
            leaf = jax.tree_util.keystr(path)
            raise ValueError(f"{name}{leaf} has dtype {dtype}; expected {wanted.dtype}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"
