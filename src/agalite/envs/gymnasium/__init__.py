"""Gymnasium, both ways.

- This library's in Gymnasium: `GymnasiumWrapper` (wrapper.py) makes a `gymnasium.Env` of a JAX
  environment, and `register` gives those of the library their Gymnasium ids.
- Gymnasium's here: `from_gymnasium` (vector.py) makes a `GymnasiumVector` of any Gymnasium
  environment, many copies of it, in this process or one process each (workers.py); spaces.py
  converts observations and actions between the spaces and arrays. An environment that fails
  raises `EnvError`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agalite.envs.gymnasium.vector import GymnasiumVector, from_gymnasium
    from agalite.envs.gymnasium.workers import EnvError
    from agalite.envs.gymnasium.wrapper import GymnasiumWrapper

__all__ = ["EnvError", "GymnasiumVector", "GymnasiumWrapper", "from_gymnasium", "register"]


def register() -> None:
    """Register the environments of `agalite.envs.ENVIRONMENTS` that have a Gymnasium id.

    `import agalite.envs` calls it; further calls change nothing.
    """
    import gymnasium

    from agalite.envs.gymnasium import no_velocity
    from agalite.envs.registry import ENVIRONMENTS

    for spec in ENVIRONMENTS.values():
        if not spec.gymnasium_id or spec.gymnasium_id in gymnasium.registry:
            continue
        if spec.on_host:
            entry_point, kwargs = spec.entry_point, dict(spec.kwargs)
        else:
            entry_point = f"{__name__}.wrapper:GymnasiumWrapper"
            kwargs = {"env": spec.entry_point, **spec.kwargs}
        gymnasium.register(spec.gymnasium_id, entry_point, kwargs=kwargs)
    no_velocity.register()


def __getattr__(name: str) -> Any:
    # Each way imports what the other does not need: gymnax takes seconds.
    match name:
        case "GymnasiumWrapper":
            from agalite.envs.gymnasium import wrapper as module
        case "GymnasiumVector" | "from_gymnasium":
            from agalite.envs.gymnasium import vector as module
        case "EnvError":
            from agalite.envs.gymnasium import workers as module
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
