"""Comparing two result files."""

import json

import pytest

from agalite.bench.compare import compare, measurements, read
from agalite.bench.report import write_results
from agalite.cli import main

FAST = [0.010, 0.011, 0.010, 0.010, 0.011]
SLOW = [0.020, 0.021, 0.020, 0.022, 0.020]


def latency(seconds, *, bound=(0.005, 0.005, 0.006), benchmark="latency"):
    """Results in the form of `agalite bench latency`."""
    rows = [
        {"model": "agalite(4,1)", "x": 128, "seconds": list(seconds)},
        {"model": "matrix products alone", "x": 128, "seconds": list(bound)},
    ]
    return {"benchmark": benchmark, "parts": {"sequence": {"title": "", "rows": rows}}}


@pytest.fixture
def file(tmp_path):
    made = iter(range(10))

    def write(results):
        path = tmp_path / f"{next(made)}.json"
        write_results(path, results)
        return path

    return write


def verdicts(before, after, **options):
    names = ("A", "B")
    changes = compare(read(before), read(after), names=names, **options)
    return {c.name: (c.verdict, c.factor) for c in changes}


def test_change_is_reported_only_beyond_the_noise(file):
    fast, slow = file(latency(FAST)), file(latency(SLOW))
    noisy = file(latency([0.008, 0.009, 0.012, 0.030, 0.031]))
    name = "sequence / agalite(4,1) / 128"
    assert verdicts(fast, slow)[name] == ("SLOWER", pytest.approx(2.0))
    assert verdicts(slow, fast)[name] == ("faster", pytest.approx(0.5))
    assert verdicts(fast, fast)[name] == ("within noise", 1.0)
    assert verdicts(fast, noisy)[name][0] == "within noise"
    # The middle halves are disjoint, but one is wider than the distance of the medians.
    wide = file(latency([0.0105, 0.0111, 0.012, 0.020, 0.025]))
    assert verdicts(fast, wide)[name][0] == "within noise"
    assert verdicts(fast, file(latency(SLOW[:2])))[name][0] == "too few runs"


def test_higher_rate_is_faster(file):
    def envs(rates):
        return {"environments": {"tmaze": {"together": 8, "steps_per_second": rates}}}

    few, many = file(envs([100.0, 101.0, 102.0])), file(envs([200.0, 201.0, 202.0]))
    assert verdicts(few, many)["environments / tmaze"] == ("faster", pytest.approx(201 / 101))
    assert verdicts(many, few)["environments / tmaze"][0] == "SLOWER"


def test_rate_with_spread_is_a_measurement(file):
    def ways(rate):
        row = {"name": "synchronous", "steps_per_second": rate, "spread": 0.05}
        return {"ways": [row]}

    found = measurements(read(file(ways(100.0))))["ways / synchronous"]
    assert (found.low, found.median, found.high, found.rate) == (95.0, 100.0, 105.0, True)
    assert verdicts(file(ways(100.0)), file(ways(104.0)))["ways / synchronous"][0] == "within noise"
    assert verdicts(file(ways(100.0)), file(ways(150.0)))["ways / synchronous"][0] == "faster"


def test_divided_by_the_bound_a_slower_machine_is_no_change(file):
    """Everything takes twice as long, including the bound."""
    here = file(latency(FAST))
    there = file(latency([2 * s for s in FAST], bound=(0.010, 0.010, 0.012)))
    name = "sequence / agalite(4,1) / 128"
    assert verdicts(here, there)[name][0] == "SLOWER"
    by = "matrix products alone"
    assert verdicts(here, there, by=by)[name] == ("within noise", pytest.approx(1.0))
    with pytest.raises(ValueError, match=r"by='frob' is not measured in A; it has sequence / agal"):
        verdicts(here, there, by="frob")


def test_divided_by_the_bound_of_the_same_part_and_length(file):
    def rows(scale):
        return [
            {"model": m, "x": x, "seconds": [s * scale] * 3}
            for m, s in (("m", 3.0), ("bound", 1.0))
            for x in (1, 2)
        ]

    parts = {"a": {"rows": rows(1)}, "b": {"rows": [r | {"seconds": [7.0] * 3} for r in rows(1)]}}
    parts["a"]["rows"][-1]["seconds"] = [6.0] * 3  # the bound of a at 2
    path = file({"benchmark": "latency", "parts": parts})
    found = {
        c.name: c.before.median
        for c in compare(read(path), read(path), names=("A", "A"), by="bound")
    }
    assert found["a / m / 1"] == pytest.approx(3.0)
    assert found["a / m / 2"] == pytest.approx(0.5)
    assert found["b / m / 2"] == pytest.approx(1.0)


def test_rows_of_different_panels_stay_apart(file):
    """In results of `agalite bench cost`, eta = 4 and r = 4 are two measurements."""
    row = {"model": "AGaLiTe", "x": 4, "seconds": FAST}
    parts = [{"against": "eta", "rows": [row]}, {"against": "r", "rows": [row | {"seconds": SLOW}]}]
    found = measurements(read(file({"benchmark": "cost", "scaling": parts})))
    assert list(found) == ["scaling / eta / AGaLiTe / 4", "scaling / r / AGaLiTe / 4"]


def test_files_that_do_not_match_are_refused(file, tmp_path):
    latencies = file(latency(FAST))
    with pytest.raises(ValueError, match=r"different benchmarks: A of latency, B of environments"):
        verdicts(latencies, file({"environments": {"t": {"steps_per_second": [1.0]}}}))
    other = latency(FAST)
    other["parts"] = {"batch": other["parts"]["sequence"]}
    with pytest.raises(ValueError, match=r"nothing was measured in both: A has sequence / agal"):
        verdicts(latencies, file(other))
    small = latency(FAST) | {"settings": {"size": {"layers": 2}}}
    with pytest.raises(ValueError, match=r"different sizes: A with none, B with layers 2"):
        verdicts(latencies, file(small))
    with pytest.raises(ValueError, match=r"nowhere.json' cannot be read: No such file"):
        read(tmp_path / "nowhere.json")
    (tmp_path / "text.json").write_text("frob")
    with pytest.raises(ValueError, match="is not a JSON file"):
        read(tmp_path / "text.json")
    (tmp_path / "list.json").write_text(json.dumps({"parts": {}}))
    with pytest.raises(ValueError, match="does not describe the machine"):
        read(tmp_path / "list.json")


def test_command_succeeds_whatever_the_timings(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    fast, slow = file(latency(FAST)), file(latency(SLOW) | {"settings": {"runs": 3}})
    assert main(["bench", "compare", str(fast), str(slow)]) == 0
    out = capsys.readouterr().out
    assert "SLOWER" in out
    assert "1 SLOWER" in out
    assert "note: settings differ" in out
    assert "load of the machine" in out
    assert main(["bench", "compare", str(fast), str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
