"""The models' part of `agalite bench throughput --models`."""

import jax

from agalite.bench.model_configs import make_model
from agalite.bench.models import INPUT_SIZE, OWN_PRODUCTS, TRAINING, bound_of, products_of
from agalite.memory.registry import DIAGONAL

_BLOCK = {"d_model": 4, "layers": 1, "ffn_size": 4}


def _tiny(name):
    return _BLOCK | ({"hidden_size": 8} if name in DIAGONAL else {"heads": 1, "head_size": 4})


def test_products_of_a_model_are_those_of_all_its_matrices():
    for label in OWN_PRODUCTS:
        name, options = TRAINING[label]
        memory = make_model(name, INPUT_SIZE, **_tiny(name), **options)
        _, (matrices, inputs, gradients) = products_of(memory)
        if name in DIAGONAL:  # others have arrays of two axes that no product reads
            expected = sum(x.size for x in jax.tree.leaves(memory) if x.ndim > 1)
            assert sum(x.size for x in matrices) == expected
        for w, x, d in zip(matrices, inputs, gradients, strict=True):
            assert w.shape == (d.shape[1], x.shape[1])


def test_every_model_has_a_bound():
    assert bound_of("agalite r=1") == "products"
    assert bound_of("lru") == "products of lru"
    assert set(OWN_PRODUCTS) <= set(TRAINING)
