"""The command line: a thin layer over the library. `agalite` alone says what there is."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro.conf

from agalite import extras
from agalite.process import Stopped, use_devices, with_huge_pages
from agalite.studies import command as study
from agalite.supervised import command as lra
from agalite.version import __version__


@dataclass(frozen=True)
class Models:
    """List the memory models, with their sizes at the paper's T-Maze settings."""

    input_size: int = 16
    """Width of an observation (16 is T-Maze's)."""

    def run(self) -> None:
        from agalite.memory import table

        table.show(self.input_size)


@dataclass(frozen=True)
class Envs:
    """List the environments, with their spaces and limits."""

    def run(self) -> None:
        from agalite.envs import table

        table.show()


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
        from agalite.envs import show

        show.show(
            self.name, out=self.out, seed=self.seed, steps=self.steps, fps=self.fps,
            options=self.set,
        )  # fmt: skip


class Train:
    """Train an agent that remembers."""

    @staticmethod
    def main(words: list[str], name: str) -> None:
        """Which options there are depends on the environment, the model and the algorithm."""
        extras.require_training(name)
        # Before the environments are looked at: the first of them wakes JAX up.
        use_devices(_whole_number(words, "--devices"), _whole_number(words, "--seeds") or 1)
        from agalite.training import options

        choices, config = options.parse(words, name)
        folder = choices.out or options.new_folder(config)
        from agalite.training.train import train

        print(f"training into {folder}", file=sys.stderr)
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
        from agalite.training import report

        report.evaluation(
            self.run_folder, episodes=self.episodes, greedy=self.greedy, best=self.best,
            seed=self.seed, seed_number=self.seed_number, together=self.together, video=self.video,
        )  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """Draw the learning curves of one or several runs."""

    run_folders: tyro.conf.Positional[tuple[Path, ...]]
    """The folders of the runs."""
    out: Path = Path("curve.png")
    """The file to write: .png or .svg."""
    metric: str = "charts/episodic_return"
    """A column of metrics.csv."""

    def run(self) -> None:
        from agalite.training import plots

        if not self.run_folders:
            raise ValueError("name at least one folder of a run")
        plots.curve(list(self.run_folders), self.out, metric=self.metric)
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
    print(f"{'curve':<24} {run.curve_path}")


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


@dataclass(frozen=True)
class Throughput:
    """Measure speed and memory, as ratios taken in one run."""

    models: bool = False
    """The memory models: forward and backward over sequences, and one streaming step."""
    envs: bool = False
    """The environments: steps a second of random actions."""
    training: bool = False
    """Training in T-Maze at the paper's settings: steps a second, share of the product rate."""
    lra: bool = False
    """Classifiers of sequences of 2048 and 4096 tokens: forward and backward."""
    asynchronous: Annotated[bool, tyro.conf.arg(name="async", aliases=["--asynchronous"])] = False
    """Acting and learning side by side against one after the other, in a slow environment."""
    memory_maze: bool = False
    """AGaLiTe and GTrXL-256 at the paper's size for Memory Maze: frames a second and memory."""
    craftax: bool = False
    """With --envs: Craftax too, which compiles for minutes."""
    rounds: int = 20
    """How often each is timed; they take turns, so that a busy machine slows all alike."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:
        from agalite.bench import throughput

        parts = [name for name in throughput.PARTS if getattr(self, name)]
        options = {"craftax": self.craftax} if self.envs else {}
        throughput.run(parts, rounds=self.rounds, out=self.out, **options)


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
    "lra": lra.COMMANDS,
    "study": study.COMMANDS,
    "bench": {"throughput": Throughput},
}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(__version__)
        return 0
    found, path = COMMANDS, ["agalite"]
    while isinstance(found, dict):
        if "" in found and (not words or words[0].startswith("-")):
            found = found[""]
            break
        if not words or words[0] in ("-h", "--help"):
            print(_overview(found, path))
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
    return _run(found, words, " ".join(path))


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


def _run(command: type, words: list[str], name: str) -> int:
    import tyro  # after the overview, which should come at once

    try:
        if hasattr(command, "main"):
            command.main(words, name)
        else:
            tyro.cli(command, args=words, prog=name).run()
    except Stopped as stopped:
        print(f"{name}: {stopped}; all is saved: agalite resume", file=sys.stderr)
        return stopped.code
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return 0


def _overview(group: dict[str, Any], path: list[str]) -> str:
    lines = [f"agalite {__version__}: memory for online reinforcement learning", ""]
    for name, command in _leaves(group, path):
        lines.append(f"  {name:<28} {(command.__doc__ or '').splitlines()[0]}")
    return "\n".join([*lines, "", f"  {'agalite COMMAND --help':<28} The options of a command."])


def _leaves(group: dict[str, Any], path: list[str]) -> list[tuple[str, type]]:
    out: list[tuple[str, type]] = []
    for name, found in group.items():
        here = [*path, name] if name else path
        out += _leaves(found, here) if isinstance(found, dict) else [(" ".join(here), found)]
    return out


if __name__ == "__main__":  # as `python -m agalite`, which is the better way
    from agalite.__main__ import main as guarded

    sys.exit(guarded())
