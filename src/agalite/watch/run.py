"""`agalite watch`: an episode of a run beside what its memory does."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from agalite import files, validation
from agalite.envs import rendering
from agalite.envs.gymnasium.spaces import describe
from agalite.networks.actor_critic import ActorCritic
from agalite.training.policy import load
from agalite.watch.episode import play
from agalite.watch.gates import look
from agalite.watch.page import page, tell
from agalite.watch.saliency import saliency

LONGEST = 1000
_PAGES, _FILMS = (".html", ".htm"), (".gif", ".mp4")
# What people call the actions, where the numbers say nothing.
_ACTIONS = {
    "tmaze": ["up", "down", "left", "right"],
    "masked-cartpole": ["left", "right"],
    "noisy-masked-cartpole": ["left", "right"],
}


def watch(
    folder: str | os.PathLike[str],
    out: Path,
    *,
    seed: int = 0,
    steps: int = 200,
    greedy: bool = False,
    best: bool = False,
    seed_number: int = 0,
) -> dict[str, Any]:
    """Writes the page or the film of a run's agent, and returns what is in it (`story.tell`)."""
    _check(out, seed, steps)
    model, trainer, at_step = load(folder, seed_number=seed_number, best=best)
    config: Any = trainer.config
    options = ", ".join(f"{name} {value}" for name, value in config.env_options.items())
    title = f"{config.memory} in {config.env}" + (f" ({options})" if options else "")
    source = f"{Path(folder).resolve().name}, checkpoint of step {at_step:,}"
    return watch_model(
        model,
        trainer.world,
        out,
        seed=seed,
        steps=steps,
        greedy=greedy,
        title=title,
        source=source,
        actions=_ACTIONS.get(config.env, []),
    )


def watch_model(
    model: ActorCritic,
    world: Any,
    out: Path,
    *,
    seed: int = 0,
    steps: int = 200,
    greedy: bool = False,
    title: str = "",
    source: str = "",
    actions: list[str] | None = None,
) -> dict[str, Any]:
    """The same for any agent in a world of a run. source: where the agent comes from, in words.
    actions: their names."""
    _check(out, seed, steps)
    watched = play(model, world, seed=seed, steps=steps, greedy=greedy)
    gradients = saliency(model, watched.obs, watched.sampled)
    layers = look(model.memory, model.encoder.over_time(jnp.asarray(watched.obs)))
    how = "likeliest" if greedy else "sampled"
    about: dict[str, Any] = {
        "title": title,
        "actions": actions or [],
        "text": f"{source}; seed {seed}, {how} actions; {len(watched.steps)} steps, "
        f"return {watched.total:.2f}, {watched.why}. "
        f"Observations: {describe(world.observation_space(world.default_params))}.",
    }
    told = tell(watched, layers, gradients, about)
    if out.suffix.lower() in _PAGES:
        files.write(out, page(told).encode())
    else:
        from agalite.watch.film import film

        film(watched, layers, gradients, title, about["actions"], out)
    return told


def _check(out: Path, seed: int, steps: int) -> None:
    validation.integer_between("steps", steps, 1, LONGEST)
    validation.integer_between("seed", seed, 0, 2**32 - 1)
    if out.suffix.lower() in _PAGES:
        files.check_writable("out", out)
    elif out.suffix.lower() in _FILMS:
        rendering.check_path(out)
    else:
        raise ValueError(f"out={str(out)!r} must end in .html, .gif or .mp4")
