"""Shortened forms of the parts of `agalite soak`: real programs, killed and disturbed."""

import pytest

from agalite.soak import asynchronous, disk, kills, stream
from agalite.soak.campaign import Record


@pytest.fixture(autouse=True)
def quick_programs(monkeypatch):
    """The programs of these parts are what a user runs: compiled as usual, on all cores."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.slow
def test_killed_runs_end_as_if_undisturbed():
    record = Record("kills", 1, {})
    kills.run(record, kills.Sizes(agents=1, classifiers=0, studies=0, power_cuts=1))
    assert record.holds, record.failures
    killed, cut = record.rows
    assert killed["kills"]
    assert cut["damaged"] or cut["refused"] is False


@pytest.mark.slow
def test_a_full_disk_is_a_message_and_nothing_is_lost(tmp_path, monkeypatch):
    if (why := disk.why_not(tmp_path)) is not None:
        pytest.skip(why)
    monkeypatch.setattr(disk, "CASES", {k: disk.CASES[k] for k in list(disk.CASES)[:1]})
    monkeypatch.setattr(disk, "_FSYNC_DELAY", 0.01)
    record = Record("disk", 1, {})
    disk.run(record, 1)
    assert record.holds, record.failures
    full, slow = record.rows
    assert full["exit_code"] == 2
    assert slow.get("seconds", 1) > 0


def test_where_disks_cannot_be_mounted_the_part_says_so(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(disk, "_mount", refuse)
    assert disk.why_not(tmp_path) == "mounting a tmpfs: Operation not permitted"


@pytest.mark.slow
def test_environments_fail_and_no_sequence_is_torn():
    record = Record("asynchronous", 1, {})
    asynchronous.run(record, minutes=0.3, every=2.0, places=("threads",))
    assert record.holds, record.failures
    (row,) = record.rows
    assert set(row["faults"]) == {"environment killed", "environment stopped", "NaN"}
    figures = {figure.what: figure.value for figure in record.figures}
    assert figures["threads: faults noticed, each with a restart"] >= 3


@pytest.mark.slow
def test_a_stream_is_exact_and_bounded():
    record = Record("stream", 1, {})
    stream.run(record, 100_003)
    assert record.holds, [(f.what, f.value) for f in record.figures]
    assert record.rows[-1]["steps"] == 100_003
    assert len({row["phase"] for row in record.rows}) == 7
