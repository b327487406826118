"""Building our own kernels: what is kept, what is mended, and what happens where there are none."""

import os
import platform
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import pytest

from agalite import kernels
from agalite.kernels import build


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


def test_they_can_be_left_out():
    for off in ("0", "off"):
        said = python("from agalite import kernels; print(kernels.why_not())", AGALITE_NATIVE=off)
        assert said == f"AGALITE_NATIVE={off}"


def test_without_a_compiler_everything_still_runs(tmp_path):
    code = """
        import sys
        sys.modules["ziglang"] = None
        import importlib.util
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "ziglang" else found(name, *a)
        import jax, jax.numpy as jnp, agalite
        from agalite import kernels
        from agalite.memory.layers import prepare_for_inference
        memory = agalite.make_memory("agalite", 2, layers=1, d_model=4, heads=1, head_size=3)
        memory = prepare_for_inference(memory)
        state, y = memory.step(memory.initial_state(), jnp.ones(2), False)
        _, ys = memory.scan(memory.initial_state(), jnp.ones((3, 2)))
        assert jnp.isfinite(ys).all() and jnp.allclose(ys[0], y, atol=1e-6)
        print(kernels.why_not())
    """
    said = python(code, PATH=str(tmp_path), CC="", XDG_CACHE_HOME=str(tmp_path))
    assert said == "there is no C compiler (gcc, clang, or: pip install 'agalite[native]')"


def test_a_compiler_that_fails_says_what_it_said(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'kernels.c:1: error: no luck today' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "compilers", lambda: [[str(broken)], [str(tmp_path / "absent")]])
    with pytest.raises(build.Unavailable, match=r"no luck today.*absent"):
        build.load(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())  # nothing half-built stays behind


def test_a_compiler_that_does_nothing_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compilers", lambda: [["true"]])
    with pytest.raises(build.Unavailable, match="true"):
        build.load(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", [lambda b: b[:20_000], lambda b: b[:-9] + bytes(9)])
def test_a_damaged_file_is_built_again(damage, tmp_path):
    """Loading it would end the process, and every one after it."""
    build.load(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.unlink()  # it is in use: a new file under the old name
    path.write_bytes(damage(whole))
    build.load(tmp_path)
    (path,) = tmp_path.iterdir()
    assert len(path.read_bytes()) == len(whole)


def test_where_nothing_can_be_kept_they_are_built_all_the_same(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    said = python(
        "from agalite import kernels; print(kernels.why_not())",
        XDG_CACHE_HOME=str(tmp_path / "file"),
    )
    assert said == "None"


def test_calling_one_that_is_not_there_says_why(monkeypatch):
    monkeypatch.setattr(kernels, "_registered", lambda: "there is no C compiler")
    with pytest.raises(build.Unavailable, match="product is not available: there is no C compiler"):
        kernels.call("product", [(1, 2)], jnp.ones((1, 3)), jnp.ones((2, 3)))


@pytest.mark.parametrize("command", build.compilers(), ids=lambda c: os.path.basename(c[-1]))
def test_every_compiler_here_builds_them_without_a_warning(command, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-Wall", "-Wextra", "-Werror"))
    monkeypatch.setattr(build, "compilers", lambda: [command])
    library = build.load(tmp_path)
    for name in build.HANDLERS:
        assert getattr(library, f"agalite_{name}")
    built = list(tmp_path.iterdir())
    assert len(built) == 1
    before = built[0].stat().st_mtime_ns
    build.load(tmp_path)
    assert built[0].stat().st_mtime_ns == before  # and the second time they are there


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
