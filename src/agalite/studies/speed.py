"""What `agalite bench latency` and `bench cost` measure, as rows of a study."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agalite.process import Stopped
from agalite.training.session import asked_to_stop


def latency(
    *, seeds: int, part: str, seconds: float, quick: bool = False, models: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """part: stream or sequence. Milliseconds of every run, for each model and length.

    A model whose state does not depend on the context has the same time at every one.
    """
    words = ["--parts", part, "--runs", str(seeds), "--seconds", str(seconds)]
    if models:
        words += ["--models", *models]
    found = _bench("latency", words, quick)["parts"][part]["rows"]
    rows = [row for row in found if row.get("parameters") is not None]  # the rest are bounds
    contexts = sorted({row["context"] for row in rows if row.get("context") is not None})
    out = []
    for row in rows:
        values = {"ms": [1e3 * s for s in row["seconds"]]}
        if part != "stream":
            out.append({"levels": {"model": row["model"], "length": row["x"]}, "values": values})
        elif row.get("context") is not None:
            kind = "gtrxl, cached" if "cached" in row["model"] else "gtrxl"
            levels = {"model": kind, "context": row["context"]}
            out.append({"levels": levels, "values": values})
        else:
            for context in contexts or [0]:
                levels = {"model": row["model"], "context": context}
                out.append({"levels": levels, "values": values})
    return out


def cost(*, seeds: int, quick: bool = False) -> list[dict[str, Any]]:
    """How many times GTrXL's operations and state are AGaLiTe's: for each of the paper's
    comparisons, by the formulas and by what XLA says of the compiled programs."""
    del seeds  # a count is the same every time
    found = _bench("cost", ["--seconds", "0.2", "--stream", "1000"], quick)
    rows = []
    for claim in found["claims"]:
        for name, counted in claim["counted"].items():
            levels = {"comparison": claim["where"], "counted": name}
            values = {k: [counted[k]] for k in ("operations", "state")}
            rows.append({"levels": levels, "values": values})
    compiled = {(row["where"], row["model"]): row for row in found["compiled"]}
    for where in dict.fromkeys(row["where"] for row in found["compiled"]):
        for name, ours in (("compiled", "AGaLiTe, not folded"), ("compiled, folded", "AGaLiTe")):
            a, b = compiled[where, "GTrXL, projecting its memory"], compiled[where, ours]
            values = {
                "operations": [a["flops"] / b["flops"]],
                "state": [a["state_floats"] / b["state_floats"]],
            }
            levels = {"comparison": where, "counted": name}
            rows.append({"levels": levels, "values": values})
    return rows


def _bench(name: str, words: Sequence[str], quick: bool) -> dict[str, Any]:
    """Runs the command in a process of its own, and reads what it wrote."""
    with tempfile.TemporaryDirectory(prefix="agalite-") as folder:
        command = [sys.executable, "-m", "agalite", "bench", name, "--out", folder, *words]
        if quick:
            command.append("--quick")
        log = Path(folder) / "log"
        with open(log, "w") as file, asked_to_stop() as asked:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            while process.poll() is None:
                if asked:
                    process.terminate()
                    process.wait()
                    raise Stopped(asked[0])
                time.sleep(0.1)
        if process.returncode:
            last = (log.read_text().strip().splitlines() or ["it said nothing"])[-1]
            raise ValueError(f"agalite bench {name} ended with {process.returncode}: {last}")
        return json.loads((Path(folder) / f"{name}.json").read_text())
