"""`agalite envs show`: a random episode as a moving picture."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track

from agalite import errors
from agalite.envs import picture
from agalite.envs.episode import LONGEST, Episode, play, speed
from agalite.envs.registry import make, on_host


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
        errors.integer("steps", steps, minimum=1)
    errors.integer_between("seed", seed, 0, 2**32 - 1)
    if fps is not None and not 0 < fps <= 100:
        raise ValueError(f"fps={fps!r} must be above 0 and at most 100")
    picture.check_path(out)
    chosen = parse_options(options)
    usual = 30.0
    if on_host(name):
        frames, total, why = _gymnasium_episode(name, chosen, seed, steps or LONGEST)
    else:
        world: Any = make(name, **chosen)
        usual = speed(world)
        limit = int(world.default_params.max_steps_in_episode)
        frames, total, why = _world_episode(world, seed, steps or min(limit, LONGEST))
    picture.write(frames, out, fps=fps or usual)
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
