"""The command line: a thin layer over the library. `agalite` alone says what there is."""

import contextlib
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro.conf

from agalite import extras, help
from agalite.bench import command as bench
from agalite.completion import Completion
from agalite.export import command as export
from agalite.studies import command as study
from agalite.supervised import command as lra
from agalite.system import Stopped, use_devices, with_huge_pages
from agalite.version import __version__
from agalite.watch import command as watch


@dataclass(frozen=True)
class Models:
    """List the memory models, with their sizes at the paper's T-Maze settings."""

    input_size: int = 16
    """Width of an observation (16 is T-Maze's)."""

    def run(self) -> None:
        from agalite.memory import registry as table

        table.show(self.input_size)


@dataclass(frozen=True)
class Envs:
    """List the environments, with their spaces and limits."""

    def run(self) -> None:
        from agalite.envs import command as table

        table.show_table()


@dataclass(frozen=True)
class EnvsShow:
    """Write a moving picture of a random episode."""

    name: tyro.conf.Positional[str]
    """The environment: a name that `agalite envs` lists, or gym:<id>."""
    out: Path
    """The file to write: .mp4 or .gif, or .png for a strip of frames."""
    seed: int = 0
    steps: int | None = None
    """Stop after so many steps, if the episode has not ended; 1000 if not given."""
    fps: float | None = None
    """Frames a second; the environment's own speed if not given."""
    set: tuple[str, ...] = ()
    """Options of the environment, for example: --set corridor=20."""

    def run(self) -> None:
        from agalite.envs import command as show

        show.show(
            self.name,
            out=self.out,
            seed=self.seed,
            steps=self.steps,
            fps=self.fps,
            options=self.set,
        )


class Train:
    """Train an agent that remembers."""

    @staticmethod
    def main(words: list[str], name: str) -> None:
        """Which options there are depends on the environment, the model and the algorithm."""
        extras.require_training(name)
        # Before the environments are looked at: the first of them wakes JAX up.
        use_devices(_whole_number(words, "--devices"), _whole_number(words, "--seeds") or 1)
        from agalite.training import command as options

        choices, config = options.parse(words, name)
        folder = choices.out or options.new_folder(config)
        from agalite.training.train import train

        _report(train(config, folder, wandb=choices.wandb, ray=choices.ray))


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest checkpoint, to the same end."""

    run_folder: tyro.conf.Positional[Path]
    """The folder of the run."""
    devices: int | None = None
    """CPU devices to spread the seeds over."""
    ray: str | None = None
    """Put the actors on the Ray cluster at this address, as in `train`."""

    def run(self) -> None:
        extras.require_training("agalite resume")
        from agalite.training.run import Run

        run = Run.open(self.run_folder)
        use_devices(self.devices, int(run.config.get("seeds", 1)))
        if lra.made(run):
            return lra.resume(self.run_folder)
        from agalite.training.train import resume

        return _report(resume(self.run_folder, ray=self.ray))


@dataclass(frozen=True)
class Eval:
    """Play whole episodes with a trained agent and say how good it is."""

    run_folder: tyro.conf.Positional[Path]
    """The folder of the run."""
    episodes: int = 100
    greedy: bool = False
    """Take the likeliest action instead of a sampled one."""
    best: bool = False
    """Use the best checkpoint instead of the newest."""
    seed: int = 0
    """Of the episodes."""
    seed_number: int = 0
    """Which of the run's seeds to use: 0 is the first."""
    together: int = 64
    """Environments that play side by side."""
    video: Path | None = None
    """Also write one episode to this .mp4 or .gif, or .png as a strip of frames."""

    def run(self) -> None:
        extras.require_training("agalite eval")
        from agalite.training import evaluate

        evaluate.evaluation(
            self.run_folder,
            episodes=self.episodes,
            greedy=self.greedy,
            best=self.best,
            seed=self.seed,
            seed_number=self.seed_number,
            together=self.together,
            video=self.video,
        )


@dataclass(frozen=True)
class Plot:
    """Draw the learning curves of one or several runs."""

    run_folders: tyro.conf.Positional[tuple[Path, ...]]
    """The folders of the runs."""
    out: Path = Path("curve.png")
    """The file to write: .png or .svg."""
    metric: str | None = None
    """A column of metrics.csv; the return, or for `agalite lra` the accuracy, if not given."""

    def run(self) -> None:
        from agalite.training import plots

        if not self.run_folders:
            raise ValueError("name at least one folder of a run")
        metric = self.metric or plots.main_metric(self.run_folders[0])
        plots.curve(list(self.run_folders), self.out, metric=metric)
        print(f"written to {self.out}")


def _whole_number(words: list[str], option: str) -> int | None:
    """The value of an option, if it has one; whether it is a good one is found out later."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        text = value if equals else following
        if name == option and text.replace("_", "").isdigit():
            return int(text)
    return None


def _report(run: Any) -> None:
    summary = run.read_summary() or {}
    for name, value in sorted(summary.get("last_tenth", {}).items()):
        print(f"{name.removeprefix('charts/'):<24} {value:,.3f}   (mean of the last tenth)")
    print(f"{'steps':<24} {summary.get('steps', 0):,}")
    if run.curve_path.exists():
        print(f"{'curve':<24} {run.curve_path}")
    else:
        print("no episode has ended yet: there is no curve")


@dataclass(frozen=True)
class Demo:
    """Watch an agent learn to remember, beside one that cannot (what `make train` runs)."""

    out: Path = Path("runs/demo")
    """Folder for both runs, their curves, an episode and the summary; continued if it exists."""
    corridor: int = 20
    """Length of the T-Maze: for so many steps the cue must be remembered."""
    steps: int = 500_000
    """Environment steps of each seed."""
    seeds: int = 2
    """Agents of each kind, trained together."""
    seed: int = 0
    """The first seed."""

    def run(self) -> None:
        extras.require_training("agalite demo")
        use_devices(None, self.seeds)
        from agalite import demo

        demo.run(
            self.out, corridor=self.corridor, steps=self.steps, seeds=self.seeds, seed=self.seed
        )


# A command is a dataclass, its fields the options; a group of commands is a dictionary, "" in it
# what the group does by itself.
COMMANDS: dict[str, Any] = {
    "models": Models,
    "envs": {"": Envs, "show": EnvsShow},
    "train": Train,
    "resume": Resume,
    "eval": Eval,
    "plot": Plot,
    "demo": Demo,
    **watch.COMMANDS,
    **export.COMMANDS,
    "lra": lra.COMMANDS,
    "study": study.COMMANDS,
    "bench": bench.COMMANDS,
    "completion": Completion,
}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words == ["--version"]:
        print(__version__)
        return 0
    found, path = COMMANDS, ["agalite"]
    while isinstance(found, dict):
        if "" in found and (not words or words[0].startswith("-")):
            found = found[""]
            break
        if not words or words[0] in ("-h", "--help"):
            print(help.overview(found, path))
            return 0
        if words[0] not in found:
            known = ", ".join(filter(None, found))
            print(
                f"{' '.join(path)}: unknown command {words[0]!r}; known: {known}", file=sys.stderr
            )
            return 2
        found = found[words[0]]
        path.append(words.pop(0))
    # Only a process that was started for this command may be started again for it.
    if arguments is None:
        with _uninterrupted():
            with_huge_pages()
        warnings.showwarning = _show_warning
    return _run(found, words, " ".join(path), debug)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """As a sentence: where in our code it comes from means nothing to who reads it."""
    print(f"warning: {message}", file=sys.stderr)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back, also in the process that this one may turn into, until that lets it come
    (`__main__`): before its first line Python itself would answer, with a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _run(command: type, words: list[str], name: str, debug: bool) -> int:
    import tyro  # after the overview, which should come at once

    def answer(message: object, code: int) -> int:
        if debug:
            traceback.print_exc()
        print(f"{name}: {message}", file=sys.stderr)
        return code

    try:
        try:
            if hasattr(command, "main"):
                command.main(words, name)
            else:
                tyro.cli(command, args=words, prog=name).run()
        except SystemExit as end:  # tyro's: it has printed its help, or what is wrong
            if end.code == 0 and (examples := help.examples(name)):
                print(f"\n{examples}")
            raise
        finally:
            sys.stdout.flush()
    except Stopped as stopped:
        return answer(stopped, stopped.code)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + signal.SIGPIPE
        if isinstance(error, OSError) and error.filename and error.strerror:
            return answer(f"{error.filename}: {error.strerror}", 2)
        return answer(error, 2)
    except KeyboardInterrupt:
        return answer("interrupted", 130)
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        again = name.replace("agalite", "agalite --debug", 1)
        return answer(f"this is a bug in agalite: {what} ({again} ... shows where)", 1)
    return 0


def _nobody_reads() -> bool:
    """Whether what reads our output has gone, as `head` does: no reason to complain."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # it is no file, as in a test
        return False
    poll = select.poll()
    poll.register(output, 0)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:  # Python flushes once more at its end, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone


if __name__ == "__main__":  # as `python -m agalite`, which is the better way
    from agalite.__main__ import main as guarded

    sys.exit(guarded())
