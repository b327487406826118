"""agalite: memory for online reinforcement learning in partially observable environments.

```python
import agalite, jax

memory = agalite.make_memory("agalite", input_size=16, key=jax.random.key(0))
state = memory.initial_state()
state, y = memory.step(state, x, reset)       # one input at a time, indefinitely
state, ys = memory.scan(state, xs, resets)    # a whole sequence at once, the same numbers

run = agalite.train("tmaze")                  # or a TrainConfig; agalite.resume(run) if it stopped
policy = agalite.load_policy(run)
state = policy.initial_state()
action, state = policy.act(obs, state, reset=True)
```
"""

from agalite.version import __version__

TYPE_CHECKING = False  # type checkers treat it as typing's, which is slow to import
if TYPE_CHECKING:
    from typing import Any

    from agalite.api import load_policy, resume, train
    from agalite.memory import make_memory
    from agalite.training.config import TrainConfig

__all__ = ["TrainConfig", "__version__", "load_policy", "make_memory", "resume", "train"]


def __getattr__(name: str) -> "Any":
    # On first use: importing JAX takes a second, and `agalite --help` does not need it.
    if name in ("train", "resume", "load_policy"):
        from agalite import api

        return getattr(api, name)
    if name == "make_memory":
        from agalite.memory import make_memory

        return make_memory
    if name == "TrainConfig":
        from agalite import extras

        extras.require_training("agalite.TrainConfig")
        from agalite.training.config import TrainConfig

        return TrainConfig
    raise AttributeError(f"module 'agalite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
