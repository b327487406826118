"""The scheduling loop, its executors, and how a study is stopped."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agalite.studies import catalogue, runner
from agalite.studies.declaration import Factor, vary
from agalite.studies.progress import ProgressDisplay
from agalite.studies.runner import Inline, Processes
from agalite.studies.trials import Outcome, check_settings, expand, requested
from agalite.system import Stopped
from agalite.training.run import Run
from studies.small_study import TRAINED, measured_study


def _modes(*names):
    return Factor("mode", {name: {"mode": name} for name in names})


def test_finished_trials_are_skipped_and_failures_do_not_stop_the_rest(tmp_path):
    study = measured_study("mixed", _modes("good", "bad"), vary("r", "r", (1, 2)))
    trials = expand(study, "smoke", tmp_path)
    first = runner.run(trials, quiet=True)
    assert [o.state for o in first] == ["finished", "finished", "failed", "failed"]
    written = trials[0].rows_path.stat().st_mtime_ns
    again = runner.run(trials, quiet=True)
    assert [o.trial for o in again] == [t.name for t in trials[2:]]
    assert trials[0].rows_path.stat().st_mtime_ns == written
    assert len(list((tmp_path / "mixed/smoke/sessions").iterdir())) == 2


def test_other_settings_in_the_same_folder_are_refused_before_anything_runs(tmp_path):
    runner.run(expand(measured_study(), "smoke", tmp_path), quiet=True)
    other = expand(measured_study(base={"noise": 0.02}), "smoke", tmp_path)
    with pytest.raises(ValueError, match=r"made with other settings \(settings\)"):
        runner.run(other, quiet=True)


def test_settings_that_are_new_since_a_run_have_their_defaults(tmp_path):
    trial = expand(TRAINED, "smoke", tmp_path)[0]
    settings = requested(trial)
    assert settings.pop("noise_steps") == 1
    Run.create(trial.folder, settings).close()
    check_settings(trial)
    other = dataclasses.replace(trial, settings={**trial.settings, "noise_steps": 2})
    with pytest.raises(ValueError, match=r"made with other settings \(noise_steps\)"):
        check_settings(other)


def test_a_folder_in_an_older_format_is_refused(tmp_path):
    trials = expand(measured_study(), "smoke", tmp_path)
    runner.run(trials[:1], quiet=True)
    (tmp_path / "small/smoke/study.json").unlink()
    with pytest.raises(ValueError, match=r"small/smoke is in study format 1, .* another --out"):
        runner.run(trials, quiet=True)


class FakeExecutor:
    """Two slots; trials end in the reverse order of submission, without being run."""

    in_process = False

    def __init__(self, on_wait=lambda: None):
        self.calls, self.running, self.on_wait = [], [], on_wait

    def start(self, count):
        self.calls.append(f"start {count}")
        return 2

    def submit(self, trial):
        assert len(self.running) < 2
        self.running.append(trial)

    def wait(self, timeout):
        assert timeout > 0
        self.on_wait()
        if "stop" in self.calls:
            outcomes = [Outcome(t.name, "stopped", 0.0, signal=15) for t in self.running]
            self.running.clear()
            return outcomes
        return [Outcome(self.running.pop().name, "finished", 1.0)]

    def stop(self):
        self.calls.append("stop")

    def close(self):
        self.calls.append("close")


def test_the_loop_fills_the_slots_of_any_executor(tmp_path):
    trials = expand(measured_study(), "smoke", tmp_path)
    executor = FakeExecutor()
    outcomes = runner.run(trials, executor, quiet=True)
    assert [o.trial for o in outcomes] == ["r=2", "r=4", "r=1"]
    assert executor.calls == ["start 3", "close"]


def test_a_signal_stops_running_trials_and_starts_no_more(tmp_path):
    trials = expand(measured_study(), "smoke", tmp_path)
    executor = FakeExecutor(on_wait=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Stopped) as stopped:
        runner.run(trials, executor, quiet=True)
    assert stopped.value.code == 128 + signal.SIGINT
    assert executor.calls == ["start 3", "stop", "close"]
    (session,) = (tmp_path / "small/smoke/sessions").iterdir()
    states = [trial["state"] for trial in json.loads(session.read_text())["trials"]]
    assert states == ["finished", "stopped"]


def test_processes_share_the_work_and_survive_one_that_is_killed(tmp_path):
    study = measured_study("shared", _modes("die", "good", "bad"))
    trials = expand(study, "smoke", tmp_path)
    outcomes = runner.run(trials, Processes(2), quiet=True)
    assert len(outcomes) == 3
    assert [trial.state() for trial in trials] == ["failed", "finished", "failed"]
    assert trials[0].failure() == "the process that ran it died (killed by SIGKILL)"


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="no autogroups")
def test_processes_of_a_study_keep_its_niceness():
    code = "import os; from agalite.system import keep_niceness; os.nice(7); os.setsid(); "
    code += "keep_niceness(); print(open('/proc/self/autogroup').read())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.split()[-2:] == ["nice", "7"], printed


def test_a_signal_stops_processes(tmp_path):
    study = measured_study("sleepy", base={"mode": "sleep", "folder": str(tmp_path)})
    trials = expand(study, "smoke", tmp_path)

    def interrupt():
        _wait(lambda: len(list(tmp_path.glob("started-*"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped):
        runner.run(trials, Processes(2), quiet=True)
    thread.join()
    assert [trial.state() for trial in trials] == ["not started"] * 3
    assert not list(tmp_path.glob("started-4"))  # the third was never started


def test_a_deadline_stops_trials_and_raises_nothing(tmp_path, monkeypatch):
    trials = expand(measured_study(), "smoke", tmp_path)
    began = time.monotonic()
    late = lambda: monkeypatch.setattr(time, "monotonic", lambda: began + 3601)  # noqa: E731
    executor = FakeExecutor(on_wait=late)
    outcomes = runner.run(trials, executor, quiet=True, deadline=began + 3600)
    assert executor.calls == ["start 3", "stop", "close"]
    assert [o.state for o in outcomes] == ["finished", "stopped"]


def _wait(condition, process=None):
    deadline = time.monotonic() + 240
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_session_is_recorded_while_it_runs(tmp_path):
    """A process that is killed cannot write anything more."""
    seen = []

    def sessions():
        return [json.loads(p.read_text()) for p in tmp_path.glob("small/smoke/sessions/*.json")]

    class Watched(Inline):
        def wait(self, timeout):
            seen.extend(sessions())
            return super().wait(timeout)

    trials = expand(measured_study(), "smoke", tmp_path)
    runner.run(trials, Watched(), quiet=True, command="so", notes=["x"])
    found = [*seen, *sessions()]
    assert [len(s["trials"]) for s in found] == [0, 1, 2, 3]
    assert [s["ended"] for s in found] == [False] * 3 + [True]
    assert (found[0]["command"], found[0]["notes"]) == ("so", ["x"])


def test_progress_shows_how_far_and_how_long(tmp_path, capsys):
    trials = expand(measured_study(), "smoke", tmp_path)
    runner.run(trials)
    printed = capsys.readouterr().err
    assert "1 of 3 trials  33%" in printed
    assert re.search(r"\d\.\d min left", printed)
    assert "3 of 3 trials  100%" in printed
    ProgressDisplay(trials).ended(Outcome(trials[0].name, "stopped", 0.0))
    assert capsys.readouterr().err.splitlines()[0].endswith(f"stopped  {trials[0].name}  0 s")


# Real training in real processes.

WORDS = [
    "study",
    "run",
    "horizon",
    "--scale",
    "cpu",
    "--only",
    "agent=gru",
    "corridor=120",
    "seed=0",
    "--jobs",
]


def _start_study(jobs, folder):
    """A study that would take hours, with `jobs` trials that have begun to learn."""
    # Background jobs of a shell ignore Ctrl-C, and their children inherit that.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from agalite.__main__ import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *WORDS, str(jobs)],
        cwd=folder,
        env={**os.environ, "AGALITE_HUGE_PAGES": "0"},
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    trials = expand(catalogue.find("horizon"), "cpu", folder / "studies", WORDS[6:-1])[:jobs]
    try:
        _wait(lambda: all(trial.progress() > 0 for trial in trials), process)
    except BaseException:
        process.kill()
        raise
    return process, trials


def _assert_saved(trials):
    for trial in trials:
        assert "stopped at step" in (trial.folder / "run.log").read_text()
        assert any((trial.folder / "checkpoints").iterdir())
        with Run.open(trial.folder, write=True):  # its lock is free
            pass


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_saves_every_run_and_prints_how_to_resume(jobs, tmp_path):
    process, trials = _start_study(jobs, tmp_path)
    try:
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, printed
    assert f"every run is saved: 2 trials: {jobs} unfinished" in printed
    assert f"resume with: agalite {' '.join([*WORDS, str(jobs)])}" in printed
    _assert_saved(trials)


@pytest.mark.slow
def test_processes_whose_parent_is_killed_save_their_runs(tmp_path):
    process, trials = _start_study(2, tmp_path)
    process.kill()
    process.wait()
    logs = [trial.folder / "run.log" for trial in trials]
    _wait(lambda: all("stopped at step" in log.read_text() for log in logs))
    time.sleep(1.0)
    _assert_saved(trials)
    (session,) = (tmp_path / "studies/horizon/cpu/sessions").iterdir()
    assert not json.loads(session.read_text())["ended"]
