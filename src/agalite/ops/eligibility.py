"""Eligibility traces of all weights of a network, and updates along them.

With B environments, each with a trace z of its own, g the gradient of what was predicted and a
weight w of group k:

    z <- decay z + g                          `accumulate`; it also returns the norms of g and z
    w <- w + sum over b of scale[b, k] z[b]   `move`

z is one array (B, P), in which every group is filled up to whole vector lanes; gradients and
weights are lists of arrays, one list for each group. A custom kernel makes one pass over memory for
either; XLA joins the arrays first, and sums each norm in a pass of its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from agalite import kernels
from agalite.ops.barriers import fusion_barrier

LANES = 128
"""Groups of weights are filled up to a multiple of it."""

Groups = Sequence[Sequence[Float[Array, "..."]]]


class Norms(NamedTuple):
    """Of each environment and each of the G groups."""

    square: Float[Array, "B G"]
    """The sum of the squares of g."""
    length: Float[Array, "B G"]
    """The sum of the squares of z, or of its absolute values."""


def group_bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each group begins and ends in z, from how many weights each has."""
    bounds, at = [], 0
    for size in sizes:
        bounds.append((at, at + size + -size % LANES))
        at = bounds[-1][1]
    return bounds


def join(groups: Groups, batch: tuple[int, ...] = ()) -> Float[Array, "*batch P"]:
    """All arrays (*batch, ...) as one, each group filled up with zeros to whole lanes."""
    parts = []
    for group in groups:
        flat = [x.reshape(*batch, -1) for x in group]
        rest = -sum(x.shape[-1] for x in flat) % LANES
        parts += [*flat, jnp.zeros((*batch, rest), flat[0].dtype)]
    return jnp.concatenate(parts, axis=-1)


def split(joined: Float[Array, "*batch P"], like: Groups) -> tuple[list[Float[Array, "..."]], ...]:
    """The inverse of `join`; `like` has the shapes, without the batch."""
    found, at = [], 0
    for group in like:
        arrays = []
        for x in group:
            size = math.prod(x.shape)
            part = joined[..., at : at + size]
            arrays.append(part.reshape(*joined.shape[:-1], *x.shape))
            at += size
        found.append(arrays)
        at += -at % LANES
    return tuple(found)


def accumulate(
    eligibility: Float[Array, "B P"],
    decay: Float[Array, " B"],
    gradients: Groups,
    *,
    absolute: bool = False,
) -> tuple[Float[Array, "B P"], Norms]:
    """z <- decay z + g, and the norms of both.

    **Arguments:**

    - `eligibility`: (B, P).
    - `decay`: (B,); 0 forgets what was before.
    - `gradients`: of each group, arrays (B, ...); at most two groups.
    - `absolute`: `Norms.length` is that of the 1-norm.

    **Returns:**

    The new traces (B, P) and the norms (B, G).
    """
    envs = eligibility.shape[0]
    arrays = [x for group in gradients for x in group]
    if kernels.usable(eligibility, decay, *arrays):
        z, square, length = kernels.call(
            "eligibility",
            [eligibility.shape, (envs, 2), (envs, 2)],
            *(eligibility, decay, *arrays),
            in_place={0: 0},
            absolute=int(absolute),
            **_places(gradients, 1),
        )
        return z, Norms(square[:, : len(gradients)], length[:, : len(gradients)])
    g = join(gradients, (envs,))
    # Kept in memory: the norms and the update read it.
    z = fusion_barrier(
        lambda z, g, decay: jnp.where(decay[:, None] == 0, 0, decay[:, None] * z) + g,
        *(eligibility, g, decay),
    )
    size = jnp.abs if absolute else jnp.square
    bounds = group_bounds(_sizes(gradients, 1))
    square, length = (
        jnp.stack([long_sum(f(x[:, a:b])) for a, b in bounds], axis=-1)
        for f, x in ((jnp.square, g), (size, z))
    )
    return z, Norms(square, length)


def move(
    weights: Groups, eligibility: Float[Array, "B P"], scales: Float[Array, "B G"]
) -> tuple[list[Float[Array, "..."]], ...]:
    """w + sum over b of scale[b] z[b], for every weight; at most two groups.

    **Arguments:**

    - `weights`: of each group.
    - `eligibility`: (B, P).
    - `scales`: (B, G).

    **Returns:**

    The new weights.
    """
    arrays = [x for group in weights for x in group]
    if kernels.usable(eligibility, scales, *arrays):
        moved = kernels.call(
            "eligibility_update",
            [x.shape for x in arrays],
            *(eligibility, jnp.broadcast_to(scales, (scales.shape[0], 2)), *arrays),
            in_place={2 + i: i for i in range(len(arrays))},
            **_places(weights, 0),
        )
        count = len(weights[0])
        return (moved[:count], moved[count:])[: len(weights)]
    changes = split(eligibility, weights)
    return tuple(
        [
            (w + jnp.tensordot(scales[:, i], z, 1)).astype(w.dtype)
            for w, z in zip(group, change, strict=True)
        ]
        for i, (group, change) in enumerate(zip(weights, changes, strict=True))
    )


def _sizes(groups: Groups, batch_axes: int) -> list[int]:
    return [sum(math.prod(x.shape[batch_axes:]) for x in group) for group in groups]


def _places(groups: Groups, batch_axes: int) -> dict[str, int]:
    """For the kernels: how many arrays group 0 has, and where group 1 begins."""
    return {"first": len(groups[0]), "second": group_bounds(_sizes(groups, batch_axes))[0][1]}


def long_sum(x: Float[Array, "... P"]) -> Float[Array, "..."]:
    """The sum along P. In two parts: XLA's CPU compiler adds up a whole axis one by one."""
    if x.shape[-1] % LANES:
        return jnp.sum(x, axis=-1)
    return jnp.sum(jnp.sum(x.reshape(*x.shape[:-1], -1, LANES), axis=-2), axis=-1)
