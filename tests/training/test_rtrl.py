"""Training with gradients past the rollout (`gradient="rtrl"`)."""

import jax
import numpy as np
import pytest

from agalite.agents.a2c import A2C
from agalite.agents.appo import APPO
from agalite.agents.ppo import PPO
from agalite.training.checkpoint import Checkpoints
from agalite.training.config import HostConfig, TrainConfig
from agalite.training.train import Trainer, TrainState

CONFIG = {
    "env": "tmaze",
    "env_options": {"corridor": 3},
    "memory": "agalite",
    "memory_options": {
        **{"d_model": 8, "layers": 1, "heads": 1, "head_size": 4, "ffn_size": 4, "eta": 2},
    },
    "num_envs": 4,
    "num_steps": 8,
    "hidden_size": 8,
    "gradient": "rtrl",
}
DIAGONAL = {"d_model": 8, "layers": 1, "ffn_size": 4, "hidden_size": 6}
LRU = {"memory": "lru", "memory_options": DIAGONAL}  # its trace is complex


def check_resume(config, tmp_path):
    """Three updates equal two, a checkpoint, and one more, in every array."""
    trainer = Trainer(TrainConfig(**config))
    advance = jax.jit(trainer.advance)
    state = jax.jit(trainer.init)(np.uint32(0))
    state, metrics = advance(state, np.int32(2))
    assert 0 < float(metrics["losses/past_grad_fraction"]) < 1
    assert "traces" not in metrics
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(2, state, None)
    shapes = jax.eval_shape(trainer.init, np.uint32(0))
    restored = checkpoints.restore(shapes)[1]
    expected, found = (advance(s, np.int32(1))[0] for s in (state, restored))
    trace = jax.tree.leaves(found.trace)
    assert trace
    assert all(len(x) == config["num_envs"] for x in trace)
    assert all(np.any(np.asarray(x) != 0) for x in trace)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("change", [{}, LRU], ids=["agalite", "lru"])
def test_a_run_with_traces_resumes_to_the_bit(change, tmp_path):
    check_resume(CONFIG | change, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 4},
        {"seq_len": 4, "agent": PPO(num_minibatches=2, update_epochs=2)},
        {"agent": PPO(num_minibatches=2, target_kl=0.1), "separate_critic": True},
        {"agent": APPO(num_minibatches=1, update_epochs=1)},
        {"precision": "bfloat16", "previous_action": True},
        LRU | {"precision": "bfloat16", "seq_len": 4, "agent": PPO(num_minibatches=2)},
        {"memory": "mingru", "memory_options": DIAGONAL},
    ],
)
def test_every_combination_resumes_to_the_bit(change, tmp_path):
    check_resume(CONFIG | change, tmp_path)


def test_noise_can_outlast_a_rollout():
    trainer = Trainer(TrainConfig(**CONFIG | {"noise_steps": 24}))
    state = TrainState(None, None, None, jax.random.key(0), np.int32(0))
    keys = [
        trainer._noise_key(state._replace(update=np.int32(update))) for update in (0, 2, 3, 5, 6)
    ]
    data = [tuple(np.asarray(jax.random.key_data(key))) for key in keys]
    assert data[0] == data[1] != data[2] == data[3] != data[4]
    assert Trainer(TrainConfig(**CONFIG | {"noise_steps": 8}))._noise_key(state) is None


def test_models_and_environments_without_traces_are_refused():
    gru = {"memory": "gru", "memory_options": {"d_model": 4, "hidden_size": 4}, "agent": A2C()}
    with pytest.raises(ValueError, match="needs a memory model with traces, and gru has none"):
        Trainer(TrainConfig(**CONFIG | gru))
    dpfp = {"memory_options": {"feature": "dpfp"}}
    with pytest.raises(ValueError, match="agalite has none with these options"):
        Trainer(TrainConfig(**CONFIG | dpfp))
    nonlinear = {"memory": "rtu", "memory_options": DIAGONAL | {"variant": "nonlinear"}}
    with pytest.raises(ValueError, match="rtu has none with these options"):
        Trainer(TrainConfig(**CONFIG | nonlinear))
    with pytest.raises(ValueError, match="gradient='rtrl' is for JAX environments"):
        HostConfig(env="gym:CartPole-v1", gradient="rtrl")
