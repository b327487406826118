"""Kernels of our own for CPUs, where XLA's programs are far from what the processor can do.

* `product`: one row times a weight, at the speed at which memory can be read;
* `agalite_*`, `galite_*`: the attentions of Algorithms 4 and 3, forwards and backwards, as plain
  loops over time in which the state stays in cache;
* `stack`: a step of all layers of AGaLiTe, for one stream or a few.

They are C (this folder), built on first use (`build.py`) and called by XLA as custom calls. Nothing
needs them: where there is no C compiler, on an accelerator, or with AGALITE_NATIVE=0, the same
operators are XLA's. What is used is decided when a program is traced.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agalite.kernels.build import HANDLERS, Unavailable, load
from agalite.system import cores

__all__ = ["call", "one_thread", "switched_off", "threads", "usable", "why_not"]

_local = threading.local()


@cache
def _registered() -> str | None:
    """Build, load and register the kernels; or why that cannot be."""
    try:
        library = load()
    except Unavailable as error:
        return str(error)
    for name in HANDLERS:
        capsule = jax.ffi.pycapsule(getattr(library, f"agalite_{name}"))
        jax.ffi.register_ffi_target(f"agalite_{name}", capsule, platform="cpu")
    return None


def why_not() -> str | None:
    """Why the kernels are not used, in a sentence; None if they are."""
    asked = os.environ.get("AGALITE_NATIVE", "")
    if asked.lower() in ("0", "false", "off", "no"):
        return f"AGALITE_NATIVE={asked}"
    if getattr(_local, "off", False):
        return "switched off"
    if jax.default_backend() != "cpu":
        return f"the backend is {jax.default_backend()}, not cpu"
    return _registered()


def usable(*arrays: Any) -> bool:
    """Whether kernels can be called on these arrays: all float32, or all float64."""
    kinds = {jnp.dtype(x.dtype) for x in arrays}
    return (
        len(kinds) == 1 and kinds <= {jnp.dtype("float32"), jnp.dtype("float64")} and not why_not()
    )


def switched_off() -> contextlib.AbstractContextManager[None]:
    """What is traced inside, in this thread, is XLA's alone: to compare, or to export."""
    return _with("off")


def one_thread() -> contextlib.AbstractContextManager[None]:
    """Kernels traced inside use one thread: for programs that share the cores with others."""
    return _with("alone")


@contextlib.contextmanager
def _with(name: str) -> Iterator[None]:
    before = getattr(_local, name, False)
    setattr(_local, name, True)
    try:
        yield
    finally:
        setattr(_local, name, before)


def call(
    name: str, shapes: Sequence[tuple[int, ...]], *args: jax.Array, **attributes: int | float
) -> list[jax.Array]:
    """The kernel `name` on args, all of one type; its results have these shapes and that type."""
    reason = _registered()
    if reason is not None:
        raise Unavailable(f"the kernel {name} is not available: {reason}")
    results = [jax.ShapeDtypeStruct(shape, args[0].dtype) for shape in shapes]
    typed = {
        key: np.float64(value) if isinstance(value, float) else np.int64(value)
        for key, value in attributes.items()
    }
    kernel: Any = jax.ffi.ffi_call(f"agalite_{name}", results)
    return list(kernel(*args, threads=np.int64(threads()), **typed))


def threads() -> int:
    """Cores for one call: seeds that train side by side, a device each, have their own."""
    if getattr(_local, "alone", False):
        return 1
    return max(1, cores() // jax.local_device_count())
