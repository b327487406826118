"""The declarations of the studies, and the trials they expand to."""

import re
from pathlib import Path

import jax
import pytest

import agalite
from agalite.studies import catalogue, verdicts
from agalite.studies.declaration import Measurement, Scale
from agalite.studies.trials import check_settings, expand, requested
from studies.small_study import measured_study

ROOT = Path(__file__).parents[2]
NAMES = [
    "tmaze",
    "tmaze-sweep",
    "cartpole-noisy",
    "cartpole-masked",
    "cartpole-sweep",
    "tuning-basis",
    "tuning-cartpole",
    "tuning-cartpole-again",
    "tuning-tmaze",
    "tuning-tmaze-again",
    "tuning-encoder",
    "tuning-precision",
    "bars-cartpole",
    "bars-tmaze",
    "bars-gym",
    "bars-published",
    "stream-memory-chain",
    "mystery-path-grid",
    "mystery-path",
    "mystery-path-sweep",
    "craftax",
    "craftax-sweep",
    "memory-maze",
    "memory-maze-window",
    "memory-maze-sweep",
    "ablation-gating",
    "ablation-feature-map",
    "ablation-approximation",
    "approximation-error",
    "bases",
    "horizon",
    "rtrl-tmaze",
    "rtrl-tmaze-long",
    "gtrxl-window",
    "memory-models",
    "lra-listops",
    "lra-text",
    "latency-streaming",
    "latency-sequence",
    "cost",
]


def test_every_experiment_of_the_paper_has_a_study():
    found = catalogue.studies()
    assert sorted(found) == sorted(NAMES)
    for study in found.values():
        without = ("tuning", "bars", "stream", "rtrl", "memory-models")
        ours = {"paper"} if study.name.startswith(without) else set()
        assert set(study.scales) == {"smoke", "cpu", "paper"} - ours, study.name


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_valid_and_figures_and_claims_name_what_exists(name, tmp_path):
    _check(catalogue.find(name), tmp_path)


def _check(study, out):
    for scale in study.scales:
        trials = expand(study, scale, out)
        assert len({trial.folder for trial in trials}) == len(trials) > 0
        for trial in trials:
            check_settings(trial)  # a mistake in a setting raises
    if isinstance(study.kind, Measurement):
        return  # measurements add levels that are not declared
    names = {part for factor in study.factors for part in factor.name.split("/")}
    for figure in study.figures:
        for field in ("x", "y", "lines", "panels"):
            assert getattr(figure, field, None) in {None, *names}, figure
    if study.selection is not None:
        assert {*study.selection.choose, *study.selection.within} <= names
    # A tested claim can be tested at the scales that it is about.
    for claim in study.claims:
        for scale in claim.scales:
            labels = study.labels_at(scale)
            for test in claim.tests:
                for side in (test.a, getattr(test, "b", {})):
                    for factor, wanted in side.items():
                        allowed = (wanted,) if isinstance(wanted, str) else wanted
                        assert set(labels[factor]) & set(allowed), (scale, claim.says)


def test_the_example_of_the_documentation_is_a_study(tmp_path):
    text = (ROOT / "docs/studies.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    found: dict = {}
    exec(example, found)
    (study,) = found["STUDIES"]
    _check(study, tmp_path)
    assert all(f"`{name}`" in text for name in NAMES)


def test_the_paper_scale_has_the_papers_settings():
    def settings(name, **levels):
        trials = expand(catalogue.find(name), "paper", Path())
        matching = [t for t in trials if levels.items() <= t.levels.items()]
        assert matching, levels
        return matching, requested(matching[0])

    trials, config = settings("tmaze", agent="agalite", corridor="200")
    assert sum(trial.seeds for trial in trials) == 50
    assert (config["total_timesteps"], config["num_envs"], config["num_steps"]) == (
        5_000_000,
        8,
        256,
    )
    assert config["algorithm"] == "a2c"
    assert config["memory_options"] == {
        "eta": 4,
        "r": 1,
        "basis": "paper",
        "projection_init": "fused",
    }
    trials, config = settings("tmaze-sweep", agent="gru", corridor="120")
    assert len(trials) == 25  # five learning rates times five entropy coefficients
    assert config["seeds"] == 5
    trials, config = settings("cartpole-noisy", agent="gru")
    assert sum(trial.seeds for trial in trials) == 30
    assert config["env"] == "noisy-masked-cartpole"
    assert (config["num_envs"], config["num_steps"]) == (1, 1024)
    assert config["agent"]["update_epochs"] == 10
    trials, config = settings("memory-maze", agent="agalite", maze="15x15")
    assert len(trials) == 3
    assert config["memory_options"]["r"] == 7
    assert config["memory_options"]["d_model"] == 512
    trials, config = settings("craftax", agent="agalite-8")
    assert len(trials) == 15
    assert (config["total_timesteps"], config["num_envs"]) == (1_000_000_000, 1024)
    assert len(settings("mystery-path-sweep", agent="agalite")[0]) == 12
    assert len(settings("craftax-sweep", agent="agalite-8")[0]) == 9 * 5
    assert len(settings("memory-maze-sweep", agent="agalite")[0]) == 9 * 3


def test_bases_have_equal_state():
    sizes = {}
    for trial in expand(catalogue.find("bases"), "cpu", Path()):
        options = requested(trial)["memory_options"]
        memory = jax.eval_shape(
            lambda options=options: agalite.make_memory(
                "agalite", 16, key=jax.random.key(0), **options
            )
        )
        c = memory.config
        vectors = int(trial.levels["vectors"])
        least = c.layers * c.heads * vectors * (c.eta + 1) * c.head_size
        sizes.setdefault(vectors, {})[trial.levels["basis"]] = memory.state_size - least
    for vectors, extra in sizes.items():
        assert extra["paper"] == extra["slots"] == 0, vectors
        # Without a constant oscillator the normaliser is one key vector more.
        assert extra["published"] == c.layers * c.heads * c.eta * c.head_size


def test_seeds_are_shared_out_without_a_gap(tmp_path):
    study = measured_study(scales={"smoke": Scale(seeds=7, seeds_per_run=3)})
    trials = expand(study, "smoke", tmp_path, ["r=1"])
    assert [(t.first_seed, t.seeds) for t in trials] == [(0, 3), (3, 3), (6, 1)]
    one = expand(study, "smoke", tmp_path, ["r=1", "seed=4"])
    assert [t.name for t in one] == ["r=1,seed=3-5"], "the run that trains this seed"
    with pytest.raises(ValueError, match="choose one of: 0, 1, 2, 3, 4, 5, 6"):
        expand(study, "smoke", tmp_path, ["seed=7"])
    assert [t.name for t in trials] == ["r=1,seed=0-2", "r=1,seed=3-5", "r=1,seed=6"]


def test_only_selects_levels_and_names_what_exists(tmp_path):
    study = catalogue.find("tmaze")
    only = ["agent=gru", "agent=lstm", "corridor=120", "corridor=200", "seed=0"]
    assert [t.name for t in expand(study, "cpu", tmp_path, only)] == [
        "agent=lstm,corridor=120,seed=0",
        "agent=lstm,corridor=200,seed=0",
        "agent=gru,corridor=120,seed=0",
        "agent=gru,corridor=200,seed=0",
    ]
    with pytest.raises(ValueError, match="choose one of: 120, 140"):
        expand(study, "cpu", tmp_path, ["corridor=999"])
    with pytest.raises(ValueError, match=r"agent=\.\.\., corridor=\.\.\."):
        expand(study, "cpu", tmp_path, ["length=20"])
    bases = expand(catalogue.find("bases"), "cpu", tmp_path, ["basis=slots", "vectors=4"])
    assert {t.settings["memory_options.r"] for t in bases} == {4}


def test_a_scale_may_have_a_preset_of_its_own(tmp_path):
    study = catalogue.find("tmaze")
    basis = {
        scale: requested(expand(study, scale, tmp_path, ["agent=agalite"])[0])["memory_options"]
        for scale in ("cpu", "paper")
    }
    assert basis["cpu"]["basis"] == "published"
    assert basis["paper"]["basis"] == "paper"


def test_the_page_of_results_has_every_claim_and_what_its_study_says():
    table = verdicts.claims_table(ROOT / "results/studies", "cpu", "../results/studies/")
    page = (ROOT / "docs/results.md").read_text()
    between = page.split(verdicts.BEGIN)[1].split(verdicts.END)[0].strip()
    assert between == table, "agalite study claims --out results/studies --into docs/results.md"
    paper = [c for s in catalogue.studies().values() if s.paper != "ours" for c in s.claims]
    assert all(claim.says.removeprefix("(ours) ") in between for claim in paper)


def test_all_studies_run_in_an_order_that_gives_verdicts_early():
    names = [study.name for study in catalogue.in_order("cpu")]
    assert sorted(names) == sorted(n for n, s in catalogue.studies().items() if "cpu" in s.scales)
    for earlier, later in (("cost", "tmaze"), ("tmaze-sweep", "tmaze"), ("tmaze", "bases")):
        assert names.index(earlier) < names.index(later)


def test_the_choice_of_a_sweep_changes_the_settings_of_its_agent(tmp_path):
    chosen = {"agalite": {"agent.learning_rate": 0.007}}
    trials = expand(catalogue.find("tmaze"), "smoke", tmp_path, chosen=chosen)
    rates = {t.levels["agent"]: requested(t)["agent"]["learning_rate"] for t in trials}
    assert rates == {"agalite": 0.007, "gru": 5e-4}
