"""The command line: a thin layer over the library. `agalite` alone says what there is."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agalite.process import with_huge_pages
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
class Throughput:
    """Measure speed and memory, as ratios taken in one run."""

    models: bool = True
    """The memory models: forward and backward over sequences, and one streaming step."""
    rounds: int = 20
    """How often each is timed; they take turns, so that a busy machine slows all alike."""
    out: Path | None = None
    """Also write the measurements to this JSON file."""

    def run(self) -> None:
        from agalite.bench import throughput

        throughput.run(models=self.models, rounds=self.rounds, out=self.out)


# A command is a dataclass, its fields the options; a group of commands is a dictionary.
COMMANDS: dict[str, Any] = {
    "models": Models,
    "bench": {"throughput": Throughput},
}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(__version__)
        return 0
    found, path = COMMANDS, ["agalite"]
    while isinstance(found, dict):
        if not words or words[0] in ("-h", "--help"):
            print(_overview(found, path))
            return 0
        if words[0] not in found:
            known = ", ".join(found)
            print(
                f"{' '.join(path)}: unknown command {words[0]!r}; known: {known}", file=sys.stderr
            )
            return 2
        found = found[words[0]]
        path.append(words.pop(0))
    return _run(found, words, " ".join(path))


def _run(command: type, words: list[str], name: str) -> int:
    import tyro  # after the overview, which should come at once

    options = tyro.cli(command, args=words, prog=name)
    with_huge_pages()
    try:
        options.run()
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
        here = [*path, name]
        out += _leaves(found, here) if isinstance(found, dict) else [(" ".join(here), found)]
    return out


if __name__ == "__main__":
    sys.exit(main())
