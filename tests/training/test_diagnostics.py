"""Symptoms of failing runs: each fires on made-up metrics, and not on those of a healthy twin."""

import dataclasses
import math

import equinox as eqx
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agalite.memory import make_memory
from agalite.memory.layers import FusedProjection
from agalite.training import diagnostics
from agalite.training.config import TrainConfig
from agalite.training.diagnostics import (
    SYMPTOMS,
    BelowEpsilon,
    Diagnostics,
    Facts,
    History,
    below_epsilon,
    frozen_gates,
    improves,
    max_entropy,
)
from agalite.training.run import Run

FACTS = Facts(
    total_steps=1_000_000,
    max_entropy=math.log(4),
    max_grad_norm=0.5,
    vf_coef=0.5,
    ent_coef=0.01,
    norm_adv=True,
    adam_eps=1e-5,
    has_memory=True,
)
HEALTHY = {
    "charts/episodic_return": [10.0 + 2 * i for i in range(20)],
    "charts/success": 0.5,
    "losses/entropy": 0.7,
    "losses/grad_norm": 0.8,
    "losses/policy_loss": 0.01,
    "losses/value_loss": 0.3,
}
FLAT = [20.0 + i % 2 for i in range(20)]
STUCK = {"charts/episodic_return": -100.0, "charts/success": 0.0, "losses/entropy": 1.386}
NAN = [math.nan] * 20


def history(rows=20, every=25_000, **changes):
    """Rows every 25,000 steps: `HEALTHY` with changes, each one value or one for each row."""
    columns = {**HEALTHY, **changes}
    made = History()
    for i in range(rows):
        row = {k: v[i] if isinstance(v, list) else v for k, v in columns.items() if v is not None}
        made.add((i + 1) * every, row)
    return made


def found(seen, facts=FACTS):
    """The kinds of the symptoms that a history has."""
    return [kind for kind, symptom in SYMPTOMS.items() if symptom(seen, facts)]


def of(**changes):
    """Changes of metrics, by the last part of their names."""
    names = {name.split("/")[1]: name for name in HEALTHY}
    return {names[name]: value for name, value in changes.items()}


def test_a_healthy_run_has_no_mark():
    assert found(history()) == []
    assert found(History()) == []
    assert found(history(**dict.fromkeys(HEALTHY, NAN))) == []
    assert found(history(**dict.fromkeys(HEALTHY, None))) == []


def test_a_uniform_policy():
    sentence = SYMPTOMS["uniform policy"](history(**STUCK), FACTS)
    assert sentence is not None
    for part in ("after 500,000 steps", "1.3860 of at most 1.3863", "no episode", "--actor-gain"):
        assert part in sentence
    assert "--ent-coef below 0.01" in sentence
    without = dataclasses.replace(FACTS, ent_coef=0.0)
    assert "--ent-coef" not in (SYMPTOMS["uniform policy"](history(**STUCK), without) or "")
    cartpole = history(**{**STUCK, **of(episodic_return=FLAT, success=None)})
    assert "the return stays at 20.5" in (SYMPTOMS["uniform policy"](cartpole, FACTS) or "")


@pytest.mark.parametrize(
    "changes",
    [
        of(entropy=1.37),
        of(entropy=[1.386] * 19 + [1.37]),
        of(episodic_return=HEALTHY["charts/episodic_return"]),
        of(episodic_return=NAN, success=NAN),
        of(success=[0.0] * 19 + [0.95]),
    ],
)
def test_a_policy_that_is_not_uniform_or_learns(changes):
    assert found(history(**{**STUCK, **changes})) == []


def test_no_mark_before_its_window_is_full():
    assert found(history(rows=7, **STUCK)) == []
    assert found(history(rows=8, **STUCK)) == ["uniform policy"]
    assert found(history(rows=3, every=100_000, **STUCK)) == [], "too few rows"


def test_continuous_actions_have_no_marks_of_entropy():
    assert found(history(**STUCK), dataclasses.replace(FACTS, max_entropy=None)) == []


def test_collapsed_entropy():
    seen = history(**of(entropy=0.01, success=[0.5 + 0.02 * (i % 2) for i in range(20)]))
    sentence = SYMPTOMS["collapsed entropy"](seen, FACTS)
    assert sentence is not None
    assert "0.0100 of at most 1.3863" in sentence
    assert "success stays at 0.51: try --ent-coef above 0.01" in sentence
    lost = [10.0] * 5 + [90.0] * 5 + [20.0] * 10
    for returns in (FLAT, lost):
        silent = of(entropy=0.01, success=None, episodic_return=returns)
        assert found(history(**silent)) == ["collapsed entropy"]


@pytest.mark.parametrize(
    "changes",
    [
        of(success=0.97),
        of(success=[0.3 + 0.02 * i for i in range(20)]),
        of(success=0.5, entropy=[0.01] * 19 + [0.1]),
        of(success=None),  # the return rises
        of(success=None, episodic_return=[10.0] * 5 + [90.0] * 15),  # it is where it was best
        of(success=None, episodic_return=NAN),
    ],
)
def test_a_policy_that_is_certain_for_a_reason(changes):
    assert found(history(**{**of(entropy=0.01), **changes})) == []


def test_a_policy_without_memory_may_be_certain_and_wrong():
    facts = dataclasses.replace(FACTS, has_memory=False)
    assert found(history(**of(entropy=0.01, success=0.5)), facts) == []


def test_clipped_gradients():
    sentence = SYMPTOMS["clipped gradients"](history(**of(grad_norm=400.0)), FACTS)
    assert sentence is not None
    assert "400 or more in the last 200,000 steps, --max-grad-norm is 0.5" in sentence
    for norms in (20.0, [400.0] * 19 + [3.0], [3.0] * 19 + [1e5]):
        assert found(history(**of(grad_norm=norms))) == []
    assert found(history(**of(grad_norm=400.0, success=0.95))) == []


def test_a_dominating_value_loss():
    large = of(value_loss=60.0, episodic_return=FLAT)
    sentence = SYMPTOMS["dominating value loss"](history(**large), FACTS)
    assert sentence is not None
    assert "30 times the policy's part" in sentence
    assert "--norm-return" in sentence
    falls = of(value_loss=[200.0 - 9 * i for i in range(20)])
    rises = of(episodic_return=HEALTHY["charts/episodic_return"])
    for changes in (falls, rises, of(value_loss=5.0), of(episodic_return=NAN), of(success=0.95)):
        assert found(history(**{**large, **changes})) == []
    # Advantages that are not normalised grow with the critic's error, and the policy's loss too.
    assert found(history(**large), dataclasses.replace(FACTS, norm_adv=False)) == []


def test_frozen_gates():
    stuck = history(**of(episodic_return=FLAT))
    sentence = frozen_gates(stuck, FACTS, BelowEpsilon(gates=0.93, rest=0.61))
    assert sentence is not None
    assert "epsilon 1e-05 is larger than the gradients of 93% of their parameters" in sentence
    assert "--adam-eps 1e-8" in sentence
    assert frozen_gates(stuck, FACTS, BelowEpsilon(0.79, 0.6)) is None
    assert frozen_gates(stuck, FACTS, BelowEpsilon(1.0, 1.0)) is None, "nothing learns"
    assert frozen_gates(history(), FACTS, BelowEpsilon(0.93, 0.61)) is None, "it improves"


def test_gradients_below_epsilon_are_counted_for_gates_and_rest():
    sizes = {"d_model": 8, "layers": 1, "heads": 1, "head_size": 4, "ffn_size": 8}
    shapes = eqx.filter_eval_shape(lambda: make_memory("agalite", 3, **sizes))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    adam = optax.adam(1e-3)
    state = adam.init(params)

    def roots(gates, rest):
        """The state after many steps with gradients of these sizes."""

        def fill(x):
            if not isinstance(x, FusedProjection):
                return jnp.full_like(x, rest**2)
            names = [name for name, width in x.widths for _ in range(width)]
            row = jnp.array([gates if n in diagnostics.GATES else rest for n in names]) ** 2
            weight = jnp.broadcast_to(row[:, None], x.inputs.weight.shape)
            new = weight, jnp.broadcast_to(row, x.bias.shape)
            return eqx.tree_at(lambda p: (p.inputs.weight, p.bias), x, new)

        is_leaf = lambda x: isinstance(x, FusedProjection)  # noqa: E731
        nu = jax.tree.map(fill, state[0].nu, is_leaf=is_leaf)
        return (state[0]._replace(nu=nu, count=jnp.int32(100_000)), *state[1:])

    slow, fast = roots(1e-6, 1e-4), roots(1e-4, 1e-6)
    assert below_epsilon(slow, 1e-5) == [BelowEpsilon(1.0, 0.0)]
    assert below_epsilon(slow, 1e-8) == [BelowEpsilon(0.0, 0.0)]
    two = jax.tree.map(lambda *x: jnp.stack(x), slow, fast)
    assert below_epsilon(two, 1e-5) == [BelowEpsilon(1.0, 0.0), BelowEpsilon(0.0, 1.0)]
    assert below_epsilon(adam.init({"a": jnp.ones(3)}), 1e-5) == [], "a model without gates"
    assert below_epsilon(None, 1e-5) == []


def test_what_improves_does_so_by_more_than_noise():
    assert improves(np.arange(8.0))
    assert not improves(np.full(8, -100.0))
    assert not improves(np.array([1.0, 3.0, 2.0, 2.5, 1.0, 3.0, 2.0, 2.6]))


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (gym.spaces.Discrete(4), math.log(4)),
        (gym.spaces.MultiDiscrete([3, 5]), math.log(15)),
        (gym.spaces.Box(0, 2, (2,), np.int32), math.log(9)),
        (gym.spaces.Box(-1, 1, (2,), np.float32), None),
    ],
)
def test_the_entropy_of_a_uniform_policy(space, expected):
    assert max_entropy(space) == (None if expected is None else pytest.approx(expected))


def log_of(run):
    return run.log_path.read_text()


# --- in a run -------------------------------------------------------------------------------------

# That the training loops call it is seen in `test_train.py` and `test_asynchronous.py`.


def test_a_warning_is_not_repeated_when_resumed_and_names_the_seed(tmp_path, capsys):
    config = TrainConfig(env="tmaze", seeds=2, total_timesteps=1_000_000)
    space = gym.spaces.Discrete(4)
    rows = [HEALTHY | of(episodic_return=1.0), HEALTHY | STUCK]
    with Run.create(tmp_path / "run", config.to_dict()) as run:
        for _ in range(2):
            watch = Diagnostics(run, config, space)
            for step in range(25_000, 500_000, 25_000):
                watch.add(step, rows)
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert shown.startswith("warning: seed number 1: the policy is still uniform")
        assert log_of(run).count("warning (uniform policy): seed number 1") == 1


def test_a_quiet_run_only_logs(tmp_path, capsys):
    config = TrainConfig(env="tmaze", total_timesteps=1_000_000)
    with Run.create(tmp_path / "run", config.to_dict()) as run:
        watch = Diagnostics(run, config, gym.spaces.Discrete(4), quiet=True)
        for step in range(25_000, 500_000, 25_000):
            watch.add(step, [HEALTHY | STUCK])
        assert capsys.readouterr().err == ""
        assert log_of(run).count("warning (uniform policy): the policy is still uniform") == 1
