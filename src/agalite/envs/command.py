"""`agalite envs` and `agalite envs show`: the table of environments, and a random episode."""

import ast
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agalite.envs.rendering import Episode

COLUMNS = ("name", "observation", "actions", "limit", "extra", "what it is")
_TABLE_WIDTH = 120  # characters; narrower terminals get a list


def show_table() -> None:
    """Print the environments: as a table, or as a list where that does not fit."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from agalite.envs.registry import ENVIRONMENTS

    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(width=max(_TABLE_WIDTH, console.width))
    if console.width >= _TABLE_WIDTH:
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
    for name, spec in ENVIRONMENTS.items():
        if spec.missing_packages():
            console.print(Text(f"{name} needs: {spec.install_hint}"), soft_wrap=True)
    console.print(
        "gym:<id> is any Gymnasium environment, for example gym:CartPole-v1.\n"
        "gym:<package>:<id> imports the package that registers it first.\n"
        "agalite envs show NAME --out episode.gif makes a picture of one.",
        highlight=False,
        soft_wrap=True,
    )


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """The cells of the table, as in `COLUMNS`."""
    from agalite.envs.registry import ENVIRONMENTS, make

    table = []
    for name, spec in ENVIRONMENTS.items():
        if spec.missing_packages():
            cells = ("not installed", "", "")
        elif spec.on_host:
            cells = _describe_gymnasium(spec.gymnasium_id)
        else:
            cells = _describe_jax(make(name))
        table.append((name, *cells, spec.extra, spec.summary))
    return table


def _describe_jax(env: Any) -> tuple[str, str, str]:
    from agalite.envs.gymnasium.spaces import describe

    params = env.default_params
    observation, action = env.observation_space(params), env.action_space(params)
    return describe(observation), describe(action), str(int(params.max_steps_in_episode))


def _describe_gymnasium(env_id: str) -> tuple[str, str, str]:
    import gymnasium

    from agalite.envs.gymnasium.spaces import describe

    with contextlib.closing(gymnasium.make(env_id)) as env:
        limit = env.get_wrapper_attr("max_steps")
        return describe(env.observation_space), describe(env.action_space), str(limit)


def show(
    name: str,
    *,
    out: Path,
    seed: int,
    steps: int | None,
    fps: float | None,
    options: Sequence[str],
) -> None:
    """Play one episode of random actions and write it to `out`."""
    from rich.console import Console

    from agalite import validation
    from agalite.envs import rendering
    from agalite.envs.registry import make, on_host

    if steps is not None:
        validation.check_integer("steps", steps, minimum=1)
    validation.check_integer_between("seed", seed, 0, 2**32 - 1)
    if fps is not None and not 0 < fps <= 100:
        raise ValueError(f"fps={fps!r} must be above 0 and at most 100")
    rendering.check_path(out)
    env_options = parse_options(options)
    if on_host(name):
        default_fps = 30.0
        episode = _gymnasium_episode(name, env_options, seed, steps or rendering.MAX_STEPS)
    else:
        env: Any = make(name, **env_options)
        default_fps = rendering.render_fps(env)
        limit = int(env.default_params.max_steps_in_episode)
        episode = _jax_episode(env, seed, steps or min(limit, rendering.MAX_STEPS))
    rendering.write(episode.frames, out, fps=fps or default_fps)
    Console().print(
        f"{name}: {len(episode.frames) - 1} steps of random actions, "
        f"return {episode.episode_return:.2f}, {episode.outcome}; written to {out}",
        highlight=False,
        soft_wrap=True,
    )


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """["corridor=20", ...] -> {"corridor": 20, ...}. What is no Python literal is a string."""
    options = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise ValueError(f"option {word!r} must look like NAME=VALUE, for example corridor=20")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            options[name] = text
    return options


def _jax_episode(env: Any, seed: int, steps: int) -> "Episode":
    from rich.progress import track

    from agalite.envs.rendering import play

    space = env.action_space(env.default_params)

    def random_action(key: Any, memory_state: Any, *_: Any) -> tuple[Any, Any]:
        return memory_state, space.sample(key)

    progress = track(range(steps), description="playing", transient=True)
    return play(env, random_action, None, seed=seed, steps=progress)


def _gymnasium_episode(name: str, options: dict[str, Any], seed: int, steps: int) -> "Episode":
    import numpy as np
    from rich.progress import track

    from agalite.envs.registry import make
    from agalite.envs.rendering import Episode

    envs: Any = make(name, **{"render_mode": "rgb_array", "seed": seed, **options, "num_envs": 1})
    with envs:
        envs.reset()
        envs.action_space.seed(seed)
        frames, total, outcome = [envs.render()], 0.0, "stopped before its end"
        for _ in track(range(steps), description="playing", transient=True):
            result = envs.step(np.asarray(envs.action_space.sample())[None])
            total += float(result.reward[0])
            if result.terminated[0] or result.truncated[0]:
                # A frame would be of the next episode.
                outcome = "ended" if result.terminated[0] else "stopped by the time limit"
                break
            frames.append(envs.render())
    return Episode(frames, total, outcome)
