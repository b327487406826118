"""How sure a mean is."""

import numpy as np
from jaxtyping import Float

from agalite import errors

_AT_ONCE = 2**20  # resampled values held in memory at a time


def bootstrap_interval(
    values: Float[np.ndarray, "N ..."],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """values (N, ...) -> low (...), high (...): where the mean over the N lies.

    The percentile bootstrap: the N samples are drawn anew with replacement, whole rows at a time,
    and the interval holds the middle of the means so found. With one sample it has no width; with a
    handful it is too narrow, as any interval is that sees nothing but the samples.
    """
    values = np.asarray(values, np.float64)
    if values.ndim == 0 or len(values) == 0:
        raise ValueError(f"values has shape {values.shape}; expected at least one sample")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must be between 0 and 1")
    errors.integer("resamples", resamples, minimum=1)
    errors.finite("values", values)
    count, rows = len(values), values.reshape(len(values), -1)
    rng = np.random.default_rng(seed)
    share = np.full(count, 1 / count)
    # How often each sample is drawn is all that a mean needs to know, and it makes the means one
    # matrix product. Around the centre, so that equal samples have an interval of no width.
    centre = rows.mean(0)
    step = max(1, _AT_ONCE // count)
    means = [
        rng.multinomial(count, share, size=min(step, resamples - i)) @ (rows - centre) / count
        for i in range(0, resamples, step)
    ]
    tail = (1 - confidence) / 2
    low, high = centre + np.quantile(np.concatenate(means), (tail, 1 - tail), axis=0)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])
