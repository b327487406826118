"""Latency: the programs compute what the models do, and timing keeps its limits."""

import csv
import json
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.bench import latency, programs
from agalite.bench.model_configs import MODEL_CONFIGS, REFERENCE, SIZE, ModelConfig, build
from agalite.bench.timing import Program, interleave, progress_bar
from agalite.cli import main
from agalite.memory import make_memory

SMALL = {"d_model": 16, "layers": 1, "heads": 2, "head_size": 8, "ffn_size": 8}


def small(name, **options):
    return build(ModelConfig(name, options), SMALL)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("agalite", {}),
        ("gtrxl", {"memory": 3}),
        ("gtrxl", {"memory": 3, "cache": False}),
        pytest.param("galite", {}, marks=pytest.mark.slow),
        pytest.param("linear", {}, marks=pytest.mark.slow),
    ],
)
def test_stream_carries_its_state(name, options):
    """Repeated calls give the outputs of a scan over the same inputs."""
    memory = small(name, **options)
    program = programs.stream(name, memory)
    ys = [program.call() for _ in range(6)]
    xs = jnp.stack((programs.stream_inputs(memory) * 2)[:6])
    _, expected = jax.jit(lambda xs: memory.scan(memory.initial_state(), xs))(xs)
    assert np.abs(np.stack(ys) - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(ys[0] - ys[4]).max() > 1e-3  # the same input with another state


def test_batch_of_streams_equals_single_streams():
    memory = small("agalite")
    single, batch = programs.stream("one", memory), programs.stream("many", memory, batch_size=5)
    for _ in range(3):
        y, ys = single.call(), batch.call()
        assert ys.shape == (5, *y.shape)
        assert np.abs(ys - y).max() < 1e-5


@pytest.mark.parametrize("make", [programs.forward, programs.backward])
def test_weights_are_arguments_of_the_programs(make):
    """The lowered text has no constants of the size of the weights, at eight letters a number."""
    size = SMALL | {"layers": 2, "d_model": 64, "ffn_size": 64, "head_size": 32}
    memory = build(ModelConfig("agalite"), size)
    function, *args = make(memory, 20)
    text = jax.jit(function).lower(*args).as_text()
    assert len(text) < 4 * memory.parameter_count


def test_gradient_is_of_every_weight():
    memory = small("agalite", r=3)
    gradients = programs.gradient("g", memory, 12).call()
    weights = [x for x in jax.tree.leaves(memory) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert [g.shape for g in gradients] == [w.shape for w in weights]
    assert all(bool(jnp.isfinite(g).all()) for g in gradients)
    assert sum(float(jnp.abs(g).max()) > 0 for g in gradients) > len(weights) // 2


@pytest.mark.parametrize("products", [1, 3])
def test_bounds_are_the_products_of_the_weights(products):
    memory = small("agalite")
    weights = sum(w.size for w in programs.weight_arrays(memory))
    make = programs.forward_products if products == 1 else programs.backward_products
    function, *args = make(memory, 32)
    compiled = jax.jit(function).lower(*args).compile()
    counted: Any = compiled.cost_analysis()
    # The gradient of the first input is not computed.
    first = 2 * 32 * programs.weight_arrays(memory)[0].size if products == 3 else 0
    assert counted["flops"] == pytest.approx(products * 2 * 32 * weights - first, rel=0.01)
    out = jax.tree.leaves(compiled(*args))
    assert all(bool(jnp.isfinite(x).all()) for x in out)
    assert max(float(jnp.abs(x).max()) for x in out) > 1e-3  # subnormal numbers would be slow


def test_bound_of_a_stream_reads_as_many_weights_as_the_model_has():
    memory = small("agalite")
    assert programs.read_weights(memory).call().shape == (-(-memory.parameter_count // 4096),)
    transposed, plain = (
        programs.products(memory, 8, transposed=True).call(),
        programs.products(memory, 8).call(),
    )
    assert np.abs(transposed - plain).max() < 1e-4 * np.abs(plain).max()


def test_recurrent_models_are_as_large_as_the_reference():
    def parameters(label, size):
        config = MODEL_CONFIGS[label]
        shapes = eqx.filter_eval_shape(make_memory, config.name, 256, **config.options | size)
        return shapes.parameter_count

    reference = parameters(REFERENCE, SIZE)
    for label in ("gru", "lstm"):
        assert parameters(label, {}) == pytest.approx(reference, rel=0.005)


# --- interleave -----------------------------------------------------------------------------------


def sleeper(seconds):
    return Program("sleep", lambda: time.sleep(seconds), 0)


def run_interleaved(programs, **limits):
    with progress_bar() as progress:
        interleave(programs, progress, **limits)


def test_short_programs_have_all_runs_and_long_ones_end_with_their_time():
    short, long, longest = sleeper(0.001), sleeper(0.02), sleeper(0.12)
    run_interleaved([short, long, longest], runs=20, seconds=0.2)
    assert len(short.seconds) == 20
    assert 3 <= len(long.seconds) < 20
    assert 1 <= len(longest.seconds) <= 3
    assert min(long.seconds) >= 0.02


def test_first_run_is_not_timed():
    first = [0.15]
    program = Program("sleep", lambda: time.sleep(first.pop() if first else 0.001), 0)
    run_interleaved([program], runs=10, seconds=0.2)
    assert len(program.seconds) == 10
    assert max(program.seconds) < 0.1


def test_order_of_interleaved_runs():
    def order(**limits):
        called = []
        made = [Program(n, lambda n=n: called.append(n), 0) for n in "ab"]
        run_interleaved(made, **limits)
        return "".join(called), [len(p.seconds) for p in made]

    # One untimed run of each; then bursts of one run that does not count and four that do.
    assert order(runs=8, seconds=10) == ("ab" + ("a" * 5 + "b" * 5) * 2, [8, 8])
    assert order(runs=3) == ("ab" * 4, [3, 3])


# --- plan -----------------------------------------------------------------------------------------


def test_plan_has_the_figures_of_the_paper():
    chosen = latency.Plan().chosen()
    assert list(chosen) == ["stream", "sequence", "batch", "gradient"]
    streamed = chosen["stream"][1]
    for m in (128, 512, 1024, 2048):
        assert {f"gtrxl-{m}", f"gtrxl-{m}, cached"} <= set(streamed)
    assert {f"agalite({eta},{r})" for eta in (4, 8, 16) for r in (1, 7)} <= set(streamed)
    assert chosen["sequence"][2][0] == 128
    assert chosen["sequence"][2][-1] == 4096
    assert chosen["batch"][2][-1] == 512


def test_plan_includes_the_reference_and_names_mistakes():
    plan = latency.Plan(parts=["stream"], models=["gru"])
    assert plan.chosen()["stream"][1] == [REFERENCE, "gru"]
    with pytest.raises(ValueError, match=r"parts='frob' is unknown; choose one of: batch"):
        latency.Plan(parts=["frob"])
    with pytest.raises(ValueError, match=r"models='frob' is unknown; choose one of: agalite"):
        latency.Plan(models=["frob"])
    with pytest.raises(ValueError, match="runs=0"):
        latency.Plan(runs=0)
    with pytest.raises(ValueError, match="seconds=0"):
        latency.Plan(seconds=0)
    with pytest.raises(ValueError, match="in none of the parts"):
        latency.Plan(parts=["gradient"], models=["gtrxl-2048"]).chosen()


def test_program_that_would_take_too_long_is_left_out():
    memories = {REFERENCE: small("agalite"), "gru": small("gru", d_model=4, hidden_size=4)}
    part = latency.Part(
        "Sleep",
        (1, 2, 10),
        "steps",
        tuple(memories),
        lambda name, _, x: Program(name, lambda: time.sleep(0.1 * x * (name == "gru")), 0),
        lambda memory, _: programs.read_weights(memory),
    )
    plan = latency.Plan(runs=2, seconds=0.1)
    with progress_bar() as progress:
        found = latency.measure(part, memories, part.xs, plan, progress)
    assert set(found.programs[2]) == {REFERENCE, "gru", "bound"}
    assert set(found.programs[10]) == {REFERENCE, "bound"}
    assert found.left_out == ["gru at 10: one run would take about 1 s"]


def test_state_beyond_the_limit_is_left_out():
    memory = small("gtrxl", memory=512)
    found = latency.Measured(latency.PARTS["batch"])
    many = 3 * 10**9 // (4 * memory.state_size)
    assert not latency._fits(found, "gtrxl-512, cached", memory, many, {}, 1.0)
    assert f"gtrxl-512, cached at {many}: its state alone takes 3.0 GB" in found.left_out
    assert latency._fits(found, "gtrxl-512, cached", memory, 1, {}, 1.0)


# --- command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stub", "compiled"]
)
def test_command_writes_tables_and_figures(compiled, tmp_path, capsys, monkeypatch):
    """The steps of the models are compiled, or replaced by a function that does nothing."""
    monkeypatch.setattr(latency, "SIZE", SMALL)
    if not compiled:
        stub = lambda name, memory, **_: Program(name, int, 0)  # noqa: ARG005, E731
        monkeypatch.setattr(programs, "stream", stub)
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["--quick", "--parts", "stream", "batch", "--models", "gtrxl-128", "--runs", "3"]
    out = tmp_path / "latency"
    assert main(["bench", "latency", *arguments, "--seconds", "0.05", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for text in ("One step of a stream", "actions per second", "weights read once"):
        assert text in said
    assert "Targets" not in said  # which are of the full size
    found = json.loads((out / "latency.json").read_text())
    assert found["benchmark"] == "latency"
    assert found["command"].startswith("agalite")
    assert found["settings"]["size"]["layers"] == 2
    rows = {r["model"]: r for r in found["parts"]["stream"]["rows"]}
    assert set(rows) == {REFERENCE, "gtrxl-128", programs.READ}
    assert rows[REFERENCE]["by_reference"] == 1.0
    assert rows["gtrxl-128"]["context"] == 128
    assert len(rows["gtrxl-128"]["seconds"]) <= 3
    assert {r["x"] for r in found["parts"]["batch"]["rows"]} == {1, 8}
    table = list(csv.DictReader((out / "latency.csv").read_text().splitlines()))
    assert {r["model"] for r in table} == {REFERENCE, "gtrxl-128", programs.READ, programs.PRODUCTS}
    for part in ("stream", "batch"):
        assert (out / f"{part}.svg").read_text().startswith("<?xml")
        assert (out / f"{part}.png").read_bytes()[:4] == b"\x89PNG"


def test_targets_are_of_the_measured_programs():
    def part(unit, *rows):
        return {
            "x": unit,
            "rows": [dict(zip(("model", "x", "by_bound"), r, strict=True)) for r in rows],
        }

    parts = {
        "sequence": part("steps", (REFERENCE, 2048, 1.5), ("galite(4)", 2048, 3.5)),
        "batch": part("streams", (REFERENCE, 64, 1.9)),
    }
    found = {t["what"]: t["holds"] for t in latency.targets(parts)}
    assert list(found.values()) == [True, False, True]
    assert all("matrix products alone" in what for what in found)
