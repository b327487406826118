"""What the command line says about itself: the overview, and examples under every --help."""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from typing import Any

from agalite.version import __version__

# Every command has at least one; the tests hold them to the parser. Runs are called runs/NAME.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "agalite models": ("agalite models", "agalite models --input-size 64"),
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
    ),
    "agalite study status": ("agalite study status tmaze --scale cpu",),
    "agalite study report": ("agalite study report tmaze --scale cpu --to results",),
    "agalite bench throughput": (
        "agalite bench throughput --models",
        "agalite bench throughput --training --rounds 5",
    ),
    "agalite bench latency": ("agalite bench latency --quick",),
    "agalite bench cost": ("agalite bench cost --quick",),
    "agalite bench compare": ("agalite bench compare before.json after.json",),
    "agalite completion": (
        "agalite completion bash > ~/.agalite.bash    # then in ~/.bashrc: source ~/.agalite.bash",
        "agalite completion zsh > ~/.agalite.zsh      # in ~/.zshrc, after compinit: source ...",
    ),
}

_FIRST = """\
Begin with:
  agalite demo                              an agent learns to remember, beside one that cannot
  agalite train tmaze --memory agalite      train one yourself; any world, any memory
"""

_LAST = """\
  agalite COMMAND --help       Its options, and examples.
  agalite --debug COMMAND      With the stack trace, if something goes wrong.
  agalite completion bash      Commands and options by the tab key; also for zsh."""


def overview(group: dict[str, Any], path: list[str]) -> str:
    """The commands of a group, a line each; of the whole program also where to begin."""
    whole = path == ["agalite"]
    lines = [f"agalite {__version__}: memory for online reinforcement learning", ""]
    lines += [_FIRST] if whole else []
    for name, command in leaves(group, path):
        if name != "agalite completion":
            lines.append(f"  {name:<28} {summary(command)}")
    last = _LAST if whole else _LAST.splitlines()[0]
    return "\n".join([*lines, "", last])


def examples(name: str) -> str:
    """What is printed under a command's --help."""
    lines = [f"  {line}" for line in EXAMPLES.get(name, ())]
    return "\n".join(["examples:", *lines]) if lines else ""


def summary(command: type) -> str:
    return (command.__doc__ or "").splitlines()[0]


def leaves(group: dict[str, Any], path: list[str]) -> list[tuple[str, type]]:
    """The commands of a group and its groups, each with its whole name."""
    out: list[tuple[str, type]] = []
    for name, found in group.items():
        here = [*path, name] if name else path
        out += leaves(found, here) if isinstance(found, dict) else [(" ".join(here), found)]
    return out


def text(command: Any, name: str, *words: str) -> str:
    """What `NAME WORDS --help` prints, without colours, as wide as the page of commands."""
    import tyro

    printed = io.StringIO()
    with _columns(84), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        if hasattr(command, "main"):
            command.main([*words, "--help"], name)
        else:
            tyro.cli(command, args=[*words, "--help"], prog=name)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())
    return "\n".join(line.rstrip() for line in plain.splitlines()).strip()


def options(command: Any, name: str, *words: str) -> list[str]:
    """The names of a command's options, as its --help has them."""
    starts = re.findall(r"^[│ ] (-.*?)(?:  |│|$)", text(command, name, *words), flags=re.MULTILINE)
    return sorted({option for start in starts for option in re.findall(r"--[a-z][\w.-]*", start)})


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
