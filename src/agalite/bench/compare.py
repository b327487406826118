"""`agalite bench compare A B`: what became faster or slower, and is it more than noise?

Two result files of one benchmark, whichever it is: every place in them that holds the times of a
program, or a rate, is a measurement, and its name is the path to it. A change counts as one only if
the middle halves of the two sets of runs do not meet and the medians are further apart than either
half is wide. Timings never fail: the code is always 0.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

_MACHINE = ("agalite", "commit", "cpu", "cores", "backend", "jax", "jaxlib", "python", "huge_pages")
_RATES = ("steps_per_second", "tokens_per_second", "per_second")
_NAMES = ("against", "name", "model")
_FEW = 3  # fewer runs than that have no quartiles worth the name


@dataclass(frozen=True)
class Measurement:
    """Quartiles of the runs: milliseconds, or something a second (`rate`)."""

    low: float
    median: float
    high: float
    rate: bool
    runs: int | None = None
    """None where the file does not say."""

    def divided(self, by: "Measurement") -> "Measurement":
        """In units of another's median, taken in the same run."""
        low, median, high = (x / by.median for x in (self.low, self.median, self.high))
        return Measurement(low, median, high, self.rate, self.runs)


@dataclass(frozen=True)
class Change:
    name: str
    before: Measurement
    after: Measurement

    @property
    def factor(self) -> float:
        """After by before."""
        return self.after.median / self.before.median

    @property
    def noise(self) -> float:
        """The larger half distance between quartiles, as a share of the median."""
        return max((m.high - m.low) / 2 / m.median for m in (self.before, self.after))

    @property
    def verdict(self) -> str:
        if any(m.runs is not None and m.runs < _FEW for m in (self.before, self.after)):
            return "too few runs"
        apart = self.after.low > self.before.high or self.after.high < self.before.low
        if not apart or abs(self.factor - 1) <= self.noise:
            return "within noise"
        return "faster" if (self.factor > 1) == self.before.rate else "SLOWER"


def run(before: Path, after: Path, *, by: str | None = None) -> None:
    files = [read(path) for path in (before, after)]
    changes = compare(files[0], files[1], names=(str(before), str(after)), by=by)
    console = Console()
    for line in differences(*files):
        console.print(line, highlight=False, soft_wrap=True)
    for part in dict.fromkeys(_part(c) for c in changes):
        console.print(_table(part, [c for c in changes if _part(c) == part], by))
    verdicts = ("faster", "SLOWER", "within noise", "too few runs")
    counts = {v: sum(c.verdict == v for c in changes) for v in verdicts}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    alone = set.symmetric_difference(*(set(measurements(file)) for file in files))
    if alone:
        console.print(f"in one file only: {_some(sorted(alone))}", soft_wrap=True)


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not a JSON file: {error}") from error
    if not isinstance(found, dict) or "machine" not in found:
        raise ValueError(
            f"{str(path)!r} is not a result of `agalite bench`: it does not say on which machine"
        )
    return found


def compare(
    before: dict[str, Any], after: dict[str, Any], *, names: tuple[str, str], by: str | None = None
) -> list[Change]:
    kinds = [kind(file) for file in (before, after)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"these are results of different benchmarks: {names[0]} of {kinds[0]}, "
            f"{names[1]} of {kinds[1]}"
        )
    sizes = [(file.get("settings") or {}).get("size") for file in (before, after)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"these were measured at different sizes: {names[0]} with {_words(sizes[0])}, "
            f"{names[1]} with {_words(sizes[1])}"
        )
    mine, other = measurements(before), measurements(after)
    common = [name for name in mine if name in other]
    if not common:
        raise ValueError(
            f"nothing was measured in both: {names[0]} has {_some(mine)}; "
            f"{names[1]} has {_some(other)}"
        )
    if by is not None:
        mine, other = (_divided(m, by, name) for m, name in zip((mine, other), names, strict=True))
    return [Change(name, mine[name], other[name]) for name in common]


def kind(file: dict[str, Any]) -> str:
    """Which benchmark wrote it; the older ones are known by what they hold."""
    if "benchmark" in file:
        return str(file["benchmark"])
    return " and ".join(sorted(file.keys() - {"machine", "targets", "gflops_of_products"}))


def measurements(file: dict[str, Any]) -> dict[str, Measurement]:
    """By name: the path to it, with the name of its row."""
    return {" / ".join(path): m for path, m in _walk(file, ())}


def _walk(found: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Measurement]]:
    if isinstance(found, list):
        for row in found:
            if isinstance(row, dict):
                words = [str(row[key]) for key in _NAMES if key in row]
                if "x" in row:  # where on the figure's axis
                    words.append(f"{row['x']}")
                yield from _walk(row, (*path, *words))
        return
    if not isinstance(found, dict):
        return
    if measured := _measurement(found):
        yield path, measured
        return
    for key, value in found.items():
        if key not in ("machine", "targets", "parts", "rows"):
            yield from _walk(value, (*path, key))
        elif key in ("parts", "rows"):  # these words would say nothing
            yield from _walk(value, path)


def _measurement(row: dict[str, Any]) -> Measurement | None:
    seconds = row.get("seconds")
    if isinstance(seconds, list) and seconds:
        return _quartiles([1e3 * x for x in seconds], rate=False)
    for name in _RATES:
        rate = row.get(name)
        if isinstance(rate, list) and rate:
            return _quartiles(rate, rate=True)
        if isinstance(rate, int | float) and "spread" in row:
            half = rate * float(row["spread"])
            return Measurement(rate - half, rate, rate + half, rate=True)
    return None


def _quartiles(values: list[float], *, rate: bool) -> Measurement:
    low, median, high = (float(q) for q in np.percentile(values, [25, 50, 75]))
    return Measurement(low, median, high, rate, len(values))


def _divided(found: dict[str, Measurement], by: str, file: str) -> dict[str, Measurement]:
    """Each by the measurement whose name ends so, of the same part and place where there are many.

    The longest common beginning decides: sequence / agalite(4,1) / 128 is divided by
    sequence / matrix products alone / 128, not by another part's or length's.
    """
    bases = {name: m for name, m in found.items() if by in name.split(" / ")}
    if not bases:
        raise ValueError(f"by={by!r} is not measured in {file}; it has {_some(found)}")

    def nearest(name: str) -> Measurement:
        words = name.split(" / ")
        return bases[max(bases, key=lambda base: _shared(words, base.split(" / ")))]

    return {name: m.divided(nearest(name)) for name, m in found.items()}


def _shared(a: list[str], b: list[str]) -> int:
    """Words that are the same in the same place; the last, where on the axis, counts too."""
    return sum(x == y for x, y in zip(a, b, strict=False)) + (a[-1] == b[-1])


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What about the machines differs, in words; times compare within one machine."""
    a, b = before["machine"], after["machine"]
    out = [
        f"note: {name} differs: {a.get(name)} and {b.get(name)}"
        for name in _MACHINE
        if a.get(name) != b.get(name)
    ]
    if before.get("settings") != after.get("settings"):
        mine, other = (_words(file.get("settings")) for file in (before, after))
        out.append(f"note: settings differ: {mine}; and {other}")
    loads = [file.get("load_before", file["machine"].get("load")) for file in (before, after)]
    if all(isinstance(load, int | float) for load in loads):
        out.append(f"load of the machine: {loads[0]:.1f} and {loads[1]:.1f}")
    return out


def _words(settings: Any) -> str:
    """A dictionary in words."""
    if not isinstance(settings, dict):
        return "none" if settings is None else str(settings)
    return ", ".join(f"{name} {_words(value)}" for name, value in settings.items())


def _some(found: Iterable[str]) -> str:
    names = list(found)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ("; ".join(names[:5]) or "no measurements") + more


def _part(change: Change) -> str:
    """The first word of a name of several."""
    first, _, rest = change.name.partition(" / ")
    return first if rest else ""


def _table(part: str, changes: list[Change], by: str | None) -> Table:
    title = ", ".join(filter(None, [part, f"in units of: {by}" if by else ""]))
    # Without lines between the columns: 80 of them are few.
    table = Table(title=title or None, box=box.SIMPLE)
    for column in ("", "before", "after", "ratio", "noise", " "):
        table.add_column(column, justify="right" if column.strip() else "left")
    for c in changes:
        unit = "" if by else "/s" if c.before.rate else " ms"
        style = {"faster": "green", "SLOWER": "bold red"}.get(c.verdict, "dim")
        table.add_row(
            c.name.removeprefix(f"{part} / "),
            f"{c.before.median:,.4g}{unit}",
            f"{c.after.median:,.4g}{unit}",
            f"{c.factor:.2f}",
            f"±{c.noise:.0%}",
            f"[{style}]{c.verdict}[/{style}]",
        )
    return table
