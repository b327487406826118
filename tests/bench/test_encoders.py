"""The encoders' part of `agalite bench throughput --models`."""

import jax

from agalite.bench import encoders
from agalite.bench.timing import Program
from agalite.networks.encoders import AtariConv, ImpalaResNet


def test_product_sizes_are_those_of_the_layers():
    atari = AtariConv((84, 84, 3), key=jax.random.key(0))
    assert encoders.product_sizes(atari, (5, 2, 84, 84, 3)) == [
        (4000, 192, 32),
        (810, 512, 64),
        (490, 576, 64),
    ]
    impala = ImpalaResNet((16, 16, 3), width=8, key=jax.random.key(0))
    sizes = encoders.product_sizes(impala, (1, 1, 16, 16, 3))
    assert len(sizes) == 3 * 5 + 1
    assert sizes[0] == (256, 27, 16)
    assert sizes[-1] == (1, 2 * 2 * 32, 8)


def test_targets_are_ratios_of_times():
    times = {encoders.KERNELS: 0.5, encoders.XLA: 1.25, encoders.PRODUCTS: 0.4}
    programs = {
        f"{name}, {kind}": Program(f"{name}, {kind}", lambda: None, 0, [seconds] * 3)
        for name in encoders.ENCODERS
        for kind, seconds in times.items()
    }
    found = encoders.targets(programs)
    assert [t["value"] for t in found] == [2.5] * 3
    assert encoders.table(programs).row_count == 9
    # Without a compiler there are no kernels to compare with.
    assert encoders.targets({k: p for k, p in programs.items() if "kernels" not in k}) == []
