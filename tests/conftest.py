import gc
import itertools
import os
from pathlib import Path

# Programs compiled by an earlier run are used again: a warm `make test` mostly computes. In the
# environment, and before JAX is imported, so that it holds for the processes tests start as well.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".venv/jax-cache")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
# Most of the time goes into compiling programs that run for milliseconds: optimise them less, and
# generate their code the older way, which takes a quarter less time.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)
# One core for each of pytest's workers: two programs side by side are faster than one on both.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import pytest


def pytest_collection_finish():
    """What was imported stays: the collector, which tracing calls all the time, need not look at
    it again. A tenth of the time of a test that traces."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


# Every compiled program takes a dozen memory maps, Linux allows a process 65,530, and XLA does not
# survive being refused one. A worker that has seen most of the tests would get there. Reading the
# maps takes milliseconds, so not after every test.
_MANY_MAPS = 15_000
_TESTS_BETWEEN_LOOKS = 20
_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_programs():
    yield
    if next(_tests) % _TESTS_BETWEEN_LOOKS:
        return
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()
