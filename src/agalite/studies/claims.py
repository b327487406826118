"""Verdicts on the paper's claims.

A test compares means over seeds. It holds if the whole 95% bootstrap interval is on its side, fails
if the whole interval is on the other side, and is undecided otherwise. Two sides that both reach
the best value there is, or both have learned nothing, are not separated.
"""

from dataclasses import dataclass

import numpy as np

from agalite.studies._wording import join_words
from agalite.studies.declaration import Alike, Between, Claim, Levels, Ratio, Test
from agalite.studies.results import Results
from agalite.studies.statistics import (
    difference_interval,
    probability_of_improvement,
    ratio_interval,
    summarise,
)

AGREES, DISAGREES, UNDECIDED = "agrees", "disagrees", "undecided"
NOT_SEPARATED = "not separated here"
NOT_TESTED = "not tested at this scale"
_NEAR = 0.02  # of the range between the limits of a metric


@dataclass(frozen=True)
class Verdict:
    """What the results say about one claim."""

    claim: Claim
    measured: tuple[str, ...]
    """A sentence per test: both sides, the comparison and the limits tested."""
    word: str
    """agrees, disagrees, undecided, not separated here or not tested at this scale."""
    why: str = ""
    """Why it is not tested."""


def judge(results: Results) -> list[Verdict]:
    """A verdict on every claim of a study."""
    return [_judge(results, claim) for claim in results.study.claims]


def _judge(results: Results, claim: Claim) -> Verdict:
    compared = [_compare(results, test) for test in claim.tests]
    measured = tuple(words for words, _ in compared)
    if not claim.tests:
        return Verdict(claim, (), NOT_TESTED, "see the figure")
    if results.scale not in claim.scales:
        return Verdict(claim, measured, NOT_TESTED, f"it is about {_scales(claim.scales)}")
    words = [word for _, word in compared]
    if NOT_TESTED in words:
        return Verdict(claim, measured, NOT_TESTED, "trials are missing, or have one seed")
    word = next((w for w in (DISAGREES, UNDECIDED, NOT_SEPARATED) if w in words), AGREES)
    return Verdict(claim, measured, word)


def _compare(results: Results, test: Test) -> tuple[str, str]:
    """What was measured, as a sentence, and the verdict of one test."""
    metric = results.study.metric(test.metric)
    a = _finite(results.values(test.a, metric.column))
    if isinstance(test, Between):
        if not len(a):
            return _side(results, test.a, a), NOT_TESTED
        s = summarise(a)
        words = f"{_side(results, test.a, a)}; tested: {_limits(test.low, test.high)}"
        return words, _within(s.low, s.high, test.low, test.high, metric.exact or len(a) > 1)
    b = _finite(results.values(test.b, metric.column))
    words = f"{_side(results, test.a, a)}, {_side(results, test.b, b)}"
    if not len(a) or not len(b):
        return words, NOT_TESTED
    enough = metric.exact or (len(a) > 1 and len(b) > 1)
    if isinstance(test, Ratio):
        low, high = ratio_interval(a, b)
        words += f"; ratio {a.mean() / b.mean():.4g}; tested: {_limits(test.low, test.high)}"
        return words, _within(low, high, test.low, test.high, enough)
    low, high = difference_interval(a, b)
    words += f"; difference {a.mean() - b.mean():+.3g} ({low:.3g} to {high:.3g})"
    if enough and _same_limit(metric.limits, a.mean(), b.mean()):
        return words, NOT_SEPARATED
    if isinstance(test, Alike):
        words += f"; tested: less than {test.within:g} apart"
        return words, _within(low, high, -test.within, test.within, enough)
    p = probability_of_improvement(a, b)
    better = p if metric.higher_is_better else 1 - p
    words += f"; probability of improvement {better:.2f}"
    if not metric.higher_is_better:
        low, high = -high, -low
    if not enough:
        return words, NOT_TESTED
    if low > test.margin:
        return words, AGREES
    return words, DISAGREES if high < test.margin else UNDECIDED


def _same_limit(limits: tuple[float, float] | None, a: float, b: float) -> bool:
    """Whether both means are within 2% of the range from the same limit."""
    if limits is None:
        return False
    near = _NEAR * abs(limits[1] - limits[0])
    return any(abs(a - limit) <= near and abs(b - limit) <= near for limit in limits)


def _within(low: float, high: float, least: float, most: float, enough: bool) -> str:
    if not enough:
        return NOT_TESTED
    if least <= low and high <= most:
        return AGREES
    return DISAGREES if high < least or low > most else UNDECIDED


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _side(results: Results, levels: Levels, values: np.ndarray) -> str:
    """One side of a comparison: its mean, or why there is none."""
    if len(values):
        return f"{_name(levels)}: {_number(values)}"
    declared = results.study.labels_at(results.scale)
    for factor, wanted in levels.items():
        allowed = {wanted} if isinstance(wanted, str) else set(wanted)
        # Measurements add levels that are not declared.
        if factor in declared and not allowed & set(declared[factor]):
            return f"{_name(levels)}: not part of this scale"
    return f"{_name(levels)}: nothing finished"


def _scales(names: tuple[str, ...]) -> str:
    return f"scale {names[0]}" if len(names) == 1 else f"the scales {join_words(names)}"


def _limits(low: float, high: float) -> str:
    return f"at least {low:.4g}" if high == np.inf else f"{low:.4g} to {high:.4g}"


def _name(levels: Levels) -> str:
    return " ".join("/".join((v,) if isinstance(v, str) else v) for v in levels.values())


def _number(values: np.ndarray) -> str:
    s = summarise(values)
    return f"{s.mean:.4g}" + (f" ({s.low:.3g} to {s.high:.3g})" if s.seeds > 1 else "")
