"""memax's models under the contract: what the rows of memory_models.py do not show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import extras
from agalite.memory import make_memory
from agalite.memory.memax import CELLS, Memax, MemaxConfig
from agalite.testing import check_memory
from memory_models import INPUT, inputs


@pytest.mark.parametrize(
    ("cell", "promises"),
    [
        ("LRU", [3, 4]),
        pytest.param("LRU", [1, 2, 5], marks=pytest.mark.slow),
        pytest.param("FFM", [1, 2, 3, 4, 5, 6], marks=pytest.mark.slow),
    ],
)
def test_a_complex_state_is_kept_as_pairs(cell, promises):
    memory = Memax(INPUT, cell=cell, d_model=8, layers=1, key=jax.random.key(0))
    assert all(x.dtype != jnp.complex64 for x in jax.tree.leaves(memory.initial_state()))
    check_memory(memory, promises=promises)


def test_it_is_memaxs_own_network():
    from memax.equinox.train_utils import get_residual_memory_model

    key = jax.random.key(1)
    memory = make_memory("memax", INPUT, cell="GDN", d_model=16, layers=2, key=key)
    network = get_residual_memory_model("GDN", INPUT, 16, 16, 2, key=key)
    xs, resets = inputs(20)
    _, expected = network(network.initialize_carry(), (xs, resets))
    _, found = memory.scan(memory.initial_state(), xs, resets)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_every_cell_can_be_named_and_no_other():
    assert MemaxConfig.__dataclass_fields__["cell"].default in CELLS
    for cell in CELLS:
        jax.eval_shape(lambda cell=cell: Memax(INPUT, cell=cell, d_model=16, key=jax.random.key(0)))
    with pytest.raises(ValueError, match=r"cell='gdn' is unknown; .*; did you mean GDN\?"):
        make_memory("memax", INPUT, cell="gdn")


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(extras, "installed", lambda name: name != "memax")
    with pytest.raises(
        ValueError, match=r"memory='memax' needs memax: pip install \"agalite\[memax\]"
    ):
        make_memory("memax", INPUT)
