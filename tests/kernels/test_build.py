"""Building the custom kernels: what is kept and rebuilt, and what happens where there are none."""

import os
import platform
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite import kernels
from agalite.kernels import build
from agalite.memory.layers import prepare_for_inference
from memory_models import random_memory


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("off", ["0", "off"])
def test_environment_variable_switches_them_off(off, monkeypatch):
    monkeypatch.setenv("AGALITE_NATIVE", off)
    assert kernels.why_not() == f"AGALITE_NATIVE={off}"
    assert not kernels.usable(jnp.ones(2))


def test_without_a_compiler_everything_still_runs(monkeypatch):
    monkeypatch.setattr(build, "compilers", list)
    reason = r"there is no C compiler \(gcc, clang, or: pip install 'agalite\[native\]'\)"
    with pytest.raises(build.Unavailable, match=reason) as error:
        build.load()
    monkeypatch.setattr(kernels, "_registered", lambda _: str(error.value))
    assert kernels.why_not() == str(error.value)
    memory = random_memory("agalite", 2, layers=1, d_model=4, heads=1, head_size=3, ffn_size=4)
    assert not memory.has_step_kernel
    prepared, start, xs = prepare_for_inference(memory), memory.initial_state(), jnp.ones((3, 2))
    _, y = jax.jit(lambda: prepared.step(start, xs[0], False))()
    _, ys = jax.jit(lambda: memory.scan(start, xs))()
    np.testing.assert_allclose(ys[0], y, atol=1e-6)


@pytest.mark.parametrize("path", ["empty", "/usr/bin"])
def test_compilers_are_looked_for(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path) if path == "empty" else path)
    monkeypatch.setenv("CC", "my-cc -m64")
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    assert build.compilers()[0] == ["my-cc", "-m64"]
    if path == "empty":
        assert len(build.compilers()) == 1


def test_a_compiler_that_fails_says_what_it_said(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'kernels.c:1: error: no luck today' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "compilers", lambda: [[str(broken)], [str(tmp_path / "absent")]])
    with pytest.raises(build.Unavailable, match=r"no luck today.*absent"):
        build.load(folder=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())  # nothing half-built stays behind


def test_a_compiler_that_does_nothing_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compilers", lambda: [["true"]])
    with pytest.raises(build.Unavailable, match="true"):
        build.load(folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_each_type_has_a_library_that_is_built_when_it_is_used(tmp_path):
    code = """
        import jax, jax.numpy as jnp
        from agalite import kernels
        from agalite.kernels.build import cache_folder
        jax.config.update("jax_enable_x64", True)
        kernels.build_ahead()
        assert kernels.usable(jnp.ones(2, jnp.float32))  # waits for it
        print(len(list(cache_folder().iterdir())))
        assert not kernels.usable(jnp.ones(2, jnp.bfloat16))
        for dtype in (jnp.float32, jnp.float64):
            x, w = jnp.full((1, 3), 2, dtype), jnp.ones((2, 3), dtype)
            (y,) = kernels.call("product", [(1, 2)], x, w)
            assert y.dtype == dtype and (y == 6).all()
            print(len(list(cache_folder().iterdir())))
    """
    assert python(code, XDG_CACHE_HOME=str(tmp_path)).split() == ["1", "1", "2"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The shared library as the first compiler builds it."""
    folder = tmp_path_factory.mktemp("kernels")
    build.load(folder=folder)
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def copied(library, monkeypatch):
    """Instead of compiling, copies the library: the list of what was built."""
    built = []

    def copy(command, _, name):
        built.append(command)
        shutil.copy(library, name)

    monkeypatch.setattr(build, "_compile", copy)
    return built


@pytest.mark.parametrize("damage", [lambda b: b[:20_000], lambda b: b[:-9] + b"\xff" * 9])
def test_a_damaged_file_is_built_again(damage, library, copied, tmp_path):
    """Loading it would end the process, and every one after it."""
    path = tmp_path / library.name
    path.write_bytes(damage(library.read_bytes()))
    build.load(folder=tmp_path)
    assert len(copied) == 1
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == library.read_bytes()
    build.load(folder=tmp_path)
    assert len(copied) == 1  # the second time it is there


def test_where_nothing_can_be_kept_they_are_built_all_the_same(copied, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    library = build.load(folder=tmp_path / "file" / "agalite")
    assert library.agalite_product
    assert len(copied) == 1


def test_calling_one_that_is_not_there_says_why(monkeypatch):
    monkeypatch.setattr(kernels, "_registered", lambda _: "there is no C compiler")
    with pytest.raises(build.Unavailable, match="product is not available: there is no C compiler"):
        kernels.call("product", [(1, 2)], jnp.ones((1, 3)), jnp.ones((2, 3)))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=pytest.mark.slow, id=os.path.basename(c[-1]))
        for c in build.compilers()
    ],
)
@pytest.mark.parametrize("bits", [32, 64])
def test_compilers_give_no_warning(command, bits, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-Wall", "-Wextra", "-Werror"))
    monkeypatch.setattr(build, "compilers", lambda: [command])
    library = build.load(bits, tmp_path)
    for name in build.HANDLERS:
        assert getattr(library, f"agalite_{name}")


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have other widths")
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_narrower_vectors_compute_the_same(processor, tmp_path):
    """16 and 32 bytes, as older processors have them, and AVX-512 off."""
    code = f"""
        from agalite.kernels import build
        build._FLAGS = tuple(
            "-march={processor}" if flag == "-march=native" else flag for flag in build._FLAGS
        )
        import jax, jax.numpy as jnp, equinox as eqx
        from agalite import kernels, make_memory
        assert kernels.why_not() is None
        xs = jax.random.normal(jax.random.key(1), (70, 5))
        for name, options in (("galite", {{}}), ("agalite", {{"r": 7}})):
            def run(method):
                memory = make_memory(
                    name, 5, layers=1, d_model=9, heads=2, head_size=7, ffn_size=6, eta=3,
                    method=method, **options,
                )
                loss = lambda m: (lambda y: (jnp.sum(jnp.sin(y)), y))(
                    m.scan(m.initial_state(), xs)[1]
                )
                return memory, *eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))(memory)
            (memory, ours, ys), (_, theirs, want) = run("auto"), run("sequential")
            assert jnp.abs(ys - want).max() < 1e-4, name
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                assert jnp.abs(a - b).max() < 1e-2 * jnp.abs(b).max() + 1e-6, name
        packed = memory.prepare_for_inference()
        assert packed is not memory
        states = jax.tree.map(lambda x: jnp.stack([x] * 11), memory.initial_state())
        resets = jnp.zeros(11, bool)
        _, a = jax.vmap(packed.step)(states, xs[:11], resets)
        _, b = jax.vmap(memory.step)(states, xs[:11], resets)
        assert jnp.abs(a - b).max() < 1e-5
        _, one = packed.step(memory.initial_state(), xs[0], False)
        assert jnp.abs(one - b[0]).max() < 1e-5
        print("same")
    """
    assert python(code, XDG_CACHE_HOME=str(tmp_path)) == "same"


# Whose library it is


def other_user(path):
    os.chown(path, 12345, -1, follow_symlinks=False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder, _: folder.chmod(0o770), "other users can write to .*/cache"),
        (lambda folder, _: folder.chmod(0o707), "other users can write to .*/cache"),
        (lambda folder, _: folder.parent.chmod(0o777), "other users can write to .*/above"),
        pytest.param(
            lambda folder, _: other_user(folder),
            "cache belongs to user 12345, not to you",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away"),
        ),
    ],
)
def test_a_folder_that_others_can_change_is_not_used(change, why, library, copied, tmp_path):
    folder = tmp_path / "above" / "cache"
    folder.mkdir(parents=True)
    path = folder / library.name
    shutil.copy(library, path)
    build.load(folder=folder)
    assert not copied  # it is taken from there
    change(folder, path)
    with pytest.warns(UserWarning, match=f"for this process only: .*{why}"):
        build.load(folder=folder)
    assert len(copied) == 1
    assert [x.name for x in folder.iterdir()] == [library.name]  # built elsewhere


@pytest.mark.parametrize("how", ["group", "others", "link", "user"])
def test_a_file_that_others_can_change_is_not_loaded(how, library, copied, tmp_path):
    if how == "user" and os.getuid() != 0:
        pytest.skip("only root can give files away")
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere.so"
    folder.mkdir()
    path = folder / library.name
    shutil.copy(library, path)
    match how:
        case "group":
            path.chmod(0o664)
        case "others":
            path.chmod(0o646)
        case "link":
            shutil.move(path, elsewhere)
            path.symlink_to(elsewhere)
        case "user":
            other_user(path)
    assert build._found(build.compilers()[0], 32, folder) is None
    build.load(folder=folder)
    assert len(copied) == 1


def test_a_temporary_library_can_be_entered_by_nobody_else():
    assert build._temporary_folder().stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("value", ["cache", "./cache", "", "../x"])
def test_a_relative_cache_folder_is_ignored(value, tmp_path, monkeypatch):
    """What is loaded must not depend on the working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.chdir(tmp_path)
    assert build.cache_folder() == Path.home() / ".cache/agalite/native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "agalite/native"
