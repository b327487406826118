"""What `agalite eval` says."""

from pathlib import Path

import numpy as np
from rich.console import Console

from agalite.envs import picture
from agalite.training.evaluate import evaluate, film
from agalite.training.policy import load
from agalite.training.statistics import bootstrap_interval


def evaluation(
    folder: Path, *, episodes: int, greedy: bool, best: bool, seed: int, seed_number: int,
    together: int, video: Path | None,
) -> None:  # fmt: skip
    if video is not None:
        picture.check_path(video, "video")
    model, trainer, step = load(folder, seed_number=seed_number, best=best)
    world = trainer.world
    scores = evaluate(model, world, episodes=episodes, seed=seed, greedy=greedy, together=together)
    console = Console()

    def line(what: str, values: np.ndarray) -> None:
        low, high = bootstrap_interval(values)
        mean = float(values.mean())
        console.print(f"{what:<16} {mean:.3f}   95% interval {low:.3f} to {high:.3f}")

    console.print(f"{episodes} episodes, checkpoint of step {step:,}", highlight=False)
    line("return", scores.returns)
    line("length", scores.lengths)
    if scores.success is not None:
        line("success", scores.success)
    if video is not None:
        total = film(model, world, video, seed=seed, greedy=greedy)
        console.print(f"an episode with return {total:.2f}: {video}", soft_wrap=True)
