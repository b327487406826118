"""`agalite study` on the command line."""

import re
import socket
import sys

import pytest

from agalite import files
from agalite.cli import main
from agalite.studies import catalogue
from agalite.studies.declaration import Factor
from agalite.studies.trials import expand, make_config, write_format
from agalite.training.run import Run
from studies.small_study import TRAINED, measured_study


@pytest.fixture(autouse=True)
def _keep_devices(monkeypatch):
    # JAX has started in this process and takes no other number of devices.
    monkeypatch.setattr("agalite.studies.command.use_devices", lambda *_: None)


def test_bad_input_is_answered_with_what_exists(tmp_path, capsys):
    for words, answer in (
        (["run", "tmase"], "study='tmase' is unknown; choose one of: ablation-approximation"),
        (["run", "tmaze", "--scale", "huge"], "scale='huge' is unknown; choose one of: cpu, paper"),
        (["run", "tmaze", "--only", "agent=rnn"], "choose one of: agalite, gru"),
        (["run", "tmaze", "--jobs", "0"], "jobs=0 must be"),
        (["run", "tmaze", "--cpus", "0"], "cpus=0.0 must be a finite number > 0"),
        (["run", "tmaze", "--ray", "auto", "--jobs", "2"], "jobs=2 is for this machine alone"),
        (["run", "tmaze", "--chosen", str(tmp_path / "no.json")], "cannot be read"),
        (["report", "tmaze", "--out", str(tmp_path / "none")], "does not exist; run it first: ag"),
        (["report", "tmaze", "--scale", "huge"], "scale='huge' is unknown"),
        (["status", "nothing"], "study='nothing' is unknown"),
    ):
        assert main(["study", *words]) == 2, words
        assert answer in capsys.readouterr().err, words


def test_a_folder_in_an_older_format_is_refused_with_a_sentence(tmp_path, capsys):
    (tmp_path / "tmaze/smoke/trials").mkdir(parents=True)
    for command in ("report", "status", "run"):
        assert main(["study", command, "tmaze", "--out", str(tmp_path)]) == 2
        assert "tmaze/smoke is in study format 1, and this" in capsys.readouterr().err


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path, capsys, monkeypatch):
    from agalite.training.asynchronous import ray

    monkeypatch.setattr(ray, "_CONNECT_TIMEOUT", 0.2)
    monkeypatch.setattr(ray, "import_ray", lambda: None)
    out = ["--out", str(tmp_path)]
    for address in ("127.0.0.1:1", "127.0.0.1:port", "127.0.0.1:99999"):
        assert main(["study", "run", "cost", "--ray", address, *out]) == 2
        printed = capsys.readouterr().err
        assert f"there is no cluster at {address} (" in printed
        assert "start one with `ray start --head`" in printed
    assert not list(tmp_path.iterdir())
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray.require_cluster(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("auto", "ray://127.0.0.1:1"):
        ray.require_cluster(address)


def test_list_names_every_study(capsys):
    assert main(["study", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in catalogue.studies())


def test_a_failure_shows_in_the_exit_code_and_in_status(tmp_path, capsys, monkeypatch):
    modes = Factor("mode", {name: {"mode": name} for name in ("good", "bad")})
    monkeypatch.setattr(catalogue, "find", lambda _: measured_study("mixed", modes))
    with pytest.raises(SystemExit) as ended:
        main(["study", "run", "mixed", "--out", str(tmp_path)])
    assert ended.value.code == 1
    assert "failed  mode=bad  0 s: this one cannot be measured" in capsys.readouterr().err
    assert main(["study", "status", "mixed", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^failed +mode=bad  this one cannot be measured$", printed, re.M)
    assert "2 trials: 1 finished, 1 failed" in printed


def test_a_study_that_another_process_runs_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(catalogue, "find", lambda _: TRAINED)
    trials = expand(TRAINED, "smoke", tmp_path)
    write_format(trials[0].home)
    runs = [Run.create(trial.folder, make_config(trial).to_dict()) for trial in trials]
    with runs[0], runs[1], pytest.raises(SystemExit) as ended:
        main(["study", "run", "trained", "--out", str(tmp_path)])
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert "another process is running 2 trials of this study" in printed
    assert "2 trials: 2 unfinished" in printed


def test_chosen_must_name_what_the_study_has(tmp_path, capsys):
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


def test_agents_without_a_choice_are_named_on_the_console_and_on_the_page(
    tmp_path, capsys, monkeypatch
):
    agents = Factor("agent", {"one": {"r": 1}, "two": {"r": 2}})
    monkeypatch.setattr(catalogue, "find", lambda _: measured_study("few", agents, figures=()))
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
    # The command to do it again is the one that was typed.
    assert f"<pre>agalite {' '.join(words)}\nagalite study report few" in page
