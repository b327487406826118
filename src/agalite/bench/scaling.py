"""Time and state of one streaming step as one thing grows: the stream, eta, r, the width.

At the paper's T-Maze size otherwise: 4 layers, 4 heads, V = 64, d = 128.
"""

import time
from typing import Any

import jax
import numpy as np
from rich.progress import Progress

from agalite.bench import programs
from agalite.bench.model_configs import Subject, build
from agalite.bench.timing import Program, interleave

SIZE: dict[str, Any] = {
    "d_model": 128,
    "layers": 4,
    "heads": 4,
    "head_size": 64,
    "ffn_size": 128,
}
AGALITE, GALITE, GTRXL = "AGaLiTe", "GaLiTe", "GTrXL-128, cached"
WHOLE = "GTrXL that keeps the whole stream, cached"
_LENGTHS = (128, 512, 2048, 8192)
_NEAR = 100  # steps before each length whose times are taken


def size(quick: bool) -> dict[str, Any]:
    return SIZE | {"layers": 1} if quick else SIZE


def measure(
    *, seconds: float, stream: int, quick: bool, progress: Progress
) -> list[dict[str, Any]]:
    """One entry for each panel: against what, and rows of model, x, time and state."""
    few = 2 if quick else None
    base = size(quick)
    etas, depths = (1, 4, 16, 64)[:few], (1, 3, 7, 15, 31)[:few]
    widths = (64, 128, 256, 512)[:few]
    wanted: dict[tuple[str, str, int], tuple[Subject, dict[str, Any]]] = {}
    for eta in etas:
        wanted["eta", AGALITE, eta] = Subject("agalite", {"eta": eta}), base
        wanted["eta", GALITE, eta] = Subject("galite", {"eta": eta}), base
    for r in depths:
        wanted["r", AGALITE, r] = Subject("agalite", {"r": r}), base
    for d in widths:
        for label, subject in (
            (AGALITE, Subject("agalite")),
            (GALITE, Subject("galite")),
            (GTRXL, Subject("gtrxl", {"memory": 128})),
        ):
            wanted["width", label, d] = subject, _of_width(base, d)
    lengths = [n for n in _LENGTHS if n <= stream][:few]
    for n in lengths:
        wanted["stream", WHOLE, n] = Subject("gtrxl", {"memory": n}), base
    timed = _timed(wanted, seconds, progress)
    flat = _along(base, lengths[-1] if quick else stream, lengths, progress)
    parts = {"stream": flat, "eta": [], "r": [], "width": []}
    for (part, label, x), (program, floats) in timed.items():
        parts[part].append(_row(label, x, program.seconds, floats))
    names = {"stream": "length of the stream", "eta": "eta", "r": "r", "width": "width d"}
    return [{"against": names[part], "rows": rows} for part, rows in parts.items()]


def _of_width(size: dict[str, Any], d: int) -> dict[str, Any]:
    """T-Maze's proportions: the heads together are twice as wide as the model."""
    return size | {"d_model": d, "ffn_size": d, "head_size": d // 2}


def _timed(wanted: dict[Any, Any], seconds: float, progress: Progress) -> dict[Any, Any]:
    task = progress.add_task("compiling sizes", total=len(wanted))
    out: dict[Any, tuple[Program, int]] = {}
    for key, (subject, size) in wanted.items():
        memory = build(subject, size)
        out[key] = programs.stream(str(key), memory), memory.state_size
        progress.advance(task)
    progress.remove_task(task)
    interleave([p for p, _ in out.values()], progress, "timing sizes", runs=100, seconds=seconds)
    return out


def _along(
    size: dict[str, Any], stream: int, lengths: list[int], progress: Progress
) -> list[dict[str, Any]]:
    """One stream of AGaLiTe, every step timed; near each length, the last hundred of them."""
    memory = build(Subject("agalite"), size)
    step = programs.stream(AGALITE, memory)
    jax.block_until_ready(step.call())
    task = progress.add_task("streaming", total=stream)
    for i in range(stream):
        start = time.perf_counter()
        jax.block_until_ready(step.call())
        step.seconds.append(time.perf_counter() - start)
        if i % 100 == 0:
            progress.update(task, completed=i)
    progress.remove_task(task)
    return [
        _row(AGALITE, n, step.seconds[max(0, n - _NEAR) : n], memory.state_size) for n in lengths
    ]


def _row(model: str, x: int, seconds: list[float], floats: int) -> dict[str, Any]:
    low, middle, high = (1e3 * float(q) for q in np.percentile(seconds, [25, 50, 75]))
    return {
        "model": model,
        "x": x,
        "milliseconds": middle,
        "low": low,
        "high": high,
        "runs": len(seconds),
        "state_floats": floats,
        "seconds": seconds,
    }
