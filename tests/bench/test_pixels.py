"""`agalite bench throughput --training --pixels`: what it counts, and its options."""

import pytest

from agalite import cli
from agalite.bench.pixels import forward_flops
from agalite.training.config import TrainConfig
from agalite.training.train import Trainer


@pytest.mark.parametrize(
    ("encoder", "first", "products", "parameters"),
    [
        # 7 x 7 patches of 12 x 12 x 3 pixels, 16 numbers of each, a dense layer of 128.
        ("patch", 49 * 432 * 16, 49 * 432 * 16 + 49 * 16 * 128, 433 * 16 + (49 * 16 + 1) * 128),
        # Outputs of 20 x 20, 9 x 9 and 7 x 7, as in Mnih et al. (2015).
        (
            "atari",
            400 * 192 * 32,
            400 * 192 * 32 + 81 * 512 * 64 + 49 * 576 * 64,
            193 * 32 + 513 * 64 + 577 * 64,
        ),
    ],
)
def test_operations_of_an_encoder_are_counted(encoder, first, products, parameters):
    trainer = Trainer(
        TrainConfig(
            env="mystery-path-grid",
            memory="feedforward",
            memory_options={"d_model": 8, "layers": 1, "ffn_size": 8},
            encoder=encoder,
            num_envs=1,
            num_steps=4,
        )
    )
    others = trainer.parameter_count - parameters
    assert forward_flops(trainer) == (2 * (products + others), 2 * first)


def test_pixels_need_training(capsys):
    assert cli.main(["bench", "throughput", "--envs", "--pixels"]) == 2
    assert "--pixels goes with --training" in capsys.readouterr().err
