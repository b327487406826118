"""GaLiTe's attention (Algorithm 3) without a matrix per time step; and the ungated Algorithm 2.

C_t q_t = sum_j (decayed beta_j v_j) (decayed gamma_j k_j . q_t): every pair (j, t) needs the
product of the decays between j and t, which differs in every channel. Dividing cumulative products
would overflow; instead each pair goes through a boundary b with j <= b < t, as (decay from b to t)
times (decay from j to b), both products of numbers in [0, 1] and safe whatever the gates. A binary
tree supplies the boundaries: at level s, blocks of s steps are joined in pairs, and the right half
reads what the left half wrote through one small matrix product. Above the tree, chunks of `CHUNK`
steps pass on C and s.

Inside the tree chunks know nothing of each other, so all chunks of a few lanes go through it at
once; groups of lanes, and segments of a long sequence, take turns. The gradient keeps the scores of
the small products and what was read, and rebuilds everything else, the states between chunks too.
What is kept grows as T * (CHUNK + V) a lane; the group at work needs K + V * K / CHUNK for each
step of a segment of each of its lanes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from agalite.ops.features import Outer
from agalite.ops.galite_tree import (
    Blocks,
    Inputs,
    Read,
    base,
    base_gradient,
    join,
    join_gradient,
    join_read,
    levels,
    transposed,
)
from agalite.ops.lanes import batched_as_lanes, into_chunks, out_of_chunks, pad_time
from agalite.ops.wall import wall

CHUNK = 64
_UNGATED_CHUNK = 32
_SEGMENT = 256  # steps of which all chunks are taken at once; longer sequences come in several
_GROUP_BYTES = 2**20  # of one K-wide array: as many lanes at a time as the caches hold


class Matrix(NamedTuple):
    C: Float[Array, "H V K"]
    s: Float[Array, "H K"]


class _Kept(NamedTuple):
    """What the gradient needs besides the inputs; N chunks of t steps in each lane.

    scores: of every level; old: what was read from the state before the chunk. Between forward and
    gradient the first axis is (H, N), inside a group it is (L * N).
    """

    scores: tuple[Array, ...]
    old: Float[Array, "*N t V"]
    out: Float[Array, "*N t V"]
    bottom: Float[Array, "*N t"]


def attend(epsilon: float, start: Matrix, inputs: Inputs) -> tuple[Matrix, Array]:
    """Returns the last state and out (T, H, V).

    The first axis of `start` and the second of `inputs` are lanes: heads, and under `vmap` the
    batch too.
    """
    steps = inputs.v.shape[0]
    if steps <= _SEGMENT:
        return _attend(epsilon, start, inputs)
    segments, _ = into_chunks(inputs, _SEGMENT)
    last, out = lax.scan(partial(_attend, epsilon), start, segments)
    return last, out_of_chunks(out, steps)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(epsilon: float, start: Matrix, inputs: Inputs) -> tuple[Matrix, Array]:
    return _attend_fwd(epsilon, start, inputs)[0]


def _attend_fwd(epsilon: float, start: Matrix, inputs: Inputs):
    def forward(start: Matrix, inputs: Inputs):
        groups = _Groups(inputs)
        last, out, (scores, old, bottom) = lax.map(
            lambda group: _group(epsilon, *group), (groups.lanes(start), groups.chunks(inputs))
        )
        kept = _Kept(scores, old, out, bottom)
        return groups.merge(last), groups.in_time(out), groups.by_lane(kept)

    forward = batched_as_lanes(forward, (0, 1), (0, 1, 0))
    last, out, kept = forward(start, inputs)
    return (last, out), (start, inputs, kept)


def _attend_bwd(_: float, saved: tuple[Matrix, Inputs, _Kept], cotangents: tuple[Matrix, Array]):
    def backward(dlast: Matrix, start: Matrix, inputs: Inputs, kept: _Kept, dout: Array):
        groups = _Groups(inputs)
        args = (groups.lanes((dlast, start)), groups.chunks(inputs), groups.by_group(kept))
        dstart, dinputs = lax.map(
            lambda group: _group_gradient(*group[0], *group[1:]), (*args, groups.chunks(dout))
        )
        return groups.merge(dstart), groups.in_time(dinputs)

    backward = batched_as_lanes(backward, (0, 0, 1, 0, 1), (0, 1))
    return backward(cotangents[0], *saved, cotangents[1])


_attend.defvjp(_attend_fwd, _attend_bwd)


class _Groups:
    """Lanes in groups of `size` that take turns, time in chunks of `chunk` steps."""

    def __init__(self, inputs: Inputs):
        self.steps, count = inputs.v.shape[:2]
        self.chunk = min(CHUNK, 1 << (self.steps - 1).bit_length())
        width = inputs.q.narrow.shape[-1] * inputs.q.wide.shape[-1]
        most = _GROUP_BYTES // (self.steps * width * inputs.v.dtype.itemsize)
        self.size = max(n for n in range(1, count + 1) if count % n == 0 and n <= max(most, 1))

    def chunks(self, x: Any) -> Any:
        """(T, H, ...) -> (G, L * N, t, ...): group, lane and chunk, step."""

        def one(x: Array) -> Array:
            x = jnp.moveaxis(x, 1, 0)  # while still narrow, and once
            return x.reshape(x.shape[0] // self.size, -1, self.chunk, *x.shape[2:])

        return jax.tree.map(one, pad_time(x, self.chunk)[0])

    def in_time(self, x: Any) -> Any:
        """(G, L * N, t, ...) -> (T, H, ...)."""

        def one(x: Array) -> Array:
            x = x.reshape(x.shape[0] * self.size, -1, *x.shape[3:])
            return jnp.moveaxis(x, 0, 1)[: self.steps]

        return jax.tree.map(one, x)

    def lanes(self, x: Any) -> Any:
        """(H, ...) -> (G, L, ...)."""
        return jax.tree.map(lambda y: y.reshape(-1, self.size, *y.shape[1:]), x)

    def merge(self, x: Any) -> Any:
        """(G, L, ...) -> (H, ...)."""
        return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), x)

    def by_lane(self, kept: Any) -> Any:
        """(G, L * N, ...) -> (H, N, ...)."""
        return jax.tree.map(lambda y: y.reshape(y.shape[0] * self.size, -1, *y.shape[2:]), kept)

    def by_group(self, kept: Any) -> Any:
        """(H, N, ...) -> (G, L * N, ...)."""
        return jax.tree.map(lambda y: y.reshape(y.shape[0] // self.size, -1, *y.shape[2:]), kept)


def _group(epsilon: float, start: Matrix, x: Inputs):
    """The last state, what was read (L * N, t, V), and what the gradient needs besides."""
    blocks, read, scores = wall(base, x)
    for size in levels(x.keep.shape[1])[1]:
        blocks, read, level = wall(partial(join_read, size), blocks, read)
        scores = (*scores, level)
    last, found = _pass_on(blocks, wall(_written, blocks), start, reverse=False)
    old, out, bottom = wall(partial(_read_state, epsilon), found, blocks, read)
    return last, out, (scores, old, bottom)


def _group_gradient(
    dlast: Matrix, start: Matrix, x: Inputs, kept: _Kept, dout: Float[Array, "LN t V"]
) -> tuple[Matrix, Inputs]:
    low, above = levels(x.keep.shape[1])
    path = [wall(lambda x: base(x)[0], x)]
    for size in above:
        path.append(wall(partial(join, size), path[-1]))
    whole = path.pop()
    _, found = _pass_on(whole, wall(_written, whole), start, reverse=False)
    dread, dold, dfound = wall(_read_gradient, whole, kept, dout)
    dstart, dleft = _pass_on(whole, dfound, dlast, reverse=True)
    d = wall(_read_state_gradient, found, dleft, kept.old, whole, dread, dold)
    for size, scores in zip(reversed(above), reversed(kept.scores[len(low) :]), strict=True):
        d = wall(partial(join_gradient, size), path.pop(), scores, d, dread)
    return dstart, wall(base_gradient, x, kept.scores[: len(low)], d, dread)


def _written(b: Blocks) -> Matrix:
    """What each chunk adds to C and s."""
    return Matrix(jnp.einsum("hvt,htk->hvk", transposed(b.write_v), b.write_k), b.write_k.sum(1))


def _pass_on(b: Blocks, added: Matrix, start: Matrix, *, reverse: bool) -> tuple[Matrix, Matrix]:
    """From chunk to chunk of every lane: decay, and add. The last state, and what each found."""
    lanes = start.s.shape[0]
    decayed = (added, b.total_k[:, 0], b.total_v[:, 0])
    xs = jax.tree.map(lambda y: y.reshape(lanes, -1, *y.shape[1:]), decayed)
    count = xs[1].shape[1]

    def one(i: Array, carry: tuple[Matrix, Matrix]) -> tuple[Matrix, Matrix]:
        state, found = carry
        n = count - 1 - i if reverse else i
        here: Any = jax.tree.map(lambda y: lax.dynamic_index_in_dim(y, n, 1, keepdims=False), xs)
        added, total_k, total_v = here
        found = jax.tree.map(lambda y, z: lax.dynamic_update_index_in_dim(y, z, n, 1), found, state)
        C = total_v[:, :, None] * total_k[:, None] * state.C + added.C
        return Matrix(C, total_k * state.s + added.s), found

    last, found = lax.fori_loop(0, count, one, (start, jax.tree.map(jnp.zeros_like, xs[0])))
    return last, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), found)


def _read_state(epsilon: float, found: Matrix, b: Blocks, read: Read):
    """Every chunk is one block now: read what came before it."""
    old = jnp.einsum("htk,hvk->htv", b.q, found.C)
    bottom = read.bottom + jnp.einsum("htk,hk->ht", b.q, found.s) + epsilon
    out = (read.top + b.seen_v * old) / bottom[..., None]
    return old, out, bottom


def _read_gradient(
    b: Blocks, kept: _Kept, dout: Float[Array, "LN t V"]
) -> tuple[Read, Array, Matrix]:
    """Gradients of what was read, of `old`, and of the state that each chunk found, by reading."""
    dtop = dout / kept.bottom[..., None]
    dbottom = -(dtop * kept.out).sum(-1)
    dold = dtop * b.seen_v
    dC = jnp.einsum("hvt,htk->hvk", transposed(dold), b.q)
    return Read(dtop, dbottom), dold, Matrix(dC, jnp.einsum("ht,htk->hk", dbottom, b.q))


def _read_state_gradient(
    found: Matrix, dleft: Matrix, old: Array, b: Blocks, dread: Read, dold: Array
) -> Blocks:
    """dleft: the gradient of the state that each chunk left behind."""
    through = dleft.C * found.C
    total_k = jnp.einsum("hvk,hv->hk", through, b.total_v[:, 0]) + dleft.s * found.s
    dq = jnp.einsum("htv,hvk->htk", dold, found.C)
    return Blocks(
        q=dq + dread.bottom[..., None] * found.s[:, None],
        write_k=jnp.einsum("htv,hvk->htk", b.write_v, dleft.C) + dleft.s[:, None],
        write_v=jnp.einsum("htk,hvk->htv", b.write_k, dleft.C),
        seen_v=dread.top * old,
        total_k=total_k[:, None],
        total_v=jnp.einsum("hvk,hk->hv", through, b.total_k[:, 0])[:, None],
    )


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

    chunks, steps = into_chunks((q, k, v, resets), _UNGATED_CHUNK)
    state, out = lax.scan(one, start, chunks)
    return state, out_of_chunks(out, steps)
