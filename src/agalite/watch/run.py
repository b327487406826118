"""`agalite watch`: an episode of an agent with its policy, its gradients and its memory's gates."""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from agalite import files, validation
from agalite.envs import rendering
from agalite.envs.gymnasium.spaces import describe
from agalite.networks.actor_critic import ActorCritic
from agalite.training.logging import read_metrics
from agalite.training.policy import load
from agalite.watch.episode import play
from agalite.watch.gates import inspect_memory
from agalite.watch.page import episode_record, make_page
from agalite.watch.saliency import episode_inputs, saliency

MAX_STEPS = 1000
_POINTS = 200  # of the curve of a run's metric
_PAGES, _FILMS = (".html", ".htm"), (".gif", ".mp4")
_ACTION_NAMES = {
    "tmaze": ["up", "down", "left", "right"],
    "masked-cartpole": ["left", "right"],
    "noisy-masked-cartpole": ["left", "right"],
    "repeat-previous": ["suit 0", "suit 1", "suit 2", "suit 3"],
    "memory-chain": ["bit 0", "bit 1"],
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
    """Writes a page or a film of an episode of a run's agent.

    **Arguments:**

    - `folder`: of the run.
    - `out`: the file to write: .html, .gif or .mp4.
    - `seed`: of the episode.
    - `steps`: the episode is stopped after so many, at most 1000.
    - `greedy`: the most likely action instead of a sampled one.
    - `best`: the best checkpoint instead of the newest.
    - `seed_number`: which of the run's seeds; 0 is the first.

    **Returns:**

    The record of the episode (`page.episode_record`).
    """
    check_arguments(out, seed, steps)
    model, trainer, at_step = load(folder, seed_number=seed_number, best=best)
    config: Any = trainer.config
    options = ", ".join(f"{name} {value}" for name, value in config.env_options.items())
    title = f"{config.memory} in {config.env}" + (f" ({options})" if options else "")
    source = f"{Path(folder).resolve().name}, checkpoint of step {at_step:,}"
    return watch_model(
        model,
        trainer.env,
        out,
        seed=seed,
        steps=steps,
        greedy=greedy,
        title=title,
        source=source,
        action_names=_ACTION_NAMES.get(config.env, []),
        past_gradient=past_gradient(folder, seed_number),
    )


def watch_model(
    model: ActorCritic,
    env: Any,
    out: Path,
    *,
    seed: int = 0,
    steps: int = 200,
    greedy: bool = False,
    title: str = "",
    source: str = "",
    action_names: list[str] | None = None,
    past_gradient: dict[str, list[float]] | None = None,
) -> dict[str, Any]:
    """Writes a page or a film of an episode of any agent.

    **Arguments:**

    - `model`: the agent.
    - `env`: its environment, as the trainer of a run has it.
    - `out`, `seed`, `steps`, `greedy`: as in `watch`.
    - `title`: of the page.
    - `source`: where the agent comes from, in words.
    - `action_names`: for discrete actions.
    - `past_gradient`: of the run that trained the agent, from the function of that name.

    **Returns:**

    The record of the episode (`page.episode_record`).
    """
    check_arguments(out, seed, steps)
    episode = play(model, env, seed=seed, steps=steps, greedy=greedy)
    gradients = saliency(model, episode.obs, episode.sampled, episode.rewards)
    arrays = (episode.obs, episode.sampled, episode.rewards)
    inputs = episode_inputs(model, *map(jnp.asarray, arrays))
    resets = jnp.arange(len(episode.steps)) == 0
    layers = inspect_memory(model.memory, model.encode(inputs, resets))
    how = "most likely" if greedy else "sampled"
    about: dict[str, Any] = {
        "title": title,
        "actions": action_names or [],
        "text": f"{source}; seed {seed}, {how} actions; {len(episode.steps)} steps, "
        f"return {episode.total:.2f}, {episode.ending}. "
        f"Observations: {describe(env.observation_space(env.default_params))}.",
    }
    record = episode_record(episode, layers, gradients, about, past_gradient)
    if out.suffix.lower() in _PAGES:
        files.write(out, make_page(record).encode())
    else:
        from agalite.watch.film import write_film

        write_film(episode, layers, gradients, title, about["actions"], out)
    return record


def past_gradient(
    folder: str | os.PathLike[str], seed_number: int = 0
) -> dict[str, list[float]] | None:
    """How much of the gradient came from before the rollout, over a run with traces.

    **Arguments:**

    - `folder`: of the run.
    - `seed_number`: which of its seeds.

    **Returns:**

    `steps` and `fractions`, at most 200 each: means of `losses/past_grad_fraction` over equal parts
    of the run. None for a run without that metric.
    """
    metrics = read_metrics(folder)
    fractions = metrics.get("losses/past_grad_fraction")
    if fractions is None:
        return None
    mine = (metrics["seed"] == seed_number) & np.isfinite(fractions)
    steps, fractions = metrics["step"][mine], fractions[mine]
    if not len(steps):
        return None
    parts = np.array_split(np.arange(len(steps)), min(len(steps), _POINTS))
    return {
        "steps": [int(steps[part[-1]]) for part in parts],
        "fractions": [float(fractions[part].mean()) for part in parts],
    }


def check_arguments(out: Path, seed: int, steps: int) -> None:
    """Refuses what `watch` refuses, before anything is loaded."""
    validation.check_integer_between("steps", steps, 1, MAX_STEPS)
    validation.check_integer_between("seed", seed, 0, 2**32 - 1)
    if out.suffix.lower() in _PAGES:
        files.check_writable("out", out)
    elif out.suffix.lower() in _FILMS:
        rendering.check_path(out)
    else:
        raise ValueError(f"out={str(out)!r} must end in .html, .gif or .mp4")
