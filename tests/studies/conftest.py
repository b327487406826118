import shutil

import pytest

from agalite.studies import runner
from agalite.studies.trials import expand
from studies.small_study import TRAINED


@pytest.fixture(scope="session")
def _trained_once(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    outcomes = runner.run(expand(TRAINED, "smoke", out), quiet=True)
    assert [o.state for o in outcomes] == ["finished"] * 2, outcomes
    return out


@pytest.fixture
def trained(_trained_once, tmp_path):
    """A copy of the folder of all studies, with `TRAINED` finished in it."""
    out = tmp_path / "studies"
    shutil.copytree(_trained_once, out)
    return out
