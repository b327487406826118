"""Optional packages: which a task needs, the extra that installs them, and imports put off."""

import importlib.util
import sys
import threading
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

TRAINING = ("optax", "orbax.checkpoint", "tensorboardX", "matplotlib", "gymnax", "gymnasium")


def require(what: str, packages: Sequence[str], extra: str) -> None:
    """Raise `ValueError` unless all `packages` are installed.

    **Arguments:**

    - `what`: the task, for the message.
    - `packages`: names of modules.
    - `extra`: the extra of agalite that installs them.
    """
    missing = [name for name in packages if not installed(name)]
    if missing:
        raise ValueError(f'{what} needs {", ".join(missing)}: pip install "agalite[{extra}]"')


def require_training(what: str) -> None:
    """Raise `ValueError` unless all that training needs is installed."""
    require(what, TRAINING, "envs,train")


class _OnUse(ModuleType):
    """A module that is executed when one of its names is first asked for.

    `importlib.util.LazyLoader` executes it at the second `import`, before Python 3.12.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # importlib asks for it; a package has it already
            raise AttributeError(f"module {self.__name__!r} is not a package")
        _execute(self)
        return getattr(self, name)

    def __dir__(self) -> Iterable[str]:
        _execute(self)
        return dir(self)


_executing = threading.RLock()


def _execute(module: ModuleType) -> None:
    """Executes a module, unless another thread has; after an error it is as if never imported."""
    spec = module.__spec__
    with _executing:
        if not isinstance(module, _OnUse) or spec is None or spec.loader is None:
            return
        object.__setattr__(module, "__class__", ModuleType)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            object.__setattr__(module, "__class__", _OnUse)
            raise


def import_on_use(name: str) -> None:
    """Makes every later `import name` cost nothing until the module is used.

    For slow modules that a package imports and hardly ever uses. Nothing happens if the module is
    imported already or not installed.
    """
    spec = importlib.util.find_spec(name) if installed(name) else None
    if spec is None or name in sys.modules:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _OnUse
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def installed(name: str) -> bool:
    """Whether a module can be imported; it is not."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent package is missing
        return False
    # A folder of that name, for example ./wandb, is a namespace package: it has no file.
    return found is not None and found.origin is not None
