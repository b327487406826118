"""The folder of a run: config, lock, log, summary and metrics."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from agalite.training import run as run_module
from agalite.training.logging import MetricsWriter, read_metrics
from agalite.training.run import Run
from agalite.version import __version__

CONFIG = {"env": "tmaze", "seeds": 2, "agent": {"learning_rate": 3e-4, "clip": None}}


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "runs" / "a", CONFIG) as run:
        yield run


def row(x: float) -> dict[str, float]:
    return {"losses/value": x + 0.5, "charts/episodic_return": x}


# The folder


def test_config_is_read_back_with_versions(run):
    again = Run.open(run.folder)
    assert again.config == run.config
    assert {k: again.config[k] for k in CONFIG} == CONFIG
    assert again.config["format"] == run_module.FORMAT
    assert again.config["versions"]["agalite"] == __version__
    assert again.config["versions"]["numpy"] == np.__version__
    assert again.name == "a"


def test_a_folder_with_a_run_is_refused(run):
    with pytest.raises(FileExistsError, match=f"agalite resume {run.folder}"):
        Run.create(run.folder, CONFIG)


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=r"thesis\.tex"):
        Run.create(tmp_path, CONFIG)
    with pytest.raises(FileExistsError, match="is a file"):
        Run.create(tmp_path / "thesis.tex", CONFIG)


def test_what_a_killed_creation_left_is_no_hindrance(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.json.abc.tmp").write_text("{")
    (tmp_path / "checkpoints").mkdir()
    Run.create(tmp_path, CONFIG).close()


def test_config_may_not_take_the_runs_own_names(tmp_path):
    with pytest.raises(ValueError, match="format"):
        Run.create(tmp_path / "a", {"format": 3})
    assert not (tmp_path / "a").exists()


def test_an_unwritable_place_is_an_error_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write to"):
        Run.create(tmp_path / "file" / "a", CONFIG)


def test_a_full_disk_is_an_error_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "SPACE_NEEDED", 10**18)
    with pytest.raises(OSError, match="MB are free"):
        Run.create(tmp_path / "a", CONFIG)
    assert not (tmp_path / "a" / "config.json").exists()
    monkeypatch.undo()
    Run.create(tmp_path / "a", CONFIG).close()  # the lock was given back


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 2,', "cannot be read"),
        ("[1]", "is not the config of a run"),
        ('{"env": "tmaze"}', "is not the config of a run"),
        ('{"format": 1}', r"older version of agalite \(format 1; this is 2\); train it again"),
        ('{"format": 99, "versions": {"agalite": "7.0"}}', r"newer version of agalite \(7\.0; f"),
    ],
)
def test_a_config_that_is_none_of_ours(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Run.open(tmp_path)


def test_endless_nesting_and_endless_numbers_are_errors_of_the_file(tmp_path, run):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json cannot be read: .*recursion"):
        Run.open(tmp_path)
    run.metrics_path.write_text(f"step,seed,x\n{10**30},0,1.0\n")
    with pytest.raises(ValueError, match=r"metrics.csv, column step: .*too large"):
        read_metrics(run.folder)


def test_what_a_killed_write_left_is_removed_when_the_run_goes_on(run):
    run.close()
    left = run.folder / ".summary.json.x1y2.tmp"
    left.touch()
    Run.open(run.folder)
    assert left.exists()  # another process may be writing it
    with Run.open(run.folder, write=True):
        assert not left.exists()


def test_no_run_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        Run.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Run.open(tmp_path / "b")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        read_metrics(tmp_path / "b")


def test_summary_is_strict_json(run):
    assert run.read_summary() is None
    run.write_summary({"a": np.float32(0.5), "b": np.arange(2), "c": math.nan, "d": run.folder})
    text = run.summary_path.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == run.read_summary()
    assert run.read_summary() == {"a": 0.5, "b": [0, 1], "c": None, "d": str(run.folder)}


def test_log_lines_have_the_time(run):
    run.log("begun")
    run.log("two\nlines")
    lines = run.log_path.read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == ["begun", "two", "lines"]
    assert all(line[:2] == "20" and line[10] == " " for line in lines)


# The lock


def test_one_writer_at_a_time(run):
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on"):
        Run.open(run.folder, write=True)
    reader = Run.open(run.folder)
    for write in (lambda: reader.log("x"), lambda: reader.write_summary({})):
        with pytest.raises(ValueError, match="write=True"):
            write()
    run.close()
    Run.open(run.folder, write=True).close()


def test_the_lock_of_a_killed_process_is_gone(tmp_path):
    folder = tmp_path / "a"
    code = (
        "import sys, time; from agalite.training.run import Run\n"
        "run = Run.create(sys.argv[1], {}); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            with pytest.raises(BlockingIOError, match=f"process {process.pid} on"):
                Run.open(folder, write=True)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    Run.open(folder, write=True).close()


def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    code = """if True:
        import os, sys, time
        from agalite.training.run import Run
        run = Run.create(sys.argv[1], {})
        if os.fork() == 0:
            sys.stdout.close(); os.close(1); time.sleep(60); os._exit(0)
        time.sleep(0.1)
        print(Run.open(sys.argv[1]).name, flush=True)
        try:
            Run.open(sys.argv[1], write=True)
        except BlockingIOError:
            print('still held', flush=True)
        os.kill(os.getpid(), 9)"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=60)
        assert out.split("\n")[:2] == ["a", "still held"]  # the child's closing did not unlock it
        os.killpg(process.pid, 0)  # the child is alive
        Run.open(tmp_path / "a", write=True).close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


# Metrics


def test_metrics_are_read_back_exactly(run):
    values = [0.1, 1 / 3, math.nan, math.inf, -math.inf, 1e-300, float(np.float32(0.1))]
    with MetricsWriter(run, 2) as metrics:
        for i, x in enumerate(values):
            metrics.write(i * 10, [row(x), row(-x)])
    table = read_metrics(run.folder)
    assert list(table) == ["step", "seed", "charts/episodic_return", "losses/value"]
    assert table["step"].tolist() == [i * 10 for i in range(len(values)) for _ in range(2)]
    assert table["seed"].tolist() == [0, 1] * len(values)
    np.testing.assert_array_equal(table["charts/episodic_return"][::2], values)
    np.testing.assert_array_equal(table["charts/episodic_return"][1::2], np.negative(values))


def test_a_run_without_metrics_yet(run):
    assert {k: v.tolist() for k, v in read_metrics(run.folder).items()} == {"step": [], "seed": []}


def test_every_write_is_in_the_file_at_once(run):
    with MetricsWriter(run, 1) as metrics:
        for i in range(3):
            metrics.write(i, [row(i)])
            assert len(run.metrics_path.read_text().splitlines()) == i + 2


def test_torn_lines_are_ignored_wherever_they_are_cut(run):
    with MetricsWriter(run, 2) as metrics:
        metrics.write(5, [row(1), row(2)])
    whole = run.metrics_path.read_bytes()
    ends = [i + 1 for i in range(len(whole)) if whole[i : i + 1] == b"\n"]
    for cut in range(len(whole)):
        run.metrics_path.write_bytes(whole[:cut])
        expected = max(0, sum(end <= cut for end in ends) - 1)
        assert len(read_metrics(run.folder)["step"]) == expected


def test_a_bad_line_inside_is_an_error(run):
    run.metrics_path.write_text("step,seed,a\n1,0,0.5\n2,0\n3,0,0.5\n")
    with pytest.raises(ValueError, match="line 3: 2 values; expected 3"):
        read_metrics(run.folder)
    run.metrics_path.write_text("step,seed,a\n1,0,x\n")
    with pytest.raises(ValueError, match="column a"):
        read_metrics(run.folder)


@pytest.mark.parametrize("torn", ["", "40,0,4.", "40,0,4.0,4.5\n40,1"])
def test_resuming_gives_the_file_of_an_unbroken_run(run, torn):
    with MetricsWriter(run, 2) as metrics:
        for step in (10, 20, 30):
            metrics.write(step, [row(step), row(-step)])
    unbroken = run.metrics_path.read_bytes()
    with open(run.metrics_path, "a") as file:
        file.write(torn)
    with MetricsWriter(run, 2, resume_step=20) as metrics:
        assert read_metrics(run.folder)["step"].tolist() == [10, 10, 20, 20]
        with pytest.raises(ValueError, match="step=20"):
            metrics.write(20, [row(20), row(-20)])
        metrics.write(30, [row(30), row(-30)])
    assert run.metrics_path.read_bytes() == unbroken


@pytest.mark.parametrize("left", [None, b"", b"step,se"])
def test_resuming_before_the_first_line(run, left):
    if left is not None:
        run.metrics_path.write_bytes(left)
    with MetricsWriter(run, 1, resume_step=0) as metrics:
        metrics.write(10, [row(1)])
    assert read_metrics(run.folder)["charts/episodic_return"].tolist() == [1]


def test_metrics_that_do_not_fit(run):
    with MetricsWriter(run, 2) as metrics:
        with pytest.raises(ValueError, match="one per seed, 2"):
            metrics.write(1, [row(1)])
        with pytest.raises(ValueError, match="'a,b'"):
            metrics.write(1, [{"a,b": 1.0}] * 2)
        metrics.write(1, [row(1), row(1)])
        with pytest.raises(ValueError, match=r"rows\[1\].*missing \['losses/value'\]"):
            metrics.write(2, [row(1), {"charts/episodic_return": 1.0}])
        with pytest.raises(ValueError, match="step=1 "):
            metrics.write(1, [row(1), row(1)])
    assert read_metrics(run.folder)["step"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="already has metrics"):
        MetricsWriter(run, 2)
    with pytest.raises(ValueError, match="write=True"):
        MetricsWriter(Run.open(run.folder), 2)


def test_tensorboard_files_have_a_folder_per_seed_and_purge_on_resume(run):
    with MetricsWriter(run, 2) as metrics:
        metrics.write(10, [row(1), row(math.nan)])
    with MetricsWriter(run, 2, resume_step=10) as metrics:
        metrics.write(20, [row(2), row(2)])
    events = {seed: _events(run.tensorboard_folder / f"seed_{seed}") for seed in (0, 1)}
    assert events[0] == [
        (10, "charts/episodic_return", 1.0),
        (10, "losses/value", 1.5),
        (11, "purge", None),
        (20, "charts/episodic_return", 2.0),
        (20, "losses/value", 2.5),
    ]
    assert events[1] == [e for e in events[0] if e[0] != 10]  # NaN is not drawn


def _events(folder):
    from tensorboardX.proto import event_pb2

    pb: Any = event_pb2  # its names are made when it is imported
    out = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at + 12 < len(data):  # length (8), its checksum (4), event, its checksum (4)
            length = int.from_bytes(data[at : at + 8], "little")
            if at + 16 + length > len(data):  # torn by a kill
                break
            event = pb.Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if event.session_log.status == pb.SessionLog.START:
                out.append((event.step, "purge", None))
            out += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return out


def test_kill_at_any_moment_leaves_metrics_that_can_be_read(tmp_path):
    folder = tmp_path / "a"
    code = """if True:
        import sys, itertools
        from agalite.training.run import Run
        from agalite.training.logging import MetricsWriter
        with Run.create(sys.argv[1], {}) as run, MetricsWriter(run, 3) as metrics:
            for step in itertools.count(1):
                metrics.write(step, [{"x": step + seed / 4} for seed in range(3)])
                print(step, flush=True)"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        process.kill()
        printed = process.stdout.read().split("\n")
    table = read_metrics(folder)
    np.testing.assert_array_equal(table["x"], table["step"] + table["seed"] / 4)
    told = int(printed[-2])  # what came after the last line end was cut short
    assert (table["step"] <= told).sum() == 3 * told
    for seed in range(3):
        shown = [(step, x) for step, _, x in _events(folder / f"tensorboard/seed_{seed}")]
        assert shown[:told] == [(step, step + seed / 4) for step in range(1, told + 1)]


@pytest.mark.parametrize("env", [None, 3, {"x": 1}, ["tmaze"]])
def test_an_environment_that_is_no_name_is_an_error_of_the_config(env):
    from agalite.training.config import config_from_dict

    with pytest.raises(ValueError, match=r"env=.* must be the name of an environment"):
        config_from_dict({"env": env})


@pytest.mark.parametrize("name", ["env_options", "memory_options", "agent"])
@pytest.mark.parametrize("value", [[1], "1", None, {1: 2}])
def test_options_that_are_no_dictionary_are_an_error_of_the_config(name, value):
    from agalite.training.config import config_from_dict
    from agalite.training.presets import configure

    values = configure("tuned", {"env": "tmaze"}).to_dict()
    with pytest.raises(ValueError, match=f"{name}=.* must be a dictionary"):
        config_from_dict({**values, name: value})
