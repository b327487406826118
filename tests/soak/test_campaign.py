"""What the parts of `agalite soak` share: figures, records, the table, comparisons, mutations."""

import json
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from agalite import cli
from agalite.bench.timing import progress_bar
from agalite.soak import campaign, diary, mutate
from agalite.soak.campaign import Figure, Record, differences, run_part
from agalite.soak.kills import damage_newest
from agalite.training.checkpoint import Checkpoints
from agalite.training.logging import MetricsWriter
from agalite.training.run import Run


def make_run(folder, *, loss=1.0, weight=2.0, speed=10.0, sessions=1):
    """A run of 30 steps, in one session or resumed after 20 steps."""
    with Run.create(folder, {}) as run:
        for session in range(sessions):
            start = 20 if session else None
            first = 30 if session else 10
            with MetricsWriter(run, 1, start) as metrics:
                for step in range(first, 31, 10):
                    metrics.write(step, [{"losses/x": loss * step, "charts/SPS": speed}])
        Checkpoints(run.checkpoints_folder).save(30, {"w": jnp.full(3, weight), "n": 3})
    return folder


def test_sigterm_leaves_no_process_and_no_folder(tmp_path):
    code = """
        import pathlib, subprocess, sys, time
        from agalite.soak.campaign import Record, run_part, workspace

        def part(record):
            with workspace() as work:
                sleeper = subprocess.Popen(["sleep", "100"], start_new_session=True)
                pathlib.Path(sys.argv[1], "seen").write_text(f"{sleeper.pid} {work}")
                time.sleep(100)

        run_part(part, Record("disk", 1, {}), pathlib.Path(sys.argv[1], "out"))
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not ((seen := tmp_path / "seen").exists() and seen.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in errors
    pid, work = seen.read_text().split()
    assert not campaign.is_alive(int(pid))
    assert not Path(work).exists()


def test_progress_is_printed_where_there_is_no_terminal(capsys):
    with progress_bar() as progress:
        task = progress.add_task("input", total=20)
        for _ in range(20):
            progress.advance(task)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("input: ")]
    assert len(lines) == 10
    assert lines[4].startswith("input: 10 of 20, 0:00:0")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "reference")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"speed": 99.0}, []),
        ({"sessions": 2}, []),  # as killed after step 30, resumed from 20
        ({"weight": 2.0000002}, ["1 of 2 leaves differ, the first is ['w']"]),
        ({"loss": 1.1}, ["metrics.csv differs in losses/x", "TensorBoard shows other values"]),
    ],
)
def test_runs_are_compared_to_the_bit(changes, found, reference, tmp_path):
    assert differences(make_run(tmp_path / "run", **changes), reference) == found


def test_what_tensorboard_lacks_is_found(reference, tmp_path):
    run = shutil.copytree(reference, tmp_path / "run")
    (board,) = (run / "tensorboard/seed_0").iterdir()
    board.write_bytes(board.read_bytes()[:-5])
    assert differences(run, reference) == ["TensorBoard shows other values"]


def test_a_record_is_written_and_its_misses_are_shown(tmp_path, capsys):
    def part(record):
        record.figures += [
            Figure("torn", 1, "=", 0),
            Figure("kept", 0.5, ">=", 0.25),
            Figure("steps", 1200),
        ]
        record.not_run.append("nodes (no Ray)")

    assert not run_part(part, Record("disk", 3, {"rounds": 1}), tmp_path / "r")
    assert "missed" in capsys.readouterr().out
    stored = json.loads((tmp_path / "r/disk.json").read_text())
    assert (stored["seed"], stored["holds"], stored["options"]) == (3, False, {"rounds": 1})
    assert stored["versions"]["jax"]
    page = (tmp_path / "r.md").read_text()
    assert "| disk | torn | 1 | 0 | **missed** |" in page
    assert "| disk | kept | 0.5 | >= 0.25 | holds |" in page
    assert "| disk | steps | 1,200 |  |  |" in page
    assert "- kills: not run." in page
    assert "- disk, not run: nodes (no Ray)." in page
    # A second part leaves the first in the table.
    assert run_part(lambda _: None, Record("stream", 0, {}), tmp_path / "r")
    assert "**missed**" in (tmp_path / "r.md").read_text()
    assert "- stream: not run." not in (tmp_path / "r.md").read_text()


def test_a_failure_is_a_miss_and_is_escaped_in_the_table(tmp_path):
    def part(record):
        for i in range(100):
            record.fail(f"{i} <b>|\nx")

    assert not run_part(part, Record("input", 0, {}), tmp_path / "r")
    assert "- input, failure: 0 &lt;b>\\| x" in (tmp_path / "r.md").read_text()
    assert len(json.loads((tmp_path / "r/input.json").read_text())["failures"]) < 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kills", "--runs", "-1"], "runs=-1"),
        (["disk", "--rounds", "0"], "rounds=0"),
        (["stream", "--steps", "10"], "steps=10"),
        (["input", "--cases", "0"], "cases=0"),
        (["input", "--seed", "-1"], "seed=-1"),
        (["asynchronous", "--minutes", "0"], "minutes=0"),
        (["all", "--share", "nan"], "share=nan"),
    ],
)
def test_bad_sizes_are_refused(words, message, tmp_path, capsys):
    assert cli.main(["soak", *words, "--out", str(tmp_path / "r")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "r.md").exists()


def test_processes_that_were_started_are_found_and_killed(tmp_path):
    child = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', '{}'])"
    process = subprocess.Popen([sys.executable, "-c", child.format("import time; time.sleep(60)")])
    program = campaign.Program(process, tmp_path / "errors")
    deadline = time.monotonic() + 20
    while not (found := campaign.descendants(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(found) == 1
    assert campaign.is_alive(found[0])
    program.kill()
    assert process.returncode == -9
    while campaign.is_alive(found[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not campaign.is_alive(found[0])


def test_a_power_cut_damages_what_was_written_last(tmp_path):
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, {"x": jnp.ones(3) * step})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    damaged = damage_newest(tmp_path, random.Random(1))
    changed = {p for p, data in before.items() if not p.exists() or p.read_bytes() != data}
    assert changed
    assert len(changed) <= len(damaged)
    assert {path.relative_to(tmp_path).parts[0] for path in changed} == {"step_000000000002"}


def play(steps, seed=0):
    """The steps of a diary as a trajectory has them: obs, resets, actions, rewards, ends."""
    env, rng = diary.Diary(), np.random.default_rng(1)
    obs, _ = env.reset(seed=seed)
    rows, begins = [], True
    for _ in range(steps):
        action = int(rng.integers(diary.ACTIONS))
        after, reward, terminated, truncated, _ = env.step(action)
        end = terminated or truncated
        rows.append((obs, begins, action, reward, end))
        obs, begins = (env.reset()[0], True) if end else (after, False)
    return [np.array(column) for column in zip(*rows, strict=True)]


def test_a_diary_finds_torn_sequences():
    rows = play(200)
    assert rows[4].sum() > 3
    assert diary.torn(*rows) is None
    assert diary.torn(*(x[50:90] for x in rows)) is None
    other = play(200, seed=5)
    joined = [np.concatenate([a[:20], b[:20]]) for a, b in zip(rows, other, strict=True)]
    assert diary.torn(*joined) == "steps of two environments"
    end = int(np.flatnonzero(rows[4])[0])

    def changed(column, value, at=end):
        new = [x.copy() for x in rows]
        new[column][at] = value
        return diary.torn(*new)

    assert changed(0, np.nan) == "an observation is not finite"
    assert "without a reset" in (changed(1, False, end + 1) or "")
    assert changed(2, (rows[2][3] + 1) % 3, 3) == "an action of another step"
    assert changed(3, 99.0) == "a reward of another step"
    assert changed(4, False) == "an end that no reset follows"
    gap = [np.delete(x, range(2, 4), axis=0) for x in rows]
    assert diary.torn(*gap) == "steps are missing or repeated"


def test_mutations_depend_on_the_seed_alone_and_change_the_input():
    words = ["train", "tmaze", "--steps", "100"]
    table = b"a,b\n1,2\n3,4\n"
    config = json.dumps({"format": 2, "x": [1, {"y": "z"}]}).encode()

    def all_of(seed):
        rng = random.Random(seed)
        return [
            (
                mutate.mutate_words(rng, words, ["--seed"]),
                mutate.mutate_rows(rng, table, b","),
                mutate.mutate_json(rng, config),
                mutate.mutate_bytes(rng, table),
            )
            for _ in range(50)
        ]

    assert all_of(1) == all_of(1)
    assert all_of(1) != all_of(2)
    for column, original in zip(
        zip(*all_of(3), strict=True), (words, table, config, table), strict=True
    ):
        assert sum(x != original for x in column) > 35
    assert words == ["train", "tmaze", "--steps", "100"]
