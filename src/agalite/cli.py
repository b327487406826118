"""The command line: commands, their help, and how errors are shown.

A command is a dataclass whose fields are its options and whose `run` does the work; tyro makes the
parser. A class with `main(words, name)` instead parses its own words (`agalite train`). Nothing
heavy is imported until a command runs, so that `agalite --help` is fast.
"""

import contextlib
import io
import os
import re
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
import tyro.conf

from agalite import extras
from agalite.bench import command as bench
from agalite.export import command as export
from agalite.soak import command as soak
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
        from agalite.memory import registry

        registry.print_models(self.input_size)


@dataclass(frozen=True)
class Presets:
    """Show the presets of `agalite train` side by side, where they differ, as Markdown."""

    memory: str = "agalite"
    """Memory model."""

    def run(self) -> None:
        extras.require_training("agalite presets")
        from agalite.training.presets import preset_table

        print(preset_table(self.memory))


@dataclass(frozen=True)
class Envs:
    """List the environments, with their spaces and limits."""

    def run(self) -> None:
        from agalite.envs import command as table

        table.show_table()


@dataclass(frozen=True)
class EnvsShow:
    """Write a video of an episode with random actions."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """Environment: a name that `agalite envs` lists, or gym:<id>."""
    out: Path
    """File to write: .mp4 or .gif, or .png for a strip of frames."""
    seed: int = 0
    """Random seed of the episode and its actions."""
    steps: int | None = None
    """Stop after so many steps, if the episode has not ended; 1000 if not given."""
    fps: float | None = None
    """Frames per second; the environment's own speed if not given."""
    set: tuple[str, ...] = ()
    """Options of the environment, for example: --set corridor=20."""
    package: Annotated[str | None, tyro.conf.arg(name="import", metavar="PACKAGE")] = None
    """Package to import before the environment is made, as in `train`."""

    def run(self) -> None:
        from agalite.envs import command as show
        from agalite.envs.registry import with_import

        show.show(
            with_import(self.name, self.package),
            out=self.out,
            seed=self.seed,
            steps=self.steps,
            fps=self.fps,
            options=self.set,
        )


class Train:
    """Train an agent with memory."""

    @staticmethod
    def main(words: list[str], name: str) -> None:
        """Which options there are depends on the environment, the model and the algorithm."""
        extras.require_training(name)
        from agalite.training import command

        parsed = command.parse_choices(words, name)
        choices = parsed.choices
        # Before the rest is parsed: that imports the environment, which initialises JAX's devices.
        use_devices(choices.devices, choices.seeds or 1)
        config = command.parse_config(parsed, name)
        from agalite.training.presets import new_folder
        from agalite.training.train import train

        folder = choices.out or new_folder(config)
        _print_summary(train(config, folder, wandb=choices.wandb, ray=choices.ray))

    @staticmethod
    def options() -> type:
        """The options that every environment has, for completion."""
        from agalite.training.command import Choices

        return Choices


@dataclass(frozen=True)
class Resume:
    """Continue a run from its newest checkpoint."""

    run_folder: tyro.conf.Positional[Path]
    """Folder of the run."""
    devices: int | None = None
    """CPU devices to train the seeds on, as in `train`."""
    ray: str | None = None
    """Address of a Ray cluster for the actors, as in `train`."""

    def run(self) -> None:
        extras.require_training("agalite resume")
        from agalite.training.run import Run

        run = Run.open(self.run_folder)
        is_lra = lra.is_lra_run(run)
        use_devices(self.devices, int(run.config.get("seeds", 1)), uneven=not is_lra)
        if is_lra:
            return lra.resume(self.run_folder)
        from agalite.training.train import resume

        return _print_summary(resume(self.run_folder, ray=self.ray))


@dataclass(frozen=True)
class Eval:
    """Score a trained agent over whole episodes."""

    run_folder: tyro.conf.Positional[Path]
    """Folder of the run."""
    episodes: int = 100
    """Episodes to play."""
    greedy: bool = False
    """Take the most likely action instead of a sampled one."""
    best: bool = False
    """Use the checkpoint with the highest return instead of the newest."""
    seed: int = 0
    """Random seed of the episodes."""
    seed_number: int = 0
    """Which of the run's seeds to use: 0 is the first."""
    num_envs: int = 64
    """Parallel environments."""
    video: Path | None = None
    """Also write one episode to this file: .mp4 or .gif, or .png for a strip of frames."""

    def run(self) -> None:
        extras.require_training("agalite eval")
        from agalite.training import evaluate

        evaluate.report(
            self.run_folder,
            episodes=self.episodes,
            greedy=self.greedy,
            best=self.best,
            seed=self.seed,
            seed_number=self.seed_number,
            num_envs=self.num_envs,
            video=self.video,
        )


@dataclass(frozen=True)
class Plot:
    """Draw the learning curves of one or several runs."""

    run_folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of the runs."""
    out: Path = Path("curve.png")
    """File to write: .png or .svg."""
    metric: str | None = None
    """Column of metrics.csv; the return, or for `agalite lra` the accuracy, if not given."""

    def run(self) -> None:
        from agalite.training import plots

        if not self.run_folders:
            raise ValueError("name at least one folder of a run")
        metric = self.metric or plots.main_metric(self.run_folders[0])
        plots.curve(list(self.run_folders), self.out, metric=metric)
        print(f"written to {self.out}")


def _print_summary(run: Any) -> None:
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
    """Train an agent with memory and one without, and compare them (what `make train` runs)."""

    out: Path = Path("runs/demo")
    """Folder for both runs, their curves, an episode and the summary; continued if it exists."""
    corridor: int = 100
    """Length of the T-Maze: the number of steps for which the cue must be remembered."""
    steps: int = 500_000
    """Environment steps of each seed."""
    seeds: int = 2
    """Seeds of each agent."""
    seed: int = 0
    """First random seed."""

    def run(self) -> None:
        extras.require_training("agalite demo")
        use_devices(None, self.seeds)
        from agalite import demo

        demo.run(
            self.out, corridor=self.corridor, steps=self.steps, seeds=self.seeds, seed=self.seed
        )


@dataclass(frozen=True)
class Completion:
    """Print a script for completion by the tab key."""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """bash or zsh."""

    def run(self) -> None:
        commands = _completable("agalite", COMMANDS)
        with contextlib.suppress(SystemExit):  # tyro exits after printing the script
            tyro.cli(commands, prog="agalite", args=["--tyro-print-completion", self.shell])


def _completable(name: str, command: Any) -> Any:
    """A command, or a group as a union of commands, as a type for tyro's completion."""
    if isinstance(command, dict):
        found: Any = Union[tuple(_completable(*item) for item in command.items())]  # noqa: UP007
    elif hasattr(command, "main"):
        # Options that depend on the environment or the memory model cannot be completed: tyro's
        # script is made once, for all of them.
        found = command.options() if hasattr(command, "options") else make_dataclass(name, [])
    else:
        found = command
    return Annotated[found, tyro.conf.subcommand(name, prefix_name=False)]


# A group of commands is a dictionary; "" in it is the command that the group itself is.
COMMANDS: dict[str, Any] = {
    "models": Models,
    "presets": Presets,
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
    "soak": soak.COMMANDS,
    "completion": Completion,
}

# Printed under the --help of a command, at least one for each; the tests parse them all.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "agalite models": ("agalite models", "agalite models --input-size 64"),
    "agalite presets": ("agalite presets", "agalite presets --memory gru"),
    "agalite envs": ("agalite envs", "agalite envs show tmaze --out episode.gif"),
    "agalite envs show": (
        "agalite envs show tmaze --out episode.gif --set corridor=10",
        "agalite envs show gym:CartPole-v1 --out episode.png",
    ),
    "agalite train": (
        "agalite train tmaze --memory agalite --corridor 20 --steps 500_000",
        "agalite train masked-cartpole --memory gru --algorithm ppo --seeds 4 --out runs/cartpole",
        "agalite train tmaze --memory gtrxl --model.memory 128 --preset paper",
        "agalite train gym:CartPole-v1 --memory agalite",
        "agalite train gym:MyEnv-v0 --import my_package    # the same as gym:my_package:MyEnv-v0",
        "agalite train mystery-path-grid --memory gtrxl --help    # the options of that choice",
    ),
    "agalite resume": ("agalite resume runs/NAME",),
    "agalite eval": (
        "agalite eval runs/NAME --episodes 500",
        "agalite eval runs/NAME --greedy --best --video episode.gif",
    ),
    "agalite plot": (
        "agalite plot runs/A runs/B --out curves.png",
        "agalite plot runs/NAME --metric charts/success",
    ),
    "agalite demo": ("agalite demo", "agalite demo --corridor 10 --steps 200_000 --out runs/short"),
    "agalite export": (
        "agalite export runs/NAME --onnx policy.onnx",
        "agalite export runs/NAME --best --stablehlo policy.bin",
    ),
    "agalite watch": (
        "agalite watch runs/NAME --out page.html",
        "agalite watch runs/NAME --greedy --best --out episode.gif",
    ),
    "agalite lra listops": (
        "agalite lra listops --memory agalite --seeds 2",
        "agalite lra listops --memory gru --max-length 600 --train-examples 2000",
    ),
    "agalite lra text": ("agalite lra text --memory linear",),
    "agalite lra baselines": ("agalite lra baselines text",),
    "agalite lra report": ("agalite lra report runs/A runs/B --out results/lra-text.md",),
    "agalite study list": ("agalite study list",),
    "agalite study run": (
        "agalite study run tmaze",
        "agalite study run tmaze --scale cpu --only agent=agalite agent=gru --jobs 2",
        "agalite study run --all --scale cpu --jobs 2 --hours 8",
    ),
    "agalite study claims": (
        "agalite study claims --out results/studies",
        "agalite study claims --out results/studies --into docs/results.md",
    ),
    "agalite study status": ("agalite study status tmaze --scale cpu",),
    "agalite study report": ("agalite study report tmaze --scale cpu --to results",),
    "agalite bench throughput": (
        "agalite bench throughput --models",
        "agalite bench throughput --training --rounds 5",
    ),
    "agalite bench latency": ("agalite bench latency --quick",),
    "agalite bench cost": ("agalite bench cost --quick",),
    "agalite bench start": ("agalite bench start --rounds 1",),
    "agalite bench seeds": ("agalite bench seeds --rounds 1",),
    "agalite bench traces": ("agalite bench traces --rounds 5",),
    "agalite bench stream": ("agalite bench stream --rounds 1 --steps 10000000",),
    "agalite bench popgym": ("agalite bench popgym --families RepeatFirst Battleship",),
    "agalite bench compare": ("agalite bench compare before.json after.json",),
    "agalite bench history": ("agalite bench history results/throughput-*.json",),
    "agalite soak kills": ("agalite soak kills --runs 5",),
    "agalite soak disk": ("agalite soak disk --rounds 1",),
    "agalite soak asynchronous": ("agalite soak asynchronous --minutes 2",),
    "agalite soak input": ("agalite soak input --cases 1000",),
    "agalite soak stream": ("agalite soak stream --steps 1_000_000",),
    "agalite soak all": ("agalite soak all", "agalite soak all --share 0.05 --out /tmp/short"),
    "agalite completion": (
        "agalite completion bash > ~/.agalite.bash    # then in ~/.bashrc: source ~/.agalite.bash",
        "agalite completion zsh > ~/.agalite.zsh      # in ~/.zshrc, after compinit: source ...",
    ),
}

_START = """\
Start here:
  agalite demo                              train an agent with memory and one without
  agalite train tmaze --memory agalite      train one yourself, in any environment
"""

_MORE = """\
  agalite COMMAND --help       Options and examples of a command.
  agalite --debug COMMAND      Show the stack trace of an error.
  agalite completion bash      Print a completion script; also for zsh."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    **Arguments:**

    - `arguments`: the words after `agalite`; those of this process if not given.
    """
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
            print(overview(found, path))
            return 0
        if words[0] not in found:
            known = ", ".join(filter(None, found))
            print(
                f"{' '.join(path)}: unknown command {words[0]!r}; known: {known}", file=sys.stderr
            )
            return 2
        found = found[words[0]]
        path.append(words.pop(0))
    # Only a process that was started for this command may be restarted, not that of a caller.
    if arguments is None:
        with _uninterrupted():
            with_huge_pages()
        warnings.showwarning = _show_warning
    return _run(found, words, " ".join(path), debug)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints only the message: the line of code does not help a user."""
    print(f"warning: {message}", file=sys.stderr)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Blocks Ctrl-C, also in the process that replaces this one, until `__main__` unblocks it.

    Before the first line of `__main__` runs there, Python would answer it with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _run(command: type, words: list[str], name: str, debug: bool) -> int:
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
        except SystemExit as end:  # tyro's, after it printed the help or an error
            if end.code == 0 and (text := examples(name)):
                print(f"\n{text}")
            raise
        finally:
            sys.stdout.flush()
    except Stopped as stopped:
        return answer(stopped, stopped.code)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
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


def _reader_is_gone() -> bool:
    """Whether the reader of the output has closed the pipe, as `head` does; that is no error."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # stdout is not a file, as in a test
        return False
    poll = select.poll()
    poll.register(output, 0)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:  # Python flushes stdout once more when it exits, which would fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone


def all_commands(group: dict[str, Any], path: list[str]) -> list[tuple[str, type]]:
    """The commands of a group and of its groups, each with its whole name."""
    out: list[tuple[str, type]] = []
    for name, found in group.items():
        here = [*path, name] if name else path
        out += all_commands(found, here) if isinstance(found, dict) else [(" ".join(here), found)]
    return out


def overview(group: dict[str, Any], path: list[str]) -> str:
    """The commands of a group, a line each; for the whole program also where to start."""
    whole = path == ["agalite"]
    lines = [f"agalite {__version__}: memory for online reinforcement learning", ""]
    lines += [_START] if whole else []
    for name, command in all_commands(group, path):
        if name != "agalite completion":
            lines.append(f"  {name:<28} {summary(command)}")
    return "\n".join([*lines, "", _MORE if whole else _MORE.splitlines()[0]])


def summary(command: type) -> str:
    """The first line of a command's docstring."""
    return (command.__doc__ or "").splitlines()[0]


def examples(name: str) -> str:
    """The examples that are printed under a command's --help."""
    lines = [f"  {line}" for line in EXAMPLES.get(name, ())]
    return "\n".join(["examples:", *lines]) if lines else ""


def help_text(command: Any, name: str, *words: str) -> str:
    """What `NAME WORDS --help` prints, without colours and 84 characters wide, for the docs."""
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "84"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            if hasattr(command, "main"):
                command.main([*words, "--help"], name)
            else:
                tyro.cli(command, args=[*words, "--help"], prog=name)
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())
    return "\n".join(line.rstrip() for line in plain.splitlines()).strip()


if __name__ == "__main__":  # as `python -m agalite`, but without its handling of Ctrl-C at once
    from agalite.__main__ import main as guarded

    sys.exit(guarded())
