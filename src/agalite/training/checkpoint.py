"""Checkpoints: training states on disk.

checkpoints/step_000000020480/
  arrays/         all arrays by their path in the state, written by Orbax
  manifest.json   the leaves of the state, and the SHA-256 of every file

A checkpoint is written under a temporary name and renamed when it is complete and synced, so it is
there completely or not at all. Before it is read, every file is compared with its SHA-256, so Orbax
never reads a damaged one. Values are restored bit for bit. A checkpoint holds data only: arrays and
JSON, no pickles; the structure of the pytree comes from the program.

Orbax gets NumPy arrays: that is twice as fast as its way of writing JAX arrays (0.25 s against
0.46 s for 22 MB in 225 leaves on two cores) and does not tie the files to the devices that they
come from. All arrays must be addressable from this host.
"""

import contextlib
import datetime
import errno
import functools
import hashlib
import json
import logging
import math
import re
import secrets
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agalite import files, validation

FORMAT = 1
_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?")
_RETRY_DELAY = 1.0  # seconds before a failed write is tried again


class AllDamaged(ValueError):
    """There are checkpoints, and all of them are damaged; `args[0]` is without advice."""

    def __str__(self) -> str:
        return f"{self.args[0]}; train again into another folder, or restore a copy of checkpoints/"


class _Damaged(ValueError):
    pass


class _Saved(NamedTuple):
    """A checkpoint's folder. Sorts by step, then by revision, which counts saves of one step."""

    step: int
    revision: int
    folder: Path


class Checkpoints:
    """The checkpoints in a folder: the last `keep`, and the one with the highest metric.

    One process may write while others read.

    **Arguments:**

    - `folder`: where the checkpoints are; made by the first `save`.
    - `keep`: how many of the last checkpoints to keep, at least 1.
    """

    def __init__(self, folder: Path, keep: int = 2):
        validation.check_integer("keep", keep, minimum=1)
        self._folder, self._keep = Path(folder), keep

    def save(self, step: int, state: Any, metric: float | None = None) -> None:
        """Write a checkpoint, then delete those that need not be kept.

        Checkpoints of later steps are deleted too: they belong to training that was abandoned when
        it was resumed from an earlier step. A write that fails is tried once more.

        **Arguments:**

        - `step`: the step that the state is of.
        - `state`: a pytree of arrays, PRNG keys and Python numbers.
        - `metric`: decides which checkpoint is the best; None or NaN if there is none.
        """
        validation.check_integer("step", step, minimum=0, maximum=validation.LARGEST_COUNT)
        leaves, arrays = _flatten(state)
        manifest = {
            "format": FORMAT,
            "step": int(step),
            "metric": None if metric is None or not math.isfinite(metric) else float(metric),
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "leaves": [leaf._asdict() for leaf in leaves],
        }
        orbax = _orbax()
        try:
            saved = self._write(orbax, manifest, arrays)
        except Exception:
            time.sleep(_RETRY_DELAY)
            try:
                saved = self._write(orbax, manifest, arrays)
            except Exception as error:
                raise OSError(self._write_error(step, error)) from error
        self._prune(saved)

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any]:
        """Read a checkpoint.

        **Arguments:**

        - `like`: a pytree of the expected structure, of arrays or `jax.ShapeDtypeStruct`s. Restored
            arrays go to the devices of those in `like`.
        - `step`: which checkpoint; None for the newest. Damaged ones are skipped with a warning.

        **Returns:**

        The step and the state.
        """
        damaged: dict[Path, str] = {}
        # Listed again after a failure: the writer may have replaced the files meanwhile.
        while found := [x for x in self._list(step) if x.folder not in damaged]:
            newest = found[-1]
            try:
                leaves = self._read_leaves(newest)
                # First: arrays of other shapes may be larger than memory.
                if mismatch := _mismatch(like, leaves):
                    raise ValueError(f"{newest.folder} does not fit: {mismatch}")
                return newest.step, _unflatten(like, leaves, self._read_arrays(newest, leaves))
            except _Damaged as error:
                damaged[newest.folder] = str(error)
                if newest.folder.exists():
                    warnings.warn(f"{newest.folder} is skipped: {error}", stacklevel=2)
        if step is not None:
            steps = ", ".join(map(str, self.steps())) or "none"
            why = "; ".join(damaged.values()) or "there is none"
            raise ValueError(
                f"no usable checkpoint of step {step} in {self._folder} ({why}); "
                f"steps there are: {steps}"
            )
        if damaged:
            reasons = "; ".join(f"{path.name}: {why}" for path, why in damaged.items())
            raise AllDamaged(f"all checkpoints in {self._folder} are damaged: {reasons}")
        raise FileNotFoundError(f"there is no checkpoint in {self._folder}")

    def leaves(self) -> tuple[int, dict[str, np.ndarray]]:
        """The newest undamaged checkpoint without the structure of its state, for comparisons.

        **Returns:**

        The step, and the leaves by their path in the state; a key as its data (..., words).
        """
        for saved in reversed(self._list()):
            with contextlib.suppress(_Damaged):
                leaves = self._read_leaves(saved)
                arrays = self._read_arrays(saved, leaves)
                return saved.step, {
                    leaf.path: arrays[leaf.name]
                    if leaf.stored
                    else np.empty(leaf.shape)
                    if leaf.value is None
                    else np.array(str(leaf.value))
                    for leaf in leaves
                }
        raise FileNotFoundError(f"there is no undamaged checkpoint in {self._folder}")

    def steps(self) -> list[int]:
        """The steps of all checkpoints with a readable manifest, ascending."""
        return sorted(self._metrics())

    def latest(self) -> int | None:
        """The largest step; None if there is no checkpoint."""
        return max(self._metrics(), default=None)

    def best(self) -> int | None:
        """The step with the highest metric, the last if several have it; None if none has one."""
        return _best(self._metrics())

    def _metrics(self) -> dict[int, float | None]:
        metrics = {}
        for saved in self._list():
            try:
                metrics[saved.step] = self._manifest(saved)["metric"]
            except _Damaged:
                continue
        return metrics

    def _list(self, step: int | None = None) -> list[_Saved]:
        if not self._folder.is_dir():
            return []
        matches = [(_NAME.fullmatch(path.name), path) for path in self._folder.iterdir()]
        found = [_Saved(int(m[1]), int(m[2] or 0), path) for m, path in matches if m]
        return sorted(x for x in found if step in (None, x.step))

    def _write(self, orbax: Any, manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> _Saved:
        step = manifest["step"]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        # A step that is saved again gets a new name: the old files stay until the new are complete.
        revision = max((x.revision + 1 for x in self._list(step)), default=0)
        name = f"step_{step:012d}" + (f".{revision}" if revision else "")
        # Random: Orbax's threads may still be writing into the folder of an attempt that failed.
        partial = self._folder / f".writing-{name}-{secrets.token_hex(4)}"
        complete = self._folder / name
        try:
            partial.mkdir()
            _require_space(partial, arrays)
            if arrays:
                orbax.save((partial / "arrays").absolute(), arrays)
            written = sorted(path for path in partial.rglob("*") if path.is_file())
            manifest = {
                **manifest,
                "files": {p.relative_to(partial).as_posix(): _file_digest(p) for p in written},
            }
            for path in partial.rglob("*"):
                files.sync(path)
            text = json.dumps({**manifest, "sha256": manifest_digest(manifest)})
            files.write(partial / "manifest.json", text.encode())
            partial.rename(complete)
            files.sync(self._folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return _Saved(step, revision, complete)

    def _write_error(self, step: int, error: Exception) -> str:
        try:
            free = f"{shutil.disk_usage(self._folder).free / 1e6:.0f} MB are free there"
        except OSError as why:
            free = str(why)
        what = f"the checkpoint of step {step} could not be written to {self._folder}"
        # TensorStore's message names files inside the checkpoint, on a line of a thousand letters.
        full = "No space left on device" in str(error)
        return f"{what}: {'no space is left on the disk' if full else error} ({free})"

    def _manifest(self, saved: _Saved) -> dict[str, Any]:
        try:
            manifest = json.loads((saved.folder / "manifest.json").read_bytes())
            digest = manifest.pop("sha256")
            intact = digest == manifest_digest(manifest)
        except (
            *(OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError),
        ) as error:
            raise _Damaged(f"its manifest cannot be read ({error})") from error
        if not intact:
            raise _Damaged("its manifest has been changed")
        if not _is_integer(manifest.get("format")):
            raise _Damaged("its manifest has no format")
        if manifest["format"] > FORMAT:
            raise ValueError(
                f"{saved.folder} was written by a newer version of agalite (checkpoint format "
                f"{manifest['format']}; this version reads up to {FORMAT})"
            )
        # Anybody can compute a SHA-256: that of a manifest finds damage, not bad intentions.
        if wrong := _wrong_entry(manifest):
            raise _Damaged(f"its manifest has {wrong}")
        return manifest

    def _read_leaves(self, saved: _Saved) -> list["_Leaf"]:
        """The descriptions of the leaves, after all files were compared with their SHA-256."""
        manifest = self._manifest(saved)
        for name, digest in manifest["files"].items():
            path = saved.folder / name
            try:
                # Files of the checkpoint only: reading a device or a pipe may never end.
                whole = path.resolve().is_relative_to(saved.folder.resolve())
                if not whole or (path.exists() and not path.is_file()):
                    raise _Damaged(f"{name!r} is no file in it")
                intact = _file_digest(path) == digest
            except OSError as error:
                raise _Damaged(f"{name} cannot be read ({error.strerror})") from error
            except ValueError as error:  # a name that no file can have
                raise _Damaged(f"{name!r} is no file in it ({error})") from error
            if not intact:
                raise _Damaged(f"{name} is not what was written")
        return [_Leaf(**leaf) for leaf in manifest["leaves"]]

    def _read_arrays(self, saved: _Saved, leaves: list["_Leaf"]) -> dict[str, np.ndarray]:
        stored = [leaf for leaf in leaves if leaf.stored]
        if not stored:
            return {}
        try:
            arrays = _orbax().restore((saved.folder / "arrays").absolute())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _Damaged(f"Orbax cannot read it ({error})") from error
        for leaf in stored:
            found = arrays.get(leaf.name)
            # The last axis of a key's data depends on its generator.
            shape = None if found is None else list(found.shape)[: len(leaf.shape)]
            plain = leaf.kind == "key" or str(getattr(found, "dtype", "")) == leaf.dtype
            if shape != leaf.shape or not plain:
                raise _Damaged(f"its array {leaf.name} is not as its manifest says")
        return arrays

    def _prune(self, newest: _Saved) -> None:
        """Delete all but the last, the best, and the newest revision of each."""
        past = {step: metric for step, metric in self._metrics().items() if step <= newest.step}
        keep = {newest.step, *sorted(past)[-self._keep :], _best(past)}
        found = self._list()
        current = {x.step: x for x in found}  # the last revision of each step
        for saved in found:
            if saved.step not in keep or current[saved.step] != saved:
                # Renamed first: a partly deleted checkpoint must not look like a damaged one. One
                # that cannot be deleted is no reason to stop training.
                with contextlib.suppress(OSError):
                    saved.folder.rename(self._folder / f".deleting-{saved.folder.name}")
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove folders that this process, or one that was killed, was writing or deleting."""
        for pattern in (".writing-*", ".deleting-*"):
            for path in self._folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)


class _Leaf(NamedTuple):
    """The description of a pytree's leaf, as JSON stores it."""

    path: str
    """Its path in the pytree: .weights.memory.layers[0].bias"""
    kind: str
    """array, key (a typed PRNG key), int, float or bool"""
    shape: list[int]
    dtype: str
    value: Any = None
    """An int or bool itself, a float in hexadecimal, the name of a key's generator."""

    @property
    def stored(self) -> bool:
        """Whether Orbax stores an array for it. Orbax does not support empty arrays."""
        return self.kind in ("array", "key") and 0 not in self.shape

    @property
    def name(self) -> str:
        """The name of its array."""
        return f"state{self.path}"


_KINDS = ("array", "key", "int", "float", "bool")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong_entry(manifest: dict[str, Any]) -> str | None:
    """What a manifest has that `save` does not write, as a phrase."""
    metric, found = manifest.get("metric"), manifest.get("files")
    if not (metric is None or (isinstance(metric, int | float) and math.isfinite(metric))):
        return f"the metric {metric!r}"
    if "metric" not in manifest or not isinstance(manifest.get("leaves"), list):
        return "no metric or no leaves"
    if not isinstance(found, dict) or not all(isinstance(x, str) for x in found.values()):
        return "no list of files"
    for leaf in manifest["leaves"]:
        if not isinstance(leaf, dict) or leaf.keys() != set(_Leaf._fields):
            return "a leaf with other entries"
        kind, shape, value = leaf["kind"], leaf["shape"], leaf["value"]
        fine = isinstance(leaf["path"], str) and isinstance(leaf["dtype"], str) and kind in _KINDS
        fine &= isinstance(shape, list) and all(_is_integer(n) and n >= 0 for n in shape)
        match kind:
            case "int":
                fine &= _is_integer(value)
            case "bool":
                fine &= isinstance(value, bool)
            case "float":
                fine &= isinstance(value, str) and _is_hexadecimal(value)
            case "key":
                fine &= isinstance(value, str)
        if not fine:
            return f"the leaf {str(leaf)[:100]}"
    return None


def _is_hexadecimal(text: str) -> bool:
    try:
        float.fromhex(text)
    except (ValueError, OverflowError):
        return False
    return True


def _flatten(tree: Any) -> tuple[list[_Leaf], dict[str, np.ndarray]]:
    """The descriptions of all leaves, and the arrays among them by name."""
    leaves, data = _describe_all(tree), {}
    for leaf, value in zip(leaves, jax.tree.leaves(tree), strict=True):
        if leaf.stored:
            data[leaf.name] = jax.random.key_data(value) if leaf.kind == "key" else value
    # All at once, so that copies from several devices overlap.
    return leaves, {k: np.asarray(x) for k, x in jax.device_get(data).items()}


def _unflatten(like: Any, leaves: list[_Leaf], arrays: dict[str, np.ndarray]) -> Any:
    """The stored leaves in the structure of `like`, on its devices."""
    by_path = {leaf.path: leaf for leaf in leaves}

    def value(path: Any, expected: Any) -> Any:
        leaf = by_path[jax.tree_util.keystr(path)]
        return _value(leaf, arrays.get(leaf.name), expected)

    return jax.tree_util.tree_map_with_path(value, like)


def _mismatch(like: Any, leaves: list[_Leaf]) -> str | None:
    """The first difference between the stored leaves and those of `like`, as a phrase."""
    expected = {leaf.path: leaf for leaf in _describe_all(like)}
    stored = {leaf.path: leaf for leaf in leaves}
    for path, want in expected.items():
        where = f"leaf {path or 'at the top'}"
        if path not in stored:
            return f"it has no {where}"
        for field in ("kind", "shape", "dtype"):
            have, wanted = getattr(stored[path], field), getattr(want, field)
            if have != wanted:
                return f"its {where} has {field} {have}; expected {wanted}"
    for path in stored:
        if path not in expected:
            return f"it has a leaf {path or 'at the top'}, which is not expected"
    return None


def _describe_all(tree: Any) -> list[_Leaf]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [_describe(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]


def _describe(path: str, leaf: Any) -> _Leaf:
    if isinstance(leaf, bool):
        return _Leaf(path, "bool", [], "bool", leaf)
    if isinstance(leaf, int):
        return _Leaf(path, "int", [], "int", leaf)
    # np.float64 is a subclass of float; it is stored as an array.
    if isinstance(leaf, float) and not isinstance(leaf, np.generic):
        return _Leaf(path, "float", [], "float", leaf.hex())
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"leaf {path} is spread over several hosts; gather it before saving")
        shape, dtype = list(leaf.shape), str(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            known = isinstance(leaf, jax.Array)
            return _Leaf(path, "key", shape, dtype, str(jax.random.key_impl(leaf)) if known else "")
        if leaf.dtype.kind not in "OUSMm":
            return _Leaf(path, "array", shape, dtype)
        raise ValueError(f"leaf {path} is an array of {dtype}; only numbers can be saved")
    raise ValueError(
        f"leaf {path} is of type {type(leaf).__name__}; only arrays and numbers can be saved "
        "(eqx.filter(..., eqx.is_array) takes the arrays of a module)"
    )


def _value(leaf: _Leaf, array: np.ndarray | None, like: Any) -> Any:
    if leaf.kind == "float":
        return float.fromhex(leaf.value)
    if leaf.kind in ("int", "bool"):
        return leaf.value
    if isinstance(like, np.ndarray | np.generic):
        values = np.empty(leaf.shape, leaf.dtype) if array is None else array
        return values[()] if isinstance(like, np.generic) else values
    # Copied: the state will be donated, and JAX may otherwise use NumPy's buffer.
    if array is None:
        value = jnp.empty(leaf.shape, like.dtype)
    elif leaf.kind == "key":
        value = jax.random.wrap_key_data(jnp.array(array), impl=leaf.value)
    else:
        value = jnp.array(array)
    # An uncommitted array stays uncommitted: committed to a device, it would cause recompilation.
    committed = like.committed if isinstance(like, jax.Array) else like.sharding is not None
    return jax.device_put(value, like.sharding) if committed else value


def _best(metrics: dict[int, float | None]) -> int | None:
    known = {step: x for step, x in metrics.items() if x is not None}
    return max(known, key=lambda step: (known[step], step), default=None)


def _require_space(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Raise before Orbax fills the disk: it would log an error for every array."""
    needed, free = sum(x.nbytes for x in arrays.values()), shutil.disk_usage(folder).free
    if free < needed + 1_000_000:
        raise OSError(errno.ENOSPC, f"no space left on the disk for {needed / 1e6:.1f} MB")


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_digest(manifest: dict[str, Any]) -> str:
    """The SHA-256 that a manifest has under "sha256", of all its other entries."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _silence_orbax() -> None:
    """Keeps Orbax from printing stack traces of an error that it also raises.

    When a write fails, every thread of Orbax logs it, and TensorStore reports chunks that fail
    later, whose event loop is closed by then, to `sys.unraisablehook`.
    """
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("absl").addFilter(
        lambda record: "_SignalingThread.run() raised" not in str(record.msg)
    )


@functools.cache
def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ValueError('checkpoints need Orbax: pip install "agalite[train]"') from error
    _silence_orbax()
    # Orbax's handler for pytrees stores arrays and JSON; it neither writes nor reads pickles.
    return orbax.checkpoint.Checkpointer(orbax.checkpoint.PyTreeCheckpointHandler())
