"""`agalite soak stream`: a long stream of a small AGaLiTe, step by step.

The streaming step, `memory.step`, runs in a compiled loop; every chunk of the stream repeats the
same inputs. After each chunk the oscillator's phase is compared with integer arithmetic in Python,
and the state with the largest it can be: sums that decay are bounded by their inputs. The chunk is
not a multiple of the oscillator's period, so the phase differs from chunk to chunk.
"""

import gc
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agalite.bench.timing import progress_bar
from agalite.memory import make_memory
from agalite.soak.campaign import Figure, Record

_INPUT, _R = 2, 7  # the oscillator's period is r
_OPTIONS = {"d_model": 4, "layers": 1, "heads": 1, "head_size": 2, "ffn_size": 4, "eta": 2}
_CHUNKS = 100
_SETTLED = 0.1  # of the stream: the process has its memory by then
_GROWTH = 1.02  # of the process's memory after that
_BOUND = 1.05  # of the largest state of the first chunks


def run(record: Record, steps: int) -> None:
    """Streams `steps` steps and fills the record."""
    memory = make_memory("agalite", _INPUT, key=jax.random.key(record.seed), r=_R, **_OPTIONS)
    size = steps // _CHUNKS
    size -= size % _R == 0  # so that the phase is another one after every chunk
    xs = np.random.default_rng(record.seed).standard_normal((size, _INPUT), np.float32)

    @jax.jit
    def chunk(state: Any, xs: jax.Array) -> tuple[Any, jax.Array]:
        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            state, y = memory.step(state, x, False)
            return state, jnp.abs(y).max()

        state, largest = jax.lax.scan(step, state, xs)
        return state, largest.max()

    state, done = memory.initial_state(), 0
    wrong_phases = not_finite = 0
    with progress_bar() as progress:
        task = progress.add_task("stream", total=steps)
        while done < steps:
            few = xs[: min(size, steps - done)]
            state, output = chunk(state, few)
            done += len(few)
            wrong_phases += int(state.phase) != done % _R
            leaves = [np.asarray(x) for x in jax.tree.leaves((state, output))]
            floats = [x for x in leaves if x.dtype.kind == "f"]
            not_finite += not all(np.isfinite(x).all() for x in floats)
            gc.collect()
            record.rows.append(
                {
                    "steps": done,
                    "phase": int(state.phase),
                    "largest_state": max(float(np.abs(x).max()) for x in floats),
                    "megabytes": _resident() / 1e6,
                }
            )
            progress.update(task, completed=done)
    fresh = chunk(memory.initial_state(), xs[:50])
    begins = _from_reset(memory, state, xs[:50])
    rows = record.rows
    settled = [row for row in rows if row["steps"] >= _SETTLED * steps]
    first = max(row["largest_state"] for row in rows[: max(_R, 1)])
    grown = max(row["megabytes"] for row in settled) / settled[0]["megabytes"]
    record.figures += [
        Figure("steps of one stream", done, ">=", steps),
        Figure("phases that differ from integer arithmetic", wrong_phases, "=", 0),
        Figure("chunks with a number that is not finite", not_finite, "=", 0),
        Figure(
            f"largest state, relative to that of the first {_R} chunks",
            max(row["largest_state"] for row in rows) / first,
            "<=",
            _BOUND,
        ),
        Figure("memory of the process, relative to that after a tenth", grown, "<=", _GROWTH),
        Figure(
            "elements that differ from a fresh state's after a reset",
            sum(
                int((np.asarray(a) != np.asarray(b)).sum())
                for a, b in zip(jax.tree.leaves(begins), jax.tree.leaves(fresh[0]), strict=True)
            ),
            "=",
            0,
        ),
    ]


def _from_reset(memory: Any, state: Any, xs: np.ndarray) -> Any:
    """The state after `xs`, of which the first begins an episode."""

    def step(state: Any, inputs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        return memory.step(state, *inputs)[0], None

    begins = jnp.arange(len(xs)) == 0
    return jax.jit(lambda state: jax.lax.scan(step, state, (jnp.asarray(xs), begins)))(state)[0]


def _resident() -> int:
    """Bytes of this process in main memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
