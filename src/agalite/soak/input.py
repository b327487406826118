"""`agalite soak input`: mutated command lines and files, which must be refused in a sentence.

A case is a valid command line or file with a few changes. It runs in this process: command lines
and configurations by `agalite.cli.main`, files by the functions that the commands read them with.
What a valid line would start (training, a study, a benchmark, this campaign) is not started: the
case ends, accepted, where it would begin. A case is a failure if it

- raises anything but what commands answer with a sentence (ValueError, OSError), or prints a stack
  trace,
- takes longer than `_SECONDS`,
- is refused with exit code 0, or, being damaged, is accepted with other contents,
- writes, makes, renames or deletes anything outside its own folder (seen by Python's audit hooks).
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agalite import cli, validation
from agalite.bench.timing import progress_bar
from agalite.soak.campaign import Figure, Record, workspace
from agalite.soak.mutate import mutate_bytes, mutate_json, mutate_rows, mutate_words
from agalite.training.checkpoint import Checkpoints

_SECONDS = 30.0  # for one case
_BUILT = 0.2  # of the configurations: with them the trainer is made
_SMALL = (
    "tmaze --algorithm a2c --corridor 3 --num-envs 2 --num-steps 4 --hidden-size 8 --memory gru "
    "--model.d-model 8 --model.hidden-size 8 --log-every 8 --checkpoint-every 8 --steps 32"
)


class Answer(NamedTuple):
    """What became of a case."""

    refused: bool
    problem: str | None
    """What must not happen and did."""


class _TooLong(BaseException):
    """Not an Exception, so that nothing catches it."""


class Guard:
    """Runs cases in this process and sees what they print, write and raise.

    **Arguments:**

    - `folder`: the only one that a case may change; it is the working directory meanwhile.
    - `seconds`: limit of a case. Needs the main thread.
    """

    def __init__(self, folder: Path, seconds: float = _SECONDS) -> None:
        self.folder, self._seconds = folder.resolve(), seconds
        self._outside: list[str] = []
        self._active = False
        sys.addaudithook(self._audit)  # stays, as Python has no way to remove one

    def cli(self, words: list[str]) -> Answer:
        """Runs a command line."""
        code: Any = None

        def call() -> None:
            nonlocal code
            try:
                code = cli.main(words)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)

        printed, problem, error = self._run(call)
        if problem is None and error is not None:
            problem = f"raised {type(error).__name__}: {error}"
        if problem is None and "Traceback (most recent call last)" in printed:
            problem = "printed a stack trace"
        if problem is None and "this is a bug in agalite" in printed:
            problem = next(line for line in printed.splitlines() if "this is a bug" in line)
        refusal = any(line.startswith("agalite") for line in printed.splitlines())
        if problem is None and code == 0 and refusal:
            problem = f"exit code 0, though it says: {printed.strip().splitlines()[-1]}"
        if problem is None and code not in (0, 1, 2):
            problem = f"exit code {code}"
        if problem is None and code and not printed.strip():
            problem = f"exit code {code} without a word"
        return Answer(code != 0, problem)

    def call(self, function: Callable[[], str | None]) -> Answer:
        """Calls a function that reads a damaged file; what it returns is a problem."""
        result: str | None = None

        def call() -> None:
            nonlocal result
            result = function()

        _, problem, error = self._run(call)
        if isinstance(error, ValueError | OSError) and str(error):
            return Answer(True, problem)
        if error is not None:
            problem = problem or f"raised {type(error).__name__}: {error}"
        return Answer(error is not None, problem or result)

    def _run(self, call: Callable[[], None]) -> tuple[str, str | None, BaseException | None]:
        """What was printed on stderr, a problem, and what was raised."""
        out, err = io.StringIO(), io.StringIO()
        error: BaseException | None = None
        problem: str | None = None
        self._outside.clear()

        def stop(*_: Any) -> None:
            raise _TooLong

        before = signal.signal(signal.SIGALRM, stop)
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        self._active = True
        try:
            with (
                contextlib.chdir(self.folder),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                call()
        except _TooLong:
            problem = f"it took longer than {time.monotonic() - began:.0f} s"
        except Exception as caught:
            error = caught
        finally:
            self._active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if self._outside:
            problem = problem or f"it changed {self._outside[0]!r}"
        return err.getvalue(), problem, error

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active or threading.current_thread() is not threading.main_thread():
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and any(c in mode for c in "wax+")) or (
                mode is None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            paths = [path] if writes else []
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown"):
            paths = arguments[:1]
        elif event in ("os.rename", "os.link", "os.symlink"):
            paths = arguments[:2]
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
            # What a case may start: git, for the commit of a result.
            if os.path.basename(str(arguments[0])) != "git":
                self._outside.append(f"by starting {arguments[0]}")
            return
        else:
            return
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                where = Path(os.path.realpath(os.fsdecode(path)))
                # What JAX compiles belongs into its cache, whatever the case.
                cache = jax.config.values["jax_compilation_cache_dir"]
                allowed = [self.folder, *([os.path.realpath(cache)] if cache else [])]
                if str(where) != os.devnull and not any(map(where.is_relative_to, allowed)):
                    self._outside.append(str(where))


@contextlib.contextmanager
def _not_started() -> Iterator[None]:
    """Ends every command where its long work would begin, as if it had been done."""
    from agalite import demo
    from agalite.studies import runner
    from agalite.supervised import command as lra
    from agalite.supervised import train as supervised
    from agalite.training import train as training

    def accept(*_: Any, **__: Any) -> Any:
        raise SystemExit(0)

    def check_devices(devices: int | None, *_: Any, **__: Any) -> None:
        # The devices of this process are made once.
        if devices is not None:
            validation.check_integer("devices", devices, minimum=1)

    replaced: list[tuple[Any, str, Any]] = [
        (training, "train", accept),
        (supervised, "train", accept),
        (demo, "run", accept),
        (runner, "run", accept),
        (cli, "use_devices", check_devices),
        (lra, "use_devices", check_devices),
        (cli.EnvsShow, "run", accept),
        (cli.Envs, "run", accept),
        (lra.Baselines, "run", accept),
    ]
    for group in ("bench", "soak"):
        for _, command in cli.all_commands(cli.COMMANDS[group], [group]):
            replaced.append((command, "run", accept))
    with contextlib.ExitStack() as stack:
        for entry in replaced:
            stack.enter_context(_replaced(*entry))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Another attribute for a while."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


# --- the kinds of cases ---------------------------------------------------------------------------


class _Case(NamedTuple):
    """A mutated input: what to say about it, and how to run it."""

    text: str
    run: Callable[[], Answer]


Make = Callable[[random.Random], _Case]
"""Makes a case."""


def _command_lines(guard: Guard) -> Make:
    lines = [
        line.split("#")[0].replace('"', "").split()[1:]
        for examples in cli.EXAMPLES.values()
        for line in examples
        if ">" not in line
    ]
    lines += [["train", *_SMALL.split()], ["lra", "text", "--max-length", "300"]]
    options = sorted({word for line in lines for word in line if word.startswith("--")})

    def make(rng: random.Random) -> _Case:
        words = mutate_words(rng, rng.choice(lines), options)

        def run() -> Answer:
            with _not_started():
                return guard.cli(words)

        return _Case(json.dumps(words)[:300], run)

    return make


def _configs(guard: Guard) -> Make:
    from agalite.training import policy, train

    good = _small_run(guard.folder / "config-good")
    text = (good / "config.json").read_bytes()
    folder, trainer_class = guard.folder / "config", train.Trainer
    shutil.copytree(good, folder)

    def make(rng: random.Random) -> _Case:
        damaged = mutate_json(rng, text) if rng.random() < 0.8 else mutate_bytes(rng, text)
        words = rng.choice(
            (
                ["resume", str(folder)],
                ["eval", str(folder), "--episodes", "1"],
                ["export", str(folder), "--stablehlo", "x.bin"],
                ["lra", "report", str(folder), "--out", "x.md"],
                ["plot", str(folder)],
            )
        )

        # Some with the environment and the shapes of the network, which takes a second.
        builds = rng.random() < _BUILT

        def accept(*_: Any, **__: Any) -> Any:
            raise SystemExit(0)

        def build(config: Any) -> Any:
            if builds:
                trainer_class(config)
            raise SystemExit(0)

        def run() -> Answer:
            (folder / "config.json").write_bytes(damaged)
            with contextlib.ExitStack() as stack:
                for owner, name, new in (
                    (train, "Trainer", build),
                    (policy, "Trainer", build),
                    (policy, "HostTrainer", accept),
                    (train.asynchronous, "make_actors", accept),
                ):
                    stack.enter_context(_replaced(owner, name, new))
                return guard.cli(words)

        return _Case(f"{words[0]} with config.json {_changes(text, damaged)}", run)

    return make


def _checkpoints(guard: Guard) -> Make:
    states = [_state(n) for n in (1, 2)]
    good = guard.folder / "checkpoints-good"
    for step, state in enumerate(states, 1):
        Checkpoints(good).save(step, state, metric=float(step))
    folder = guard.folder / "checkpoints"
    originals = [_bits(state) for state in states]

    def make(rng: random.Random) -> _Case:
        seed = rng.random()
        text = f"checkpoints damaged with {seed}"

        def run() -> Answer:
            own = random.Random(seed)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            forged = own.random() < 0.4
            if forged:
                _forge(own, folder)
            else:
                paths = sorted(path for path in folder.rglob("*") if path.is_file())
                for path in own.sample(paths, own.choice((1, 1, 2, 5, len(paths)))):
                    path.write_bytes(mutate_bytes(own, path.read_bytes()))

            def read() -> str | None:
                checkpoints = Checkpoints(folder)
                for question in (checkpoints.best, checkpoints.latest, checkpoints.steps):
                    question()
                step, state = checkpoints.restore(_state(0))
                # A forged manifest may say another step; the arrays have their own checksums.
                if _bits(state) not in originals and not forged:
                    return f"it was restored from step {step} with other contents"
                if _shapes(state) != _shapes(states[0]):
                    return "it was restored with other shapes"
                return None

            return guard.call(read)

        return _Case(text, run)

    return make


def _forge(rng: random.Random, folder: Path) -> None:
    """Changes a manifest and gives it the right checksum, as somebody with bad intentions would."""
    from agalite.training.checkpoint import manifest_digest

    for path in sorted(folder.glob("*/manifest.json")):
        manifest = json.loads(path.read_bytes())
        manifest.pop("sha256")
        if rng.random() < 0.2 and manifest["files"]:
            name = rng.choice(["/dev/zero", "../../../etc/hostname", "/proc/self/mem", "..", ""])
            manifest["files"][name] = "0" * 64
        else:
            manifest = json.loads(mutate_json(rng, json.dumps(manifest).encode(), valid=True))
        if isinstance(manifest, dict):
            manifest["sha256"] = manifest_digest(manifest)
        path.write_text(json.dumps(manifest))


def _exports(guard: Guard) -> Make:
    from agalite.export import stablehlo
    from agalite.export.policy import export_run

    path, damaged = guard.folder / "policy.bin", guard.folder / "damaged.bin"
    export_run(_small_run(guard.folder / "export-run"), stablehlo=path)
    data, expected = path.read_bytes(), stablehlo.read(path)
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}

    def make(rng: random.Random) -> _Case:
        new = mutate_bytes(rng, data)
        if rng.random() < 0.5:
            about = mutate_json(rng, contents[stablehlo.METADATA])
            new = stablehlo.archive({**contents, stablehlo.METADATA: about})

        def run() -> Answer:
            damaged.write_bytes(new)

            def read() -> str | None:
                same = stablehlo.read(damaged) == expected
                return None if same else "a damaged file was read"

            return guard.call(read)

        return _Case(f"exported file {_short(new)}", run)

    return make


def _listops(guard: Guard) -> Make:
    from agalite.supervised import listops

    path = guard.folder / "rows.tsv"
    grammar = listops.Grammar(longer_than=3, shorter_than=60, max_depth=4, max_arguments=4)
    listops.write_tsv(path, listops.generate(20, seed=0, grammar=grammar))
    good = path.read_bytes()

    def make(rng: random.Random) -> _Case:
        rows = mutate_rows(rng, good, b"\t")

        def run() -> Answer:
            path.write_bytes(rows)

            def read() -> str | None:
                examples = listops.read_tsv(path)
                for i in range(len(examples)):
                    if listops.evaluate(examples[i]) != examples.labels[i]:
                        return f"row {i} has another value"
                return None

            return guard.call(read)

        return _Case(f"rows {_short(rows)}", run)

    return make


def _reviews(guard: Guard) -> Make:
    from agalite.supervised.text import SOURCE, read_csv

    good = b"text,label,source\n" + b"".join(
        f'"A film, {word}.\nSeen twice.",{i % 2},{SOURCE}\n'.encode()
        for i, word in enumerate(("good", "bad", 'of ""note""', "tr\u00e8s long", "dull", "fine"))
    )

    def make(rng: random.Random) -> _Case:
        rows = mutate_rows(rng, good, b",")

        def read() -> str | None:
            examples = read_csv(rows, "the table").examples
            fine = set(examples.labels.tolist()) == {0, 1}
            return None if fine else "it has other labels than 0 and 1"

        return _Case(f"table {_short(rows)}", lambda: guard.call(read))

    return make


def _metrics(guard: Guard) -> Make:
    from agalite.training.logging import read_metrics

    good = _small_run(guard.folder / "metrics-run")
    text = (good / "metrics.csv").read_bytes()

    def make(rng: random.Random) -> _Case:
        rows = mutate_rows(rng, text, b",")

        def run() -> Answer:
            (good / "metrics.csv").write_bytes(rows)
            if rng.random() < 0.05:
                return guard.cli(["plot", str(good)])

            def read() -> str | None:
                lengths = {len(column) for column in read_metrics(good).values()}
                return None if len(lengths) == 1 else "columns of different lengths"

            return guard.call(read)

        return _Case(f"metrics.csv {_short(rows)}", run)

    return make


# The kinds of cases with their shares of all.
KINDS: dict[str, tuple[float, Callable[[Guard], Make]]] = {
    "command lines": (0.4, _command_lines),
    "config.json of runs": (0.15, _configs),
    "checkpoint files": (0.15, _checkpoints),
    "exported files and their metadata": (0.1, _exports),
    "ListOps rows (TSV)": (0.1, _listops),
    "review tables (CSV)": (0.05, _reviews),
    "metrics.csv": (0.05, _metrics),
}


def run(record: Record, cases: int) -> None:
    """Runs mutated inputs of every kind and fills the record.

    **Arguments:**

    - `cases`: in all.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("`agalite soak input` needs the main thread, for its time limit")
    problems, done = 0, 0
    with workspace() as work, progress_bar() as progress:
        cache = jax.config.values["jax_compilation_cache_dir"]
        guard = Guard(work)
        _warm_up(work)
        task = progress.add_task("input", total=cases)
        for kind, (share, setup) in KINDS.items():
            progress.update(task, description=f"input: {kind}")
            folder = work / kind.split()[0].replace(".", "-")
            folder.mkdir()
            guard.folder = folder.resolve()
            make = setup(guard)
            rng, refused, found = random.Random(f"{record.seed} {kind}"), 0, 0
            count = max(1, round(cases * share))
            began = time.perf_counter()
            for _ in range(count):
                case = make(rng)
                answer = case.run()
                refused += answer.refused
                if answer.problem is not None:
                    found += 1
                    record.fail(f"{kind}: {' '.join(answer.problem.split())[:300]}: {case.text}")
                progress.advance(task)
            record.rows.append(
                {
                    "kind": kind,
                    "cases": count,
                    "refused": refused,
                    "problems": found,
                    "seconds": round(time.perf_counter() - began, 1),
                }
            )
            problems, done = problems + found, done + count
            record.figures += [Figure(f"{kind}: cases", count), Figure(f"{kind}: refused", refused)]
        jax.config.update("jax_compilation_cache_dir", cache)
    record.figures += [
        Figure("cases in all", done, ">=", cases),
        Figure(
            "stack traces, hangs, wrong exit codes, wrong contents, files outside", problems, "=", 0
        ),
    ]


def _warm_up(work: Path) -> None:
    """Draws a curve: Matplotlib writes a list of fonts into the user's cache when first used."""
    from agalite.training import plots

    run = _small_run(work / "warm-up")
    plots.curve([run], work / "curve.png", metric="losses/entropy")


def _small_run(folder: Path) -> Path:
    """The folder of a finished run."""
    from agalite.training.command import parse
    from agalite.training.train import train

    _, config = parse(_SMALL.split(), "agalite train")
    train(config, folder, quiet=True)
    return folder


def _state(n: int) -> dict[str, Any]:
    x = np.random.default_rng(n).normal(size=(3, 5)) * (n + 1)
    return {
        "x": jnp.asarray(x, jnp.float32),
        "key": jax.random.key(n),
        "count": jnp.int32(n),
        "int": n,
        "float": 0.1 * n,
        "nested": [{"a": jnp.ones(4) * n}],
    }


def _bits(state: Any) -> list[tuple[str, bytes]]:
    out = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        out.append((jax.tree_util.keystr(path), data.tobytes()))
    return out


def _shapes(state: Any) -> list[tuple[Any, str]]:
    return [
        (getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf).__name__)))
        for leaf in jax.tree.leaves(state)
    ]


def _changes(before: bytes, after: bytes) -> str:
    """What differs between two JSON objects at the top."""
    try:
        a, b = json.loads(before), json.loads(after)
        names = [x for x in {**a, **b} if repr(a.get(x)) != repr(b.get(x))]
        return ", ".join(f"{x}={b.get(x)!r:.200}" for x in names) or "unchanged"
    except (ValueError, AttributeError, TypeError, RecursionError):
        return _short(after)


def _short(data: bytes) -> str:
    return repr(data[:120])
