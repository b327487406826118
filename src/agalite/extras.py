"""Packages that only some of the work needs, and how to get them."""

import importlib.util
from collections.abc import Sequence

TRAINING = ("optax", "orbax.checkpoint", "tensorboardX", "matplotlib", "gymnax", "gymnasium")


def require(what: str, packages: Sequence[str], extra: str) -> None:
    """Refuse to begin `what` without `packages`, and say what to install."""
    missing = [name for name in packages if not _installed(name)]
    if missing:
        raise ValueError(f'{what} needs {", ".join(missing)}: pip install "agalite[{extra}]"')


def require_training(what: str) -> None:
    require(what, TRAINING, "envs,train")


def _installed(name: str) -> bool:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the package that it would be in is missing
        return False
    # Any folder of that name passes for a package, ./wandb for one; only a real one has a file.
    return found is not None and found.origin is not None
