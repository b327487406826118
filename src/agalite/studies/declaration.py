"""What a study is: a declaration, and nothing else. How to run and report it is shared by all.

A study varies *factors* over a *base*, at one of three *scales*. A combination of levels is a
setting; a setting with its seeds is a trial. Settings are written flat, "memory_options.eta": 8.
Nothing heavy is imported here: `agalite study list` should answer at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agalite import validation

SCALES = ("smoke", "cpu", "paper")

Changes = Mapping[str, Any]
"""Settings by name: "total_timesteps", "agent.ent_coef", "memory_options.eta"."""


@dataclass(frozen=True)
class Factor:
    """What varies: each level has a label and the settings that make it.

    Two that depend on each other are one factor, "basis/vectors" with levels like "slots/2"; in
    figures and on the command line they are two.
    """

    name: str
    levels: Mapping[str, Changes]

    def split(self, label: str) -> dict[str, str]:
        """{"basis": "slots", "vectors": "2"}."""
        return dict(zip(self.name.split("/"), label.split("/"), strict=True))


def over(name: str, setting: str, values: tuple[Any, ...]) -> Factor:
    """A factor that is one setting with several values."""
    return Factor(
        name, {f"{value:g}" if _real(value) else str(value): {setting: value} for value in values}
    )


def _real(value: Any) -> bool:
    return isinstance(value, float)


@dataclass(frozen=True)
class Training:
    """Trials are runs of `agalite train`; the base names an environment ("env")."""

    preset: str = "paper"


@dataclass(frozen=True)
class Supervised:
    """Trials are runs of `agalite lra`; the base names a task ("task")."""

    preset: str = "paper"


@dataclass(frozen=True)
class Measurement:
    """Trials call a function with the settings (and `seeds`) as arguments, by name.

    It returns rows: {"levels": {name: label}, "values": {metric: [one number a repetition]}}.
    """

    function: str
    """module:function."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    seeds: int = 1
    together: int | None = None
    """Seeds in one run, and so in one compiled program; None: all of them."""
    changes: Changes = field(default_factory=dict)
    size: str = "paper"
    """Of the models: paper, small or tiny (`sizes.py`)."""
    factors: tuple[Factor, ...] = ()
    """Instead of the study's factors of the same names."""
    note: str = ""
    """What differs from the paper, for the report."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    column: str
    """A column of metrics.csv, a list in summary.json ("summary:..."), or a measured value."""
    name: str
    """For people."""
    last: int | None = None
    """Mean over the episodes of so many last steps, though never more than a fifth of the run."""
    higher: bool = True
    """Whether more is better."""
    exact: bool = False
    """A count that is the same every time: one is as good as many."""


@dataclass(frozen=True)
class Selection:
    """The levels of `choose` with the best mean, over all other factors, for each of `within`."""

    choose: tuple[str, ...]
    within: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Against:
    """The metric against a factor: a line for each level of another, perhaps panels for a third."""

    x: str
    lines: str
    panels: str | None = None
    metric: str | None = None
    """A column; the study's first metric if not given."""
    log: bool = False
    """Both axes logarithmic."""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Learning curves: a line for each level, a panel for each level of another factor."""

    lines: str
    panels: str | None = None
    columns: str | None = None
    """Columns of metrics.csv, with * for any text; a panel for each."""
    bins: int = 50
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Map:
    """The metric as colour over two factors, a panel for each level of a third."""

    x: str
    y: str
    panels: str | None = None
    title: str = ""


Figure = Against | Curves | Map

Select = Mapping[str, str | tuple[str, ...]]
"""Levels by factor: the settings that have one of them; their mean where there are several."""


@dataclass(frozen=True, kw_only=True)
class Better:
    """`a` is better than `b`, by `margin` at least."""

    a: Select
    b: Select
    margin: float = 0.0
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Alike:
    """`a` and `b` differ by less than `within`."""

    a: Select
    b: Select
    within: float
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Between:
    """`a` lies between two numbers."""

    a: Select
    low: float
    high: float
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """`a` divided by `b` lies between two numbers."""

    a: Select
    b: Select
    low: float
    high: float
    metric: str | None = None


Test = Better | Alike | Between | Ratio


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the paper, and how our numbers can agree or disagree with it."""

    says: str
    where: str
    tests: tuple[Test, ...] = ()
    """All must hold. Without any, the claim is listed, and a reader judges by the figure."""
    scales: tuple[str, ...] = ("paper",)
    """Where the tests mean what the paper means; elsewhere the numbers are shown, not judged."""


@dataclass(frozen=True, kw_only=True)
class Study:
    name: str
    title: str
    paper: str
    """Where it is in the paper; "ours" if it is not."""
    work: Training | Supervised | Measurement
    factors: tuple[Factor, ...]
    base: Changes = field(default_factory=dict)
    scales: Mapping[str, Scale]
    metrics: tuple[Metric, ...]
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...] = ()
    selection: Selection | None = None
    bands: str = "standard error"
    """What the figures shade, and the paper's statistic: standard error, or 95% interval."""
    note: str = ""
    """What a reader should know, at every scale."""

    def __post_init__(self) -> None:
        validation.one_of("bands", self.bands, ("standard error", "95% interval"))
        for scale in self.scales:
            validation.one_of(f"scale of study {self.name}", scale, SCALES)

    def factors_at(self, scale: str) -> tuple[Factor, ...]:
        instead = {factor.name: factor for factor in self.at(scale).factors}
        return tuple(instead.get(factor.name, factor) for factor in self.factors)

    def at(self, scale: str) -> Scale:
        validation.one_of("scale", scale, self.scales)
        return self.scales[scale]

    def metric(self, column: str | None) -> Metric:
        """The one with this column, or the first."""
        if column is None:
            return self.metrics[0]
        return next(metric for metric in self.metrics if metric.column == column)
