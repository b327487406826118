"""One trial: its state in its folder, how it runs and resumes, and how it fails."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from agalite.agents.ppo import PPO
from agalite.studies import runner
from agalite.studies.declaration import Scale
from agalite.studies.trials import (
    expand,
    find_same_run,
    make_config,
    record_failure,
    run_trial,
)
from agalite.training.logging import read_metrics
from agalite.training.run import Run
from studies.small_study import TRAINED, measured_study


def test_a_trial_that_succeeds_is_no_longer_a_failure(tmp_path):
    trial = expand(measured_study(), "smoke", tmp_path)[0]
    assert trial.state() == "not started"
    record_failure(trial, "it was too warm")
    assert (trial.state(), trial.failure()) == ("failed", "it was too warm")
    assert run_trial(trial).state == "finished"
    assert trial.state() == "finished"
    assert trial.progress() == 1
    assert not trial.failure_path.exists()


def test_a_failure_is_recorded_with_its_traceback(tmp_path):
    trial = expand(measured_study(base={"mode": "bad"}), "smoke", tmp_path)[0]
    outcome = run_trial(trial)
    assert (outcome.state, outcome.message) == ("failed", "this one cannot be measured")
    assert trial.failure() == "this one cannot be measured"
    assert "Traceback" in json.loads(trial.failure_path.read_text())["details"]


def test_a_run_that_another_process_writes_to_is_left_alone(tmp_path):
    trial = expand(TRAINED, "smoke", tmp_path)[0]
    with Run.create(trial.folder, make_config(trial).to_dict()):
        assert run_trial(trial).state == "busy"
        assert trial.state() == "unfinished"
    assert not trial.failure_path.exists()


def test_a_killed_trial_resumes_to_the_same_end(trained, tmp_path):
    """A run that was created, and was killed before its first checkpoint."""
    whole = expand(TRAINED, "smoke", trained)[0]
    killed = expand(TRAINED, "smoke", tmp_path / "killed")[0]
    Run.create(killed.folder, make_config(killed).to_dict()).close()
    assert killed.state() == "unfinished"
    assert run_trial(killed).state == "finished"
    assert "resumed" in (killed.folder / "run.log").read_text()
    a, b = read_metrics(whole.folder), read_metrics(killed.folder)
    for name in a.keys() - {"charts/SPS"}:
        np.testing.assert_array_equal(a[name], b[name])


def test_damaged_checkpoints_come_with_a_remedy(trained):
    trial = expand(TRAINED, "smoke", trained)[0]
    (trial.folder / "summary.json").unlink()  # as if it had been killed after its last checkpoint
    for path in (trial.folder / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.warns(UserWarning, match="checkpoint"):
        outcome = run_trial(trial)
    assert outcome.state == "failed"
    assert "are damaged" in outcome.message
    assert f"remove the folder {trial.folder} and run the study again" in outcome.message


def test_a_damaged_config_fails_its_trial_and_the_others_run(trained):
    hurt, whole = expand(TRAINED, "smoke", trained)
    (hurt.folder / "summary.json").unlink()
    (hurt.folder / "config.json").write_text('{"format": ')
    (outcome,) = runner.run([hurt, whole], quiet=True)
    assert (outcome.trial, outcome.state) == (hurt.name, "failed")
    assert "config.json cannot be read" in outcome.message
    assert f"remove the folder {hurt.folder} and run" in hurt.failure()


def test_a_damaged_measurement_is_not_finished_and_not_overwritten(tmp_path):
    trials = expand(measured_study(), "smoke", tmp_path)
    runner.run(trials, quiet=True)
    path = trials[0].rows_path
    path.write_text(path.read_text()[:50])
    assert [trial.state() for trial in trials] == ["failed", "finished", "finished"]
    assert str(path) in trials[0].failure()
    (outcome,) = runner.run(trials, quiet=True)
    assert outcome.state == "failed"
    assert f"remove the folder {trials[0].folder}" in outcome.message
    shutil.rmtree(trials[0].folder)
    assert [o.state for o in runner.run(trials, quiet=True)] == ["finished"]
    assert [trial.state() for trial in trials] == ["finished"] * 3


def test_seeds_start_where_the_scale_says(tmp_path):
    scale = Scale(seeds=3, first_seed=100, seeds_per_run=2)
    trials = expand(replace(TRAINED, scales={"cpu": scale}), "cpu", tmp_path)
    assert [(t.first_seed, t.seeds) for t in trials] == [(100, 2), (102, 1)]
    assert make_config(trials[0]).seed == 100


def test_an_algorithm_has_its_own_settings(tmp_path):
    settings = {"algorithm": "ppo", "agent.update_epochs": 2}
    study = replace(TRAINED, scales={"cpu": Scale(settings=settings)})
    [trial] = expand(study, "cpu", tmp_path)
    assert make_config(trial).agent == PPO(update_epochs=2)


def test_the_same_run_in_another_study_is_not_trained_again(trained):
    """Also where one names an option of the model that is the other's default."""
    first, second = expand(TRAINED, "smoke", trained)
    same = replace(TRAINED, name="again", base={**TRAINED.base, "memory_options.horizon": None})
    again = expand(same, "smoke", trained)
    assert find_same_run(again[0]) == replace(again[0], name=first.name, home=first.home)
    assert run_trial(again[0]).state == "finished"
    assert again[0].state() == "finished"
    for name in ("metrics.csv", "summary.json"):
        assert (again[0].folder / name).read_bytes() == (first.folder / name).read_bytes()
    assert f"copied from {first.folder}" in (again[0].folder / "run.log").read_text()

    second.result_path.unlink()  # unfinished
    assert find_same_run(again[1]) is None
    other = replace(same, name="other", base={**same.base, "agent.gamma": 0.5})
    assert find_same_run(expand(other, "smoke", trained)[0]) is None
