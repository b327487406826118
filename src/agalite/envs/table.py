"""The table that `agalite envs` prints."""

import contextlib
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agalite.envs.registry import ENVIRONMENTS, make


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """(name, observation, actions, steps an episode may last, extra, what it is) of each."""
    out = []
    for name, environment in ENVIRONMENTS.items():
        if environment.missing():
            row = ("not installed", "", "")
        elif environment.host:
            row = _gymnasium_spaces(environment.gymnasium)
        else:
            row = _spaces(make(name))
        out.append((name, *row, environment.extra, environment.summary))
    return out


def _spaces(world: Any) -> tuple[str, str, str]:
    from agalite.envs.spaces import describe

    params = world.default_params
    observation, action = world.observation_space(params), world.action_space(params)
    return describe(observation), describe(action), str(int(params.max_steps_in_episode))


def _gymnasium_spaces(env_id: str) -> tuple[str, str, str]:
    import gymnasium

    from agalite.envs.spaces import describe

    with contextlib.closing(gymnasium.make(env_id)) as env:
        limit = env.get_wrapper_attr("max_steps")
        return describe(env.observation_space), describe(env.action_space), str(limit)


COLUMNS = ("name", "observation", "actions", "limit", "extra", "what it is")
ROOM = 120  # columns that the table needs


def show() -> None:
    console = Console()
    if not console.is_terminal:  # a file or a pipe is as wide as it must be
        console = Console(width=max(ROOM, console.width))
    if console.width >= ROOM:
        table = Table(title="Environments")
        for column in COLUMNS:
            table.add_column(
                column, justify="right" if column == "limit" else "left", overflow="fold",
                no_wrap=column == "name",
            )  # fmt: skip
        for row in rows():
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    else:
        for name, *rest in rows():
            console.print(Text(name, style="bold"))
            for column, cell in zip(COLUMNS[1:], rest, strict=True):
                if cell:
                    console.print(Text(f"  {column}: {cell}"), soft_wrap=True)
    for name, environment in ENVIRONMENTS.items():
        if environment.missing():
            console.print(Text(f"{name} needs: {environment.installation}"), soft_wrap=True)
    console.print(
        "gym:<id> is any Gymnasium environment, for example gym:CartPole-v1.\n"
        "agalite envs show NAME --out episode.gif makes a picture of one.",
        highlight=False,
        soft_wrap=True,
    )
