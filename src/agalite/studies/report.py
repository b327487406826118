"""Writes the report of a study: the page, its figures, the numbers, and what a sweep has chosen."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from agalite import files
from agalite.studies.claims import Verdict, judge
from agalite.studies.declaration import Study
from agalite.studies.figures import draw
from agalite.studies.page import render_page
from agalite.studies.results import Choice, Results, choose, load
from agalite.studies.runner import FROM_PYTHON
from agalite.studies.statistics import summarise


def write(study: Study, scale: str, out: Path, to: Path | None = None) -> Path:
    """Writes the report of the trials that are finished so far.

    **Arguments:**

    - `study`, `scale`: what was run, and how large.
    - `out`: the folder of all studies.
    - `to`: the folder for the report; the study's own if not given.

    **Returns:**

    The path of report.html.
    """
    results = load(study, scale, out)
    if not results.home.is_dir():
        raise ValueError(
            f"{results.home} does not exist; run it first: {run_command(study, scale, out)}"
        )
    folder = to or results.home
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    figures, verdicts, choices = draw(results), judge(results), choose(results)
    for figure in figures:
        files.write(folder / "figures" / f"{figure.name}.png", figure.png)
    commands = [
        last_command(results) or run_command(study, scale, out),
        report_command(study, scale, out),
    ]
    text = render_page(results, figures, verdicts, choices, commands)
    files.write(folder / "report.html", text.encode())
    numbers = _numbers(results, verdicts, choices)
    # On one line: there may be thousands of points.
    text = json.dumps(files.plain(numbers), allow_nan=False, ensure_ascii=False)
    files.write(folder / "numbers.json", f"{text}\n".encode())
    if choices and study.selection and study.selection.within == ("agent",):
        files.write_json(folder / "chosen.json", {c.within["agent"]: c.settings for c in choices})
    return folder / "report.html"


def _numbers(results: Results, verdicts: list[Verdict], choices: list[Choice]) -> dict[str, Any]:
    """The contents of numbers.json."""
    points = []
    for point in results.points:
        row: dict[str, Any] = {"levels": point.levels}
        for metric, values in point.values.items():
            rounded = [float(f"{x:.6g}") for x in values]
            row[metric] = {"values": rounded, **summarise(values)._asdict()}
        points.append({**row, **point.summary})
    return {
        "study": results.study.name,
        "scale": results.scale,
        "points": points,
        "trials": {
            "finished": sum(results.state(trial) == "finished" for trial in results.trials),
            "declared": len(results.trials),
        },
        "claims": [
            {"says": v.claim.says, "measured": v.measured, "verdict": v.word} for v in verdicts
        ],
        "chosen": [dataclasses.asdict(choice) for choice in choices],
        "sessions": results.sessions,
    }


def last_command(results: Results) -> str | None:
    """The command of the last session, with --chosen and --only; None if it was not a command."""
    commands = [session["command"] for session in results.sessions]
    return commands[-1] if commands and commands[-1] != FROM_PYTHON else None


def run_command(study: Study, scale: str, out: Path) -> str:
    """The command that runs a study."""
    return f"agalite study run {study.name} --scale {scale} --out {out}"


def report_command(study: Study, scale: str, out: Path) -> str:
    """The command that writes its report."""
    return f"agalite study report {study.name} --scale {scale} --out {out}"
