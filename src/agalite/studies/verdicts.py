"""One table of all claims of the paper, and one of this library's own, with their verdicts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agalite import files
from agalite.studies.catalogue import studies
from agalite.studies.claims import NOT_TESTED
from agalite.studies.declaration import Claim, Study

BEGIN, END = "<!-- claims -->", "<!-- /claims -->"
NEEDS_MORE = "needs more than two cores"
NOT_RUN = "not run yet"
OURS = "(ours) "


@dataclass(frozen=True)
class Row:
    """A claim with what is known about it."""

    study: Study
    claim: Claim
    verdict: str
    measured: tuple[str, ...]
    seeds: str
    """Of each combination of levels: "5", or "2 to 5"; and of how many trials, if not of all."""

    @property
    def ours(self) -> bool:
        """Whether it is this library's claim, not the paper's."""
        return self.study.paper == "ours" or self.claim.says.startswith(OURS)


def claim_rows(out: Path, scale: str) -> list[Row]:
    """A row for every claim in the catalogue.

    **Arguments:**

    - `out`: a folder of studies with their reports (numbers.json).
    - `scale`: the scale of the reports.

    **Returns:**

    The rows, in the order of the paper. A claim without a report has the verdict "not run yet", one
    that the scale cannot test "needs more than two cores".
    """
    rows = []
    for study in studies().values():
        numbers = _read(out / study.name / scale / "numbers.json")
        found = {row["says"]: row for row in numbers.get("claims", ())}
        counts = sorted(
            {len(x["values"]) for p in numbers.get("points", ()) for x in _metrics(p) if x}
        )
        seeds = " to ".join(str(n) for n in dict.fromkeys((*counts[:1], *counts[-1:])))
        trials = numbers.get("trials", {"finished": 0, "declared": 0})
        if trials["finished"] < trials["declared"]:
            seeds += f" ({trials['finished']} of {trials['declared']} trials)"
        for claim in study.claims:
            row = found.get(claim.says)
            if not claim.tests or scale not in claim.scales:
                verdict = NEEDS_MORE
            elif row is None or row["verdict"] == NOT_TESTED:
                verdict = NOT_RUN
            else:
                verdict = row["verdict"]
            measured = tuple(row["measured"]) if row and verdict != NOT_RUN else ()
            rows.append(Row(study, claim, verdict, measured, seeds if measured else ""))
    return rows


def _metrics(point: dict[str, Any]) -> list[dict[str, Any]]:
    return [x for x in point.values() if isinstance(x, dict) and "values" in x]


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; write the report again") from error


def claims_table(out: Path, scale: str, link: str = "") -> str:
    """The rows of `claim_rows` as a Markdown table, with a count of the verdicts.

    **Arguments:**

    - `out`, `scale`: as in `claim_rows`.
    - `link`: what precedes the path of a page inside `out`, for links to the reports.
    """
    rows = claim_rows(out, scale)
    paper, ours = [row for row in rows if not row.ours], [row for row in rows if row.ours]
    tables = [_table("the paper says", paper, scale, link)]
    if ours:
        tables.append("What the paper does not say:\n\n" + _table("claim", ours, scale, link))
    return "\n\n".join(tables)


def _table(head: str, rows: list[Row], scale: str, link: str) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.verdict] = counts.get(row.verdict, 0) + 1
    lines = [
        f"{len(rows)} claims: " + ", ".join(f"{n} {word}" for word, n in counts.items()) + ".",
        "",
        f"| {head} | verdict | measured (means, 95% intervals) | seeds | command |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        word = f"**{row.verdict}**" if row.measured and row.verdict != NEEDS_MORE else row.verdict
        if row.measured:
            word = f"[{word}]({link}{row.study.name}/{scale}/report.html)"
        cells = (
            f"{row.claim.says.removeprefix(OURS)} *({row.claim.where})*",
            word,
            "; ".join(row.measured).replace("|", "/"),
            row.seeds,
            f"`agalite study run {row.study.name} --scale {scale}`",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_table(path: Path, table: str) -> None:
    """Puts a table between the marks of a Markdown file."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path} must have the lines {BEGIN} and {END}, once each and in order")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    files.write(path, f"{before}{BEGIN}\n{table}\n{END}{after}".encode())
