"""Checkpoints: exact, whole or not there, and never a surprise."""

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.training import checkpoint
from agalite.training.checkpoint import Checkpoints


class Net(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    name: str = eqx.field(static=True)


def make(n: float = 1.0):
    """A pytree with every kind of leaf that a run has, and some that it may get."""
    x = np.random.default_rng(int(n)).normal(size=(3, 5)) * n
    return {
        "net": Net(jnp.asarray(x, jnp.float32), None, "net"),
        "odd": jnp.asarray([np.nan, -np.nan, np.inf, -0.0, 1e-45], jnp.float32),
        "half": jnp.asarray(x, jnp.bfloat16),
        "flags": jnp.asarray([True, False]),
        "keys": jax.random.split(jax.random.key(int(n)), 3),
        "other_key": jax.random.key(int(n), impl="rbg"),
        "count": jnp.int32(n),
        "empty": jnp.zeros((0, 4)),
        "no_keys": jax.random.split(jax.random.key(0), 0),
        "numpy": np.asarray(x),
        "numpy_number": np.int64(2**60 + int(n)),
        "names": {"a/b": jnp.ones(2) * n, "a": jnp.ones(2), "": jnp.zeros(1), "..": jnp.ones(3)},
        "int": 2**70 + int(n),
        "float": 0.1 * n,
        "bool": True,
        "tuple": (jnp.uint8(3), [jnp.ones((), jnp.float16)]),
    }


def bits(tree) -> list[tuple]:
    """All there is to know about the leaves."""
    out = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(leaf) if key else leaf)
        raw = repr(leaf) if data.dtype == object else data.tobytes()
        out.append((jax.tree_util.keystr(path), type(leaf), str(dtype), data.shape, raw))
    return out


def small(n: int):
    return {"x": jnp.arange(1000) + n, "key": jax.random.key(n), "n": n}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(checkpoint, "_RETRY_DELAY", 0.0)


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


def folder(checkpoints, step: int):
    return next(checkpoints._folder.glob(f"step_{step:012d}*"))


def names(checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints._folder.iterdir())


# There and back


def test_everything_comes_back_to_the_bit(checkpoints):
    state = make(7)
    checkpoints.save(5, state)
    step, got = checkpoints.restore(make(1))
    assert step == 5
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert bits(got) == bits(state)
    assert bits(state) != bits(make(1))


def test_shapes_are_enough_to_restore(checkpoints):
    checkpoints.save(5, small(3))
    like = jax.eval_shape(lambda: {**small(0), "n": jnp.int32(0)})
    _, got = checkpoints.restore({**like, "n": 0})
    assert bits(got) == bits(small(3))
    assert not got["x"].committed  # JAX may place it, as it may what `small` makes
    jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)(got)  # owns its memory


def test_arrays_go_where_those_of_like_are(checkpoints):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.device_put(small(0), sharding)
    checkpoints.save(1, jax.device_put(small(3), sharding))
    _, got = checkpoints.restore(like)
    assert got["x"].committed
    assert got["key"].committed
    assert got["key"].sharding == like["key"].sharding


def test_sharded_arrays_are_restored_onto_their_devices(tmp_path):
    code = """if True:
        import sys, jax, numpy as np, jax.numpy as jnp
        jax.config.update("jax_num_cpu_devices", 2)
        from jax.sharding import NamedSharding, PartitionSpec as P
        from agalite.training.checkpoint import Checkpoints
        mesh = jax.make_mesh((2,), ("seeds",))
        put = lambda t: jax.device_put(t, NamedSharding(mesh, P("seeds")))
        state = put({"x": jnp.arange(8.0), "keys": jax.random.split(jax.random.key(3), 4)})
        c = Checkpoints(sys.argv[1])
        c.save(1, state)
        _, got = c.restore(jax.tree.map(lambda x: put(jnp.zeros_like(x)), state))
        for name in state:
            assert got[name].sharding == state[name].sharding and len(got[name].devices()) == 2
            assert (got[name] == state[name]).all()
        """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    _, got = Checkpoints(tmp_path).restore(  # on one device, here
        {"x": jnp.zeros(8), "keys": jax.random.split(jax.random.key(0), 4)}
    )
    np.testing.assert_array_equal(got["x"], np.arange(8.0))


def test_a_state_without_arrays(checkpoints):
    checkpoints.save(1, {"n": 4})
    assert checkpoints.restore({"n": 0}) == (1, {"n": 4})


def test_it_can_be_read_with_orbax_alone(checkpoints):
    import orbax.checkpoint

    checkpoints.save(1, make(3))
    path = folder(checkpoints, 1) / "arrays"
    arrays = orbax.checkpoint.PyTreeCheckpointer().restore(path)
    np.testing.assert_array_equal(arrays["state['net'].weight"], make(3)["net"].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {**s, "x": s["x"][:10]}, r"leaf \['x'\] has shape \[1000\]; expected \[10\]"),
        (lambda s: {**s, "x": s["x"] * 1.0}, r"leaf \['x'\] has dtype int32; expected float32"),
        (lambda s: {**s, "x": 3}, r"leaf \['x'\] has kind array; expected int"),
        (lambda s: {**s, "key": jnp.zeros(2, jnp.uint32)}, r"leaf \['key'\] has kind key; exp"),
        (lambda s: {**s, "key": jax.random.key(0, impl="rbg")}, r"'key'\] has dtype key<fry>; exp"),
        (lambda s: {**s, "new": jnp.ones(1)}, r"it has no leaf \['new'\]"),
        (lambda s: {"x": s["x"], "n": 0}, r"it has a leaf \['key'\], which is not expected"),
        (lambda s: s["x"], "it has no leaf at the top"),
    ],
)
def test_another_structure_is_an_error_that_names_the_leaf(checkpoints, change, message):
    checkpoints.save(5, small(3))
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(change(small(0)))


@pytest.mark.parametrize("leaf", [jnp.sin, "text", np.array([None]), np.array(["a"])])
def test_what_is_no_number_is_refused(checkpoints, leaf):
    with pytest.raises(ValueError, match=r"leaf \['f'\] is .*only (arrays and )?numbers"):
        checkpoints.save(1, {"f": leaf})
    assert not checkpoints._folder.exists()


# Which are kept


def test_the_last_and_the_best_are_kept(checkpoints):
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ([], None, None)
    for step, metric in [(1, None), (2, 5.0), (3, float("nan")), (4, 1.0), (5, 2.0)]:
        checkpoints.save(step, small(step), metric)
    assert checkpoints.steps() == [2, 4, 5]
    assert (checkpoints.best(), checkpoints.latest()) == (2, 5)
    assert bits(checkpoints.restore(small(0), step=2)[1]) == bits(small(2))
    checkpoints.save(6, small(6), 5.0)  # as good, and later
    assert checkpoints.best() == 6
    assert names(checkpoints) == [f"step_{step:012d}" for step in (5, 6)]


def test_saving_a_step_again_replaces_it(checkpoints):
    for n in (1, 2, 3):
        checkpoints.save(9, small(n), float(-n))
    assert checkpoints.steps() == [9]
    assert len(names(checkpoints)) == 1
    assert bits(checkpoints.restore(small(0))[1]) == bits(small(3))


def test_going_back_drops_what_came_after(checkpoints):
    for step in (1, 2, 3):
        checkpoints.save(step, small(step), float(step))
    checkpoints.save(2, small(20))
    assert checkpoints.steps() == [2]  # 1 went when 3 came
    assert bits(checkpoints.restore(small(0))[1]) == bits(small(20))


def test_leftovers_of_a_killed_process_are_removed(checkpoints):
    checkpoints.save(1, small(1))
    for name in (".writing-step_000000000002-abcd", ".deleting-step_000000000000"):
        shutil.copytree(folder(checkpoints, 1), checkpoints._folder / name)
    assert checkpoints.steps() == [1]
    checkpoints.save(3, small(3))
    assert names(checkpoints) == ["step_000000000001", "step_000000000003"]


# Damage


def damages():
    def flip(path):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def cut(path):
        path.write_bytes(path.read_bytes()[:-1])

    return [flip, cut, lambda path: path.write_bytes(b""), lambda path: path.unlink()]


def test_any_damage_to_any_file_is_found(checkpoints, tmp_path):
    checkpoints.save(1, small(1))
    checkpoints.save(2, small(2))
    whole = folder(checkpoints, 2)
    copy = shutil.copytree(whole, tmp_path / "copy")
    paths = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(paths) > 5
    for path, damage in itertools.product(paths, damages()):
        damage(whole / path)
        with pytest.warns(UserWarning, match="step_000000000002 is skipped"):
            step, got = checkpoints.restore(small(0))
        assert step == 1
        assert bits(got) == bits(small(1))
        shutil.rmtree(whole)
        shutil.copytree(copy, whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoints.restore(small(0))[0] == 2


def test_a_manifest_that_was_edited_is_found(checkpoints):
    checkpoints.save(1, small(1), 0.5)
    path = folder(checkpoints, 1) / "manifest.json"
    manifest = json.loads(path.read_text())
    for change in ({"metric": 0.6}, {"format": 0}, {"sha256": None}):
        path.write_text(json.dumps({**manifest, **change}))
        assert checkpoints.steps() == []
    path.write_text(json.dumps(manifest))
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"].update({"/dev/zero": "0"}), r"'/dev/zero' is no file in it"),
        (lambda m: m["files"].update({"../../x": "0"}), r"'../../x' is no file in it"),
        (lambda m: m["files"].update({"": "0"}), r"'' is no file in it"),
        (lambda m: m["files"].update({"a\0b": "0"}), r"is no file in it"),
        (lambda m: m["files"].update({"arrays/d": 5}), "no list of files"),
        (lambda m: m.pop("metric"), "no metric or no leaves"),
        (lambda m: m.update(metric="much"), "the metric 'much'"),
        (lambda m: m.update(leaves=[3]), "a leaf with other entries"),
        (lambda m: m["leaves"][0].pop("dtype"), "a leaf with other entries"),
        (lambda m: m["leaves"][0].update(shape=[-1]), "the leaf"),
        (lambda m: m.update(format=None), "no format"),
    ],
)
def test_a_forged_manifest_is_refused(checkpoints, change, message):
    """With a SHA-256 that is right: nothing but files of the checkpoint is read."""
    checkpoints.save(1, small(1))
    path = folder(checkpoints, 1) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    change(manifest)
    path.write_text(json.dumps({**manifest, "sha256": checkpoint.manifest_digest(manifest)}))
    passed = pytest.warns(UserWarning, match="is skipped")
    with passed, pytest.raises(ValueError, match=message):
        checkpoints.restore(small(0))


def test_a_pipe_in_a_checkpoint_is_not_waited_for(checkpoints):
    checkpoints.save(1, small(1))
    path = folder(checkpoints, 1) / "arrays/manifest.ocdbt"
    path.unlink()
    os.mkfifo(path)
    passed = pytest.warns(UserWarning, match="is skipped")
    with passed, pytest.raises(ValueError, match=r"manifest.ocdbt' is no file in it"):
        checkpoints.restore(small(0))


def test_leaves_are_those_of_the_newest_undamaged(checkpoints):
    checkpoints.save(1, small(1))
    checkpoints.save(2, small(2))
    step, leaves = checkpoints.leaves()
    assert step == 2
    np.testing.assert_array_equal(leaves["['x']"], small(2)["x"])
    assert leaves["['n']"] == "2"
    folder(checkpoints, 2).joinpath("manifest.json").write_text("{}")
    assert checkpoints.leaves()[0] == 1
    folder(checkpoints, 1).joinpath("manifest.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no undamaged checkpoint"):
        checkpoints.leaves()


def test_after_damage_training_goes_on_and_the_damaged_are_replaced(checkpoints):
    for step in (1, 2):
        checkpoints.save(step, small(step))
    folder(checkpoints, 2).joinpath("manifest.json").unlink()
    with pytest.warns(UserWarning, match="is skipped"):
        assert checkpoints.restore(small(0))[0] == 1
    checkpoints.save(2, small(20))
    assert checkpoints.steps() == [1, 2]
    assert bits(checkpoints.restore(small(0))[1]) == bits(small(20))
    assert len(names(checkpoints)) == 2


def test_nothing_usable_is_a_clear_error(checkpoints):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        checkpoints.restore(small(0))
    checkpoints.save(1, small(1))
    checkpoints.save(2, small(2))
    with pytest.raises(ValueError, match=r"step 3 .*there is none.*steps there are: 1, 2"):
        checkpoints.restore(small(0), step=3)
    folder(checkpoints, 2).joinpath("arrays/manifest.ocdbt").unlink()
    passed = pytest.warns(UserWarning, match="is skipped")
    with passed, pytest.raises(ValueError, match=r"step 2 .*cannot be read"):
        checkpoints.restore(small(0), step=2)  # asked for: no other will do
    folder(checkpoints, 1).joinpath("manifest.json").unlink()
    passed = pytest.warns(UserWarning, match="is skipped")
    with (
        passed,
        pytest.raises(ValueError, match=r"all checkpoints in .* are damaged.*; train again"),
    ):
        checkpoints.restore(small(0))


def test_a_newer_format_is_not_taken_for_damage(checkpoints, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    checkpoints.save(1, small(1))
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    with pytest.raises(ValueError, match="newer version of agalite"):
        checkpoints.restore(small(0))


def test_pickles_are_never_opened(checkpoints, monkeypatch):
    import pickle

    def refuse(*_, **__):
        raise AssertionError("a pickle")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    checkpoints.save(1, make(2))
    assert bits(checkpoints.restore(make(0))[1]) == bits(make(2))
    for path in folder(checkpoints, 1).rglob("*"):
        assert not path.is_file() or b"\x80\x04\x95" not in path.read_bytes()  # how one begins


# Writing that fails


def test_a_write_is_tried_again(checkpoints, monkeypatch):
    real, calls = checkpoint.files.write, []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(checkpoint.files, "write", fail_once)
    checkpoints.save(1, small(1))
    assert len(calls) == 2
    assert names(checkpoints) == ["step_000000000001"]


def test_no_space_is_a_clear_error_and_leaves_nothing(checkpoints, monkeypatch):
    checkpoints.save(1, small(1))
    usage = shutil.disk_usage(checkpoints._folder)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"step 2 could not be written .*no space .*1 MB are free"):
        checkpoints.save(2, small(2))
    assert names(checkpoints) == ["step_000000000001"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a disk")
def test_a_disk_that_fills_up_inside_orbax_prints_no_stack_trace(tmp_path):
    code = """if True:
        import sys
        from pathlib import Path
        import numpy as np
        from agalite.soak import disk
        from agalite.training import checkpoint
        folder = Path(sys.argv[1])
        if why := disk.why_not(folder):
            print(why)
            sys.exit(77)
        disk._SIZE, checkpoint._RETRY_DELAY = 3_000_000, 0.0
        checkpoint._require_space = lambda *_: None  # it was free a moment ago
        rng = np.random.default_rng(0)
        state = {f"x{i}": rng.normal(size=(300, 100)) for i in range(8)}
        with disk.disk(folder / "disk") as small:
            checkpoints = checkpoint.Checkpoints(small / "checkpoints")
            checkpoints.save(1, state)
            try:
                checkpoints.save(2, state)
            except OSError as error:
                print(error)
            assert checkpoints.restore(state)[0] == 1
        """
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    if done.returncode == 77:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "step 2 could not be written" in done.stdout
    assert "no space is left on the disk" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_inside_orbax_is_a_clear_error_and_leaves_nothing(checkpoints):
    checkpoints.save(1, small(1))
    state = {"x": jnp.asarray(np.random.default_rng(0).integers(2**30, size=100_000))}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # the system refuses larger
    try:
        with pytest.raises(OSError, match=r"step 2 could not be written .*File too large"):
            checkpoints.save(2, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(checkpoints) == ["step_000000000001"]
    assert checkpoints.restore(small(0))[0] == 1


# Killed while saving

# Imports once, which takes seconds, and forks, before JAX has begun, a process for every line read.
SAVING = """if True:
    import itertools, os, sys, jax, jax.numpy as jnp
    from agalite.training.checkpoint import Checkpoints
    def small(n):
        return {"x": jnp.arange(1000) + n, "key": jax.random.key(n), "n": n}
    for line in sys.stdin:
        folder, keep, first = line.split()
        if child := os.fork():
            print("child", child, flush=True)
            os.waitpid(child, 0)
            print("dead", flush=True)
            continue
        checkpoints = Checkpoints(folder, keep=int(keep))
        # A step later, then the same step again: the two ways in which a save replaces another.
        for n in itertools.count(int(first)):
            checkpoints.save(n // 2, small(n), float(-(n % 5)))
            os.write(1, b"%d\\n" % n)
"""


@pytest.fixture(scope="module")
def saver():
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SAVING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("keep", [1, 2])
def test_killed_at_any_moment_it_restores_a_state_that_was_saved(tmp_path, keep, saver):
    chance, first = random.Random(keep), 0
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for _ in range(3):
        saver.stdin.write(f"{tmp_path} {keep} {first}\n")
        saver.stdin.flush()
        word, child = saver.stdout.readline().split()
        assert word == "child"
        assert saver.stdout.readline() == f"{first}\n"
        time.sleep(chance.uniform(0.05, 0.5))
        os.kill(int(child), signal.SIGKILL)
        told = [int(line) for line in iter(saver.stdout.readline, "dead\n")]
        saved = told[-1] if told else first
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing half-written was taken for a checkpoint
            step, got = checkpoints.restore(small(0))
        n = got["n"]
        assert n in (saved, saved + 1)  # the last one finished, or whole but not yet told
        assert step == n // 2
        assert bits(got) == bits(small(n))
        best = checkpoints.best()
        assert best is not None
        assert checkpoints.restore(small(0), step=best)[1]["n"] // 2 == best
        first = n + 1
