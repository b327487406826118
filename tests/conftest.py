import os
from pathlib import Path

import jax

# Programs compiled by an earlier run are used again: a warm `make test` mostly computes.
jax.config.update(
    "jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".venv/jax-cache")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# One core for each of pytest's workers: two programs side by side are faster than one on both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
