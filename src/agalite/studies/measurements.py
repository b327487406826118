"""How far AGaLiTe's state is from GaLiTe's, as in Appendix E: random keys and values, gates that
are all the same constant."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agalite.ops.attention import agalite_attention, galite_attention
from agalite.ops.delta import make_basis
from agalite.system import Stopped
from agalite.training.session import asked_to_stop


def measure(
    *,
    seeds: int,
    basis: str,
    r: Sequence[int],
    gates: Sequence[float],
    width: int = 128,
    steps: int = 100,
) -> list[dict[str, Any]]:
    """Frobenius norms of C - C~ after so many steps, for `seeds` independent draws.

    At each r all bases have the same number of state vectors, r//2 + 1: that is what slots and the
    rank-1 trick count.
    """
    k, v = jax.random.normal(jax.random.key(0), (2, steps, seeds, width))
    rows = []
    for order in r:
        vectors = order // 2 + 1
        own = order if basis in ("paper", "published") else vectors
        compare = _comparison(k, v, own, basis)
        for gate in gates:
            error, size = (np.asarray(x, np.float64) for x in compare(jnp.float32(gate)))
            rows.append(
                {
                    "levels": {"r": order, "gate": f"{gate:g}", "vectors": vectors},
                    "values": {"error": error, "relative_error": error / size},
                }
            )
    return rows


def _comparison(k: jax.Array, v: jax.Array, r: int, basis: str) -> Any:
    """gate () -> the error (seeds,) and the norm of the exact state (seeds,).

    The draws are independent, so they pass as heads of one attention.
    """
    b = make_basis(basis, r)
    # As in `delta_approximation`: the approximation of C carries 2 / r, which the attention leaves
    # to its normaliser.
    scale = 2 / r if basis in ("paper", "published") else 1.0
    weights = jnp.asarray(scale * np.asarray(b.numerator), k.dtype)

    def compare(gate: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jnp.full(k.shape, gate)
        options: dict[str, Any] = {"method": "sequential"}
        exact, _ = galite_attention(k, k, v, gates, gates, **options)
        state, _ = agalite_attention(
            k, k, v, gates, gates, r=r, basis=basis, key=jax.random.key(1), **options
        )
        keys = state.keys[:, : b.value_vectors]
        near = jnp.einsum("r,hrv,hrk->hvk", weights, state.values, keys)
        return jnp.linalg.norm(exact.C - near, axis=(1, 2)), jnp.linalg.norm(exact.C, axis=(1, 2))

    return jax.jit(compare)


# --- What `agalite bench latency` and `bench cost` measure, as rows of a study --------------------


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
