"""What a sweep chooses: the settings with the best mean of the metric."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from agalite.studies.results import Results


@dataclass(frozen=True)
class Choice:
    within: dict[str, str]
    chosen: dict[str, str]
    mean: float
    settings: dict[str, Any]
    """What the chosen levels stand for: {"agent.learning_rate": 0.0005, ...}."""
    of: int
    """How many were compared."""


def choose(results: Results) -> list[Choice]:
    """For each combination of the levels `within`: the best of `choose`, by the mean over all other
    factors and seeds. A seed without any finished episode makes a setting the last to be chosen."""
    rule = results.study.selection
    if rule is None:
        return []
    metric = results.study.metrics[0]
    factors = {factor.name: factor for factor in results.study.factors_at(results.scale)}
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[float]]] = {}
    for point in results.points:
        if metric.column not in point.values:
            continue
        group = tuple(point.levels[name] for name in rule.within)
        candidate = tuple(point.levels[name] for name in rule.choose)
        mean = float(np.mean(point.values[metric.column]))
        groups.setdefault(group, {}).setdefault(candidate, []).append(mean)
    sign = 1 if metric.higher else -1
    out = []
    for group, candidates in groups.items():
        scores = {key: float(np.mean(values)) for key, values in candidates.items()}
        # NaN compares with nothing: it is the worst there is.
        best = max(scores, key=lambda key: sign * scores[key] if scores[key] == scores[key]
                   else -np.inf)  # fmt: skip
        chosen = dict(zip(rule.choose, best, strict=True))
        settings: dict[str, Any] = {}
        for name, label in chosen.items():
            settings.update(factors[name].levels[label])
        out.append(
            Choice(
                dict(zip(rule.within, group, strict=True)), chosen, scores[best], settings,
                len(scores),
            )
        )  # fmt: skip
    return out
