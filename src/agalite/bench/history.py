"""`agalite bench history FILE ...`: the headline ratios of result files, version by version.

Every benchmark's result file has its targets, which are ratios taken in one run wherever a time is
concerned. The history keeps those of each file and commit, and shows them side by side: a ratio
that is worse than before on the same kind of machine is a regression.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agalite import files

WORSE = 0.1
"""Relative change for the worse that is marked: single rounds differ by about as much."""

Entry = dict[str, Any]


def run(results: Sequence[Path], out: Path) -> None:
    """Adds result files to a history and writes its page.

    **Arguments:**

    - `results`: result files of benchmarks. Those without targets are refused.
    - `out`: a folder; `history.json` in it is read if it exists and written with `history.md`.
    """
    new = [_entry(path) for path in results]
    store, page = out / "history.json", out / "history.md"
    entries = add(_read(store), new)
    if not entries:
        raise ValueError(f"{store} does not exist: name result files that benchmarks wrote")
    out.mkdir(exist_ok=True)
    for path in (store, page):
        files.check_writable("out", path)
    files.write_json(store, {"entries": entries})
    files.write(page, render(entries).encode())
    print(f"{len(entries)} entries in {store}\nwritten to {page}")


def add(entries: Iterable[Entry], new: Iterable[Entry]) -> list[Entry]:
    """Entries with those of `new` at the end; one of the same benchmark and commit is replaced."""
    by_key = {(e["benchmark"], e["commit"]): e for e in entries}
    for entry in new:
        key = entry["benchmark"], entry["commit"]
        by_key.pop(key, None)
        by_key[key] = entry
    return list(by_key.values())


def render(entries: Sequence[Entry]) -> str:
    """The page: for each benchmark a table with a row per ratio and a column per commit."""
    lines = [
        "# Headline ratios over versions",
        "",
        "Made by `agalite bench history`. The oldest commit is on the left. "
        f"**Bold**: worse than the last one on the same processor by more than {WORSE:.0%}.",
    ]
    for benchmark in dict.fromkeys(e["benchmark"] for e in entries):
        own = [e for e in entries if e["benchmark"] == benchmark]
        lines += ["", f"## {benchmark}", ""]
        lines.append(f"| | target | {' | '.join(_heading(e) for e in own)} |")
        lines.append(f"|---|---:|{'---:|' * len(own)}")
        for what in dict.fromkeys(t["what"] for e in own for t in e["targets"]):
            limit = next(
                t["limit"] for e in reversed(own) for t in e["targets"] if t["what"] == what
            )
            lines.append(f"| {what} | {limit} | {' | '.join(_cells(own, what))} |")
    return "\n".join(lines) + "\n"


def _cells(entries: Sequence[Entry], what: str) -> list[str]:
    """A ratio in every entry; empty where it was not measured."""
    cells = []
    last: dict[str, float] = {}
    for entry in entries:
        target = next((t for t in entry["targets"] if t["what"] == what), None)
        if target is None:
            cells.append("")
            continue
        value, cpu = float(target["value"]), str(entry["cpu"])
        text = f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        cells.append(f"**{text}**" if _worse(last.get(cpu), value, target["limit"]) else text)
        last[cpu] = value
    return cells


def _worse(before: float | None, now: float, limit: str) -> bool:
    if before is None:
        return False
    change = now - before if limit.startswith("<=") else before - now
    return change > WORSE * abs(before)


def _heading(entry: Entry) -> str:
    return "<br>".join(str(entry[name]) for name in ("agalite", "commit", "cpu") if entry[name])


def _entry(path: Path) -> Entry:
    try:
        stored = json.loads(path.read_text())
        machine = stored["machine"]
        return _checked(
            {
                # Files that name no benchmark are told apart by their own names.
                "benchmark": stored.get("benchmark", path.stem),
                **{name: machine.get(name, "") for name in ("agalite", "commit", "cpu")},
                "targets": [
                    {n: t[n] for n in ("what", "value", "limit")} for t in stored["targets"]
                ],
            }
        )
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} is not a result file of a benchmark with targets ({reason}); "
            "agalite bench throughput --out writes them"
        ) from error


def _checked(entry: Any) -> Entry:
    """An entry whose targets can be shown; ValueError if they cannot, KeyError without them."""
    targets = entry["targets"]
    if not targets:
        raise ValueError("it has no targets")
    for name in ("benchmark", "agalite", "commit", "cpu"):
        if not isinstance(entry[name], str | None):
            raise ValueError(f"{name}={entry[name]!r} is not a text")
    for target in targets:
        value, limit = target["value"], target["limit"]
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number or isinstance(value, bool) or not isinstance(target["what"], str):
            raise ValueError(f"value={value!r} of {target['what']!r} is not a number of a text")
        if not isinstance(limit, str) or not limit.startswith(("<=", ">=")):
            raise ValueError(f"limit={limit!r} of {target['what']!r} must begin with <= or >=")
    return entry


def _read(path: Path) -> list[Entry]:
    if not path.exists():
        return []
    try:
        return [_checked(entry) for entry in json.loads(path.read_text())["entries"]]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); remove it") from error
