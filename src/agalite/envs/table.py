"""The table that `agalite envs` prints."""

from typing import Any

from rich.console import Console
from rich.table import Table

from agalite.envs.registry import ENVIRONMENTS, make


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """(name, observation, actions, steps an episode may last, extra, what it is) of each."""
    out = []
    for name, environment in ENVIRONMENTS.items():
        if environment.missing():
            row = ("not installed:", environment.installation, "")
        else:
            row = _spaces(make(name))
        out.append((name, *row, environment.extra, environment.summary))
    return out


def _spaces(world: Any) -> tuple[str, str, str]:
    from agalite.envs.spaces import describe

    params = world.default_params
    observation, action = world.observation_space(params), world.action_space(params)
    return describe(observation), describe(action), str(int(params.max_steps_in_episode))


def show() -> None:
    table = Table(title="Environments")
    for column in ("name", "observation", "actions", "limit", "extra", "what it is"):
        table.add_column(
            column, justify="right" if column == "limit" else "left", no_wrap=column == "name"
        )
    for row in rows():
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(
        "gym:<id> is any Gymnasium environment, for example gym:CartPole-v1.\n"
        "agalite envs show NAME --out episode.gif makes a picture of one.",
        highlight=False,
        soft_wrap=True,
    )
