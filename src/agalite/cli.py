"""The command line: a thin layer over the library. `agalite` alone says what there is."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro.conf

from agalite.process import Stopped, use_devices, with_huge_pages
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
    """The file to write: .gif, or .png for a strip of frames."""
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
        import time

        # Before the environments are looked at: the first of them wakes JAX up.
        use_devices(_whole_number(words, "--devices"), _whole_number(words, "--seeds") or 1)
        from agalite.training import options

        choices, config = options.parse(words, name)
        folder = choices.out or Path("runs") / (
            f"{config.env}-{config.memory}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        from agalite.training.train import train

        print(f"training into {folder}", file=sys.stderr)
        _report(train(config, folder))


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest checkpoint, to the same end."""

    run_folder: tyro.conf.Positional[Path]
    """The folder of the run."""
    devices: int | None = None
    """CPU devices to spread the seeds over."""

    def run(self) -> None:
        from agalite.training.run import Run

        use_devices(self.devices, int(Run.open(self.run_folder).config.get("seeds", 1)))
        from agalite.training.train import resume

        _report(resume(self.run_folder))


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
    """Also write one episode to this .gif, or .png as a strip of frames."""

    def run(self) -> None:
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
class Throughput:
    """Measure speed and memory, as ratios taken in one run."""

    models: bool = False
    """The memory models: forward and backward over sequences, and one streaming step."""
    envs: bool = False
    """The environments: steps a second of random actions."""
    craftax: bool = False
    """With --envs: Craftax too, which compiles for minutes."""
    rounds: int = 20
    """How often each is timed; they take turns, so that a busy machine slows all alike."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:
        from agalite.bench import throughput

        throughput.run(
            models=self.models,
            envs=self.envs,
            craftax=self.craftax,
            rounds=self.rounds,
            out=self.out,
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
        with_huge_pages()
    return _run(found, words, " ".join(path))


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


if __name__ == "__main__":
    sys.exit(main())
