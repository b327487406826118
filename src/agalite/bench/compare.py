"""`agalite bench compare A B`: which measurements of two result files differ by more than noise.

The files are of one benchmark, whichever it is. Every object in them that holds the times of a
program, or a rate, is a measurement, and its name is the path to it. A change is reported only if
the middle halves of the two sets of runs do not overlap and the medians are further apart than half
the width of either. The exit code does not depend on the timings.
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
_MIN_RUNS = 3  # for quartiles


@dataclass(frozen=True)
class Measurement:
    """Quartiles of the runs, in milliseconds or, if `rate`, in something per second."""

    low: float
    median: float
    high: float
    rate: bool
    runs: int | None = None
    """None where the file does not say."""

    def divided(self, by: "Measurement") -> "Measurement":
        """In units of the median of another measurement of the same file."""
        low, median, high = (x / by.median for x in (self.low, self.median, self.high))
        return Measurement(low, median, high, self.rate, self.runs)


@dataclass(frozen=True)
class Change:
    """A measurement in two files."""

    name: str
    before: Measurement
    after: Measurement

    @property
    def factor(self) -> float:
        """The median after, divided by the median before."""
        return self.after.median / self.before.median

    @property
    def noise(self) -> float:
        """The larger half distance between quartiles, as a fraction of the median."""
        return max((m.high - m.low) / 2 / m.median for m in (self.before, self.after))

    @property
    def verdict(self) -> str:
        """faster, SLOWER, within noise or too few runs."""
        if any(m.runs is not None and m.runs < _MIN_RUNS for m in (self.before, self.after)):
            return "too few runs"
        disjoint = self.after.low > self.before.high or self.after.high < self.before.low
        if not disjoint or abs(self.factor - 1) <= self.noise:
            return "within noise"
        return "faster" if (self.factor > 1) == self.before.rate else "SLOWER"


def run(before: Path, after: Path, *, by: str | None = None) -> None:
    """Prints the changes from one result file to another.

    **Arguments:**

    - `before`, `after`: JSON files of one benchmark.
    - `by`: the name of a measurement; every other is divided by it, in each file.
    """
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
    unpaired = set.symmetric_difference(*(set(measurements(file)) for file in files))
    if unpaired:
        console.print(f"in one file only: {_first_names(sorted(unpaired))}", soft_wrap=True)


def read(path: Path) -> dict[str, Any]:
    """The contents of a result file; a ValueError if it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not a JSON file: {error}") from error
    if not isinstance(found, dict) or "machine" not in found:
        raise ValueError(
            f"{str(path)!r} is not a result of `agalite bench`: it does not describe the machine"
        )
    return found


def compare(
    before: dict[str, Any], after: dict[str, Any], *, names: tuple[str, str], by: str | None = None
) -> list[Change]:
    """The measurements that both files have.

    **Arguments:**

    - `before`, `after`: the contents of the files.
    - `names`: what messages call the files.
    - `by`: the name of the measurement to divide by, if any.

    **Returns:**

    A list of changes, in the order of `before`. Files of different benchmarks, of different sizes
    or without a common measurement are a ValueError.
    """
    benchmarks = [benchmark_of(file) for file in (before, after)]
    if benchmarks[0] != benchmarks[1]:
        raise ValueError(
            f"these are results of different benchmarks: {names[0]} of {benchmarks[0]}, "
            f"{names[1]} of {benchmarks[1]}"
        )
    sizes = [(file.get("settings") or {}).get("size") for file in (before, after)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"these were measured at different sizes: {names[0]} with {_words(sizes[0])}, "
            f"{names[1]} with {_words(sizes[1])}"
        )
    old, new = measurements(before), measurements(after)
    common = [name for name in old if name in new]
    if not common:
        raise ValueError(
            f"nothing was measured in both: {names[0]} has {_first_names(old)}; "
            f"{names[1]} has {_first_names(new)}"
        )
    if by is not None:
        old, new = (_divided(m, by, name) for m, name in zip((old, new), names, strict=True))
    return [Change(name, old[name], new[name]) for name in common]


def benchmark_of(file: dict[str, Any]) -> str:
    """The benchmark that wrote the file: its name, or its keys where it has no name."""
    if "benchmark" in file:
        return str(file["benchmark"])
    return " and ".join(sorted(file.keys() - {"machine", "targets", "gflops_of_products"}))


def measurements(file: dict[str, Any]) -> dict[str, Measurement]:
    """All measurements of a file by name: the keys and the row's name, joined by " / "."""
    return {" / ".join(path): m for path, m in _walk(file, ())}


def _walk(found: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Measurement]]:
    if isinstance(found, list):
        for row in found:
            if isinstance(row, dict):
                words = [str(row[key]) for key in _NAMES if key in row]
                if "x" in row:  # on the figure's axis
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
        elif key in ("parts", "rows"):  # not part of a name
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
    """Every measurement divided by the one called `by`, of its own part and x if there are many.

    sequence / agalite(4,1) / 128 is divided by sequence / matrix products alone / 128, not by that
    of another part or another length: the base that shares the most words is taken.
    """
    bases = {name: m for name, m in found.items() if by in name.split(" / ")}
    if not bases:
        raise ValueError(f"by={by!r} is not measured in {file}; it has {_first_names(found)}")

    def nearest(name: str) -> Measurement:
        words = name.split(" / ")
        return bases[max(bases, key=lambda base: _shared_words(words, base.split(" / ")))]

    return {name: m.divided(nearest(name)) for name, m in found.items()}


def _shared_words(a: list[str], b: list[str]) -> int:
    """Words that are equal at the same index; an equal last word, which is x, counts too."""
    return sum(x == y for x, y in zip(a, b, strict=False)) + (a[-1] == b[-1])


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Sentences on how the machines, settings and loads of two files differ."""
    a, b = before["machine"], after["machine"]
    out = [
        f"note: {name} differs: {a.get(name)} and {b.get(name)}"
        for name in _MACHINE
        if a.get(name) != b.get(name)
    ]
    if before.get("settings") != after.get("settings"):
        old, new = (_words(file.get("settings")) for file in (before, after))
        out.append(f"note: settings differ: {old}; and {new}")
    loads = [file.get("load_before", file["machine"].get("load")) for file in (before, after)]
    if all(isinstance(load, int | float) for load in loads):
        out.append(f"load of the machine: {loads[0]:.1f} and {loads[1]:.1f}")
    return out


def _words(settings: Any) -> str:
    """A dictionary without brackets and quotes."""
    if not isinstance(settings, dict):
        return "none" if settings is None else str(settings)
    return ", ".join(f"{name} {_words(value)}" for name, value in settings.items())


def _first_names(found: Iterable[str]) -> str:
    names = list(found)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ("; ".join(names[:5]) or "no measurements") + more


def _part(change: Change) -> str:
    """The first word of a name, if it has several."""
    first, _, rest = change.name.partition(" / ")
    return first if rest else ""


def _table(part: str, changes: list[Change], by: str | None) -> Table:
    title = ", ".join(filter(None, [part, f"in units of: {by}" if by else ""]))
    # Without vertical lines it fits into 80 columns.
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
