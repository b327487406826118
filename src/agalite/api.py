"""The Python API at the top of the package: `agalite.train`, `resume` and `load_policy`.

Nothing heavy is imported until one of them is called.

```python
run = agalite.train("tmaze", env_options={"corridor": 10}, total_timesteps=300_000)
policy = agalite.load_policy(run)
```
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
    """Trains an agent to the end of a new run.

    `train("tmaze", memory="gru", env_options={"corridor": 10}, agent=A2C(learning_rate=1e-3))`

    **Arguments:**

    - `config`: a `TrainConfig`; or the name of an environment, with fields of `TrainConfig` as
        `settings`.
    - `folder`: of the run; runs/<env>-<memory>-<time> if not given.
    - `preset`: where the settings that are not given come from: "tuned", "paper" or
        "published".
    - `quiet`: no progress on the terminal.
    - `wandb`: send the metrics to Weights & Biases too.
    - `settings`: fields of `TrainConfig`, if `config` is a name.

    **Returns:**

    The run. On Ctrl-C the run is saved and `agalite.system.Stopped` is raised; `agalite.resume`
    continues it.
    """
    from agalite import extras

    extras.require_training("agalite.train")
    from agalite.training import presets
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
        config = presets.configure(preset, settings)
    else:
        raise ValueError(
            f"config={config!r} must be a TrainConfig, or the name of an environment with other "
            'settings by name: train("tmaze", total_timesteps=300_000)'
        )
    return train(config, folder or presets.new_folder(config), quiet=quiet, wandb=wandb)


def resume(run: "Run | Folder", *, quiet: bool = False) -> "Run":
    """Continues a run from its newest checkpoint, to the same end as if it had never stopped.

    **Arguments:**

    - `run`: a run, or its folder.
    - `quiet`: no progress on the terminal.

    **Returns:**

    The run.
    """
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
    """The trained agent of a run.

    **Arguments:**

    - `run`: a run, or its folder.
    - `seed_number`: which of the run's seeds; 0 is the first.
    - `best`: the checkpoint with the highest return instead of the newest.
    - `greedy`: take the most likely action instead of a sampled one.
    - `seed`: of the sampling.

    **Returns:**

    A `Policy`.
    """
    from agalite import extras

    extras.require_training("agalite.load_policy")
    from agalite.training.policy import load_policy

    return load_policy(_folder(run), seed_number=seed_number, best=best, greedy=greedy, seed=seed)


def _folder(run: "Run | Folder") -> Folder:
    return run if isinstance(run, str | os.PathLike) else run.folder
