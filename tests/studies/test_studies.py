"""Studies: what is declared, and how it is run. About a minute."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agalite import files
from agalite.cli import main
from agalite.studies import catalogue, runner, trials
from agalite.studies.catalogue import studies
from agalite.studies.declaration import (
    Against,
    Factor,
    Map,
    Measurement,
    Metric,
    Scale,
    Study,
    over,
)
from agalite.studies.runner import Board, Here, Processes
from agalite.studies.trials import expand
from agalite.training.logging import read_metrics


def measured(*, seeds, mode="good", r=1, noise=0.0, folder=None):
    """What the studies below measure, and how they fail."""
    if mode == "bad":
        raise ValueError("this one cannot be measured")
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "slow":
        Path(folder, "begun").touch()
        time.sleep(60)
    rng = np.random.default_rng(0)
    return [
        {"levels": {"gate": gate}, "values": {"error": gate / r + noise * rng.normal(size=seeds)}}
        for gate in (0.1, 0.5)
    ]


def small(name="small", *factors, **options):
    factors = factors or (over("r", "r", (1, 2, 4)),)
    return Study(
        **{
            "name": name,
            "title": "A small one",
            "paper": "ours",
            "factors": factors,
            "work": Measurement("test_studies:measured"),
            "base": {"noise": 0.01},
            "metrics": (Metric(column="error", name="error", higher=False),),
            "figures": (Map(x="r", y="gate"), Against(x="r", lines="gate")),
            "scales": {"smoke": Scale(seeds=5), "cpu": Scale(seeds=3)},
            **options,
        }
    )


def test_every_study_of_the_paper_is_there_and_every_setting_is_valid(tmp_path):
    found = studies()
    assert set(found) == {
        "tmaze",
        "tmaze-sweep",
        "cartpole-noisy",
        "cartpole-masked",
        "cartpole-sweep",
        "mystery-path-grid",
        "mystery-path",
        "mystery-path-sweep",
        "craftax",
        "craftax-sweep",
        "memory-maze",
        "memory-maze-window",
        "memory-maze-sweep",
        "ablation-gating",
        "ablation-feature-map",
        "ablation-approximation",
        "approximation-error",
        "bases",
        "horizon",
        "gtrxl-window",
        "lra-listops",
        "lra-text",
        "latency-streaming",
        "latency-sequence",
        "cost",
    }
    for study in found.values():
        assert set(study.scales) == {"smoke", "cpu", "paper"}, study.name
        for scale in study.scales:
            trials = expand(study, scale, tmp_path)
            assert len({trial.folder for trial in trials}) == len(trials) > 0
            for trial in trials:
                trials.check(trial)  # a mistake in a setting raises
        _figures_and_claims_name_what_exists(study)


def _figures_and_claims_name_what_exists(study):
    if isinstance(study.work, Measurement):
        return  # what is measured brings levels of its own
    names = {part for factor in study.factors for part in factor.name.split("/")}
    for figure in study.figures:
        for field in ("x", "y", "lines", "panels"):
            assert getattr(figure, field, None) in {None, *names}, (study.name, figure)
    # Every tested claim can be tested at the scales that it is about.
    for claim in study.claims:
        for scale in claim.scales:
            labels = {name: set() for name in names}
            for trial in expand(study, scale, Path()):
                for name, label in trial.levels.items():
                    labels[name].add(label)
            for test in claim.tests:
                for side in (test.a, getattr(test, "b", {})):
                    for factor, wanted in side.items():
                        allowed = (wanted,) if isinstance(wanted, str) else wanted
                        assert labels[factor] & set(allowed), (study.name, scale, claim.says)


def test_the_worked_example_in_the_docs_is_a_study(tmp_path):
    text = (Path(__file__).parent.parent / "docs/studies.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    found: dict = {}
    exec(example, found)
    (study,) = found["STUDIES"]
    for scale in study.scales:
        trials = expand(study, scale, tmp_path)
        for trial in trials:
            trials.check(trial)
    _figures_and_claims_name_what_exists(study)
    # The docs' table has every study.
    assert all(f"`{name}`" in text for name in studies())


def test_the_paper_scale_is_the_papers():
    def settings(name, **levels):
        trials = expand(catalogue.find(name), "paper", Path())
        mine = [t for t in trials if levels.items() <= t.levels.items()]
        assert mine, levels
        return mine, trials.asked(mine[0])

    trials, agalite = settings("tmaze", agent="agalite", corridor="200")
    assert sum(trial.seeds for trial in trials) == 50
    assert (agalite["steps"], agalite["num_envs"], agalite["num_steps"]) == (5_000_000, 8, 256)
    assert agalite["algorithm"] == "a2c"
    assert agalite["memory_options"] == {"eta": 4, "r": 1}
    trials, sweep = settings("tmaze-sweep", agent="gru", corridor="120")
    assert len(trials) == 25  # five learning rates times five entropy coefficients
    assert sweep["seeds"] == 5
    trials, pole = settings("cartpole-noisy", agent="gru")
    assert sum(trial.seeds for trial in trials) == 30
    assert (pole["env"], pole["num_envs"], pole["num_steps"]) == ("noisy-masked-cartpole", 1, 1024)
    assert pole["agent"]["update_epochs"] == 10
    trials, maze = settings("memory-maze", agent="agalite", maze="15x15")
    assert len(trials) == 3
    assert maze["memory_options"]["r"] == 7
    assert maze["memory_options"]["d_model"] == 512
    trials, craft = settings("craftax", agent="agalite-8")
    assert len(trials) == 15
    assert (craft["steps"], craft["num_envs"]) == (1_000_000_000, 1024)
    assert len(settings("mystery-path-sweep", agent="agalite")[0]) == 12
    assert len(settings("craftax-sweep", agent="agalite-8")[0]) == 9 * 5
    assert len(settings("memory-maze-sweep", agent="agalite")[0]) == 9 * 3


def test_seeds_are_shared_out_without_a_gap(tmp_path):
    study = small(scales={"smoke": Scale(seeds=7, together=3)})
    parts = [(t.first, t.seeds) for t in expand(study, "smoke", tmp_path) if t.levels["r"] == "1"]
    assert parts == [(0, 3), (3, 3), (6, 1)]
    names = [t.name for t in expand(study, "smoke", tmp_path)][:3]
    assert names == ["r=1,seed=0-2", "r=1,seed=3-5", "r=1,seed=6"]


def test_only_selects_levels_and_says_what_exists(tmp_path):
    study = catalogue.find("tmaze")
    names = [t.name for t in expand(study, "cpu", tmp_path, ["agent=gru", "agent=lstm"])]
    assert names == [
        "agent=lstm,corridor=20",
        "agent=lstm,corridor=40",
        "agent=gru,corridor=20",
        "agent=gru,corridor=40",
    ]
    with pytest.raises(ValueError, match="choose one of: 20, 40"):
        expand(study, "cpu", tmp_path, ["corridor=999"])
    with pytest.raises(ValueError, match=r"agent=\.\.\., corridor=\.\.\."):
        expand(study, "cpu", tmp_path, ["length=20"])
    bases = expand(catalogue.find("bases"), "cpu", tmp_path, ["basis=slots", "vectors=4"])
    assert [t.settings["memory_options.r"] for t in bases] == [4]


def test_bases_have_equal_state():
    import jax

    import agalite

    sizes = {}
    for trial in expand(catalogue.find("bases"), "cpu", Path()):
        options = trials.asked(trial)["memory_options"]
        memory = agalite.make_memory("agalite", 16, key=jax.random.key(0), **options)
        c = memory.config
        vectors = int(trial.levels["vectors"])
        least = c.layers * c.heads * vectors * (c.eta + 1) * c.head_size
        sizes.setdefault(vectors, {})[trial.levels["basis"]] = memory.state_size - least
    for vectors, extra in sizes.items():
        assert extra["paper"] == extra["slots"] == 0, vectors
        # Without a constant oscillator the normaliser is one key vector more.
        assert extra["published"] == c.layers * c.heads * c.eta * c.head_size


# Running.


def test_finished_trials_are_not_run_again_and_failures_do_not_stop_the_rest(tmp_path):
    modes = Factor("mode", {name: {"mode": name} for name in ("good", "bad")})
    study = small("mixed", modes, over("r", "r", (1, 2)))
    trials = expand(study, "smoke", tmp_path)
    first = runner.run(trials, quiet=True)
    assert [o.state for o in first] == ["finished", "finished", "failed", "failed"]
    assert trials[2].state() == "failed"
    assert trials[2].failure() == "this one cannot be measured"
    assert "Traceback" in json.loads(trials[2].failure_path.read_text())["details"]
    before = trials[0].rows_path.stat().st_mtime_ns
    again = runner.run(trials, quiet=True)
    assert [o.trial for o in again] == [t.name for t in trials[2:]]
    assert trials[0].rows_path.stat().st_mtime_ns == before
    assert len(list((tmp_path / "mixed/smoke/sessions").iterdir())) == 2


def test_a_trial_that_succeeds_is_no_longer_a_failure(tmp_path):
    trial = expand(small(), "smoke", tmp_path)[0]
    trials.record_failure(trial, "it was too warm")
    assert trial.state() == "failed"
    assert trials.perform(trial).state == "finished"
    assert trial.state() == "finished"
    assert not trial.failure_path.exists()


def test_other_settings_in_the_same_folder_are_refused_before_anything_is_run(tmp_path):
    runner.run(expand(small(), "smoke", tmp_path), quiet=True)
    other = small(base={"noise": 0.02})
    with pytest.raises(ValueError, match=r"made with other settings \(settings\)"):
        runner.run(expand(other, "smoke", tmp_path), quiet=True)


def test_processes_share_the_work_and_outlive_one_that_dies(tmp_path):
    modes = Factor("mode", {name: {"mode": name} for name in ("die", "good", "bad")})
    study = small("shared", modes, over("r", "r", (1, 2)))
    trials = expand(study, "smoke", tmp_path)
    outcomes = runner.run(trials, Processes(2), quiet=True)
    states = {t.name: t.state() for t in trials}
    assert len(outcomes) == 6
    assert [s for n, s in states.items() if "good" in n] == ["finished"] * 2
    assert all(s == "failed" for n, s in states.items() if "good" not in n)
    assert trials[0].failure() == "the process that ran it died (killed by SIGKILL)"


# Ctrl-C, in real processes.


def _agalite(words, folder, **options):
    # Background jobs of a shell ignore Ctrl-C, and their children inherit that.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    run = "from agalite.__main__ import main; sys.exit(main())"
    environment = {**os.environ, "AGALITE_HUGE_PAGES": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", start + run, *words],
        cwd=folder,
        env=environment,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **options,
    )


WORDS = ["study", "run", "horizon", "--scale", "cpu", "--only", "agent=gru", "--jobs"]


def _at_work(jobs, folder):
    """A study that would take hours, with `jobs` trials that have begun to learn."""
    process = _agalite([*WORDS, str(jobs)], folder)
    trials = expand(catalogue.find("horizon"), "cpu", folder / "studies", ["agent=gru"])[:jobs]
    try:
        _wait(process, lambda: all(trials.progress(trial) > 0 for trial in trials))
    except BaseException:
        process.kill()
        raise
    return process, trials


def _saved(trials):
    from agalite.training.run import Run

    for trial in trials:
        assert "stopped at step" in (trial.folder / "run.log").read_text()
        assert any((trial.folder / "checkpoints").iterdir())
        with Run.open(trial.folder, write=True):  # nobody is at it any more: its lock is free
            pass


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_saves_every_run_and_says_how_to_go_on(jobs, tmp_path):
    process, trials = _at_work(jobs, tmp_path)
    try:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert f"every run is saved: 2 trials: {jobs} half-finished" in said
    assert f"go on with: agalite {' '.join([*WORDS, str(jobs)])}" in said
    _saved(trials)


def test_workers_whose_parent_is_killed_save_their_runs_and_go(tmp_path):
    process, trials = _at_work(2, tmp_path)
    process.kill()
    process.wait()
    logs = [trial.folder / "run.log" for trial in trials]
    deadline = time.monotonic() + 120
    while not all("stopped at step" in log.read_text() for log in logs):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.0)
    _saved(trials)
    (session,) = (tmp_path / "studies/horizon/cpu/sessions").iterdir()
    assert not json.loads(session.read_text())["over"]


def test_a_session_is_on_the_disk_while_it_runs(tmp_path):
    """A process that is killed writes nothing any more."""
    seen = []

    class Watched(Here):
        def run(self, trials, begun):
            for outcome in super().run(trials, begun):
                seen.append(sessions())
                yield outcome

    def sessions():
        return [json.loads(p.read_text()) for p in tmp_path.glob("small/smoke/sessions/*.json")]

    runner.run(expand(small(), "smoke", tmp_path), Watched(), quiet=True, command="so", notes=["x"])
    assert [[len(s["trials"]) for s in found] for found in [*seen, sessions()]] == [
        [0],
        [1],
        [2],
        [3],
    ]
    assert [s["over"] for found in [*seen, sessions()] for s in found] == [False] * 3 + [True]
    assert seen[0][0]["command"] == "so"
    assert seen[0][0]["notes"] == ["x"]


def _wait(process, until):
    deadline = time.monotonic() + 240
    while not until():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_study_goes_on_to_the_same_end(tmp_path):
    """One that was killed without warning ends with the numbers of one that was not."""
    whole, killed = _tiny(tmp_path / "whole"), _tiny(tmp_path / "killed")
    assert [o.state for o in runner.run(whole, quiet=True)] == ["finished"]
    from agalite.training.run import Run

    # A run that was created, and had not come to its first checkpoint.
    Run.create(killed[0].folder, trials.config(killed[0]).to_dict()).close()
    assert killed[0].state() == "half-finished"
    assert [o.state for o in runner.run(killed, quiet=True)] == ["finished"]
    assert "resumed" in (killed[0].folder / "run.log").read_text()
    a, b = read_metrics(whole[0].folder), read_metrics(killed[0].folder)
    for name in a.keys() - {"charts/SPS"}:
        np.testing.assert_array_equal(a[name], b[name])


def test_a_damaged_trial_is_its_own_failure_and_the_others_run(tmp_path):
    from agalite.training.run import Run

    trials = expand(catalogue.find("tmaze"), "smoke", tmp_path)
    for trial in trials:
        Run.create(trial.folder, trials.config(trial).to_dict()).close()
    (trials[0].folder / "config.json").write_text('{"format": ')
    outcomes = runner.run(trials, quiet=True)
    assert [o.state for o in outcomes] == ["failed", "finished"]
    assert "config.json cannot be read" in outcomes[0].message
    assert f"remove the folder {trials[0].folder} and run" in trials[0].failure()


def test_damaged_checkpoints_come_with_the_way_out(tmp_path):
    (trial,) = _tiny(tmp_path)
    trials.perform(trial)
    (trial.folder / "summary.json").unlink()  # as if it had been killed after its last checkpoint
    for path in (trial.folder / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.warns(UserWarning, match="is passed over"):
        outcome = trials.perform(trial)
    assert outcome.state == "failed"
    assert "are damaged" in outcome.message
    assert f"remove the folder {trial.folder} and run the study again" in outcome.message


def _tiny(out):
    study = catalogue.find("tmaze-sweep")
    return expand(study, "smoke", out, ["learning_rate=0.001"])


def test_a_run_that_somebody_else_writes_to_is_left_alone(tmp_path):
    from agalite.training.run import Run

    (trial,) = _tiny(tmp_path)
    with Run.create(trial.folder, trials.config(trial).to_dict()):
        assert trials.perform(trial).state == "busy"
    assert not trial.failure_path.exists()


def test_a_study_that_somebody_else_runs_says_so(tmp_path, capsys):
    from agalite.training.run import Run

    (trial,) = expand(catalogue.find("tmaze-sweep"), "smoke", tmp_path, ["learning_rate=0.001"])
    words = ["study", "run", "tmaze-sweep", "--only", "learning_rate=0.001", "--out", str(tmp_path)]
    with (
        Run.create(trial.folder, trials.config(trial).to_dict()),
        pytest.raises(SystemExit) as ended,
    ):
        main(words)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "another process is running 1 trial of this study" in said
    assert "1 trial: 1 half-finished" in said


def test_a_stopped_trial_needs_no_reason(tmp_path, capsys):
    trials = expand(small(), "smoke", tmp_path)
    Board(trials).ended(trials.Outcome(trials[0].name, "stopped", 0.0))
    assert capsys.readouterr().err.splitlines()[0].endswith(f"stopped  {trials[0].name}  0 s")


def test_progress_tells_how_far_and_how_long(tmp_path, capsys):
    trials = expand(small(), "smoke", tmp_path)
    runner.run(trials)
    said = capsys.readouterr().err
    assert "1 of 3 trials  33%" in said
    assert re.search(r"\d\.\d min left", said)
    assert "3 of 3 trials  100%" in said


# The command line.


def test_bad_input_is_answered_with_what_exists(tmp_path, capsys):
    for words, answer in (
        (["run", "tmase"], "study='tmase' is unknown; choose one of: ablation-approximation"),
        (["run", "tmaze", "--scale", "huge"], "scale='huge' is unknown; choose one of: cpu, paper"),
        (["run", "tmaze", "--only", "agent=rnn"], "choose one of: agalite, gru"),
        (["run", "tmaze", "--jobs", "0"], "jobs=0 must be a whole number >= 1"),
        (["run", "tmaze", "--cpus", "0"], "cpus=0.0 must be a finite number > 0"),
        (["run", "tmaze", "--ray", "auto", "--jobs", "2"], "jobs=2 is for this machine alone"),
        (["run", "tmaze", "--chosen", str(tmp_path / "no.json")], "cannot be read"),
        (["report", "tmaze", "--out", str(tmp_path / "none")], "does not exist; run it first: ag"),
        (["report", "tmaze", "--scale", "huge"], "scale='huge' is unknown"),
        (["status", "nothing"], "study='nothing' is unknown"),
    ):
        assert main(["study", *words]) == 2, words
        assert answer in capsys.readouterr().err, words


def test_where_nothing_listens_there_is_no_cluster(tmp_path, capsys, monkeypatch):
    """Ray itself is not needed for that, and not waited for."""
    import socket

    from agalite.training.asynchronous import ray

    monkeypatch.setattr(ray, "_ANSWER", 0.2)
    monkeypatch.setattr("agalite.studies.runner.import_ray", lambda: None)
    out = ["--out", str(tmp_path)]
    for address in ("127.0.0.1:1", "127.0.0.1:port", "127.0.0.1:99999"):
        assert main(["study", "run", "cost", "--ray", address, *out]) == 2
        said = capsys.readouterr().err
        assert f"there is no cluster at {address} (" in said
        assert "start one with `ray start --head`" in said
    assert not list(tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray.require_cluster(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("auto", "ray://127.0.0.1:1"):
        ray.require_cluster(address)


def test_list_names_every_study(capsys):
    assert main(["study", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in studies())


def test_a_failure_is_seen_in_the_exit_code_and_in_status(tmp_path, capsys, monkeypatch):
    modes = Factor("mode", {name: {"mode": name} for name in ("good", "bad")})
    monkeypatch.setattr(catalogue, "find", lambda _: small("mixed", modes))
    with pytest.raises(SystemExit) as ended:
        main(["study", "run", "mixed", "--out", str(tmp_path)])
    assert ended.value.code == 1
    assert "failed  mode=bad  0 s: this one cannot be measured" in capsys.readouterr().err
    assert main(["study", "status", "mixed", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^failed +mode=bad  this one cannot be measured$", said, re.M)
    assert "2 trials: 1 finished, 1 failed" in said


def test_what_a_sweep_chose_is_used(tmp_path):
    path = tmp_path / "chosen.json"
    files.write_json(path, {"agalite": {"agent.learning_rate": 0.007}})
    trials = expand(catalogue.find("tmaze"), "smoke", tmp_path, chosen=json.loads(path.read_text()))
    rates = {t.levels["agent"]: trials.asked(t)["agent"]["learning_rate"] for t in trials}
    assert rates == {"agalite": 0.007, "gru": 5e-4}


def test_chosen_must_name_what_the_study_has(tmp_path, capsys, monkeypatch):
    # JAX is awake in this process, and takes no other number of devices any more.
    monkeypatch.setattr("agalite.studies.command.use_devices", lambda *_: None)
    path = tmp_path / "chosen.json"
    words = ["study", "run", "tmaze", "--chosen", str(path), "--out", str(tmp_path / "out")]
    for chosen, answer in (
        ({"gru": {"agent.learning_rat": 0.1}}, "setting='agent.learning_rat' is unknown; choose"),
        ({"gru": {"learning_rate": 0.1}}, "agent.learning_rate"),
        ({"rnn": {}}, "agent of study tmaze in chosen='rnn' is unknown; choose one of: agalite, "),
    ):
        files.write_json(path, chosen)
        assert main(words) == 2, chosen
        assert answer in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    files.write_json(path, {"gru": {}})
    assert main(["study", "run", "cost", *words[3:]]) == 2
    assert "study cost has no agents; run it without --chosen" in capsys.readouterr().err


def test_agents_that_were_not_chosen_are_named_on_the_console_and_on_the_page(
    tmp_path, capsys, monkeypatch
):
    agents = Factor("agent", {"one": {"r": 1}, "two": {"r": 2}})
    monkeypatch.setattr(catalogue, "find", lambda _: small("few", agents, figures=()))
    path = tmp_path / "chosen.json"
    files.write_json(path, {"one": {"r": 4}})
    words = ["study", "run", "few", "--chosen", str(path), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["agalite", *words])
    assert main(words) == 0
    note = f"{path} does not name two: default settings"
    assert note in capsys.readouterr().err
    assert main(["study", "report", "few", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "few/smoke/report.html").read_text()
    assert note in page
    # What to type to do it again is what was typed.
    assert f"<pre>agalite {' '.join(words)}\nagalite study report few" in page
