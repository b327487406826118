"""How a run begins and ends, whatever its algorithm."""

from types import SimpleNamespace

import numpy as np

from agalite.training.metrics import MetricsWriter
from agalite.training.run import Run
from agalite.training.session import finish


def test_a_run_in_which_no_episode_ended_ends_well(tmp_path):
    rows = [{"charts/episodic_return": np.nan, "charts/SPS": 3.0}]
    with Run.create(tmp_path / "run", {}) as run, MetricsWriter(run, 1) as metrics:
        metrics.write(100, rows)
        config = SimpleNamespace(seeds_in_all=1, steps_per_update=100)
        finish(run, config, parameters=7, seconds=1.0, updates=1)  # pyright: ignore
        assert run.read_summary()["last_tenth"] == {"charts/SPS": 3.0}
        assert not run.curve_path.exists()
        assert "no episode has ended" in (run.folder / "run.log").read_text()
        metrics.write(200, [{"charts/episodic_return": 1.0, "charts/SPS": 3.0}])
        finish(run, config, parameters=7, seconds=1.0, updates=1)  # pyright: ignore
        assert run.curve_path.exists()
