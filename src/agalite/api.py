"""What `agalite train`, `resume` and their likes do, from Python. Light until it is called.

run = agalite.train("tmaze", env_options={"corridor": 10}, total_timesteps=300_000)
policy = agalite.load_policy(run)
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agalite.training.config import HostConfig, TrainConfig
    from agalite.training.policy import Policy
    from agalite.training.run import Run

Folder = str | os.PathLike[str]


def train(
    config: "TrainConfig | HostConfig | str | None" = None,
    folder: Folder | None = None,
    *,
    preset: str = "tuned",
    quiet: bool = False,
    wandb: bool = False,
    **settings: Any,
) -> "Run":
    """Trains an agent to the end, into a new folder, and returns the run.

    config: a `TrainConfig`, which says it all; or the name of an environment, and then `settings`
    are fields of `TrainConfig`, and those not given are the `preset`'s, as on the command line:
    `train("tmaze", memory="gru", env_options={"corridor": 10}, agent=A2C(learning_rate=1e-3))`.
    folder: where to; runs/<env>-<memory>-<time> if not given.
    quiet: no progress on the terminal. wandb: the metrics go to Weights & Biases too.

    Ctrl-C saves and raises `agalite.process.Stopped`; `agalite.resume` goes on from there.
    """
    from agalite import extras

    extras.require_training("agalite.train")
    from agalite.training import command
    from agalite.training.config import HostConfig, TrainConfig
    from agalite.training.train import train

    if isinstance(config, TrainConfig | HostConfig):
        if settings:
            raise ValueError(
                f"config is given, and {', '.join(settings)} besides; "
                "dataclasses.replace(config, ...) makes another"
            )
    elif config is None or isinstance(config, str):
        if config is not None:
            settings = {"env": config, **settings}
        config = command.configure(preset, settings)
    else:
        raise ValueError(
            f"config={config!r} must be a TrainConfig, or the name of an environment with other "
            'settings by name: train("tmaze", total_timesteps=300_000)'
        )
    return train(config, folder or command.new_folder(config), quiet=quiet, wandb=wandb)


def resume(run: "Run | Folder", *, quiet: bool = False) -> "Run":
    """Goes on with a run, or the folder of one, to the same end as if it had never stopped."""
    from agalite import extras

    extras.require_training("agalite.resume")
    from agalite.training.train import resume

    return resume(_folder(run), quiet=quiet)


def load_policy(
    run: "Run | Folder",
    *,
    seed_number: int = 0,
    best: bool = False,
    greedy: bool = False,
    seed: int = 0,
) -> "Policy":
    """The agent of a run, or of the folder of one: see `Policy`.

    seed_number: which of the run's seeds, 0 is the first. best: the best checkpoint instead of the
    newest. greedy: the likeliest action instead of a sampled one; `seed` is of the sampling.
    """
    from agalite import extras

    extras.require_training("agalite.load_policy")
    from agalite.training.policy import load_policy

    return load_policy(_folder(run), seed_number=seed_number, best=best, greedy=greedy, seed=seed)


def _folder(run: "Run | Folder") -> Folder:
    return run if isinstance(run, str | os.PathLike) else run.folder
