"""The report of a study as one HTML file that contains its figures and fetches nothing."""

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from agalite.studies._wording import count_of, duration, join_words
from agalite.studies.aggregate import aggregates, gap_closed
from agalite.studies.claims import Verdict
from agalite.studies.declaration import LEARNED, Measurement, Study
from agalite.studies.figures import DrawnFigure
from agalite.studies.results import Choice, Results, count_failures
from agalite.studies.statistics import probability_of_improvement, summarise
from agalite.studies.trials import STATES
from agalite.system import commit

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; padding: 0 1rem;
       width: fit-content; min-width: min(1100px, 100% - 2rem); max-width: calc(100% - 2rem); }
p, figure, pre { max-width: 1100px; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.faint { color: #666; } figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; } figcaption { color: #444; font-size: .9rem; }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left;
         vertical-align: top; }
td.nowrap { white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
th { cursor: pointer; user-select: none; background: #f6f6f6; position: sticky; top: 0; }
th[aria-sort=ascending]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
.wide { overflow: auto; } .long { max-height: 36rem; } details { margin: .2rem 0; }
pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; font-size: .82rem; }
summary { cursor: pointer; }
.word { white-space: nowrap; font-weight: 600; } .agrees { color: #00664b; }
.disagrees { color: #a63600; } .undecided { color: #7a5c00; } .not { color: #666; }
"""

_SCRIPT = """
for (const th of document.querySelectorAll("table.sortable th")) {
  th.addEventListener("click", () => {
    const table = th.closest("table"), body = table.tBodies[0];
    const column = [...th.parentNode.children].indexOf(th);
    const up = th.getAttribute("aria-sort") !== "ascending";
    for (const other of th.parentNode.children) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => {
      const cell = row.children[column], text = cell.dataset.value ?? cell.textContent.trim();
      const number = Number(text);
      return text === "" || Number.isNaN(number) ? text : number;
    };
    const rows = [...body.rows].sort((a, b) => {
      const x = key(a), y = key(b);
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
      const order = x < y ? -1 : x > y ? 1 : 0;
      return up ? order : -order;
    });
    body.append(...rows);
  });
}
"""


def render_page(
    results: Results,
    figures: Sequence[DrawnFigure],
    verdicts: Sequence[Verdict],
    choices: Sequence[Choice],
    commands: Sequence[str],
) -> str:
    """The HTML text of a report; `commands` make the results and the report again."""
    study = results.study
    parts = [
        f"<h1>{escape(study.title)}</h1>",
        f'<p class="faint">Study <b>{escape(study.name)}</b> at scale '
        f"<b>{escape(results.scale)}</b>. In the paper: {escape(study.paper)}.</p>",
        _overview(results),
        *(f"<p>{escape(note)}</p>" for note in (study.note, study.at(results.scale).note) if note),
        "<h2>Figures</h2>" if figures else "",
        *(
            f'<figure id="figure-{escape(figure.name)}">{figure.svg}'
            f"<figcaption>{escape(figure.title)}{_caption(study, figure)}</figcaption></figure>"
            for figure in figures
        ),
        _together(results),
        _claims(results, verdicts),
        _choices(study, choices),
        _numbers(results),
        _seed_failures(results),
        _improvement(results),
        _failures(results),
        _settings(results),
        _sessions(results, commands),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(study.name)} ({escape(results.scale)})</title>"
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _overview(results: Results) -> str:
    states = [results.state(trial) for trial in results.trials]
    counts = {state: states.count(state) for state in STATES if states.count(state)}
    words = ", ".join(f"{n} {state}" for state, n in counts.items())
    seconds = sum(session["seconds"] for session in results.sessions)
    return (
        f"<p>{count_of(len(states), 'trial')}: {words}. "
        f"Wall time of all sessions: {duration(seconds)}.</p>"
    )


def _caption(study: Study, figure: DrawnFigure) -> str:
    """What the lines and the shaded bands are."""
    if not figure.error_bands:
        return "." if study.metrics[0].exact else "; means over seeds."
    standard_error = study.error_bands == "standard error"
    bands = "the standard error" if standard_error else "a 95% bootstrap interval"
    return f"; lines are means over seeds, bands are {bands}."


def _claims(results: Results, verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    rows = []
    for v in verdicts:
        word = v.word.split()[0]
        why = f"<br>{_faint(v.why)}" if v.why else ""
        measured = "<br>".join(map(escape, v.measured)) or "-"
        rows.append(
            [
                _Cell(f"{escape(v.claim.says)}<br>{_faint(v.claim.where)}"),
                _Cell(measured),
                _Cell(f'<span class="word {word}">{escape(v.word)}</span>{why}'),
            ]
        )
    heads = ["what the paper says", "what was measured", "verdict"]
    return "<h2>The paper's claims</h2>" + _table(heads, rows, "claims") + _intervals(results)


def _intervals(results: Results) -> str:
    """Explains the numbers in brackets, which exact metrics do not have."""
    inexact = [metric.column for metric in results.study.metrics if not metric.exact]
    many = any(len(point.values.get(name, ())) > 1 for point in results.points for name in inexact)
    if not many:
        return ""
    over = "repetitions" if isinstance(results.study.kind, Measurement) else "seeds"
    return (
        f'<p class="faint">Means with 95% bootstrap intervals over {over}. The verdict is agrees '
        "or disagrees only if the whole interval is on one side.</p>"
    )


def _choices(study: Study, choices: Sequence[Choice]) -> str:
    if not choices or study.selection is None:
        return ""
    metric, rule = study.metrics[0], study.selection
    best = "highest" if metric.higher_is_better else "lowest"
    words = (
        f"For each {_factors(rule.within)}: the {_factors(rule.choose)} with the "
        f"{best} mean of {metric.name}, over all seeds and all other factors. "
        "A candidate with a seed in which no episode ended is chosen last."
    )
    rows = [
        [
            _Cell(escape(", ".join(c.within.values()))),
            _Cell(escape(", ".join(f"{k} = {v}" for k, v in c.chosen.items()))),
            _number(c.mean),
            _number(c.candidates),
        ]
        for c in choices
    ]
    heads = ["for", "chosen", "its mean", "candidates"]
    return f"<h2>What the sweep chooses</h2><p>{escape(words)}</p>" + _table(heads, rows, "choices")


def _together(results: Results) -> str:
    """The scores of all tasks side by side, for studies that have them."""
    found = aggregates(results)
    if not found:
        return ""
    study = results.study
    tasks = [task for task in study.scores if any(task in a.tasks for a in found)]
    closed = gap_closed(found, *study.gap) if study.gap else {}
    heads = [str(study.compared), "all tasks", "95% interval", *tasks]
    heads += ["gap closed"] if closed else []
    heads += ["learned", "steps a second", "parameters", "floats of state"]
    rows = []
    for a in found:
        learned = sum(np.isfinite(x) for x in a.sooner.values())
        row = [_Cell(escape(a.label)), _number(round(a.mean, 3))]
        row.append(_Cell(f"{a.low:.2f} to {a.high:.2f}", a.low))
        row += [_number(round(a.tasks[t], 2)) if t in a.tasks else _Cell("") for t in tasks]
        if closed:
            row.append(_number(round(closed[a.label], 2)) if a.label in closed else _Cell(""))
        row.append(_Cell(f"{learned} of {len(a.tasks)}", learned))
        row += [_number(float(f"{a.speed:.3g}")), _number(a.parameters), _number(a.state)]
        rows.append(row)
    steps = [
        [
            _Cell(escape(a.label)),
            *(_late(a.sooner[t]) if t in a.sooner else _Cell("") for t in tasks),
        ]
        for a in found
    ]
    limits = "; ".join(f"{t}: {s.low:g} to {s.high:g}" for t, s in study.scores.items())
    words = (
        "A score is 0 for what an agent without memory or without learning gets, and 1 for the "
        f"best there is ({limits}), by the last fifth of each run. Over all tasks it is the "
        "interquartile mean over tasks and seeds; for the interval the seeds of each task are "
        f"resampled. Learned: tasks in which the median seed reaches {LEARNED:g}."
    )
    if closed and study.gap:
        words += (
            f" Gap closed: the share of the way from {study.gap[1]} to {study.gap[0]}, neither of "
            "which has a memory, over the tasks in which they are at least 0.1 apart."
        )
    return (
        f"<h2>All tasks</h2><p>{escape(words)}</p>"
        + _table(heads, rows, "together")
        + f"<h3>Steps until the score reaches {LEARNED:g}</h3>"
        + _table([str(study.compared), *tasks], steps, "sooner")
    )


def _late(steps: float) -> "_Cell":
    return _number(round(steps)) if np.isfinite(steps) else _Cell("never", 1e18)


def _factors(names: Sequence[str]) -> str:
    return join_words([name.replace("_", " ") for name in names])


def _numbers(results: Results) -> str:
    if not results.points:
        return "<h2>Results</h2><p>No trial is finished yet.</p>"
    factors = list(dict.fromkeys(name for point in results.points for name in point.levels))
    metrics = [
        m for m in results.study.metrics if any(m.column in p.values for p in results.points)
    ]
    heads = [*(name.replace("_", " ") for name in factors), "seeds"]
    for metric in metrics:
        heads.append(metric.name)
        if not metric.exact:
            of = ("standard error", "95% interval", "interquartile mean")
            heads += [f"{metric.name}: {what}" for what in of]
    facts = [
        f
        for f in ("steps", "parameters", "seconds")
        if any(p.summary.get(f) for p in results.points)
    ]
    rows = []
    for point in results.points:
        row = [_Cell(escape(point.levels.get(name, ""))) for name in factors]
        values = [point.values.get(m.column) for m in metrics]
        row.append(_number(max((len(v) for v in values if v is not None), default=0)))
        for metric, v in zip(metrics, values, strict=True):
            if v is None:
                row += [_Cell("")] * (1 if metric.exact else 4)
                continue
            s = summarise(v)
            if metric.exact:
                row.append(_number(s.mean))
                continue
            interval = f"{s.low:.4g} to {s.high:.4g}" if s.seeds > 1 else ""
            row += [_number(s.mean), _number(s.standard_error), _Cell(interval, s.low)]
            row.append(_number(s.interquartile_mean))
        row += [_number(point.summary.get(f)) for f in facts]
        rows.append(row)
    return "<h2>Results</h2>" + _table([*heads, *facts], rows, "results") + _shortened(results)


def _shortened(results: Results) -> str:
    """The number of steps averaged over, where runs are too short for the metric's own number."""
    parts = []
    for metric in results.study.metrics:
        steps = {p.shortened[metric.column] for p in results.points if metric.column in p.shortened}
        if steps:
            low, high = min(steps), max(steps)
            how_many = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            parts.append(
                f'<p class="faint">{escape(metric.name)}: these runs are short, so it is averaged '
                f"over their last {how_many} steps (never more than the last fifth of a run).</p>"
            )
    return "".join(parts)


def _seed_failures(results: Results) -> str:
    """How many seeds of every combination failed, in which way."""
    ways = results.study.seed_failures
    counted = [(point, count_failures(point, ways)) for point in results.points]
    if not any(counted_ways for _, counted_ways in counted):
        return ""
    factors = list(dict.fromkeys(name for point in results.points for name in point.levels))
    rows = []
    for point, counts in counted:
        seeds = max((len(v) for v in point.values.values()), default=0)
        row = [_Cell(escape(point.levels.get(name, ""))) for name in factors]
        row += [_number(seeds - sum(counts.values())), *(_number(counts[way.name]) for way in ways)]
        rows.append(row)
    limits = join_words([f"{way.name}: {way.column} below {way.below:g}" for way in ways])
    heads = [*(name.replace("_", " ") for name in factors), "neither", *(w.name for w in ways)]
    return (
        "<h2>Seeds that failed</h2>"
        f"<p>By the last fifth of each run ({escape(limits)}); a seed counts for the first that "
        "applies.</p>" + _table(heads, rows, "seed-failures")
    )


def _improvement(results: Results) -> str:
    """The probability of improvement for each pair of levels of the first factor."""
    metric, factor = results.study.metrics[0], results.study.factors[0].name.split("/")[0]
    labels = results.labels(factor)
    values = {label: results.values({factor: label}, metric.column) for label in labels}
    values = {label: v[v == v] for label, v in values.items()}
    values = {label: v for label, v in values.items() if len(v) > 1}
    if not 2 <= len(values) <= 20:
        return ""
    rows = []
    for a, x in values.items():
        cells = []
        for b, y in values.items():
            better, worse = (x, y) if metric.higher_is_better else (y, x)
            p = probability_of_improvement(better, worse)
            cells.append(_Cell("") if a == b else _number(round(p, 3)))
        rows.append([_Cell(escape(a)), *cells])
    return (
        "<h2>Probability of improvement</h2>"
        f"<p>That a seed of the row is better than a seed of the column, by {escape(metric.name)} "
        "(mean over the other factors).</p>" + _table(["", *values], rows, "improvement")
    )


def _failures(results: Results) -> str:
    failed = results.failures()
    if not failed:
        return ""
    rows = [[_Cell(escape(name)), _Cell(escape(why))] for name, why in failed.items()]
    return "<h2>Failures</h2>" + _table(["trial", "error"], rows, "failures")


def _settings(results: Results) -> str:
    parts = []
    for trial in results.trials:
        if results.state(trial) != "finished":
            continue
        path = trial.folder / "config.json"
        source = path if path.exists() else trial.rows_path
        text = json.loads(source.read_text())
        text = text.get("requested", text)
        parts.append(
            f"<details><summary>{escape(trial.name)}</summary>"
            f"<pre>{escape(json.dumps(text, indent=1))}</pre></details>"
        )
    return "<h2>Every setting</h2>" + "".join(parts) if parts else ""


def _sessions(results: Results, commands: Sequence[str]) -> str:
    rows = [
        [
            _Cell(escape(s["started"])),
            _Cell(_command(s)),
            _number(s["seconds"]),
            _number(len(s["trials"])),
            _Cell(escape(s.get("commit") or "")),
            _Cell(escape(_machine(s["machine"]))),
            _Cell(escape(", ".join(f"{k} {v}" for k, v in s["versions"].items()))),
        ]
        for s in results.sessions
    ]
    heads = ["started", "command", "seconds", "trials", "commit", "machine", "versions"]
    again = "\n".join(commands)
    now = commit()
    by = f"<p>This page was written at commit {escape(now)} of agalite.</p>" if now else ""
    return (
        f"<h2>How it was run</h2>{_table(heads, rows, 'sessions')}{by}"
        f"<p>To do it again:</p><pre>{escape(again)}</pre>"
    )


def _command(session: dict[str, Any]) -> str:
    """The command of a session, with its notes."""
    notes = list(session.get("notes", ()))
    if not session.get("ended", True):
        notes.append("running, or killed: its end was not recorded")
    faint = "".join(f"<br>{_faint(note)}" for note in notes)
    return f"<code>{escape(session['command'])}</code>{faint}"


def _machine(facts: dict[str, Any]) -> str:
    return (
        f"{facts.get('processor', '?')}, {facts['cores']} cores, {facts.get('memory_gb', '?')} GB, "
        f"{facts['system']}; load before {facts.get('load_before', '?')}"
    )


def _faint(text: str) -> str:
    return f'<span class="faint">{escape(text)}</span>'


class _Cell:
    """A cell of a table: its HTML, and the value that it is sorted by."""

    def __init__(self, text: str, value: float | None = None, *, number: bool = False) -> None:
        self.text, self.value, self.number = text, value, number


def _number(value: float | int | None) -> _Cell:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return _Cell("", number=True)
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return _Cell(text, value, number=True)


def _table(heads: Sequence[str], rows: Iterable[Sequence[_Cell]], name: str) -> str:
    rows = list(rows)
    long = " long" if len(rows) > 15 else ""
    right = [any(row[i].number for row in rows) for i in range(len(heads))]
    head = "".join(
        f"<th{' class=number' if r else ''}>{escape(h)}</th>"
        for h, r in zip(heads, right, strict=True)
    )
    lines = []
    for row in rows:
        cells = []
        for cell in row:
            kind = " class=number" if cell.number else " class=nowrap" if cell.value else ""
            value = "" if cell.value is None else f' data-value="{cell.value!r}"'
            cells.append(f"<td{kind}{value}>{cell.text}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    table = f'<table class="sortable" id="{name}"><thead><tr>{head}</tr></thead>'
    return f'<div class="wide{long}">{table}<tbody>{"".join(lines)}</tbody></table></div>'
