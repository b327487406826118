import gc
import os
from pathlib import Path

import jax
import pytest

# Programs compiled by an earlier run are used again: a warm `make test` mostly computes.
jax.config.update(
    "jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".venv/jax-cache")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# One core for each of pytest's workers: two programs side by side are faster than one on both.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every compiled program takes a dozen memory maps, Linux allows a process 65,530, and XLA does not
# survive being refused one. A worker that has seen most of the tests would get there.
_MANY_MAPS = 15_000


@pytest.fixture(autouse=True)
def _few_programs():
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()
