"""`agalite soak input`: its guard sees what must not happen, and a short campaign finds nothing."""

import os
import time
import warnings
from pathlib import Path

import pytest

from agalite import cli
from agalite.soak import input as mutated
from agalite.soak.campaign import Record


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    return mutated.Guard(folder, seconds=0.5)


def fail(error):
    def call():
        raise error

    return call


def test_a_sentence_is_a_refusal_and_anything_else_is_a_problem(guard):
    assert guard.call(fail(ValueError("x=3 is too large"))) == (True, None)
    assert guard.call(fail(FileNotFoundError(2, "there is none"))) == (True, None)
    assert guard.call(lambda: None) == (False, None)
    assert guard.call(lambda: "other contents") == (False, "other contents")
    assert guard.call(fail(ValueError(""))).problem
    assert guard.call(fail(KeyError("metric"))).problem == "raised KeyError: 'metric'"
    assert "longer than" in (guard.call(lambda: time.sleep(5)).problem or "")


def test_files_outside_are_seen(guard, tmp_path):
    assert guard.call(lambda: Path("inside").write_text("x") and None) == (False, None)
    outside = tmp_path / "outside"
    for change in (
        lambda: outside.write_text("x") and None,
        lambda: os.mkdir(tmp_path / "folder"),
        lambda: os.rename("inside", tmp_path / "moved"),
        lambda: os.remove(outside),
    ):
        assert "it changed" in (guard.call(change).problem or "")
    assert guard.call(lambda: outside.parent.exists() and None) == (False, None)  # reading is fine


def test_commands_are_judged_by_what_they_print_and_return(guard, monkeypatch):
    assert guard.cli(["frobnicate"]) == (True, None)
    assert guard.cli(["models", "--input-size", "many"]) == (True, None)

    def command(printed, code):
        def main(_):
            warnings.warn("nothing to see", stacklevel=1)
            print(printed, file=mutated.sys.stderr)
            return code

        monkeypatch.setattr(cli, "main", main)
        return guard.cli([]).problem

    assert command("agalite: no such thing", 2) is None
    assert command("agalite: no such thing", 0) is not None
    assert command("", 2) == "exit code 2 without a word"
    assert command("agalite: this is a bug in agalite: X", 1) is not None
    assert command("Traceback (most recent call last)", 1) == "printed a stack trace"
    assert command("agalite: x", 77) == "exit code 77"


@pytest.mark.slow
def test_mutated_inputs_are_refused_in_a_sentence():
    record = Record("input", 1, {})
    mutated.run(record, 400)
    assert record.holds, record.failures
    rows = {row["kind"]: row for row in record.rows}
    assert rows.keys() == mutated.KINDS.keys()
    for row in rows.values():
        assert row["refused"] > row["cases"] / 3, row
    assert sum(row["cases"] for row in rows.values()) >= 400
