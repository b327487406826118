"""`agalite envs show`: a random episode as a moving picture."""

import ast
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from agalite import validation
from agalite.envs import rendering
from agalite.envs.registry import ENVIRONMENTS, make, on_host
from agalite.envs.rendering import LONGEST, Episode, play, speed


def show(
    name: str,
    *,
    out: Path,
    seed: int,
    steps: int | None,
    fps: float | None,
    options: Sequence[str],
) -> None:
    if steps is not None:
        validation.integer("steps", steps, minimum=1)
    validation.integer_between("seed", seed, 0, 2**32 - 1)
    if fps is not None and not 0 < fps <= 100:
        raise ValueError(f"fps={fps!r} must be above 0 and at most 100")
    rendering.check_path(out)
    chosen = parse_options(options)
    usual = 30.0
    if on_host(name):
        frames, total, why = _gymnasium_episode(name, chosen, seed, steps or LONGEST)
    else:
        world: Any = make(name, **chosen)
        usual = speed(world)
        limit = int(world.default_params.max_steps_in_episode)
        frames, total, why = _world_episode(world, seed, steps or min(limit, LONGEST))
    rendering.write(frames, out, fps=fps or usual)
    Console().print(
        f"{name}: {len(frames) - 1} steps of random actions, return {total:.2f}, {why}; "
        f"written to {out}",
        highlight=False,
        soft_wrap=True,
    )


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """["corridor=20", ...] -> {"corridor": 20, ...}; what is no Python value is text."""
    options = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise ValueError(f"option {word!r} must look like NAME=VALUE, for example corridor=20")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def _world_episode(world: Any, seed: int, steps: int) -> Episode:
    space = world.action_space(world.default_params)

    def at_random(key: jax.Array, memory: Any, *_: Any) -> tuple[Any, jax.Array]:
        return memory, space.sample(key)

    counted = track(range(steps), description="playing", transient=True)
    return play(world, at_random, None, seed=seed, steps=counted)


def _gymnasium_episode(name: str, options: dict[str, Any], seed: int, steps: int) -> Episode:
    vector: Any = make(name, **{"render_mode": "rgb_array", "seed": seed, **options, "count": 1})
    with vector:
        vector.reset()
        vector.action_space.seed(seed)
        frames, total, why = [vector.render()], 0.0, "stopped before its end"
        for _ in track(range(steps), description="playing", transient=True):
            result = vector.step(np.asarray(vector.action_space.sample())[None])
            total += float(result.reward[0])
            if result.terminated[0] or result.truncated[0]:  # a frame would be of the next episode
                why = "ended" if result.terminated[0] else "stopped by the time limit"
                break
            frames.append(vector.render())
    return Episode(frames, total, why)


# --- The table that `agalite envs` prints ---------------------------------------------------------


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
    from agalite.envs.gymnasium.spaces import describe

    params = world.default_params
    observation, action = world.observation_space(params), world.action_space(params)
    return describe(observation), describe(action), str(int(params.max_steps_in_episode))


def _gymnasium_spaces(env_id: str) -> tuple[str, str, str]:
    import gymnasium

    from agalite.envs.gymnasium.spaces import describe

    with contextlib.closing(gymnasium.make(env_id)) as env:
        limit = env.get_wrapper_attr("max_steps")
        return describe(env.observation_space), describe(env.action_space), str(limit)


COLUMNS = ("name", "observation", "actions", "limit", "extra", "what it is")
ROOM = 120  # columns that the table needs


def show_table() -> None:
    console = Console()
    if not console.is_terminal:  # a file or a pipe is as wide as it must be
        console = Console(width=max(ROOM, console.width))
    if console.width >= ROOM:
        table = Table(title="Environments")
        for column in COLUMNS:
            table.add_column(
                column,
                justify="right" if column == "limit" else "left",
                overflow="fold",
                no_wrap=column == "name",
            )
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
