"""AGaLiTe's attention (Algorithm 4) arranged for a CPU's caches, in XLA.

The recurrence is a handful of operations per number of state. What costs time is moving the
trajectory of the state through memory, forwards and backwards. So time is divided into chunks:

* inside a chunk a short loop writes the trajectory of the running sums k~ and v~, small enough to
  stay in cache, and a few contractions turn it into outputs;
* between chunks only the state at the boundary is kept, one per chunk;
* the gradient walks the chunks backwards, rebuilds each trajectory from its boundary and runs the
  adjoint recurrence beside it. It is a custom gradient, because autodiff of the loop would store
  the trajectory of every intermediate.

Keys, queries and gamma come as outer products (`features.Outer`) and are multiplied out one chunk,
or one step, at a time. The first axis of `Sums` and the second of `Inputs` are lanes: heads, and
under `vmap` heads times batch.
"""

import math
import operator
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from agalite.ops._batching import batched_as_lanes, pad_time
from agalite.ops.features import Outer

# Cache that a chunk's trajectory may take, per lane. Longer chunks have fewer boundaries, but
# beyond this length nothing more is gained (docs/performance.md).
_LANE_BYTES = 128 * 2**10
_LONGEST_CHUNK = 32
# Axes up to this length are summed term by term: see `_total`.
_SHORT = 8


class Inputs(NamedTuple):
    """One sequence. E and W are the widths of the outer products' factors, K = E * W.

    keep is 0 where an episode begins and 1 elsewhere.
    """

    q: Outer
    k: Outer
    gamma: Outer | None
    v: Float[Array, "T H V"]
    beta: Float[Array, "T H V"] | None
    cosines: Float[Array, "T H Rk"]
    keep: Float[Array, "T H"]


class Sums(NamedTuple):
    keys: Float[Array, "H Rk E W"]
    values: Float[Array, "H R V"]


class Readout(NamedTuple):
    """How outputs are read from the sums: constants of the basis (`delta.Basis`)."""

    numerator: tuple[float, ...]
    denominator: tuple[float, ...]
    epsilon: float


def _outer(x: Outer) -> Array:
    return x.narrow[..., :, None] * x.wide[..., None, :]


def _decays(x: Inputs) -> tuple[Array, Array]:
    """The decay of k~ (H, 1, E, W) and of v~ (H, 1, V) in one step of time."""
    if x.gamma is None or x.beta is None:
        return x.keep[:, None, None, None], x.keep[:, None, None]
    key = x.keep[:, None, None] * (1 - _outer(x.gamma))
    value = x.keep[:, None] * (1 - x.beta)
    return key[:, None], value[:, None]


def _writes(x: Inputs) -> tuple[Array, Array]:
    """gamma * k (H, E, W) and beta * v (H, V) of one step, or of a chunk (T, ...)."""
    if x.gamma is None or x.beta is None:
        return _outer(x.k), x.v
    return _outer(x.gamma) * _outer(x.k), x.beta * x.v


def _total(a: Array, b: Array, axis: int) -> Array:
    """Sum of a * b along a short axis: the oscillators, or the narrow factor.

    Written out it is one pass over memory in which slices cost nothing. As a sum or a product, XLA
    calls a library routine for long axes, which copies the slices first.
    """
    if b.shape[axis] > _SHORT:
        return jnp.sum(a * b, axis)
    take = partial(lax.index_in_dim, axis=axis, keepdims=False)
    return reduce(operator.add, (take(a, i) * take(b, i) for i in range(b.shape[axis])))


def _advance(sums: Sums, x: Inputs) -> Sums:
    """Algorithm 4, lines 7-12: the sums after one step of time."""
    key_decay, value_decay = _decays(x)
    key, value = _writes(x)
    return Sums(
        key_decay * sums.keys + x.cosines[..., None, None] * key[:, None],
        value_decay * sums.values + x.cosines[:, : sums.values.shape[1], None] * value[:, None],
    )


def _trajectory(
    start: Sums, inputs: Inputs, first: Array, path: Sums, *, with_start: bool
) -> tuple[Sums, Sums]:
    """`_advance` from step `first` on, for as many steps as `path` has room.

    Returns the last sums and all of them (T, ...), written into `path`, behind the start if
    `with_start`. The loop reads its inputs and writes its results in place: slicing a chunk out of
    the inputs and allocating its trajectory would cost as much as the arithmetic.
    """
    skip = int(with_start)
    if with_start:
        path = _put(path, start, jnp.zeros((), jnp.int32))

    def step(i: Array, carry: tuple[Sums, Sums]) -> tuple[Sums, Sums]:
        sums, path = carry
        sums = _advance(sums, _at(inputs, first + i))
        return sums, _put(path, sums, i + skip)

    return lax.fori_loop(0, path.keys.shape[0] - skip, step, (start, path))


def _at(tree: Any, i: Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(tree: Any, values: Any, i: Array) -> Any:
    def put(x: Array, y: Array) -> Array:
        return lax.dynamic_update_index_in_dim(x, y, i, 0)

    return jax.tree.map(put, tree, values)


def _slice(tree: Any, first: Array, size: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size), tree)


def _room(start: Sums, size: int) -> Sums:
    return jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), start)


def _scores(keys: Array, q: Outer) -> Float[Array, "T H Rk"]:
    """k~_m . q for every oscillator m."""
    along = jnp.einsum("threw,thw->thre", keys, q.wide)
    return _total(along, q.narrow[:, :, None], axis=-1)


def _mixture(readout: Readout, scores: Float[Array, "T H Rk"]) -> Float[Array, "T H R"]:
    """Algorithm 4, lines 14-16: how much of each v~_m is in the output."""
    bottom = scores @ jnp.asarray(readout.denominator, scores.dtype) + readout.epsilon
    top = scores[..., : len(readout.numerator)] * jnp.asarray(readout.numerator, scores.dtype)
    return top / bottom[..., None]


def _forward(readout: Readout, size: int, start: Sums, inputs: Inputs):
    """-> last sums, out (T, H, V), scores (T, H, Rk), the sums at the start of each chunk."""

    def one(carry: tuple[Sums, Sums], n: Array):
        sums, path = carry
        last, path = _trajectory(sums, inputs, n * size, path, with_start=False)
        q = _slice(inputs.q, n * size, size)
        scores = _scores(path.keys, q)
        out = jnp.einsum("thr,thrv->thv", _mixture(readout, scores), path.values)
        return (last, path), (out, scores, sums)

    carry, numbers = (start, _room(start, size)), jnp.arange(inputs.v.shape[0] // size)
    (last, _), (out, scores, boundaries) = lax.scan(one, carry, numbers)
    return last, out.reshape(inputs.v.shape), scores.reshape(inputs.cosines.shape), boundaries


def _backward(
    readout: Readout,
    size: int,
    dlast: Sums,
    inputs: Inputs,
    scores: Array,
    boundaries: Sums,
    dout: Array,
) -> tuple[Sums, Inputs]:
    def one(carry: tuple[Sums, Sums, Sums], x: tuple[Array, Sums]):
        after, path, adjoint = carry
        n, start = x
        after, path, adjoint, gradient = _chunk_gradient(
            readout, after, inputs, scores, dout, start, n * size, path, adjoint
        )
        return (after, path, adjoint), gradient

    count = inputs.v.shape[0] // size
    carry = (dlast, _room(dlast, size + 1), _room(dlast, size))
    (dstart, _, _), gradient = lax.scan(one, carry, (jnp.arange(count), boundaries), reverse=True)
    return dstart, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), gradient)


def attend(readout: Readout, start: Sums, inputs: Inputs) -> tuple[Sums, Float[Array, "T H V"]]:
    """The last sums and the outputs (T, H, V)."""
    result: Any = _attend(readout, start, inputs)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(readout: Readout, start: Sums, inputs: Inputs) -> tuple[Sums, Array]:
    return _attend_fwd(readout, start, inputs)[0]


def _attend_fwd(readout: Readout, start: Sums, inputs: Inputs):
    def forward(start: Sums, inputs: Inputs):
        size = _chunk_size(start, inputs)
        padded, steps = pad_time(inputs, size)
        last, out, scores, boundaries = _forward(readout, size, start, padded)
        return last, out[:steps], scores[:steps], boundaries

    forward = batched_as_lanes(forward, (0, 1), (0, 1, 1, 1))
    last, out, scores, boundaries = forward(start, inputs)
    return (last, out), (inputs, scores, boundaries)


def _attend_bwd(
    readout: Readout, saved: tuple[Inputs, Array, Sums], cotangents: tuple[Sums, Array]
):
    def backward(dlast: Sums, inputs: Inputs, scores: Array, boundaries: Sums, dout: Array):
        size = _chunk_size(dlast, inputs)
        inputs, steps = pad_time(inputs, size)
        (scores, dout), _ = pad_time((scores, dout), size)
        dstart, gradient = _backward(readout, size, dlast, inputs, scores, boundaries, dout)
        return dstart, jax.tree.map(lambda x: x[:steps], gradient)

    backward = batched_as_lanes(backward, (0, 1, 1, 1, 1), (0, 1))
    return backward(cotangents[0], *saved, cotangents[1])


def _chunk_size(sums: Sums, inputs: Inputs) -> int:
    """Steps whose trajectory fits the cache, a power of two; independent of the number of lanes."""
    lane = sum(x[0].size * x.dtype.itemsize for x in sums)
    size = 1 << max(3, int(math.log2(max(1, _LANE_BYTES // lane))))
    return min(size, _LONGEST_CHUNK, 1 << (inputs.v.shape[0] - 1).bit_length())


_attend.defvjp(_attend_fwd, _attend_bwd)


def _chunk_gradient(
    readout: Readout,
    after: Sums,
    inputs: Inputs,
    scores: Array,
    dout: Array,
    start: Sums,
    first: Array,
    path: Sums,
    adjoint: Sums,
) -> tuple[Sums, Sums, Sums, Inputs]:
    """The gradient of one chunk.

    `after` is the gradient of the chunk's last sums. Returns the gradient of the sums before the
    chunk, the two buffers, and the gradient of every input.
    """
    size = adjoint.keys.shape[0]
    _, path = _trajectory(start, inputs, first, path, with_start=True)
    before = jax.tree.map(lambda x: x[:-1], path)
    sums = jax.tree.map(lambda x: x[1:], path)
    chunk, douts = _slice(inputs, first, size), _slice(dout, first, size)
    mixture, mixture_vjp = jax.vjp(partial(_mixture, readout), _slice(scores, first, size))
    (dscores,) = mixture_vjp(jnp.einsum("thv,thrv->thr", douts, sums.values))

    def step(back: Array, carry: tuple[Sums, Sums]) -> tuple[Sums, Sums]:
        later, adjoint = carry
        i = size - 1 - back
        t = first + i
        # The adjoint at t is that at t + 1 times step t + 1's decay; `after` includes it already.
        key_decay, value_decay = (
            jnp.where(back == 0, 1, decay) for decay in _decays(_at(inputs, t + 1))
        )
        q = _outer(_at(inputs.q, t))
        here = Sums(
            key_decay * later.keys + _at(dscores, i)[..., None, None] * q[:, None],
            value_decay * later.values + _at(mixture, i)[..., None] * _at(dout, t)[:, None],
        )
        return here, _put(adjoint, here, i)

    earliest, adjoint = lax.fori_loop(0, size, step, (after, adjoint))
    decays = _decays(_at(inputs, first))
    leaving = Sums(*(d * x for d, x in zip(decays, earliest, strict=True)))
    dq = _total(dscores[..., None, None], sums.keys, axis=2)
    dkey = _total(chunk.cosines[..., None, None], adjoint.keys, axis=2)
    dvalue = _total(chunk.cosines[:, :, : mixture.shape[-1], None], adjoint.values, axis=2)
    gradient = chunk._replace(
        q=_outer_gradient(chunk.q, dq),
        cosines=jnp.zeros_like(chunk.cosines),
        keep=jnp.zeros_like(chunk.keep),
    )
    k, gamma = chunk.k, chunk.gamma
    if gamma is None or chunk.beta is None:
        gradient = gradient._replace(k=_outer_gradient(k, dkey), v=dvalue)
        return leaving, path, adjoint, gradient

    keep = chunk.keep[..., None]
    # The write gamma * k is an outer product too: its gradient serves k and gamma.
    written = Outer(gamma.narrow * k.narrow, gamma.wide * k.wide)
    dwritten = _outer_gradient(written, dkey)
    lost = _outer_gradient(gamma, _total(adjoint.keys, before.keys, axis=2))
    lost_values = _total(adjoint.values, before.values, axis=2) * keep
    gradient = gradient._replace(
        k=Outer(dwritten.narrow * gamma.narrow, dwritten.wide * gamma.wide),
        gamma=Outer(
            dwritten.narrow * k.narrow - lost.narrow * keep,
            dwritten.wide * k.wide - lost.wide * keep,
        ),
        v=dvalue * chunk.beta,
        beta=dvalue * chunk.v - lost_values,
    )
    return leaving, path, adjoint, gradient


def _outer_gradient(x: Outer, d: Float[Array, "T H E W"]) -> Outer:
    return Outer(jnp.einsum("thew,thw->the", d, x.wide), jnp.einsum("thew,the->thw", d, x.narrow))
