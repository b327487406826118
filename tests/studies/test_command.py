"""`agalite study` on the command line."""

import json
import re
import socket
import sys

import pytest

from agalite import files
from agalite.cli import main
from agalite.studies import catalogue
from agalite.studies.declaration import Better, Between, Claim, Factor
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


def test_one_study_or_all_of_them(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    for words, answer in (
        ([], "name one study or give --all"),
        (["tmaze", "--all"], "name one study or give --all"),
        (["--all", "--only", "agent=gru"], "--only and --chosen are for one study"),
        (["--all", "--scale", "huge"], "scale='huge' is unknown"),
        (["tmaze", "--hours", "0"], "hours=0.0 must be a finite number > 0"),
    ):
        assert main(["study", "run", *words, *out]) == 2, words
        assert answer in capsys.readouterr().err, words


def test_all_studies_are_run_and_their_pages_written(tmp_path, capsys, monkeypatch):
    modes = Factor("mode", {"bad": {"mode": "bad"}})
    two = [measured_study("first"), measured_study("second", modes, figures=())]
    monkeypatch.setattr(catalogue, "in_order", lambda _: two)
    with pytest.raises(SystemExit) as ended:
        main(["study", "run", "--all", "--out", str(tmp_path)])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "trials failed in: second" in printed.err
    for name in ("first", "second"):
        assert (tmp_path / name / "smoke/report.html").exists()
    # When the time is over nothing more is started.
    words = ["study", "run", "--all", "--scale", "cpu", "--hours", "1e-9", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "hours are over; the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "first/cpu").exists()


def test_the_table_of_claims(tmp_path, capsys, monkeypatch):
    claims = (
        Claim(
            says="Less is better.",
            where="Section 1",
            tests=(Better(a={"r": "4"}, b={"r": "1"}),),
            scales=("cpu",),
        ),
        Claim(says="More is better.", where="Section 2", tests=(), scales=("cpu",)),
        Claim(
            says="(ours) Slots are enough.",
            where="findings",
            tests=(Between(a={"r": "9"}, low=0, high=1),),
            scales=("cpu",),
        ),
    )
    known = {"small": measured_study(paper="Section 1", claims=claims, figures=())}
    monkeypatch.setattr(catalogue, "studies", lambda: known)
    monkeypatch.setattr("agalite.studies.verdicts.studies", lambda: known)
    command = ["study", "claims", "--out", str(tmp_path)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "2 claims: 1 not run yet, 1 needs more than two cores." in printed
    assert "What the paper does not say:\n\n1 claims: 1 not run yet." in printed
    assert "| Slots are enough. *(findings)* | not run yet" in printed
    assert main(["study", "run", "small", "--scale", "cpu", "--out", str(tmp_path)]) == 0
    assert main(["study", "report", "small", "--scale", "cpu", "--out", str(tmp_path)]) == 0
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- claims -->\nold\n<!-- /claims -->\nafter\n")
    for _ in range(2):  # writing it again changes nothing
        assert main([*command, "--into", str(page)]) == 0
        text = page.read_text()
        assert text.startswith("before\n<!-- claims -->\n2 claims: 1 agrees, 1 needs")
        assert text.endswith("<!-- /claims -->\nafter\n")
        assert "[**agrees**](./small/cpu/report.html)" in text
        assert "| 3 | `agalite study run small --scale cpu` |" in text
    page.write_text("no marks")
    assert main([*command, "--into", str(page)]) == 2
    assert "must have the lines <!-- claims -->" in capsys.readouterr().err


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


def test_a_study_takes_the_choice_of_its_sweep(tmp_path, capsys, monkeypatch):
    agents = Factor("agent", {"one": {"r": 1}})
    study = measured_study("few", agents, figures=(), sweep="few-sweep")
    monkeypatch.setattr(catalogue, "find", lambda _: study)
    words = ["study", "run", "few", "--out", str(tmp_path / "without")]
    assert main(words) == 0
    assert "few-sweep has no choice in" in capsys.readouterr().err
    path = tmp_path / "with/few-sweep/smoke/chosen.json"
    path.parent.mkdir(parents=True)
    files.write_json(path, {"one": {"r": 4}})
    assert main([*words[:-1], str(tmp_path / "with")]) == 0
    assert f"as chosen by {path}" in capsys.readouterr().err
    (rows,) = (tmp_path / "with/few/smoke/trials").glob("*/rows.json")
    assert json.loads(rows.read_text())["requested"]["settings"]["r"] == 4
