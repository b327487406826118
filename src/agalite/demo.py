"""`agalite demo`, which `make train` runs: an agent with memory, and one without.

Both are trained in the same T-Maze with the same settings. The direction to take at the junction is
shown only in the first observation, so that a policy without memory succeeds in half of the
episodes at best.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from agalite import files, validation
from agalite.envs import make
from agalite.training import plots
from agalite.training.config import TrainConfig
from agalite.training.evaluate import evaluate, film
from agalite.training.logging import read_metrics
from agalite.training.plots import bootstrap_interval
from agalite.training.policy import load
from agalite.training.presets import configure
from agalite.training.run import Run
from agalite.training.session import SUCCESS
from agalite.training.train import resume, train

AGENTS = ("agalite", "feedforward")
CHANCE, GOAL = 0.5, 0.95
EPISODES = 1000


@dataclass(frozen=True)
class Result:
    """How one agent did."""

    memory: str
    success: tuple[float, ...]
    """Success rate of each seed after training, over `EPISODES` new episodes."""
    interval: tuple[float, float]
    """95% interval of the mean over all of these episodes."""
    steps_to_goal: tuple[int | None, ...]
    """Environment steps of each seed until its success rate in training reached `GOAL`."""
    steps: int
    seconds: float


def run(out: Path, *, corridor: int, steps: int, seeds: int, seed: int) -> list[Result]:
    """Trains both agents, or continues them, scores them, and writes pictures and a summary.

    **Arguments:**

    - `out`: the folder for both runs, `curve.png`, `episode.gif` and `summary.json`.
    - `corridor`: length of the T-Maze.
    - `steps`: environment steps of each seed.
    - `seeds`: seeds of each agent.
    - `seed`: the first of them, and that of the episode in the picture.

    **Returns:**

    A result for each of `AGENTS`.
    """
    validation.check_integer("steps", steps, minimum=1)
    configs = {name: config(name, corridor, steps, seeds, seed) for name in AGENTS}
    make("tmaze", corridor=corridor)  # refuses a wrong length
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(f"out={str(out)!r} must be a folder; {path} is a file")
    for name, c in configs.items():
        _check_settings(c, out / name)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"A T-Maze whose cue must be remembered for {corridor} steps. Without memory: "
        f"{CHANCE:.0%} at best.\nTraining {' and '.join(AGENTS)} into {out}."
    )
    results = [_result(name, _trained(c, out / name, console)) for name, c in configs.items()]
    curve, episode = out / "curve.png", out / "episode.gif"
    plots.curve([out / name for name in AGENTS], curve, metric=SUCCESS)
    loaded = load(out / AGENTS[0])
    film(loaded.model, loaded.trainer.env, episode, seed=seed)
    files.write_json(
        out / "summary.json",
        {"corridor": corridor, "chance": CHANCE, "agents": [vars(r) for r in results]},
    )
    console.print(_table(results))
    console.print(f"curves      {curve}\nan episode  {episode}")
    return results


def config(memory: str, corridor: int, steps: int, seeds: int, seed: int) -> TrainConfig:
    """The configuration of one of the agents: that of `agalite train tmaze`, but for the entropy
    bonus, which falls to zero, so that in the end no action is left to chance."""
    settings = configure(
        "tuned",
        {
            "env": "tmaze",
            "env_options": {"corridor": corridor},
            "memory": memory,
            "total_timesteps": steps,
            "seeds": seeds,
            "seed": seed,
        },
    )
    assert isinstance(settings, TrainConfig)
    agent = dataclasses.replace(settings.agent, anneal_ent_coef=True)
    return dataclasses.replace(settings, agent=agent)


def _check_settings(config: TrainConfig, folder: Path) -> None:
    if folder.exists() and Run.open(folder).settings != files.plain(config.to_dict()):
        raise ValueError(
            f"{folder} holds a run with other settings; remove it, or choose another --out"
        )


def _trained(config: TrainConfig, folder: Path, console: Console) -> Run:
    if not folder.exists():
        console.print(f"\n{config.memory}:")
        return train(config, folder)
    run = Run.open(folder)
    if run.read_summary() is not None:
        console.print(f"\n{config.memory}: already trained")
        return run
    console.print(f"\n{config.memory}: resuming")
    return resume(folder)


def _result(memory: str, run: Run) -> Result:
    seeds = int(run.config["seeds"])
    episodes = []
    for number in range(seeds):
        loaded = load(run.folder, seed_number=number)
        scores = evaluate(loaded.model, loaded.trainer.env, episodes=EPISODES, seed=number)
        assert scores.success is not None  # T-Maze reports success
        episodes.append(scores.success)
    low, high = bootstrap_interval(np.concatenate(episodes))
    summary = run.read_summary() or {}
    table = read_metrics(run.folder)
    return Result(
        memory,
        tuple(float(x.mean(dtype=np.float64)) for x in episodes),
        (float(low), float(high)),
        tuple(_first(table, number) for number in range(seeds)),
        int(summary["steps"]),
        float(summary["seconds_of_this_session"]),
    )


def _first(table: dict[str, np.ndarray], seed: int) -> int | None:
    good = (table["seed"] == seed) & (table[SUCCESS] >= GOAL)
    return int(table["step"][good].min()) if good.any() else None


def _table(results: list[Result]) -> Table:
    table = Table(title=f"Success over {EPISODES} new episodes for each seed")
    for column in ("memory", "success", "95% interval", f"steps to {GOAL:.0%}", "seconds"):
        table.add_column(column, justify="left" if column == "memory" else "right")
    for r in results:
        low, high = r.interval
        reached = ", ".join("never" if s is None else f"{s:,}" for s in r.steps_to_goal)
        table.add_row(
            r.memory,
            " ".join(f"{x:.1%}" for x in r.success),
            f"{low:.1%} to {high:.1%}",
            reached,
            f"{r.seconds:.0f}",
        )
    return table
