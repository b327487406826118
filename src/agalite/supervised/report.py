"""Writes the results of runs on one task, beside the baselines and the paper's results."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from agalite import files
from agalite.supervised.baselines import baselines
from agalite.supervised.config import LRAConfig
from agalite.supervised.data import load
from agalite.supervised.train import ACCURACY, VALIDATION, load_config
from agalite.training import plots
from agalite.training.run import Run

PAPER = {
    "listops": (
        ("linear transformer (Tay et al., 2021)", "8.9M", "16.13"),
        ("transformer (Tay et al., 2021)", "8.9M", "36.37"),
        ("AGaLiTe, eta = 8, r = 1 (10 seeds)", "1.7M", "39.33 ± 0.34"),
    ),
    "text": (
        ("linear transformer (Tay et al., 2021)", "3.4M", "65.9"),
        ("transformer (Tay et al., 2021)", "3.4M", "64.27"),
        ("AGaLiTe, eta = 8, r = 1 (10 seeds)", "1.7M", "79.83 ± 1.3"),
    ),
}
_NAMES = {"listops": "ListOps", "text": "Text"}


class _ScoredRun(NamedTuple):
    run: Run
    config: LRAConfig
    summary: dict[str, Any]


def write(folders: list[Path], out: Path) -> None:
    """Writes a Markdown page on runs of one task, and a figure of their learning curves.

    **Arguments:**

    - `folders`: the folders of the runs, which must have the same data.
    - `out`: the page, a .md file; the figure has the same name with .png.
    """
    if not folders:
        raise ValueError("name at least one folder of a run")
    if out.suffix != ".md":
        raise ValueError(f"out={str(out)!r} must end in .md")
    files.check_writable("out", out)
    runs = [_open(folder) for folder in folders]
    first = runs[0]
    for other in runs[1:]:
        if other.run.config["data_sha256"] != first.run.config["data_sha256"]:
            raise ValueError(
                f"{other.run.folder} and {first.run.folder} were trained on different examples; "
                "report them one by one"
            )
    picture = out.with_suffix(".png")
    plots.curve(
        [s.run.folder for s in runs], picture, metric=[VALIDATION, ACCURACY], steps="tokens"
    )
    files.write(out, _page(runs, picture.name).encode())


def _open(folder: Path) -> _ScoredRun:
    run = Run.open(folder)
    config = load_config(run)
    summary = run.read_summary()
    if summary is None:
        raise ValueError(f"{folder} has not ended: it has no summary.json yet")
    return _ScoredRun(run, config, summary)


def _page(runs: list[_ScoredRun], picture: str) -> str:
    first = runs[0]
    task = load(first.config)
    plain = baselines(task)
    name = _NAMES[task.name]
    lines = [f"# Long Range Arena, {name}", ""]
    lines += [f"- {note}" for note in task.notes]
    lines += [
        "",
        "A step is one token. Test accuracy is that of the weights with the best validation "
        "score; its 95% interval is over seeds (bootstrap) or, with one seed, over test examples "
        "(Wilson).",
        "",
        "| model | parameters | seeds | steps each | epochs | test accuracy, % | 95% interval |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for what, share in (
        ("commonest class", plain.majority),
        ("logistic regression on token counts", plain.counts),
    ):
        interval = _interval(share, len(task.test))
        lines.append(f"| {what} | | | | | {100 * share:.2f} | {interval} |")
    lines += [_row(s) for s in runs]
    lines += ["", f"![learning curves]({picture})", "", "## What the paper reports", ""]
    lines += ["| model | parameters | test accuracy, % |", "|---|---:|---:|"]
    lines += [f"| {' | '.join(row)} |" for row in PAPER[task.name]]
    lines += ["", "## Settings", ""]
    for s in runs:
        c = s.config
        options = ", ".join(f"{k}={v}" for k, v in sorted(c.memory_options.items()))
        lines.append(
            f"- `{s.run.name}`: {c.memory} ({options}); {c.pooling} pooling; batches of "
            f"{c.rows} x {c.row_length} tokens; learning rate {c.learning_rate:g}, warm-up "
            f"{c.warmup:g}, weight decay {c.weight_decay:g}, gradient norm "
            f"{c.max_grad_norm:g}; "
            f"{s.summary['steps_per_second_of_this_session']:,.0f} tokens/s in its last session"
        )
    return "\n".join(lines) + "\n"


def _row(s: _ScoredRun) -> str:
    accuracy = s.summary["test_accuracy_mean"]
    interval = s.summary["test_accuracy_interval_over_seeds"]
    words = _percent(*interval) if interval else _interval(accuracy, s.summary["test_examples"])
    epochs = sum(s.summary["epochs"]) / len(s.summary["epochs"])
    return (
        f"| {s.config.memory} (`{s.run.name}`) | {s.summary['parameters']:,} | "
        f"{s.summary['seeds']} | {s.summary['steps']:,} | {epochs:.2f} | {100 * accuracy:.2f} | "
        f"{words} |"
    )


def _interval(share: float, count: int) -> str:
    """The 95% interval of Wilson for a share of `count` examples."""
    z = 1.96
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return _percent((middle - half) / scale, (middle + half) / scale)


def _percent(low: float, high: float) -> str:
    return f"{100 * low:.2f} to {100 * high:.2f}"
