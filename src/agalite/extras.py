"""Optional packages: which a task needs, and the extra that installs them."""

import importlib.util
from collections.abc import Sequence

TRAINING = ("optax", "orbax.checkpoint", "tensorboardX", "matplotlib", "gymnax", "gymnasium")


def require(what: str, packages: Sequence[str], extra: str) -> None:
    """Raise `ValueError` unless all `packages` are installed.

    **Arguments:**

    - `what`: the task, for the message.
    - `packages`: names of modules.
    - `extra`: the extra of agalite that installs them.
    """
    missing = [name for name in packages if not _installed(name)]
    if missing:
        raise ValueError(f'{what} needs {", ".join(missing)}: pip install "agalite[{extra}]"')


def require_training(what: str) -> None:
    """Raise `ValueError` unless all that training needs is installed."""
    require(what, TRAINING, "envs,train")


def _installed(name: str) -> bool:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent package is missing
        return False
    # A folder of that name, for example ./wandb, is a namespace package: it has no file.
    return found is not None and found.origin is not None
