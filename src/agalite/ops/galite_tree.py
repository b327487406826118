"""The binary tree of GaLiTe's attention inside chunks: blocks of steps, joined in pairs.

Every function takes all chunks of a group of lanes at once, as one first axis. What the tree is for
is written in `galite_chunked.py`. The gradients are by hand: autodiff would keep every level.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from agalite.ops.features import Outer
from agalite.ops.wall import wall

_BASE = 2  # below this, levels are cheaper fused than kept apart


class Inputs(NamedTuple):
    """keep is 0 at a reset, else 1."""

    q: Outer
    k: Outer
    gamma: Outer
    v: Float[Array, "T H V"]
    beta: Float[Array, "T H V"]
    keep: Float[Array, "T H"]


class Blocks(NamedTuple):
    """Chunks cut into N blocks; the first axis counts the chunks of all lanes of a group.

    Relative to the block a step is in, `q` is decayed from the block's start, `write_*` to its end
    and `seen_v` is the decay of values from its start; `total_*` is the decay over a whole block.
    """

    q: Float[Array, "H T K"]
    write_k: Float[Array, "H T K"]
    write_v: Float[Array, "H T V"]
    seen_v: Float[Array, "H T V"]
    total_k: Float[Array, "H N K"]
    total_v: Float[Array, "H N V"]


class Read(NamedTuple):
    """What the queries have read so far: the attention's numerator and denominator."""

    top: Float[Array, "H T V"]
    bottom: Float[Array, "H T"]


def levels(time: int) -> tuple[list[int], list[int]]:
    """Sizes of the blocks that are joined in pairs: in the base, and above it."""
    sizes = [1 << i for i in range((time - 1).bit_length())]
    return [size for size in sizes if size < _BASE], [size for size in sizes if size >= _BASE]


def base(x: Inputs) -> tuple[Blocks, Read, tuple[Array, ...]]:
    """Blocks of `_BASE` steps (or the whole chunk, if that is shorter)."""
    blocks, read, scores = *_single(x), ()
    for size in levels(x.keep.shape[1])[0]:
        blocks, read, level = join_read(size, blocks, read)
        scores = (*scores, level)
    return blocks, read, scores


def base_gradient(x: Inputs, scores: tuple[Array, ...], d: Blocks, dread: Read) -> Inputs:
    sizes = levels(x.keep.shape[1])[0]
    path = [_single(x)[0]]
    for size in sizes[:-1]:
        path.append(join(size, path[-1]))
    for size, level in zip(reversed(sizes), reversed(scores), strict=True):
        d = join_gradient(size, path.pop(), level, d, dread)
    return _single_gradient(x, d, dread)


def _write(k: Outer, gamma: Outer) -> Outer:
    """gamma * k is an outer product too."""
    return Outer(gamma.narrow * k.narrow, gamma.wide * k.wide)


def _own(q: Outer, k: Outer, gamma: Outer) -> Float[Array, "LN t"]:
    """q . (gamma * k): a step reads its own write undecayed."""
    write = _write(k, gamma)
    return (q.narrow * write.narrow).sum(-1) * (q.wide * write.wide).sum(-1)


def _single(x: Inputs) -> tuple[Blocks, Read]:
    """Blocks of one step."""
    keep_k, keep_v = x.keep[..., None] * (1 - x.gamma.expand()), x.keep[..., None] * (1 - x.beta)
    write_k, write_v = _write(x.k, x.gamma).expand(), x.beta * x.v
    own = _own(x.q, x.k, x.gamma)
    blocks = Blocks(x.q.expand() * keep_k, write_k, write_v, keep_v, keep_k, keep_v)
    return blocks, Read(own[..., None] * write_v, own)


def _single_gradient(x: Inputs, d: Blocks, dread: Read) -> Inputs:
    """By hand: autodiff writes out the broadcasts that expand the outer products."""
    keep = x.keep[..., None]
    own, own_gradient = jax.vjp(_own, x.q, x.k, x.gamma)
    dq, dk, dgamma = own_gradient(dread.bottom + (dread.top * x.beta * x.v).sum(-1))
    dq_read = _outer_gradient(x.q, d.q * keep * (1 - x.gamma.expand()))
    dgamma_lost = _outer_gradient(x.gamma, -keep * (d.q * x.q.expand() + d.total_k))
    dwrite_k = _outer_gradient(_write(x.k, x.gamma), d.write_k)
    dwrite_v = d.write_v + own[..., None] * dread.top

    def sum_of(first: Outer, *more: Outer) -> Outer:
        return jax.tree.map(lambda *y: sum(y[1:], y[0]), first, *more)

    return Inputs(
        q=sum_of(dq, dq_read),
        k=sum_of(dk, jax.tree.map(jnp.multiply, dwrite_k, x.gamma)),
        gamma=sum_of(dgamma, jax.tree.map(jnp.multiply, dwrite_k, x.k), dgamma_lost),
        v=dwrite_v * x.beta,
        beta=dwrite_v * x.v - keep * (d.seen_v + d.total_v),
        keep=jnp.zeros_like(x.keep),  # resets are not differentiable
    )


def _outer_gradient(x: Outer, d: Float[Array, "LN t K"]) -> Outer:
    d = d.reshape(*d.shape[:-1], x.narrow.shape[-1], x.wide.shape[-1])
    return Outer(jnp.einsum("htew,htw->hte", d, x.wide), jnp.einsum("htew,hte->htw", d, x.narrow))


def join_read(size: int, b: Blocks, read: Read) -> tuple[Blocks, Read, Array]:
    """Blocks of `size` steps become blocks of twice that, and in each pair the right one reads what
    the left one wrote; returns the scores too."""
    q, write_k, write_v, seen_v = (_pair(y, size) for y in b[:4])
    scores = jnp.einsum("hptk,hpjk->hptj", q[:, :, 1], write_k[:, :, 0])
    values = jnp.einsum("hptj,hpjv->hptv", scores, write_v[:, :, 0])
    time = b.q.shape[1]
    new = Read(
        read.top + _place(seen_v[:, :, 1] * values, 1, time),
        read.bottom + _place(scores.sum(-1), 1, time),
    )
    return join(size, b), new, scores


def join(size: int, b: Blocks) -> Blocks:
    """Blocks of `size` steps become blocks of twice that."""
    time = b.q.shape[1]
    q, write_k, write_v, seen_v = (_pair(y, size) for y in b[:4])
    left_k, right_k = _sides(b.total_k)
    left_v, right_v = _sides(b.total_v)
    return Blocks(
        q=_scale(q, left_k, 1, time),
        write_k=_scale(write_k, right_k, 0, time),
        write_v=_scale(write_v, right_v, 0, time),
        seen_v=_scale(seen_v, left_v, 1, time),
        total_k=left_k * right_k,
        total_v=left_v * right_v,
    )


def join_gradient(size: int, b: Blocks, scores: Array, d: Blocks, dread: Read) -> Blocks:
    """Gradient of `b`, from that of the joined blocks and of everything read."""
    time = b.q.shape[1]
    q, write_k, write_v, seen_v = (_pair(y, size) for y in b[:4])
    dq, dwrite_k, dwrite_v, dseen_v = (_pair(y, size) for y in d[:4])
    dtop, dbottom = (_pair(y, size)[:, :, 1] for y in dread)
    left_k, right_k = _sides(b.total_k)
    left_v, right_v = _sides(b.total_v)

    values = jnp.einsum("hptj,hpjv->hptv", scores, write_v[:, :, 0])
    dvalues = dtop * seen_v[:, :, 1]
    dscores = jnp.einsum("hptv,hpjv->hptj", dvalues, write_v[:, :, 0]) + dbottom[..., None]
    dscores_t = jnp.einsum("hpjv,hptv->hpjt", write_v[:, :, 0], dvalues) + dbottom[:, :, None]
    from_q = jnp.einsum("hptj,hpjk->hptk", dscores, write_k[:, :, 0])
    from_k = jnp.einsum("hpjt,hptk->hpjk", dscores_t, q[:, :, 1])
    from_v = jnp.einsum("hpjt,hptv->hpjv", transposed(scores), dvalues)

    def total(scaled_left: Array, scaled_right: Array, dwhole: Array, left: Array, right: Array):
        pairs = jnp.stack([scaled_left + dwhole * right, scaled_right + dwhole * left], axis=2)
        return pairs.reshape(left.shape[0], -1, left.shape[-1])

    return Blocks(
        q=_scale(dq, left_k, 1, time) + _place(from_q, 1, time),
        write_k=_scale(dwrite_k, right_k, 0, time) + _place(from_k, 0, time),
        write_v=_scale(dwrite_v, right_v, 0, time) + _place(from_v, 0, time),
        seen_v=_scale(dseen_v, left_v, 1, time) + _place(dtop * values, 1, time),
        total_k=total(
            jnp.einsum("hptk,hptk->hpk", dq[:, :, 1], q[:, :, 1]),
            jnp.einsum("hptk,hptk->hpk", dwrite_k[:, :, 0], write_k[:, :, 0]),
            d.total_k, left_k, right_k,
        ),
        total_v=total(
            jnp.einsum("hptv,hptv->hpv", dseen_v[:, :, 1], seen_v[:, :, 1]),
            jnp.einsum("hptv,hptv->hpv", dwrite_v[:, :, 0], write_v[:, :, 0]),
            d.total_v, left_v, right_v,
        ),
    )  # fmt: skip


def transposed(y: Float[Array, "... A B"]) -> Float[Array, "... B A"]:
    """The transpose, kept: a product that sums over the rows of both factors is slow in XLA, and it
    would make one of any product with a transpose that it sees (docs/performance.md)."""
    return wall(lambda y: jnp.swapaxes(y, -1, -2), y)


def _pair(y: Float[Array, "H T C"], size: int) -> Float[Array, "H P 2 S C"]:
    return y.reshape(y.shape[0], -1, 2, size, *y.shape[2:])


def _sides(total: Float[Array, "H 2P C"]) -> tuple[Array, Array]:
    pairs = total.reshape(total.shape[0], -1, 2, total.shape[-1])
    return pairs[:, :, 0], pairs[:, :, 1]


def _scale(y: Float[Array, "H P 2 S C"], by: Float[Array, "H P C"], side: int, time: int) -> Array:
    """Multiply one half of each pair, leave the other, and lay time out again."""
    here = lax.broadcasted_iota(jnp.int32, y.shape, 2) == side
    scaled = y * jnp.where(here, by[:, :, None, None], 1)
    return scaled.reshape(y.shape[0], time, y.shape[-1])


def _place(y: Float[Array, "H P S *C"], side: int, time: int) -> Float[Array, "H T *C"]:
    """`y` in one half of each pair, zeros in the other."""
    padded = jnp.pad(y[:, :, None], [(0, 0), (0, 0), (side, 1 - side)] + [(0, 0)] * (y.ndim - 2))
    return padded.reshape(y.shape[0], time, *y.shape[3:])
