"""The paper's recurrences as plain numpy loops in float64, which `agalite.ops` is compared with.

One sequence and one head each: q, k, gamma (T, K); v, beta (T, V); resets (T,). Written from the
paper's equations and nothing of ours, with neither folding nor chunks nor a stored phase. Where
gates may be None they are off: nothing decays and everything is written whole.

`resets[n]` means that an episode begins with input n: the state is zeroed before it, and t counts
from 1 again. All divisions by s . q have EPSILON added, which the paper leaves out.
"""

import math

import numpy as np

EPSILON = 1e-5


def per_head(function, *arrays, states=None, **options):
    """`function` for every head of (T, H, ...) arrays: (list of states, out (T, H, V))."""
    heads = arrays[0].shape[1]
    results = []
    for h in range(heads):
        one = [
            x if x is None or np.ndim(x) < 2 else np.asarray(x, np.float64)[:, h] for x in arrays
        ]
        results.append(function(*one, state=None if states is None else states[h], **options))
    return [state for state, _ in results], np.stack([out for _, out in results], axis=1)


# --- Algorithm 1 and Transformer-XL ---------------------------------------------------------------


def softmax_attention(q, k, v, resets, *, window=None, state=None):
    """Algorithm 1, line 4, causal; query t sees its episode, at most `window` inputs back."""
    out = np.zeros_like(v)
    begin = 0
    for t in range(len(q)):
        if resets[t]:
            begin = t
        first = begin if window is None else max(begin, t - window)
        scores = np.array([q[t] @ k[j] for j in range(first, t + 1)]) / math.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        weights = weights / weights.sum()
        for j in range(first, t + 1):
            out[t] += weights[j - first] * v[j]
    return state, out


def xl_attention(q, k, v, relative, u, w, starts):
    """Dai et al. (2019), Section 3.3, all heads: q (T, H, V), k, v (S, H, V), relative (M+1, H, V).

    score(t, j) = ((q_t + u) . k_j + (q_t + w) . R[t - j]) / sqrt(V), over the window t - M .. t.
    """
    steps, heads, width = q.shape
    before, longest = len(k) - steps, len(relative) - 1
    out = np.zeros((steps, heads, width))
    for n in range(steps):
        t = before + n  # position of the query's own key
        first = max(0, t - longest, starts[n])
        for h in range(heads):
            scores = np.array(
                [
                    (q[n, h] + u[h]) @ k[j, h] + (q[n, h] + w[h]) @ relative[t - j, h]
                    for j in range(first, t + 1)
                ]
            ) / math.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[n, h] = (weights / weights.sum()) @ v[first : t + 1, h]
    return out


# --- Algorithms 2 and 3 ---------------------------------------------------------------------------


def linear_attention(q, k, v, resets, *, state=None):
    """Algorithm 2. state: (C, s)."""
    zero = np.zeros((v.shape[1], q.shape[1])), np.zeros(q.shape[1])
    C, s = zero if state is None else state
    out = np.zeros_like(v)
    for t in range(len(v)):
        if resets[t]:
            C, s = zero
        C = C + np.outer(v[t], k[t])  # line 4
        s = s + k[t]  # line 5
        out[t] = (C @ q[t]) / (s @ q[t] + EPSILON)  # line 6
    return (C, s), out


def galite_attention(q, k, v, beta, gamma, resets, *, decay="paper", state=None):
    """Algorithm 3 (Appendix A), lines 9-11. state: (C, s).

    decay "published": every element of C keeps 1 - beta_v gamma_k, as in the authors' code.
    """
    if beta is None:
        return linear_attention(q, k, v, resets, state=state)
    zero = np.zeros((v.shape[1], q.shape[1])), np.zeros(q.shape[1])
    C, s = zero if state is None else state
    out = np.zeros_like(v)
    for t in range(len(v)):
        if resets[t]:
            C, s = zero
        kept = np.outer(1 - beta[t], 1 - gamma[t])
        if decay == "published":
            kept = 1 - np.outer(beta[t], gamma[t])
        C = kept * C + np.outer(beta[t] * v[t], gamma[t] * k[t])
        s = (1 - gamma[t]) * s + gamma[t] * k[t]
        out[t] = (C @ q[t]) / (s @ q[t] + EPSILON)
    return (C, s), out


# --- Algorithm 4 ----------------------------------------------------------------------------------


def omega(basis, i, r):
    """Paper: Algorithm 4, line 8. Published code: np.linspace(-pi, pi, r + 1)."""
    if basis == "published":
        return float(np.linspace(-math.pi, math.pi, r + 1)[i])
    return 2 * math.pi * i / r


def exact_cosine(basis, i, r, t):
    """cos(omega_i t) for a t of any size: the angle is reduced in Python's integers.

    omega_i is 2 pi i / r in the paper's basis, pi (2 i - r) / r in the published one.
    """
    if basis == "published":
        return math.cos(math.pi * (((2 * i - r) * t) % (2 * r)) / r)
    return math.cos(2 * math.pi * ((i * t) % r) / r)


def agalite_attention(
    q, k, v, beta, gamma, resets, *, r, basis="paper", signs=None, exact=False, state=None
):
    """Algorithm 4 (Appendix C) with its r + 1 vectors and its s. state: (v~, k~, s, t).

    basis "slots": r vectors, step t writes number t mod r, a = sum_m v~_m (k~_m . q) / (s . q).
    basis "rank1": r vectors, step t writes signs(t)[m] times, the sum is averaged over m.
    """
    count = r + 1 if basis in ("paper", "published") else r
    zero = np.zeros((count, v.shape[1])), np.zeros((count, q.shape[1])), np.zeros(q.shape[1]), 0
    v_sum, k_sum, s, t = zero if state is None else state
    out = np.zeros_like(v)
    for n in range(len(v)):
        if resets[n]:
            v_sum, k_sum, s, t = zero
        t = t + 1
        v_sum, k_sum = v_sum.copy(), k_sum.copy()
        decay_v, write_v = (1, v[n]) if beta is None else (1 - beta[n], beta[n] * v[n])
        decay_k, write_k = (1, k[n]) if gamma is None else (1 - gamma[n], gamma[n] * k[n])
        a = np.zeros(v.shape[1])
        for i in range(count):
            if basis == "slots":
                c = float(t % r == i)
            elif basis == "rank1":
                c = float(signs(t)[i])
            else:
                c = exact_cosine(basis, i, r, t) if exact else math.cos(omega(basis, i, r) * t)
            v_sum[i] = v_sum[i] * decay_v + c * write_v  # line 9
            k_sum[i] = k_sum[i] * decay_k + c * write_k  # line 10
            a = a + v_sum[i] * (k_sum[i] @ q[n])  # line 13
        s = decay_k * s + write_k  # line 12
        times = {"paper": 2 * r, "published": 2 * (r + 1), "slots": 1, "rank1": r}[basis]
        # line 14: b = 2 r (s . q); EPSILON belongs to s . q alone where the sum is a plain mean.
        b = times * (s @ q[n] + EPSILON) if basis == "rank1" else times * (s @ q[n]) + EPSILON
        out[n] = a / b  # line 15
    return (v_sum, k_sum, s, t), out


def delta(m, n, r):
    """Equation for delta^_mn in Section 4 (and Appendix B.1)."""
    return (2 / r) * sum(
        math.cos(2 * math.pi * i / r * m) * math.cos(2 * math.pi * i / r * n) for i in range(r + 1)
    )


# --- the recurrence under all of them -------------------------------------------------------------


def linear_recurrence(decay, write, initial=None, resets=None):
    """h_t = decay_t * h_{t-1} + write_t."""
    h = np.zeros(decay.shape[1:]) if initial is None else initial
    path = []
    for t in range(len(decay)):
        if resets is not None and resets[t]:
            h = np.zeros_like(h)
        h = decay[t] * h + write[t]
        path.append(h)
    return np.stack(path)
