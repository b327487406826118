"""Presets: complete, valid for every model, and shown in the documentation as they are."""

import re
from pathlib import Path

import pytest

from agalite.memory.registry import MODELS
from agalite.training.presets import (
    _EXAMPLES,
    FAMILIES,
    PRESETS,
    configure,
    preset,
    preset_rows,
    preset_table,
)

PAGE = Path(__file__).parents[2] / "docs/training.md"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_for_every_environment_and_model(name):
    for family in FAMILIES:
        for memory in MODELS:
            config = configure(name, {"env": _EXAMPLES[family], "memory": memory})
            MODELS[memory].config(**config.memory_options)


def test_unknown_presets_are_refused():
    with pytest.raises(ValueError, match="preset='best' is unknown"):
        preset("best", "tmaze", "gru")


def test_the_documentation_shows_the_presets():
    """`agalite presets` prints what belongs between the two comments."""
    pattern = r"<!-- presets: [^>]*-->\n\n(.*?)\n\n<!-- /presets -->"
    assert re.search(pattern, PAGE.read_text(), re.DOTALL).group(1) == preset_table()


def test_published_is_the_code_of_the_authors():
    """Findings: gains, epsilon, basis, time limits, fused projections, value loss."""
    config = configure("published", {"env": "tmaze", "memory": "agalite"})
    assert config.actor_gain == config.critic_gain == pytest.approx(2**0.5)
    assert (config.agent.adam_eps, config.agent.time_limit) == (1e-8, "terminate")
    assert config.agent.vf_coef == 1.0
    assert config.memory_options == {"basis": "published", "projection_init": "fused"}
    gru = configure("published", {"env": "tmaze", "memory": "gru"})
    assert gru.memory_options == {"embedding": False, "hidden_size": 680}
    assert (gru.agent.learning_rate, gru.agent.ent_coef) == (5e-4, 1e-2)
    craftax = configure("published", {"env": "craftax-symbolic", "memory": "agalite"})
    assert (craftax.activation, craftax.hidden_gain) == ("relu", 2.0)
    assert craftax.agent.anneal_lr
    assert craftax.agent.vf_clip_coef == 0.2


def test_rows_are_the_settings_that_differ():
    rows = dict(preset_rows("tmaze", "agalite"))
    assert "gamma" not in rows
    assert rows["model.basis"][1:] == ("paper", "published")
    with pytest.raises(ValueError, match="environment='maze' is unknown"):
        preset_rows("maze", "agalite")
