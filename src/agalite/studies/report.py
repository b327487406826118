"""`agalite study report`: a page, its figures, the numbers, and what a sweep has chosen."""

import dataclasses
import json
from pathlib import Path

from agalite import files
from agalite.studies.claims import judge
from agalite.studies.declaration import Study
from agalite.studies.figures import draw
from agalite.studies.page import page
from agalite.studies.results import Results, choose, load, summarise
from agalite.studies.runner import FROM_PYTHON


def write(study: Study, scale: str, out: Path, to: Path | None = None) -> Path:
    """The page of what is there, however much that is; `to` is another folder than the study's."""
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
    text = page(results, figures, verdicts, choices, commands)
    files.write(folder / "report.html", text.encode())
    numbers = {
        "study": study.name,
        "scale": scale,
        "settings": [
            {
                "levels": point.levels,
                **{
                    metric: {
                        "values": [float(f"{x:.6g}") for x in values],
                        **summarise(values)._asdict(),
                    }
                    for metric, values in point.values.items()
                },
                **point.summary,
            }
            for point in results.points
        ],
        "claims": [
            {"says": v.claim.says, "measured": v.measured, "verdict": v.word} for v in verdicts
        ],
        "chosen": [dataclasses.asdict(choice) for choice in choices],
        "sessions": results.sessions,
    }
    # In one line: there may be thousands of settings.
    text = json.dumps(files.plain(numbers), allow_nan=False, ensure_ascii=False)
    files.write(folder / "numbers.json", f"{text}\n".encode())
    if choices and study.selection and study.selection.within == ("agent",):
        files.write_json(folder / "chosen.json", {c.within["agent"]: c.settings for c in choices})
    return folder / "report.html"


def last_command(results: Results) -> str | None:
    """What the last session was really started with, --chosen and --only included; None if there
    is none, or it was started from Python."""
    commands = [session["command"] for session in results.sessions]
    return commands[-1] if commands and commands[-1] != FROM_PYTHON else None


def run_command(study: Study, scale: str, out: Path) -> str:
    return f"agalite study run {study.name} --scale {scale} --out {out}"


def report_command(study: Study, scale: str, out: Path) -> str:
    return f"agalite study report {study.name} --scale {scale} --out {out}"
