"""`agalite completion bash|zsh`: a script that lets the tab key finish commands and options.

The script holds all the words itself, so that completing one does not start Python.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tyro.conf

from agalite import help


@dataclass(frozen=True)
class Completion:
    """Print a script that lets the tab key finish commands and options."""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """bash or zsh."""

    def run(self) -> None:
        from agalite.cli import COMMANDS

        print(script(self.shell, COMMANDS))


def script(shell: str, commands: dict[str, Any]) -> str:
    choices = _choices()
    named = {
        "train": choices["env"],
        "envs show": choices["env"],
        "completion": ["bash", "zsh"],
        "lra baselines": ["listops", "text"],
    }
    paths = _groups(commands, [])
    options = {
        path.removeprefix("agalite "): _options(command, path, choices)
        for path, command in help.leaves(commands, ["agalite"])
    }
    for path in options:
        paths.setdefault(path, [])
    known = "|".join(_quoted(f" {path}") for path in paths if path)
    branches = []
    for path, subcommands in paths.items():
        words = [*subcommands, *named.get(path, [])]
        ours = options.get(path, ["--help"]) if path else ["--debug", "--help", "--version"]
        branches.append(_branch(f" {path}" if path else "", words, ours))
    values = [
        f"        {option}) words={_quoted(' '.join(choices[name]))} ;;"
        for option, name in _VALUES.items()
    ]
    return _SCRIPT.format(
        zsh="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        known=known,
        values="\n".join(values),
        branches="\n".join(branches),
    )


_VALUES = {
    "--memory": "memory",
    "--preset": "preset",
    "--algorithm": "algorithm",
    "--model.basis": "basis",
}

_SCRIPT = """\
# Made by `agalite completion`; make it anew after an upgrade.
{zsh}_agalite() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="" words="" options="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$command ${{COMP_WORDS[i]}}" in
            {known}) command="$command ${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$prev" in
{values}
        *)
            case "$command" in
{branches}
            esac
            case "$cur" in
                -*) words="$options" ;;
            esac
            ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _agalite agalite"""


def _branch(path: str, words: Sequence[str], options: Sequence[str]) -> str:
    words_and_options = f"words={_quoted(' '.join(words))} options={_quoted(' '.join(options))}"
    return f"                {_quoted(path)}) {words_and_options} ;;"


def _quoted(text: str) -> str:
    return f'"{text}"'


def _groups(group: Mapping[str, Any], path: list[str]) -> dict[str, list[str]]:
    """What can follow each group of commands; "" is the program itself."""
    out = {" ".join(path): [name for name in group if name]}
    for name, found in group.items():
        if isinstance(found, dict):
            out |= _groups(found, [*path, name])
    return out


def _choices() -> dict[str, list[str]]:
    from agalite.envs.registry import ENVIRONMENTS
    from agalite.memory.registry import MODELS
    from agalite.ops.delta import BASES

    return {
        "env": list(ENVIRONMENTS),
        "memory": list(MODELS),
        "preset": ["tuned", "paper"],
        "algorithm": ["a2c", "ppo", "appo"],
        "basis": list(BASES),
    }


def _options(command: Any, path: str, choices: Mapping[str, Sequence[str]]) -> list[str]:
    """All that a command may take; which ones `train` does depends on its first words."""
    variants: list[list[str]] = [[]]
    if path == "agalite train":
        variants = [["tmaze", *words] for words in _memories(choices)]
        variants += [["masked-cartpole"], ["gym:CartPole-v1"]]
    elif path in ("agalite lra listops", "agalite lra text"):
        variants = _memories(choices)
    found: set[str] = set()
    for words in variants:
        try:
            found |= set(help.options(command, path, *words))
        except ValueError:  # an extra is not installed: without it the command does nothing
            found.add("--help")
    return sorted(found)


def _memories(choices: Mapping[str, Sequence[str]]) -> list[list[str]]:
    return [["--memory", name] for name in choices["memory"]]
