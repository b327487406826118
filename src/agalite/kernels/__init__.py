"""Custom kernels for CPUs: C, built on first use (`build.py`) and called by XLA through its FFI.

* `product`: one row times a weight, at the speed of memory (`product.h`);
* `agalite_*`, `galite_*`: the attentions of Algorithms 4 and 3, forwards and backwards, as plain
  loops over time in which the state stays in cache (`agalite.h`, `galite.h`);
* `agalite_trace`, `agalite_trace_gradient`: AGaLiTe's traces over a sequence, and the gradient that
  reaches the weights through them (`trace.h`);
* `eligibility`, `eligibility_update`: eligibility traces of streaming agents (`eligibility.h`);
* `convolution_*`: the encoders' convolutions of images and their gradients (`convolution.h`);
* `sparse_*`: rows that are mostly zeros times a weight (`sparse.h`);
* `bits_*`: rows that are kept as bits times a weight (`bits.h`);
* `stack`: one step of all layers of AGaLiTe, for one stream or a few (`stack.h`).

They are optional. Without a C compiler, on an accelerator, or with AGALITE_NATIVE=0, the same
operators are XLA's. The choice is made when a program is traced.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agalite.kernels.build import HANDLERS, Unavailable, load
from agalite.system import cores

__all__ = [
    "as_on_accelerator",
    "build_ahead",
    "call",
    "on_accelerator",
    "one_thread",
    "switched_off",
    "threads",
    "usable",
    "why_not",
]

_local = threading.local()


_BITS = {jnp.dtype("float32"): 32, jnp.dtype("float64"): 64}
_building = {bits: threading.Lock() for bits in _BITS.values()}


def _registered(bits: int) -> str | None:
    """Builds, loads and registers the kernels. Returns the reason if that is not possible."""
    with _building[bits]:
        return _register(bits)


@cache
def _register(bits: int) -> str | None:
    try:
        library = load(bits)
    except Unavailable as error:
        return str(error)
    for name in HANDLERS:
        capsule = jax.ffi.pycapsule(getattr(library, f"agalite_{name}"))
        jax.ffi.register_ffi_target(f"agalite_{name}_f{bits}", capsule, platform="cpu")
    return None


def build_ahead() -> None:
    """Builds the kernels of float32, if they are not there, in a thread."""
    if why_not(built=False) is None:
        threading.Thread(
            target=_registered, args=(32,), name="agalite kernels", daemon=True
        ).start()


def why_not(*, bits: int = 32, built: bool = True) -> str | None:
    """The reason why the kernels are not used; None if they are.

    **Arguments:**

    - `bits`: 32 for those of float32, 64 for those of float64.
    - `built`: build them, if necessary.
    """
    asked = os.environ.get("AGALITE_NATIVE", "")
    if asked.lower() in ("0", "false", "off", "no"):
        return f"AGALITE_NATIVE={asked}"
    if getattr(_local, "off", False):
        return "switched off"
    if on_accelerator():
        backend = jax.default_backend()
        return f"the backend is {'an accelerator' if backend == 'cpu' else backend}, not cpu"
    return _registered(bits) if built else None


def on_accelerator() -> bool:
    """Whether programs are traced for something else than a CPU."""
    return jax.default_backend() != "cpu" or getattr(_local, "elsewhere", False)


def as_on_accelerator() -> contextlib.AbstractContextManager[None]:
    """A context in which programs are traced with an accelerator's methods, to look at them."""
    return _with("elsewhere")


def usable(*arrays: Any) -> bool:
    """Whether kernels can be called on these arrays: all float32, or all float64."""
    kinds = {jnp.dtype(x.dtype) for x in arrays}
    bits = _BITS.get(kinds.pop()) if len(kinds) == 1 else None
    return bits is not None and why_not(bits=bits) is None


def switched_off() -> contextlib.AbstractContextManager[None]:
    """A context in which programs are traced without custom kernels: for comparisons and export."""
    return _with("off")


def one_thread() -> contextlib.AbstractContextManager[None]:
    """A context in which traced kernels use one thread, for programs that share the cores."""
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
    name: str,
    shapes: Sequence[tuple[int, ...]],
    *args: jax.Array,
    in_place: Mapping[int, int] | None = None,
    **attributes: int | float,
) -> list[jax.Array]:
    """Calls the kernel `name`.

    The results have the type of the first argument, and `shapes`.

    **Arguments:**

    - `name`, `shapes`: of the kernel, of its results.
    - `args`: its arguments.
    - `in_place`: numbers of arguments, and of the results that may be written over them.
    - `attributes`: numbers that are known when a program is traced.
    """
    bits = _BITS[jnp.dtype(args[0].dtype)]
    reason = _registered(bits)
    if reason is not None:
        raise Unavailable(f"the kernel {name} is not available: {reason}")
    results = [jax.ShapeDtypeStruct(shape, args[0].dtype) for shape in shapes]
    typed = {
        key: np.float64(value) if isinstance(value, float) else np.int64(value)
        for key, value in attributes.items()
    }
    kernel: Any = jax.ffi.ffi_call(
        f"agalite_{name}_f{bits}", results, input_output_aliases=dict(in_place or {})
    )
    return list(kernel(*args, threads=np.int64(threads()), **typed))


def threads() -> int:
    """Threads of one call.

    Seeds that train side by side have a device each, and share the cores.
    """
    if getattr(_local, "alone", False):
        return 1
    return max(1, cores() // jax.local_device_count())
