"""What a study is: plain data. How studies are run and reported is the same for all of them.

A study varies *factors* over *base* settings, at one of three *scales*. One level of every factor
is a combination; a combination with its seeds is a *trial*. Settings are written flat, for example
"memory_options.eta": 8. `catalogue/` holds the declarations.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agalite import validation

SCALES = ("smoke", "cpu", "paper")

TASK = "task"
"""The factor whose levels have scores, in studies that have them."""
SCORE = "score"
"""The column of the metric that is the score of a task."""
LEARNED = 0.75
"""The score from which on a task counts as learned."""

Settings = Mapping[str, Any]
"""Values by flat name: "total_timesteps", "agent.ent_coef", "memory_options.eta"."""

Levels = Mapping[str, str | tuple[str, ...]]
"""Selects results by factor: those with this level, or with one of these levels."""


@dataclass(frozen=True)
class Factor:
    """What varies: each level has a label and the settings it stands for.

    Two factors that depend on each other are declared as one, "basis/vectors" with labels such as
    "slots/2". Figures, tables and the command line treat them as two.
    """

    name: str
    levels: Mapping[str, Settings]

    def split(self, label: str) -> dict[str, str]:
        """The parts of a label by factor: {"basis": "slots", "vectors": "2"}."""
        return dict(zip(self.name.split("/"), label.split("/"), strict=True))


def vary(name: str, setting: str, values: tuple[Any, ...]) -> Factor:
    """A factor that gives one setting several values.

    **Arguments:**

    - `name`: the factor's name.
    - `setting`: the flat name of the setting.
    - `values`: one level each.

    **Returns:**

    The factor; its labels are the values as text.
    """
    return Factor(
        name,
        {f"{x:g}" if isinstance(x, float) else str(x): {setting: x} for x in values},
    )


@dataclass(frozen=True)
class Training:
    """Trials are runs of `agalite train`; the settings name an environment ("env")."""

    preset: str = "paper"


@dataclass(frozen=True)
class Supervised:
    """Trials are runs of `agalite lra`; the settings name a task ("task")."""

    preset: str = "paper"


@dataclass(frozen=True)
class Measurement:
    """Trials call a function with the settings, and `seeds`, as keyword arguments.

    It returns rows: {"levels": {factor: label}, "values": {metric: [one number per repetition]}}.
    """

    function: str
    """module:function."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a study is run."""

    seeds: int = 1
    """Seeds of every combination of levels."""
    first_seed: int = 0
    """The first of them. A sweep has seeds of its own: what it chooses is reported on others."""
    seeds_per_run: int | None = None
    """Seeds that share one run, and so one compiled program; None: all of them."""
    settings: Settings = field(default_factory=dict)
    """Applied after the study's base settings."""
    model_size: str = "paper"
    """Size of the models: paper, small or tiny (`catalogue/agents.py`)."""
    preset: str | None = None
    """The preset that the settings of a training start from; None: the study's."""
    factors: tuple[Factor, ...] = ()
    """Replace the study's factors of the same names."""
    note: str = ""
    """What differs from the paper, for the report."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number per seed that the study reports."""

    column: str
    """A column of metrics.csv, its mean over the whole run ("whole:..."), a list in summary.json
    ("summary:..."), or a measured value."""
    name: str
    """What figures and tables call it."""
    last_steps: int | None = None
    """Mean over the episodes of this many last steps, at most a fifth of the run; None: a fifth."""
    higher_is_better: bool = True
    exact: bool = False
    """Whether it is the same in every repetition, so that one is enough for a verdict."""
    limits: tuple[float, float] | None = None
    """The value of an agent that has learned nothing, and the best there is. Two sides that are
    both within 2% of the range from one of them are not separated."""


@dataclass(frozen=True, kw_only=True)
class SeedFailure:
    """A way in which a seed fails: the value of a column is below a threshold."""

    name: str
    """What tables call it: "never reached the junction"."""
    column: str
    below: float


@dataclass(frozen=True)
class Score:
    """The score of a task: 0 at `low`, 1 at `high`, linear and never outside."""

    column: str
    """Of metrics.csv; the mean over the last fifth of a run."""
    low: float
    """What an agent without memory, or without learning, gets."""
    high: float
    """The best there is."""

    def of(self, values: Any) -> Any:
        """The scores of values of the column."""
        return ((values - self.low) / (self.high - self.low)).clip(0.0, 1.0)


@dataclass(frozen=True)
class Selection:
    """A sweep's rule: for each level of `within`, the levels of `choose` with the best mean."""

    choose: tuple[str, ...]
    within: tuple[str, ...]
    between_equals: str | None = None
    """The column of the metric that decides between candidates that are within 2% of the best one:
    where several learn the task, the one that learns it sooner."""


@dataclass(frozen=True, kw_only=True)
class LinePlot:
    """A metric against a factor: a line per level of another, a panel per level of a third."""

    x: str
    lines: str
    panels: str | None = None
    metric: str | None = None
    """The column of a metric; None: the study's first."""
    log: bool = False
    """Whether both axes are logarithmic."""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class LearningCurves:
    """The first metric against steps: a line per level, a panel per level of another factor."""

    lines: str
    panels: str | None = None
    columns: str | None = None
    """A pattern with *: instead of `panels`, a panel per matching column of metrics.csv."""
    bins: int = 50
    """Points per curve."""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """The first metric as colour over two factors, a panel per level of a third."""

    x: str
    y: str
    panels: str | None = None
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class SeedDots:
    """The first metric of every seed: a row per level, in the order of their medians."""

    rows: str
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The score over all tasks of every level that is compared, with its interval; best first."""

    title: str = ""


Figure = LinePlot | LearningCurves | Heatmap | SeedDots | Ranking


@dataclass(frozen=True, kw_only=True)
class Better:
    """`a` is better than `b` by at least `margin`."""

    a: Levels
    b: Levels
    margin: float = 0.0
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Alike:
    """`a` and `b` differ by less than `within`."""

    a: Levels
    b: Levels
    within: float
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Between:
    """`a` lies between `low` and `high`."""

    a: Levels
    low: float
    high: float
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """`a` divided by `b` lies between `low` and `high`."""

    a: Levels
    b: Levels
    low: float
    high: float
    metric: str | None = None


Test = Better | Alike | Between | Ratio


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the paper, and the tests by which results agree or disagree with it."""

    says: str
    where: str
    """The section or figure of the paper."""
    tests: tuple[Test, ...] = ()
    """All must hold. A claim without tests is listed for the reader to judge by the figures."""
    scales: tuple[str, ...] = ("paper",)
    """The scales at which the tests mean what the paper means; at others there is no verdict."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, the trials that answer it, and how the answer is shown."""

    name: str
    title: str
    paper: str
    """Where it is in the paper; "ours" if it is not."""
    kind: Training | Supervised | Measurement
    """What a trial is."""
    factors: tuple[Factor, ...]
    base: Settings = field(default_factory=dict)
    """Settings of every trial, unless a scale or a level changes them."""
    scales: Mapping[str, Scale]
    metrics: tuple[Metric, ...]
    """The first is the one that figures, selection and claims use unless they name another."""
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...] = ()
    selection: Selection | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)
    """The score of each level of the factor "task"; the metric "score" is it."""
    compared: str | None = None
    """With scores: the factor whose levels are compared over all tasks."""
    gap: tuple[str, str] | None = None
    """With scores: the levels of `compared` without memory, the one that observes the hidden state
    and the one that does not. What lies between them is the price of partial observability."""
    sweep: str = ""
    """The study whose choice of settings for each agent this one takes, where it has been run."""
    seed_failures: tuple[SeedFailure, ...] = ()
    """Ways in which seeds fail, counted on the page. A seed counts for the first that applies."""
    error_bands: str = "standard error"
    """What figures shade: standard error or 95% interval, whichever the paper does."""
    note: str = ""
    """For the report, at every scale."""

    def __post_init__(self) -> None:
        bands = ("standard error", "95% interval")
        validation.check_one_of("error_bands", self.error_bands, bands)
        for scale in self.scales:
            validation.check_one_of(f"scale of study {self.name}", scale, SCALES)

    def at(self, scale: str) -> Scale:
        """The scale of this name; ValueError if the study has none."""
        validation.check_one_of("scale", scale, self.scales)
        return self.scales[scale]

    def kind_at(self, scale: str) -> Training | Supervised | Measurement:
        """What a trial is at a scale, which may have a preset of its own."""
        preset = self.at(scale).preset
        if preset is None or isinstance(self.kind, Measurement):
            return self.kind
        return dataclasses.replace(self.kind, preset=preset)

    def factors_at(self, scale: str) -> tuple[Factor, ...]:
        """The factors, with those that the scale replaces."""
        replaced = {factor.name: factor for factor in self.at(scale).factors}
        return tuple(replaced.get(factor.name, factor) for factor in self.factors)

    def labels_at(self, scale: str) -> dict[str, list[str]]:
        """The labels of each factor at a scale, in the order of the declaration."""
        found: dict[str, dict[str, None]] = {}
        for factor in self.factors_at(scale):
            for label in factor.levels:
                for name, part in factor.split(label).items():
                    found.setdefault(name, {})[part] = None
        return {name: list(labels) for name, labels in found.items()}

    def metric(self, column: str | None) -> Metric:
        """The metric with this column; None: the first."""
        if column is None:
            return self.metrics[0]
        return next(metric for metric in self.metrics if metric.column == column)
