"""GaLiTe's attention (Algorithm 3) as matrix products over chunks of time, in XLA.

No matrix per time step is formed. C_t q_t = sum_j (decayed beta_j v_j) (decayed gamma_j k_j . q_t):
every pair (j, t) needs the product of the decays between j and t, which differs in every channel.
Dividing cumulative products would overflow. Instead each pair goes through a boundary b with j <= b
< t, as (decay from b to t) times (decay from j to b): both are products of numbers in [0, 1] and
safe whatever the gates. A binary tree supplies the boundaries: at level s, blocks of s steps are
joined in pairs, and the right half reads what the left half wrote through one small matrix product.
Above the tree, chunks of `CHUNK` steps pass on C and s.

Inside the tree chunks are independent, so all chunks of a group of lanes go through it at once;
groups of lanes, and segments of a long sequence, come one after another. Lanes are heads, and under
`vmap` heads times batch. The gradients are custom: they keep the scores of the small products and
what was read, and rebuild everything else. What is kept grows as T * (CHUNK + V) per lane; the
group at work needs K + V * K / CHUNK for each step of a segment of each of its lanes.

The file has three parts: the entry points, what happens to a group of lanes, and the tree.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from agalite.ops._batching import batched_as_lanes, into_chunks, out_of_chunks, pad_time
from agalite.ops.barriers import fusion_barrier
from agalite.ops.features import Outer
from agalite.ops.linear import MatrixState

CHUNK = 64
_SEGMENT = 256  # steps of which all chunks are taken at once; longer sequences come in several
_GROUP_BYTES = 2**20  # of one K-wide array: as many lanes at a time as the caches hold
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
    """Chunks divided into N blocks; the first axis counts the chunks of all lanes of a group.

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

    numerator: Float[Array, "H T V"]
    denominator: Float[Array, "H T"]


class _Kept(NamedTuple):
    """What the gradient needs besides the inputs; N chunks of t steps in each lane.

    scores: of every level; old: what was read from the state before the chunk. Between forward and
    gradient the first axis is (H, N), inside a group it is (L * N).
    """

    scores: tuple[Array, ...]
    old: Float[Array, "*N t V"]
    out: Float[Array, "*N t V"]
    denominator: Float[Array, "*N t"]


def attend(epsilon: float, start: MatrixState, inputs: Inputs) -> tuple[MatrixState, Array]:
    """The last state and the outputs (T, H, V)."""
    steps = inputs.v.shape[0]
    if steps <= _SEGMENT:
        return _attend(epsilon, start, inputs)
    segments, _ = into_chunks(inputs, _SEGMENT)
    last, out = lax.scan(partial(_attend, epsilon), start, segments)
    return last, out_of_chunks(out, steps)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(epsilon: float, start: MatrixState, inputs: Inputs) -> tuple[MatrixState, Array]:
    return _attend_fwd(epsilon, start, inputs)[0]


def _attend_fwd(epsilon: float, start: MatrixState, inputs: Inputs):
    def forward(start: MatrixState, inputs: Inputs):
        groups = _Groups(inputs)
        last, out, (scores, old, denominator) = lax.map(
            lambda group: _group(epsilon, *group), (groups.lanes(start), groups.chunks(inputs))
        )
        kept = _Kept(scores, old, out, denominator)
        return groups.merge(last), groups.in_time(out), groups.by_lane(kept)

    forward = batched_as_lanes(forward, (0, 1), (0, 1, 0))
    last, out, kept = forward(start, inputs)
    return (last, out), (start, inputs, kept)


def _attend_bwd(
    _: float, saved: tuple[MatrixState, Inputs, _Kept], cotangents: tuple[MatrixState, Array]
):
    def backward(dlast: MatrixState, start: MatrixState, inputs: Inputs, kept: _Kept, dout: Array):
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
    """Lanes in groups of `size`, processed one after another; time in chunks of `chunk` steps."""

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


def _group(epsilon: float, start: MatrixState, x: Inputs):
    """The last state, what was read (L * N, t, V), and what the gradient needs besides."""
    blocks, read, scores = fusion_barrier(base, x)
    for size in levels(x.keep.shape[1])[1]:
        blocks, read, level = fusion_barrier(partial(join_read, size), blocks, read)
        scores = (*scores, level)
    last, found = _pass_on(blocks, fusion_barrier(_written, blocks), start, reverse=False)
    old, out, denominator = fusion_barrier(partial(_read_state, epsilon), found, blocks, read)
    return last, out, (scores, old, denominator)


def _group_gradient(
    dlast: MatrixState, start: MatrixState, x: Inputs, kept: _Kept, dout: Float[Array, "LN t V"]
) -> tuple[MatrixState, Inputs]:
    low, above = levels(x.keep.shape[1])
    path = [fusion_barrier(lambda x: base(x)[0], x)]
    for size in above:
        path.append(fusion_barrier(partial(join, size), path[-1]))
    whole = path.pop()
    _, found = _pass_on(whole, fusion_barrier(_written, whole), start, reverse=False)
    dread, dold, dfound = fusion_barrier(_read_gradient, whole, kept, dout)
    dstart, dleft = _pass_on(whole, dfound, dlast, reverse=True)
    d = fusion_barrier(_read_state_gradient, found, dleft, kept.old, whole, dread, dold)
    for size, scores in zip(reversed(above), reversed(kept.scores[len(low) :]), strict=True):
        d = fusion_barrier(partial(join_gradient, size), path.pop(), scores, d, dread)
    return dstart, fusion_barrier(base_gradient, x, kept.scores[: len(low)], d, dread)


def _written(b: Blocks) -> MatrixState:
    """What each chunk adds to C and s."""
    return MatrixState(
        jnp.einsum("hvt,htk->hvk", transposed(b.write_v), b.write_k), b.write_k.sum(1)
    )


def _pass_on(
    b: Blocks, added: MatrixState, start: MatrixState, *, reverse: bool
) -> tuple[MatrixState, MatrixState]:
    """From chunk to chunk of every lane: decay, and add. The last state, and what each found."""
    lanes = start.s.shape[0]
    decayed = (added, b.total_k[:, 0], b.total_v[:, 0])
    xs = jax.tree.map(lambda y: y.reshape(lanes, -1, *y.shape[1:]), decayed)
    count = xs[1].shape[1]

    def one(i: Array, carry: tuple[MatrixState, MatrixState]) -> tuple[MatrixState, MatrixState]:
        state, found = carry
        n = count - 1 - i if reverse else i
        here: Any = jax.tree.map(lambda y: lax.dynamic_index_in_dim(y, n, 1, keepdims=False), xs)
        added, total_k, total_v = here
        found = jax.tree.map(lambda y, z: lax.dynamic_update_index_in_dim(y, z, n, 1), found, state)
        C = total_v[:, :, None] * total_k[:, None] * state.C + added.C
        return MatrixState(C, total_k * state.s + added.s), found

    last, found = lax.fori_loop(0, count, one, (start, jax.tree.map(jnp.zeros_like, xs[0])))
    return last, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), found)


def _read_state(epsilon: float, found: MatrixState, b: Blocks, read: Read):
    """At this level a chunk is one block: read what came before it."""
    old = jnp.einsum("htk,hvk->htv", b.q, found.C)
    denominator = read.denominator + jnp.einsum("htk,hk->ht", b.q, found.s) + epsilon
    out = (read.numerator + b.seen_v * old) / denominator[..., None]
    return old, out, denominator


def _read_gradient(
    b: Blocks, kept: _Kept, dout: Float[Array, "LN t V"]
) -> tuple[Read, Array, MatrixState]:
    """Gradients of what was read, of `old`, and of the state that each chunk found, by reading."""
    dnumerator = dout / kept.denominator[..., None]
    ddenominator = -(dnumerator * kept.out).sum(-1)
    dold = dnumerator * b.seen_v
    dC = jnp.einsum("hvt,htk->hvk", transposed(dold), b.q)
    ds = jnp.einsum("ht,htk->hk", ddenominator, b.q)
    return Read(dnumerator, ddenominator), dold, MatrixState(dC, ds)


def _read_state_gradient(
    found: MatrixState, dleft: MatrixState, old: Array, b: Blocks, dread: Read, dold: Array
) -> Blocks:
    """dleft: the gradient of the state that each chunk left behind."""
    through = dleft.C * found.C
    total_k = jnp.einsum("hvk,hv->hk", through, b.total_v[:, 0]) + dleft.s * found.s
    dq = jnp.einsum("htv,hvk->htk", dold, found.C)
    return Blocks(
        q=dq + dread.denominator[..., None] * found.s[:, None],
        write_k=jnp.einsum("htv,hvk->htk", b.write_v, dleft.C) + dleft.s[:, None],
        write_v=jnp.einsum("htk,hvk->htv", b.write_k, dleft.C),
        seen_v=dread.numerator * old,
        total_k=total_k[:, None],
        total_v=jnp.einsum("hvk,hk->hv", through, b.total_k[:, 0])[:, None],
    )


# --- the tree: blocks of steps, joined in pairs ---------------------------------------------------
# Every function takes all chunks of a group of lanes at once, as one first axis.


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
    dq, dk, dgamma = own_gradient(dread.denominator + (dread.numerator * x.beta * x.v).sum(-1))
    dq_read = _outer_gradient(x.q, d.q * keep * (1 - x.gamma.expand()))
    dgamma_lost = _outer_gradient(x.gamma, -keep * (d.q * x.q.expand() + d.total_k))
    dwrite_k = _outer_gradient(_write(x.k, x.gamma), d.write_k)
    dwrite_v = d.write_v + own[..., None] * dread.numerator

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
        read.numerator + _place(seen_v[:, :, 1] * values, 1, time),
        read.denominator + _place(scores.sum(-1), 1, time),
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
    dnumerator, ddenominator = (_pair(y, size)[:, :, 1] for y in dread)
    left_k, right_k = _sides(b.total_k)
    left_v, right_v = _sides(b.total_v)

    values = jnp.einsum("hptj,hpjv->hptv", scores, write_v[:, :, 0])
    dvalues = dnumerator * seen_v[:, :, 1]
    dscores = jnp.einsum("hptv,hpjv->hptj", dvalues, write_v[:, :, 0]) + ddenominator[..., None]
    dscores_t = jnp.einsum("hpjv,hptv->hpjt", write_v[:, :, 0], dvalues) + ddenominator[:, :, None]
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
        seen_v=_scale(dseen_v, left_v, 1, time) + _place(dnumerator * values, 1, time),
        total_k=total(
            jnp.einsum("hptk,hptk->hpk", dq[:, :, 1], q[:, :, 1]),
            jnp.einsum("hptk,hptk->hpk", dwrite_k[:, :, 0], write_k[:, :, 0]),
            d.total_k,
            left_k,
            right_k,
        ),
        total_v=total(
            jnp.einsum("hptv,hptv->hpv", dseen_v[:, :, 1], seen_v[:, :, 1]),
            jnp.einsum("hptv,hptv->hpv", dwrite_v[:, :, 0], write_v[:, :, 0]),
            d.total_v,
            left_v,
            right_v,
        ),
    )


def transposed(y: Float[Array, "... A B"]) -> Float[Array, "... B A"]:
    """The transpose, kept: a product that sums over the rows of both factors is slow in XLA, and it
    would make one of any product with a transpose that it sees (docs/performance.md)."""
    return fusion_barrier(lambda y: jnp.swapaxes(y, -1, -2), y)


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
