"""Metrics for Weights & Biases, with the real package, offline; nothing here needs a network."""

import importlib.util
import json
import math
import struct

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from agalite import extras
from agalite.cli import main
from agalite.training.logging import MetricsWriter, check_wandb, enable_wandb, read_metrics
from agalite.training.run import Run
from agalite.training.train import resume, train
from host_envs import small_config

CONFIG = {"env": "tmaze", "seed": 3, "seeds": 2}
NO_SERVER = "http://127.0.0.1:9"
API_KEY = "0" * 40  # has the form of a key


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.setenv("WANDB_BASE_URL", NO_SERVER)
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.teardown()  # it reads its environment once per process


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "runs" / "a", CONFIG) as run:
        enable_wandb(run)
        yield run


def row(x):
    return {"losses/value": x + 0.5, "charts/episodic_return": x}


def records(path):
    """The records in W&B's offline file, which is a LevelDB log of protocol buffers."""
    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


def sessions(folder):
    """For each `wandb.init`, in order: the W&B run, its (step, metrics), its exit code.

    W&B's process may write the end of a file after `finish` has returned, so it must end first.
    """
    wandb.teardown()
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


def test_each_seed_is_a_run_with_its_own_lines(run):
    with MetricsWriter(run, 2, quiet=True) as metrics:
        metrics.write(10, [row(1.0), row(2.0)])
        metrics.write(20, [row(math.nan), row(4.0)])
    # Folders are named by the second and a random id: two of one second are in any order.
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
    # The last checkpoint is of step 10.
    with MetricsWriter(run, 2, 10, quiet=True) as metrics:
        for step in (20, 30, 40):
            metrics.write(step, [row(step)] * 2)
    found = sessions(run.folder)
    history = [
        step for run, lines, _ in found if run.display_name == "a-seed3" for step, _ in lines
    ]
    assert history == [10, 20, 30, 40]
    assert sorted(code for _, _, code in found) == [0, 0, 1, 1]
    assert len({run.run_id for run, _, _ in found}) == 2, "they continue the same W&B runs"
    assert list(read_metrics(run.folder)["step"]) == [10, 10, 20, 20, 30, 30, 40, 40]


def test_a_server_that_cannot_be_reached_is_a_warning(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    check_wandb()
    with MetricsWriter(run, 2, quiet=True) as metrics:
        for step in range(100):
            metrics.write(step, [row(step)] * 2)
    log = run.log_path.read_text()
    assert log.count("warning: W&B failed, training goes on without it: ") == 1
    # With W&B back, here offline, a resumed run sends everything.
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    MetricsWriter(run, 2, 99, quiet=True).close()
    found = sessions(run.folder)
    assert len(found) == 2
    for _, history, _ in found:
        assert [step for step, _ in history] == list(range(100))


@pytest.mark.parametrize("at", ["log", "finish"])
def test_an_error_inside_wandb_is_a_warning(at, run, monkeypatch, capsys):
    class Broken:
        offline, disabled, finished = True, False, 0

        def log(self, *_, **__):
            if at == "log":
                raise BrokenPipeError("the service is gone")

        def finish(self, _):
            Broken.finished += 1
            if at == "finish":
                raise TimeoutError("the service is gone")

    monkeypatch.setattr(wandb, "init", lambda **_: Broken())
    with MetricsWriter(run, 2) as metrics:
        for step in (10, 20):
            metrics.write(step, [row(1.0)] * 2)
    assert run.log_path.read_text().count("the service is gone") == 1
    assert "Error: the service is gone" in capsys.readouterr().err
    assert Broken.finished == 2
    assert len(read_metrics(run.folder)["step"]) == 4


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


def test_without_an_account_nothing_begins(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "online")
    out = tmp_path / "x"
    assert main(["train", "tmaze", "--wandb", "--out", str(out)]) == 2
    message = capfd.readouterr().err
    assert "wandb login" in message
    assert "WANDB_MODE=offline" in message
    assert not out.exists()


def test_a_run_is_resumed_without_the_package_too(run, monkeypatch, capsys):
    without_wandb(monkeypatch)
    with MetricsWriter(run, 2) as metrics:
        metrics.write(10, [row(1.0)] * 2)
    warning = 'sending metrics needs wandb: pip install "agalite[wandb]"'
    assert warning in run.log_path.read_text()
    assert warning in capsys.readouterr().err


def test_a_folder_called_wandb_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="it needs no_such_package: pip"):
        extras.require("it", ["no_such_package"], "dev")


def test_disabled_is_disabled(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    check_wandb()
    with MetricsWriter(run, 2, quiet=True) as metrics:
        metrics.write(10, [row(1.0)] * 2)
    assert sessions(run.folder) == []
    assert not run.log_path.exists() or "warning" not in run.log_path.read_text()


def test_a_training_run_is_sent(tmp_path):
    """Resuming a run that has ended begins no session."""
    run = train(small_config(), tmp_path / "runs" / "whole", quiet=True, wandb=True)
    assert "wandb" not in json.loads(run.config_path.read_text())
    resume(run.folder, quiet=True)
    [(found, history, code)] = sessions(run.folder)
    assert (found.display_name, code) == ("whole", 0)
    table = read_metrics(run.folder)
    assert [step for step, _ in history] == list(table["step"])
    for name in table.keys() - {"step", "seed"}:
        expected = [x for x in table[name] if math.isfinite(x)]
        assert [values[name] for _, values in history if name in values] == pytest.approx(expected)
