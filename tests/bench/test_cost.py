"""Counted operations and state: against the paper's figures, the models and XLA."""

import csv
import json

import equinox as eqx
import pytest

from agalite.bench import cost
from agalite.bench.cost import head_cost
from agalite.bench.flops import (
    AGALITE,
    AGALITE_FOLDED,
    CLAIMS,
    COUNTS,
    GALITE,
    GTRXL,
    GTRXL_CACHED,
    GTRXL_PLAIN,
    LINEAR,
    evaluate,
    ratios,
    truncate,
)
from agalite.bench.timing import Program, progress_bar
from agalite.cli import main
from agalite.memory import make_memory


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.where)
def test_state_ratios_of_the_paper_are_reproduced_to_the_digit(claim):
    found = ratios(claim, GTRXL, AGALITE)["state"]
    assert truncate(found, claim.digits) == claim.state


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.where)
def test_operation_ratios_of_the_paper_lie_between_two_counts(claim):
    """The paper gives no formula: its figure lies between counts without and with positions."""
    low = ratios(claim, GTRXL_PLAIN, AGALITE)["operations"]
    high = ratios(claim, GTRXL, AGALITE)["operations"]
    assert low < claim.operations < high
    assert high / claim.operations < 1.11


def test_counts_by_hand():
    sizes = {"d": 128, "V": 64, "M": 256, "eta": 4, "r": 1, "H": 4}
    assert evaluate("2*M*d*V", **sizes) == 4_194_304
    assert AGALITE.total("state", **sizes) == 896
    assert AGALITE_FOLDED.total("state", **sizes) == 320
    assert GTRXL.total("state", **sizes) == GTRXL.layer_state(**sizes) == 32_768
    assert AGALITE.layer_state(**sizes) == 4 * 896
    # 5 d V + 3 eta d = 42,496 of projections; 4,676 + 268 for everything elementwise.
    assert AGALITE.total("operations", **sizes) == 42_496 + 268 + 4 * 64 * (
        3 + 2 + 6 + 2 + 2 + 1
    ) + (64 * (2 + 6 + 2 + 1) + 1)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("agalite", {"eta": 4, "r": 1}, AGALITE_FOLDED),
        ("agalite", {"eta": 8, "r": 7}, AGALITE_FOLDED),
        ("agalite", {"eta": 2, "r": 4}, AGALITE_FOLDED),
        ("galite", {"eta": 4}, GALITE),
        ("linear", {}, LINEAR),
        ("gtrxl", {"memory": 20, "cache": False}, GTRXL),
        ("gtrxl", {"memory": 20}, GTRXL_CACHED),
    ],
)
def test_state_formulas_equal_the_state_of_the_models(name, options, count):
    size = {"d_model": 12, "layers": 2, "heads": 3, "head_size": 8, "ffn_size": 4}
    memory = eqx.filter_eval_shape(make_memory, name, 5, **size, **options)
    sizes = {"d": 12, "V": 8, "H": 3, "M": 20, "eta": 4, "r": 1} | options
    assert memory.state_size == 2 * count.layer_state(
        **{k: sizes[k] for k in ("d", "V", "H", "M", "eta", "r")}
    )


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("agalite", {"eta": 4, "r": 1}, AGALITE_FOLDED),
        ("agalite", {"eta": 8, "r": 7}, AGALITE_FOLDED),
        ("gtrxl", {"memory": 128, "cache": False}, GTRXL_PLAIN),
    ],
)
def test_xla_counts_as_many_operations(name, options, count):
    """XLA counts a multiplication and its addition as two, and the output projection too."""
    d, v = 128, 64
    found = head_cost(name, d, v, options)
    sizes = {"d": d, "V": v, "M": 128, "eta": 4, "r": 1, "H": 1} | options
    sizes = {k: sizes[k] for k in ("d", "V", "M", "eta", "r", "H")}
    expected = 2 * (count.total("operations", **sizes) + d * v)
    assert found["flops"] == pytest.approx(expected, rel=0.1)
    assert found["state_floats"] == count.total("state", **sizes)


def test_formulas_grow_with_their_sizes():
    small = {"d": 16, "V": 8, "M": 10, "eta": 2, "r": 1, "H": 2}
    for count in COUNTS:
        grows = [
            k
            for k in "dVM"
            if count.total("operations", **small | {k: 100}) > count.total("operations", **small)
        ]
        assert {"d", "V"} <= set(grows)
        assert ("M" in grows) == ("GTrXL" in count.name)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stub", "compiled"]
)
def test_command_writes_tables_and_figures(compiled, tmp_path, capsys, monkeypatch):
    """The steps of the models are compiled, or replaced by a function that does nothing."""
    monkeypatch.setenv("COLUMNS", "160")
    if not compiled:
        monkeypatch.setattr(cost.programs, "stream", lambda name, _: Program(name, int, 0))
    arguments = ["bench", "cost", "--quick", "--seconds", "0.01", "--stream", "1000"]
    assert main([*arguments, "--out", str(tmp_path / "cost")]) == 0
    out = capsys.readouterr().out
    for text in ("125.1x", "36.57x", "2*M*d*V", "3*eta*d", "GTrXL, cached"):
        assert text in out
    found = json.loads((tmp_path / "cost/cost.json").read_text())
    assert found["benchmark"] == "cost"
    assert {"cpu", "jax", "load"} <= set(found["machine"])
    assert found["claims"][0]["paper"] == {"operations": 125.1, "state": 36.57}
    assert found["scaling"][0]["against"] == "length of the stream"
    flat = [r for r in found["scaling"][0]["rows"] if r["model"] == "AGaLiTe"]
    assert len({r["state_floats"] for r in flat}) == 1
    rows = list(csv.reader((tmp_path / "cost/cost.csv").read_text().splitlines()))
    assert ["T-Maze, GTrXL-256 / AGaLiTe", "paper", "125.1", "36.57", ""] in rows
    assert (tmp_path / "cost/scaling.svg").read_text().startswith("<?xml")
    assert (tmp_path / "cost/scaling.png").read_bytes()[:4] == b"\x89PNG"


def test_bad_options_are_refused(tmp_path, capsys):
    assert main(["bench", "cost", "--stream", "10"]) == 2
    assert "stream=10 must be a whole number >= 1000" in capsys.readouterr().err
    assert main(["bench", "cost", "--out", str(tmp_path / "a/b")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_memory_of_training_for_both_backends(monkeypatch):
    monkeypatch.setattr(cost, "ENVS", 2)
    monkeypatch.setattr(cost, "STEPS", 128)
    size = {"d_model": 16, "layers": 1, "heads": 2, "head_size": 16, "ffn_size": 16}
    with progress_bar() as progress:
        rows = cost.training_memory(size, progress)
    found = {(row["model"], row["backend"]): row["temporary_bytes"] for row in rows}
    assert len(found) == 6
    assert found["AGaLiTe", "accelerator"] > found["AGaLiTe", "cpu"], "it keeps all states"
    assert found["GTrXL-128", "accelerator"] == found["GTrXL-128", "cpu"] > 0
    # The smallest that a gradient can keep: the inputs of its products.
    assert found["GaLiTe", "cpu"] > 2 * 128 * 16 * 4
