"""Metrics for Weights & Biases, with the real package, offline; nothing here needs a network."""

import importlib.util
import json
import math
import struct
import subprocess
import sys
import time

import pytest
from wandb.proto import wandb_internal_pb2

from agalite import extras
from agalite.cli import main
from agalite.training import wandb_log
from agalite.training.logging import MetricsWriter, read_metrics
from agalite.training.run import Run

CONFIG = {"env": "tmaze", "seed": 3, "seeds": 2}
NOWHERE = "http://127.0.0.1:9"  # nobody listens there
KEY = "0" * 40  # looks like one, opens nothing


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.setenv("WANDB_BASE_URL", NOWHERE)
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "runs" / "a", CONFIG) as run:
        wandb_log.mark(run)
        yield run


def row(x):
    return {"losses/value": x + 0.5, "charts/episodic_return": x}


def records(path):
    """What W&B keeps offline: a log as LevelDB's, of its own messages."""
    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


def sessions(folder):
    """In order: the run, its (step, metrics), its exit code, of each time a W&B run was begun."""
    out = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run, history, code = None, [], None
        for record in records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    run = record.run
                case "history":
                    pairs = [(x.key or "/".join(x.nested_key), x) for x in record.history.item]
                    values = {k: json.loads(x.value_json) for k, x in pairs if k[0] != "_"}
                    history.append((record.history.step.num, values))
                case "exit":
                    code = record.exit.exit_code
        out.append((run, history, code))
    return out


def steps_of_first_seed(folder):
    mine = (x for x in sessions(folder) if x[0].display_name.endswith("3"))
    return [step for _, history, _ in mine for step, _ in history]


def test_each_seed_is_a_run_with_its_own_lines(run):
    with MetricsWriter(run, 2, quiet=True) as metrics:
        metrics.write(10, [row(1.0), row(2.0)])
        metrics.write(20, [row(math.nan), row(4.0)])
    # Folders carry the second and a random name: two of one second lie in any order.
    first, second = sorted(sessions(run.folder), key=lambda session: session[0].display_name)
    for (found, _, code), name, seed in ((first, "a-seed3", "3"), (second, "a-seed4", "4")):
        assert (found.display_name, found.run_group, found.project) == (name, "a", "agalite")
        config = {x.key: x.value_json for x in found.config.update}
        assert (config["seed"], config["env"]) == (seed, '"tmaze"')
        assert code == 0
    assert first[1] == [(10, row(1.0)), (20, {})]
    assert second[1] == [(10, row(2.0)), (20, row(4.0))]
    assert f"wandb sync {run.folder}/wandb/offline-*" in run.log_path.read_text()


def test_a_resumed_run_sends_no_step_twice(run):
    metrics = MetricsWriter(run, 2, quiet=True)
    for step in (10, 20, 30):
        metrics.write(step, [row(step)] * 2)
    metrics.__exit__(RuntimeError)
    # Its last checkpoint was of step 10.
    with MetricsWriter(run, 2, 10, quiet=True) as metrics:
        for step in (20, 30, 40):
            metrics.write(step, [row(step)] * 2)
    assert steps_of_first_seed(run.folder) == [10, 20, 30, 40]
    found = sessions(run.folder)
    assert [code for _, _, code in found] == [1, 1, 0, 0]
    assert len({run.run_id for run, _, _ in found}) == 2, "they go on where they were"
    assert list(read_metrics(run.folder)["step"]) == [10, 10, 20, 20, 30, 30, 40, 40]


def test_what_a_killed_process_wrote_is_sent_and_only_once(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from test_wandb import *\n"
        "run = Run.create(sys.argv[1], CONFIG)\n"
        "wandb_log.mark(run)\n"
        "metrics = MetricsWriter(run, 2, quiet=True)\n"
        "for step in (10, 20, 30): metrics.write(step, [row(step)] * 2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=__file__.rsplit("/", 1)[0], check=False
    )
    assert done.returncode == -9
    # At once, while the first sender is still at it: the two must not meet.
    with Run.open(folder, write=True) as run, MetricsWriter(run, 2, 20, quiet=True) as metrics:
        for step in (30, 40):
            metrics.write(step, [row(step)] * 2)
    assert steps_of_first_seed(folder) == [10, 20, 30, 40]
    assert [code for _, _, code in sessions(folder)] == [1, 1, 0, 0]


def test_a_server_that_cannot_be_reached_is_a_warning(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    wandb_log.check()
    with MetricsWriter(run, 2, quiet=True) as metrics:
        for step in range(100):
            metrics.write(step, [row(step)] * 2)
    log = run.log_path.read_text()
    assert log.count("warning: W&B cannot be reached, training goes on: ") == 1
    assert f"`agalite resume {run.folder}` tries again" in log
    # As it says: with W&B back, here offline, all is sent.
    monkeypatch.setenv("WANDB_MODE", "offline")
    MetricsWriter(run, 2, 99, quiet=True).close()
    assert steps_of_first_seed(run.folder) == list(range(100))


def test_a_slow_sender_is_left_behind(run, monkeypatch):
    monkeypatch.setattr(wandb_log, "_PATIENCE", 0.3)
    sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]
    monkeypatch.setattr(wandb_log, "_COMMAND", sleeper)
    began = time.perf_counter()
    with MetricsWriter(run, 2, quiet=True) as metrics:
        metrics.write(10, [row(1.0)] * 2)
    assert time.perf_counter() - began < 100, "training does not wait for W&B"
    assert "W&B is slow" in run.log_path.read_text()


@pytest.mark.parametrize(
    ("code", "said"),
    [("import os; os.abort()", "ended with code -6"), ("raise SystemExit(3)", "ended with code 3")],
)
def test_a_sender_that_dies_is_a_warning(code, said, run, monkeypatch, capsys):
    monkeypatch.setattr(wandb_log, "_COMMAND", [sys.executable, "-c", code])
    with MetricsWriter(run, 2) as metrics:
        time.sleep(0.5)
        metrics.write(10, [row(1.0)] * 2)
    assert f"warning: the process that sends metrics to W&B {said}" in run.log_path.read_text()
    assert said in capsys.readouterr().err
    assert len(read_metrics(run.folder)["step"]) == 2


def without_wandb(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "wandb" else find(n, *a)
    )


def test_without_the_package_nothing_begins(tmp_path, monkeypatch, capsys):
    without_wandb(monkeypatch)
    out = tmp_path / "x"
    assert main(["train", "tmaze", "--wandb", "--out", str(out)]) == 2
    assert '--wandb needs wandb: pip install "agalite[wandb]"' in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_called_wandb_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="it needs no_such_package: pip"):
        extras.require("it", ["no_such_package"], "dev")


def test_without_an_account_nothing_begins(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    out = tmp_path / "x"
    assert main(["train", "tmaze", "--wandb", "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "wandb login" in message
    assert "WANDB_MODE=offline" in message
    assert not out.exists()


def test_a_run_is_resumed_without_the_package_too(run, monkeypatch, capsys):
    without_wandb(monkeypatch)
    with MetricsWriter(run, 2) as metrics:
        metrics.write(10, [row(1.0)] * 2)
    warning = 'warning: no metrics for W&B: sending the metrics to W&B needs wandb: pip install "ag'
    assert warning in run.log_path.read_text()
    assert warning in capsys.readouterr().err


def test_disabled_is_disabled(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb_log.check()
    with MetricsWriter(run, 2, quiet=True) as metrics:
        metrics.write(10, [row(1.0)] * 2)
    assert sessions(run.folder) == []
    assert not run.log_path.exists() or "warning" not in run.log_path.read_text()


def test_the_command_line_does_it_all(tmp_path):
    """Training with --wandb; resuming a run that has ended sends nothing, and begins no session."""
    folder = tmp_path / "runs" / "whole"
    words = [
        "tmaze",
        "--memory",
        "gru",
        "--corridor",
        "3",
        "--num-envs",
        "4",
        "--num-steps",
        "8",
        "--hidden-size",
        "16",
        "--model.d-model",
        "16",
        "--model.hidden-size",
        "16",
        "--steps",
        "640",
        "--log-every",
        "64",
        "--checkpoint-every",
        "640",
    ]
    assert main(["train", *words, "--out", str(folder), "--wandb"]) == 0
    assert "wandb" not in json.loads((folder / "config.json").read_text())
    assert main(["resume", str(folder)]) == 0
    [(found, history, code)] = sessions(folder)
    assert (found.display_name, code) == ("whole", 0)
    table = read_metrics(folder)
    assert [step for step, _ in history] == list(table["step"])
    for name in table.keys() - {"step", "seed"}:
        expected = [x for x in table[name] if math.isfinite(x)]
        assert [values[name] for _, values in history if name in values] == pytest.approx(expected)
