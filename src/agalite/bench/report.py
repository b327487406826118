"""What a benchmark says at its end: did the targets hold, and where are the numbers."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agalite.bench.timing import machine


def show_targets(targets: list[dict[str, Any]]) -> None:
    """Each: what, value, limit (text), holds."""
    table = Table(title="Targets")
    for column in ("what", "measured", "target", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    for t in targets:
        table.add_row(
            t["what"], f"{t['value']:.2f}", t["limit"], "holds" if t["holds"] else "missed"
        )
    Console().print(table)


def write_results(path: Path, results: dict[str, Any]) -> None:
    # Written whole or not at all.
    partial = path.with_suffix(path.suffix + ".partial")
    text = json.dumps({"machine": machine(), **results}, indent=2)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
    Console().print(f"written to {path}", highlight=False, soft_wrap=True)
