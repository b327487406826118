"""agalite: memory for agents that see only part of their world.

import agalite, jax
memory = agalite.make_memory("agalite", input_size=16, key=jax.random.key(0))
state = memory.initial_state()
state, y = memory.step(state, x, reset)       # one input at a time, for ever
state, ys = memory.scan(state, xs, resets)    # or a whole sequence, the same numbers
"""

from typing import TYPE_CHECKING, Any

from agalite.version import __version__

if TYPE_CHECKING:
    from agalite.memory import make_memory

__all__ = ["__version__", "make_memory"]


def __getattr__(name: str) -> Any:
    # JAX takes a second to import; `agalite --help` should not.
    if name == "make_memory":
        from agalite.memory import make_memory

        return make_memory
    raise AttributeError(f"module 'agalite' has no attribute {name!r}")
