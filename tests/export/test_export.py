"""Exported files compute what the agent computes: models, encoders, kinds of actions."""

import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

import agalite
from agalite.cli import main
from agalite.envs.tmaze import TMaze
from agalite.export import stablehlo
from agalite.export.onnx import file as onnx_file
from agalite.export.onnx.graph import build
from agalite.export.onnx.program import trace
from agalite.export.onnx.rules import RULES
from agalite.export.policy import export_model
from agalite.export.step import make_step, zeros
from agalite.networks.actor_critic import ActorCritic
from agalite.training.config import TrainConfig
from memory_models import ROWS

pytest.importorskip("onnxruntime")

EXAMPLE = Path(__file__).parents[2] / "examples/onnx_tmaze.py"
VECTOR = Box(-1.0, 1.0, (3,), np.float32)
IMAGE = Box(0, 255, (40, 36, 3), np.uint8)
GRU = {"d_model": 6, "hidden_size": 7}
QUICK_MODELS = ("agalite", "galite", "gru", "s5", "mamba2")


def one_layer(row):
    """The name and options of a model in `memory_models.ROWS`, with one layer."""
    memory, options = ROWS[row]
    return memory, options | ({"layers": 1} if "layers" in options else {})


def make(
    memory="gru",
    options=None,
    observations=VECTOR,
    actions=None,
    encoder="auto",
    noise=1.0,
    bounded_mean=False,
):
    """An agent; `noise` makes its weights and biases nonzero."""
    options = GRU if options is None else options
    model = ActorCritic.make(
        observations,
        actions or Discrete(4),
        memory=memory,
        memory_options=options,
        encoder=encoder,
        hidden_size=8,
        bounded_mean=bounded_mean,
        key=jax.random.key(1),
    )
    leaves, tree = jax.tree.flatten(model)
    generator = np.random.default_rng(0)

    def noisy(x):
        scale = noise / max(3, np.sqrt(x.shape[-1]))
        return x + scale * generator.normal(size=x.shape).astype(np.float32)

    return jax.tree.unflatten(tree, [noisy(x) for x in leaves])


ENCODERS = {
    "vector": (VECTOR, "vector"),
    "vector 2 x 3": (Box(-1.0, 1.0, (2, 3), np.float32), "vector"),
    "one-hot": (Discrete(5), "vector"),
    "craftax": (Box(0.0, 1.0, (1345,), np.float32), "auto"),
    "atari": (IMAGE, "atari"),
    "impala": (Box(0, 255, (10, 9, 2), np.uint8), "impala"),
}
ACTIONS = {
    "Discrete from 2": Discrete(3, start=2),
    "MultiDiscrete": MultiDiscrete([2, 3, 4]),
    "Box": Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, np.inf], np.float32)),
}


def quick(names, chosen):
    """All names as parameters, those not chosen marked slow."""
    return [x if x in chosen else pytest.param(x, marks=pytest.mark.slow) for x in names]


@pytest.mark.parametrize("row", quick(ROWS, QUICK_MODELS))
def test_models_to_onnx(row, tmp_path):
    model = make(*one_layer(row))
    (file,) = export_model(model, (VECTOR, Discrete(4)), onnx=tmp_path / "policy.onnx")
    assert file.difference > 0, "a program of another compiler is not equal to the bit"
    assert [x.name for x in tmp_path.iterdir()] == ["policy.onnx"]


@pytest.mark.parametrize("name", quick(ENCODERS, ("one-hot", "atari")))
def test_encoders_to_onnx(name, tmp_path):
    space, encoder = ENCODERS[name]
    model = make(observations=space, encoder=encoder, noise=0.0)
    export_model(model, (space, Discrete(4)), onnx=tmp_path / "policy.onnx", batch_size=2)


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_as_the_metadata_describes(name, tmp_path):
    """An action made of the outputs by the metadata is the one that the agent takes."""
    space, path = ACTIONS[name], tmp_path / "policy.onnx"
    model = make(actions=space, bounded_mean=name == "Box")
    export_model(model, (VECTOR, space), onnx=path)
    run, about = onnx_file.open_file(path)
    observation = np.array([[0.3, -0.2, 0.9]], np.float32)
    step = make_step(model, np.float32)
    names = [x["name"] for x in about["outputs"]]
    arrays = run([observation, np.array([True]), *zeros(step)])
    found = dict(zip(names, arrays, strict=True))
    _, policy, value = jax.jit(lambda x: model.step(model.initial_state(), x, True))(observation[0])
    expected = np.asarray(model.to_env(policy.mode()))
    how = about["distribution"]
    match how["kind"]:
        case "categorical":
            action = how["start"] + found["logits"][0].argmax()
        case "categorical of each part":
            parts = np.split(found["logits"][0], np.cumsum(how["sizes"])[:-1])
            action = np.reshape(how["start"] + np.array([x.argmax() for x in parts]), how["shape"])
        case _:
            low = [-np.inf if x is None else x for x in how["low"]]
            high = [np.inf if x is None else x for x in how["high"]]
            moved = np.array(how["centre"]) + np.array(how["half"]) * found["mean"][0]
            action = np.clip(moved, low, high).reshape(how["shape"])
            draws = jax.vmap(policy.sample)(jax.random.split(jax.random.key(0), 4000))
            np.testing.assert_allclose(found["std"][0], np.std(draws, axis=0), rtol=0.1)
    np.testing.assert_allclose(action, expected, atol=1e-5)
    np.testing.assert_allclose(found["value"][0], value, atol=1e-5)


@pytest.mark.parametrize("row", quick(["gru", "agalite rank1", "gtrxl"], ["gtrxl"]))
def test_models_to_stablehlo(row, tmp_path):
    model = make(*one_layer(row))
    path = tmp_path / "policy.bin"
    export_model(model, (VECTOR, Discrete(4)), stablehlo=path, batch_size=3, config={"env": "x"})
    _, about = stablehlo.open_file(path)
    assert about["run"] == {"env": "x"}
    assert about["batch"] == 3
    assert all(x["shape"][0] == 3 for x in about["inputs"] + about["outputs"])


def test_constant_parts_of_the_state_are_left_out():
    """GTrXL's checksum of the weights and rank1's random key."""
    for row, left_out in (("gtrxl", "stamp"), ("agalite rank1", "signs")):
        model = make(*one_layer(row))
        names = [x.name for x in make_step(model, np.float32).state]
        paths = jax.tree_util.tree_leaves_with_path(model.initial_state())
        gone = [jax.tree_util.keystr(path) for path, _ in paths if left_out in str(path)]
        assert len(gone) > 0
        assert len(names) == len(set(names)) == len(paths) - len(gone)
        assert not any(left_out in name for name in names)


def test_file_that_differs_is_not_kept(tmp_path, monkeypatch):
    """With a wrong rule in the table."""
    path = tmp_path / "policy.onnx"
    path.write_bytes(b"an older file")
    wrong = {"logistic": lambda at: at.graph.add("Tanh", at.names[0])}
    monkeypatch.setattr("agalite.export.onnx.rules.RULES", RULES | wrong)
    said = (
        r"differs from the agent: output '[\w.]+' by .* 1e-05 is .* the agent differs by .*e-0[678]"
    )
    with pytest.raises(ValueError, match=said):
        export_model(make(), (VECTOR, Discrete(4)), onnx=path)
    assert path.read_bytes() == b"an older file"
    assert len(list(tmp_path.iterdir())) == 1


def test_rounding_of_the_agent_itself_is_allowed_unless_a_tolerance_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr("agalite.export.verify.TOLERANCE", 1e-12)
    agent, spaces, path = make(), (VECTOR, Discrete(4)), tmp_path / "policy.onnx"
    with pytest.raises(ValueError, match="1e-12 is allowed"):
        export_model(agent, spaces, onnx=path, tolerance=1e-12)
    (file,) = export_model(agent, spaces, onnx=path)
    assert 1e-12 < file.difference < 1e-5


def test_both_formats_in_one_file_are_refused(tmp_path):
    path = tmp_path / "policy"
    with pytest.raises(ValueError, match="one would replace the other"):
        export_model(make(), (VECTOR, Discrete(4)), onnx=path, stablehlo=tmp_path / "." / "policy")
    assert not path.exists()


def test_agent_with_nan_is_not_exported(tmp_path):
    model = jax.tree.map(lambda x: x * jnp.nan, make())
    with pytest.raises(ValueError, match="by nan at step 0"):
        export_model(model, (VECTOR, Discrete(4)), onnx=tmp_path / "policy.onnx")


def test_unknown_primitive_is_named():
    program = trace(lambda x: [jnp.linalg.cholesky(x)], [jax.ShapeDtypeStruct((2, 2), np.float32)])
    with pytest.raises(ValueError, match=r"primitive 'cholesky'.*--stablehlo"):
        build(program, RULES, ["x"], ["y"])


# Primitives that the models do not use have rules too.
FUNCTIONS = {
    "elementwise": lambda x, i: [
        jnp.clip(x, -0.5, 0.5),
        jnp.abs(x) ** 1.5,
        x**3,
        jnp.log1p(jnp.abs(x)),
        jnp.sign(x),
        jnp.floor(3 * x),
        jnp.isfinite(1 / i.astype(jnp.float32)),
        jax.lax.erf(x),
        ~(x > 0),
        (x > 0) ^ (x < 0.5),
        (x > 0) | (x < -0.5),
        i // 2,
        i % 3,
        -i,
        i & 5,
        i | 8,
        i ^ 3,
        ~i,
    ],
    "reductions": lambda x, i: [
        x.sum(0),
        x.max(1),
        x.min((0, 1)),
        x.prod(1),
        jnp.argmax(x, 1),
        jnp.argmin(x, 0),
        jnp.cumsum(x, 1),
        jnp.all(x > -0.9, 0),
        jnp.any(i > 6, 1),
    ],
    "indexing": lambda x, i: [
        x[i[0, 0] % 3],
        x[:, i[0] % 4],
        x[i[:, 0] % 3, i[:, 1] % 4],
        x[::2, 1:],
        jax.lax.dynamic_slice(x, (i[0, 0], i[0, 1] - 4), (2, 3)),
        jax.lax.dynamic_update_slice(x, x[:2, :2] * 3, (i[0, 0], i[1, 1])),
        x.at[i[0, 0] % 3, :].set(7.0, mode="clip"),
        x.at[1].add(x[0]),
        jnp.take_along_axis(x, i % 4, axis=1, mode="clip"),
    ],
    "products": lambda x, i: [
        x @ x.T,
        jnp.einsum("ab,cb->ca", x, 2 * x),
        jnp.einsum("ab,ab->a", x, x),
        jax.vmap(lambda a, b: jnp.outer(a, b))(x, x),
        jnp.tensordot(x, x, 2),
        i @ i.T,
    ],
    "shapes": lambda x, i: [
        jnp.stack([x, 2 * x], 1),
        jnp.concatenate([x, x], 1),
        jnp.pad(x, ((1, 0), (0, 2))),
        x.T,
        *jnp.split(x, [1, 3], axis=1),
        jnp.where(x[:, :1] > 0, x, i.astype(jnp.float32)),
        i.astype(jnp.uint32) * jnp.uint32(2**31 + 5) >> 3,
        (i - 5).astype(jnp.uint32),
    ],
    "loop": lambda x, _: list(
        jax.lax.scan(lambda c, y: (c * y + 1, c.sum()), x[0], x, reverse=True)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules_agree_with_jax(name):
    import onnxruntime

    x = np.random.default_rng(0).uniform(-1, 1, (3, 4)).astype(np.float32)
    i = np.arange(12, dtype=np.int32).reshape(3, 4)[::-1].copy()
    expected = jax.jit(FUNCTIONS[name])(x, i)
    program = trace(FUNCTIONS[name], [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, i)])
    names = [f"y{k}" for k in range(len(expected))]
    model = build(program, RULES, ["x", "i"], names)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for k, (a, b) in enumerate(zip(expected, session.run(None, {"x": x, "i": i}), strict=True)):
        np.testing.assert_allclose(np.asarray(a), b, atol=1e-5, err_msg=f"output {k}")


def test_xla_convolution_to_onnx():
    """The encoders use it on accelerators."""
    import onnxruntime

    from agalite.networks.encoders import Convolution

    conv = Convolution(2, 5, 4, 2, "SAME", key=jax.random.key(0))
    image = np.random.default_rng(0).normal(size=(9, 8, 2)).astype(np.float32)
    program = trace(
        lambda x: [conv(x, method="direct")], [jax.ShapeDtypeStruct(image.shape, image.dtype)]
    )
    assert "conv_general_dilated" in {x.primitive for x in program.equations}
    model = build(program, RULES, ["x"], ["y"])
    (found,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": image})
    np.testing.assert_allclose(found, conv(image, method="direct"), atol=1e-5)


def test_command_and_example(tmp_path, capsys):
    """Train, export on the command line, and play with onnxruntime and NumPy, without JAX."""
    run = agalite.train(
        TrainConfig(
            env="tmaze",
            env_options={"corridor": 3},
            memory="gru",
            memory_options={"d_model": 8, "hidden_size": 8},
            num_envs=4,
            num_steps=8,
            hidden_size=8,
            total_timesteps=64,
            log_every=64,
            checkpoint_every=64,
        ),
        tmp_path / "run",
        quiet=True,
    )
    policy, program = tmp_path / "policy.onnx", tmp_path / "policy.bin"
    words = ["export", str(run.folder), "--onnx", str(policy), "--stablehlo", str(program)]
    assert main(words) == 0
    assert capsys.readouterr().out.count("200 steps replayed") == 2
    about = stablehlo.open_file(program)[1]
    assert about == onnx_file.open_file(policy)[1]
    assert about["run"]["env_options"] == {"corridor": 3}
    assert about["checkpoint_step"] == 64
    script = (
        f"import runpy, sys; sys.argv = ['x', {str(policy)!r}, '--episodes', '3']; "
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__'); assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("corridor 3: ")
    assert main(["export", str(run.folder)]) == 2
    assert "--onnx" in capsys.readouterr().err
    assert main(["export", str(run.folder), "--onnx", str(tmp_path / "no" / "x.onnx")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_maze_of_the_example_equals_tmaze():
    example = runpy.run_path(str(EXAMPLE))["TMaze"](5, np.random.default_rng(0))
    env = TMaze(5)
    step = jax.jit(env.step_env)
    generator = np.random.default_rng(1)
    for episode in range(4):
        observation, state = env.reset_env(jax.random.key(episode), env.default_params)
        example.reset()
        example.cue = int(state.cue)
        np.testing.assert_array_equal(example._observation(), observation)
        for t in range(60):
            action = int(generator.choice(4, p=[0.1, 0.1, 0.2, 0.6]))
            observation, state, _, ended, info = step(
                jax.random.key(t), state, action, env.default_params
            )
            found, over, right = example.step(action)
            np.testing.assert_array_equal(found[:10], observation[:10])
            assert (over, right) == (bool(ended), bool(info["success"]))
            if over:
                break
        assert over


@pytest.mark.parametrize("kind", ["onnx", "stablehlo"])
def test_a_damaged_file_is_found(kind, tmp_path):
    path = tmp_path / "policy"
    export_model(make(), (VECTOR, Discrete(4)), **{kind: path})
    module = onnx_file if kind == "onnx" else stablehlo
    module.open_file(path)
    data = path.read_bytes()
    for at in (0, 40, len(data) // 3, len(data) // 2, len(data) - 30):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="is damaged"):
                module.open_file(path)
