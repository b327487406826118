"""GaLiTe's attention (Algorithm 3) without a matrix per time step; and the ungated Algorithm 2.

C_t q_t = sum_j (decayed beta_j v_j) (decayed gamma_j k_j . q_t): every pair (j, t) needs the
product of the decays between j and t, which differs in every channel. Dividing cumulative products
would overflow; instead each pair goes through a boundary b with j <= b < t, as (decay from b to t)
times (decay from j to b), both products of numbers in [0, 1] and safe whatever the gates. A binary
tree supplies the boundaries: at level s, blocks of s steps are joined in pairs, and the right half
reads what the left half wrote through one small matrix product. Above the tree, chunks of `CHUNK`
steps pass on C and s, kept once per chunk. The gradient keeps the results of the small products and
rebuilds everything else, so its memory grows as T * CHUNK + (T / CHUNK) * V * K.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite.ops.features import Outer
from agalite.ops.lanes import batched_as_lanes, into_chunks, out_of_chunks

CHUNK = 32
_BASE = 4  # below this, levels are cheaper fused than kept apart


class Inputs(NamedTuple):
    """keep is 0 at a reset, else 1."""

    q: Outer
    k: Outer
    gamma: Outer
    v: Float[Array, "T H V"]
    beta: Float[Array, "T H V"]
    keep: Float[Array, "T H"]


class Matrix(NamedTuple):
    C: Float[Array, "H V K"]
    s: Float[Array, "H K"]


class _Blocks(NamedTuple):
    """A chunk cut into blocks. Relative to the block a step is in, `q` is decayed from the block's
    start, `write_*` to its end and `seen_v` is the decay of values from its start; `total_*` is the
    decay over each whole block."""

    q: Float[Array, "H T K"]
    write_k: Float[Array, "H T K"]
    write_v: Float[Array, "H T V"]
    seen_v: Float[Array, "H T V"]
    total_k: Float[Array, "H N K"]
    total_v: Float[Array, "H N V"]


class _Read(NamedTuple):
    """What the queries have read so far: the attention's numerator and denominator."""

    top: Float[Array, "H T V"]
    bottom: Float[Array, "H T"]


class _Kept(NamedTuple):
    """What the gradient of a chunk needs besides its inputs."""

    state: Matrix
    pairs: tuple[tuple[Array, Array], ...]  # scores and reads of every level
    old: Float[Array, "H T V"]  # what was read from the state
    out: Float[Array, "H T V"]
    bottom: Float[Array, "H T"]


def attend(epsilon: float, start: Matrix, inputs: Inputs) -> tuple[Matrix, Array]:
    """Returns the last state and out (T, H, V).

    The first axis of `start` and the second of `inputs` are lanes: heads, and under `vmap` the
    batch too.
    """
    result: Any = _attend(epsilon, start, inputs)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(epsilon: float, start: Matrix, inputs: Inputs) -> tuple[Matrix, Array]:
    return _attend_fwd(epsilon, start, inputs)[0]


def _attend_fwd(epsilon: float, start: Matrix, inputs: Inputs):
    def forward(start: Matrix, inputs: Inputs):
        chunks, steps = into_chunks(inputs, CHUNK)
        last, (out, kept) = lax.scan(partial(_chunk, epsilon), start, chunks)
        return last, out_of_chunks(out, steps), kept

    forward = batched_as_lanes(forward, (0, 1), (0, 1, 1))
    last, out, kept = forward(start, inputs)
    return (last, out), (inputs, kept)


def _attend_bwd(_: float, saved: tuple[Inputs, _Kept], cotangents: tuple[Matrix, Array]):
    def backward(dlast: Matrix, inputs: Inputs, kept: _Kept, dout: Array):
        chunks, steps = into_chunks(inputs, CHUNK)
        dout, _ = into_chunks(dout, CHUNK)

        def one(dstate: Matrix, x: tuple[Inputs, _Kept, Array]) -> tuple[Matrix, Inputs]:
            return _chunk_gradient(dstate, *x)

        dstart, dchunks = lax.scan(one, dlast, (chunks, kept, dout), reverse=True)
        return dstart, out_of_chunks(dchunks, steps)

    backward = batched_as_lanes(backward, (0, 1, 1, 1), (0, 1))
    return backward(cotangents[0], *saved, cotangents[1])


_attend.defvjp(_attend_fwd, _attend_bwd)


def _levels(time: int) -> list[int]:
    """Sizes of the blocks that are joined in pairs, above the base."""
    return [size for size in (1 << i for i in range(12)) if _BASE <= size < time]


def _chunk(epsilon: float, state: Matrix, x: Inputs) -> tuple[Matrix, tuple[Array, _Kept]]:
    wall = _Wall(x.keep)
    blocks, read = wall(_base, x)
    pairs = []
    for size in _levels(x.v.shape[0]):
        read, pair = wall(partial(_join_read, size), blocks, read)
        blocks = wall(partial(_join, size), blocks)
        pairs.append(pair)
    (new, old, out, bottom) = wall(partial(_read_state, epsilon), state, blocks, read)
    return new, (jnp.moveaxis(out, 0, 1), _Kept(state, tuple(pairs), old, out, bottom))


def _chunk_gradient(
    dnew: Matrix, x: Inputs, kept: _Kept, dout: Float[Array, "T H V"]
) -> tuple[Matrix, Inputs]:
    wall = _Wall(x.keep)
    sizes = _levels(x.v.shape[0])
    path = [wall(lambda x: _base(x)[0], x)]
    for size in sizes:
        path.append(wall(partial(_join, size), path[-1]))
    dstate, dblocks, dread = wall(_read_state_gradient, dnew, kept, path.pop(), dout)
    for size, pair in zip(reversed(sizes), reversed(kept.pairs), strict=True):
        dblocks = wall(partial(_join_gradient, size), path.pop(), pair, dblocks, dread)
    dx = wall(
        lambda x, dblocks, dread: jax.vjp(_base, x)[1]((dblocks, dread))[0], x, dblocks, dread
    )
    return dstate, dx


def _base(x: Inputs) -> tuple[_Blocks, _Read]:
    """Blocks of `_BASE` steps (or the whole chunk, if that is shorter)."""
    # Lanes first, so that the products over time are batched matrix products.
    x = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), x)
    gamma = x.gamma.expand()
    keep_k, keep_v = x.keep[..., None] * (1 - gamma), x.keep[..., None] * (1 - x.beta)
    q, write_k, write_v = x.q.expand(), gamma * x.k.expand(), x.beta * x.v
    own = jnp.einsum("htk,htk->ht", q, write_k)  # a step reads its own write undecayed
    blocks = _Blocks(q * keep_k, write_k, write_v, keep_v, keep_k, keep_v)
    read = _Read(own[..., None] * write_v, own)
    size = 1
    while size < min(_BASE, q.shape[1]):
        read, _ = _join_read(size, blocks, read)
        blocks = _join(size, blocks)
        size *= 2
    return blocks, read


def _join_read(size: int, b: _Blocks, read: _Read) -> tuple[_Read, tuple[Array, Array]]:
    """In each pair of blocks of `size` steps, the right one reads what the left one wrote."""
    q, write_k, write_v, seen_v = (_pair(y, size) for y in b[:4])
    scores = jnp.einsum("hptk,hpjk->hptj", q[:, :, 1], write_k[:, :, 0])
    values = jnp.einsum("hptj,hpjv->hptv", scores, write_v[:, :, 0])
    time = b.q.shape[1]
    new = _Read(
        read.top + _place(seen_v[:, :, 1] * values, 1, time),
        read.bottom + _place(scores.sum(-1), 1, time),
    )
    return new, (scores, values)


def _join(size: int, b: _Blocks) -> _Blocks:
    """Blocks of `size` steps become blocks of twice that."""
    time = b.q.shape[1]
    q, write_k, write_v, seen_v = (_pair(y, size) for y in b[:4])
    left_k, right_k = _sides(b.total_k)
    left_v, right_v = _sides(b.total_v)
    return _Blocks(
        q=_scale(q, left_k, 1, time),
        write_k=_scale(write_k, right_k, 0, time),
        write_v=_scale(write_v, right_v, 0, time),
        seen_v=_scale(seen_v, left_v, 1, time),
        total_k=left_k * right_k,
        total_v=left_v * right_v,
    )


def _join_gradient(
    size: int, b: _Blocks, pair: tuple[Array, Array], d: _Blocks, dread: _Read
) -> _Blocks:
    """Gradient of `b`, from that of the joined blocks and of everything read."""
    time = b.q.shape[1]
    scores, values = pair
    q, write_k, write_v, seen_v = (_pair(y, size) for y in b[:4])
    dq, dwrite_k, dwrite_v, dseen_v = (_pair(y, size) for y in d[:4])
    dtop, dbottom = (_pair(y, size)[:, :, 1] for y in dread)
    left_k, right_k = _sides(b.total_k)
    left_v, right_v = _sides(b.total_v)

    dvalues = dtop * seen_v[:, :, 1]
    dscores = jnp.einsum("hptv,hpjv->hptj", dvalues, write_v[:, :, 0]) + dbottom[..., None]
    from_q = jnp.einsum("hptj,hpjk->hptk", dscores, write_k[:, :, 0])
    from_k = jnp.einsum("hptj,hptk->hpjk", dscores, q[:, :, 1])
    from_v = jnp.einsum("hptj,hptv->hpjv", scores, dvalues)

    def total(scaled_left: Array, scaled_right: Array, dwhole: Array, left: Array, right: Array):
        pairs = jnp.stack([scaled_left + dwhole * right, scaled_right + dwhole * left], axis=2)
        return pairs.reshape(left.shape[0], -1, left.shape[-1])

    return _Blocks(
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


def _read_state(epsilon: float, state: Matrix, b: _Blocks, read: _Read):
    """The chunk is one block now: read what came before it, and pass on C and s."""
    old = jnp.einsum("htk,hvk->htv", b.q, state.C)
    bottom = read.bottom + jnp.einsum("htk,hk->ht", b.q, state.s) + epsilon
    out = (read.top + b.seen_v * old) / bottom[..., None]
    C = b.total_v[:, 0, :, None] * b.total_k[:, 0, None, :] * state.C
    C = C + jnp.einsum("htv,htk->hvk", b.write_v, b.write_k)
    s = b.total_k[:, 0] * state.s + b.write_k.sum(1)
    return Matrix(C, s), old, out, bottom


def _read_state_gradient(
    dnew: Matrix, kept: _Kept, b: _Blocks, dout: Float[Array, "T H V"]
) -> tuple[Matrix, _Blocks, _Read]:
    state, dC = kept.state, dnew.C
    dtop = jnp.moveaxis(dout, 1, 0) / kept.bottom[..., None]
    dbottom = -(dtop * kept.out).sum(-1)
    dold = dtop * b.seen_v
    total_k, total_v = b.total_k[:, 0], b.total_v[:, 0]
    through = dC * state.C
    dblocks = _Blocks(
        q=jnp.einsum("htv,hvk->htk", dold, state.C) + dbottom[..., None] * state.s[:, None],
        write_k=jnp.einsum("htv,hvk->htk", b.write_v, dC) + dnew.s[:, None],
        write_v=jnp.einsum("htk,hvk->htv", b.write_k, dC),
        seen_v=dtop * kept.old,
        total_k=(jnp.einsum("hvk,hv->hk", through, total_v) + dnew.s * state.s)[:, None],
        total_v=jnp.einsum("hvk,hk->hv", through, total_k)[:, None],
    )
    dstate = Matrix(
        C=total_v[:, :, None] * total_k[:, None] * dC + jnp.einsum("htv,htk->hvk", dold, b.q),
        s=total_k * dnew.s + jnp.einsum("ht,htk->hk", dbottom, b.q),
    )
    return dstate, dblocks, _Read(dtop, dbottom)


class _Wall:
    """Calls a function behind a wall that the compiler does not fuse across.

    XLA's CPU fuser repeats cheap producers inside each of their consumers. Down a chain of levels
    that turns linear work into quadratic. A conditional whose outcome only the running program
    knows keeps every level's results in memory, computed once.
    """

    def __init__(self, keep: Array):
        self.always = keep.ravel()[0] >= 0

    def __call__(self, function, *args):
        shapes = jax.eval_shape(function, *args)

        def never(*_):
            return jax.tree.map(lambda y: jnp.full(y.shape, jnp.nan, y.dtype), shapes)

        return lax.cond(self.always, function, never, *args)


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


def attend_ungated(
    start: Matrix, q: Outer, k: Outer, v: Float[Array, "T H V"], resets: Bool[Array, " T"],
    *, epsilon: float,
) -> tuple[Matrix, Float[Array, "T H V"]]:  # fmt: skip
    """Algorithm 2 in chunks: nothing decays, so a mask of who sees whom is all there is."""

    @jax.checkpoint
    def one(state: Matrix, x: tuple[Outer, Outer, Array, Array]) -> tuple[Matrix, Array]:
        q, k, v, resets = x
        q, k = q.expand(), k.expand()
        episode = jnp.cumsum(resets)
        time = jnp.arange(v.shape[0])
        seen = (episode[:, None] == episode) & (time[:, None] >= time)
        fresh, last = (episode == 0).astype(v.dtype), (episode == episode[-1]).astype(v.dtype)
        scores = jnp.where(seen, jnp.einsum("thk,jhk->htj", q, k), 0)
        top = jnp.einsum("htj,jhv->thv", scores, v)
        bottom = scores.sum(-1).T
        old = q * fresh[:, None, None]
        top = top + jnp.einsum("thk,hvk->thv", old, state.C)
        bottom = bottom + jnp.einsum("thk,hk->th", old, state.s)
        keep = episode[-1] == 0
        new = k * last[:, None, None]
        C = jnp.where(keep, state.C, 0) + jnp.einsum("thv,thk->hvk", v, new)
        s = jnp.where(keep, state.s, 0) + new.sum(0)
        return Matrix(C, s), top / (bottom + epsilon)[..., None]

    chunks, steps = into_chunks((q, k, v, resets), CHUNK)
    state, out = lax.scan(one, start, chunks)
    return state, out_of_chunks(out, steps)
