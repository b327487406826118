"""What the studies measure that is not a training run.

Each function takes the settings of a trial and returns rows, as `declaration.Measurement` says.
`approximation_error` computes Appendix E. `latency` and `cost` run `agalite bench` in a process of
its own and turn its results into rows.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from agalite.ops import agalite_attention, galite_attention
from agalite.ops.delta import make_basis
from agalite.system import Stopped
from agalite.training.session import stop_signals

Rows = list[dict[str, Any]]


def approximation_error(
    *,
    seeds: int,
    basis: str,
    r: Sequence[int],
    gates: Sequence[float],
    width: int = 128,
    steps: int = 100,
) -> Rows:
    """The error of AGaLiTe's state for random keys and values and constant gates (Appendix E).

    **Arguments:**

    - `seeds`: independent draws of keys and values.
    - `basis`: of AGaLiTe's approximation.
    - `r`: values of r. All bases have the same number of state vectors at each r, r//2 + 1. For
      slots and rank1, whose r is the number of state vectors, r is replaced by that number.
    - `gates`: values of all gates.
    - `width`: d, of keys and values.
    - `steps`: T.

    **Returns:**

    A row for each r and gate: the Frobenius norm of C_T - C~_T, and its ratio to that of C_T.
    """
    k, v = jax.random.normal(jax.random.key(0), (2, steps, seeds, width))
    rows = []
    for order in r:
        vectors = order // 2 + 1
        compare = _comparison(k, v, order if _is_cosine(basis) else vectors, basis)
        for gate in gates:
            error, norm = (np.asarray(x, np.float64) for x in compare(jnp.float32(gate)))
            rows.append(
                {
                    "levels": {"r": order, "gate": f"{gate:g}", "vectors": vectors},
                    "values": {"error": error, "relative_error": error / norm},
                }
            )
    return rows


def _is_cosine(basis: str) -> bool:
    return basis in ("paper", "published")


def _comparison(
    k: Float[Array, "T seeds d"], v: Float[Array, "T seeds d"], r: int, basis: str
) -> Callable[[Float[Array, ""]], tuple[Float[Array, " seeds"], Float[Array, " seeds"]]]:
    """A function of the gate: the norms of C - C~ and of C, for each draw.

    The draws are independent, so they are the heads of one attention.
    """
    b = make_basis(basis, r)
    # As in `delta_approximation`: C~ has a factor 2 / r, which the attention's normaliser cancels.
    scale = 2 / r if _is_cosine(basis) else 1.0
    weights = jnp.asarray(scale * np.asarray(b.numerator), k.dtype)

    def compare(gate: Float[Array, ""]) -> tuple[Float[Array, " seeds"], Float[Array, " seeds"]]:
        gates = jnp.full(k.shape, gate)
        exact, _ = galite_attention(k, k, v, gates, gates, method="sequential")
        state, _ = agalite_attention(
            k, k, v, gates, gates, r=r, basis=basis, key=jax.random.key(1), method="sequential"
        )
        keys = state.keys[:, : b.value_vectors]
        approximate = jnp.einsum("r,hrv,hrk->hvk", weights, state.values, keys)
        error = jnp.linalg.norm(exact.C - approximate, axis=(1, 2))
        return error, jnp.linalg.norm(exact.C, axis=(1, 2))

    return jax.jit(compare)


def latency(
    *, seeds: int, part: str, seconds: float, quick: bool = False, models: Sequence[str] = ()
) -> Rows:
    """Milliseconds of every run of `agalite bench latency`.

    **Arguments:**

    - `seeds`: runs of each model.
    - `part`: "stream" (one element) or "sequence".
    - `seconds`: least time for each model.
    - `quick`: smaller models and fewer lengths.
    - `models`: names; all of the benchmark's if empty.

    **Returns:**

    A row for each model and context (stream) or length (sequence). A model whose state does not
    depend on the context has the same time at every context.
    """
    words = ["--parts", part, "--runs", str(seeds), "--seconds", str(seconds)]
    if models:
        words += ["--models", *models]
    measured = _run_bench("latency", words, quick)["parts"][part]["rows"]
    measured = [row for row in measured if row.get("parameters") is not None]  # others are bounds
    contexts = sorted({row["context"] for row in measured if row.get("context") is not None})
    rows = []
    for row in measured:
        if part != "stream":
            levels = [{"model": row["model"], "length": row["x"]}]
        elif row.get("context") is not None:
            model = "gtrxl, cached" if "cached" in row["model"] else "gtrxl"
            levels = [{"model": model, "context": row["context"]}]
        else:
            levels = [{"model": row["model"], "context": x} for x in contexts or [0]]
        values = {"ms": [1e3 * s for s in row["seconds"]]}
        rows += [{"levels": level, "values": values} for level in levels]
    return rows


def cost(*, seeds: int, quick: bool = False) -> Rows:
    """GTrXL's operations and state divided by AGaLiTe's, for each of the paper's comparisons.

    Counted by formulas and by XLA in the compiled programs, as `agalite bench cost` does. A count
    is the same every time, whatever `seeds` is.
    """
    del seeds
    found = _run_bench("cost", ["--seconds", "0.2", "--stream", "1000"], quick)
    rows = []
    for claim in found["claims"]:
        for name, ratios in claim["counted"].items():
            levels = {"comparison": claim["where"], "counted": name}
            values = {k: [ratios[k]] for k in ("operations", "state")}
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


def _run_bench(name: str, words: Sequence[str], quick: bool) -> dict[str, Any]:
    """The results of `agalite bench`, which runs in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="agalite-") as folder:
        command = [sys.executable, "-m", "agalite", "bench", name, "--out", folder, *words]
        if quick:
            command.append("--quick")
        log = Path(folder) / "log"
        with open(log, "w") as file, stop_signals() as received:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            while process.poll() is None:
                if received:
                    process.terminate()
                    process.wait()
                    raise Stopped(received[0])
                time.sleep(0.1)
        if process.returncode:
            last = (log.read_text().strip().splitlines() or ["it printed nothing"])[-1]
            raise ValueError(f"agalite bench {name} ended with {process.returncode}: {last}")
        return json.loads((Path(folder) / f"{name}.json").read_text())
