"""What a benchmark says at its end: did the targets hold, and where are the numbers."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agalite import files
from agalite.bench.timing import machine


def at_most(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "limit": f"<= {limit:g}", "holds": value <= limit}


def at_least(what: str, value: float, limit: float) -> dict[str, Any]:
    return {"what": what, "value": value, "limit": f">= {limit:g}", "holds": value >= limit}


def show_targets(targets: list[dict[str, Any]]) -> None:
    table = Table(title="Targets")
    for column in ("what", "measured", "target", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    for t in targets:
        table.add_row(
            t["what"], f"{t['value']:.2f}", t["limit"], "holds" if t["holds"] else "missed"
        )
    Console().print(table)


def write_results(path: Path, results: dict[str, Any]) -> None:
    files.write_json(path, {"machine": machine(), **results})
    Console().print(f"written to {path}", highlight=False, soft_wrap=True)
