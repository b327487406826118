"""A model without its weights: what is the same for every seed and after every update."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax


class Skeleton:
    """Of the model that `make(key)` makes; nothing is computed, only its shapes are looked at."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.shapes = eqx.filter_eval_shape(make, jax.random.key(0))
        self.parameter_count: int = self.shapes.parameter_count
        self._rest = without_arrays(self.shapes)

    def model(self, weights: Any) -> Any:
        """With these arrays for weights."""
        return eqx.combine(weights, self._rest)


def without_arrays(shapes: Any) -> Any:
    """A model of shapes, None in the place of each."""
    return eqx.filter(shapes, is_shape, inverse=True)


def is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
