"""The worlds of the paper as JAX environments, and the bridges to and from Gymnasium.

`make("tmaze", corridor=160)` is the one way in. Importing this package also registers the
environments with Gymnasium, where that is installed: `gymnasium.make("agalite/TMaze-v0")`.
"""

import importlib.util

from agalite.envs.registry import ENVIRONMENTS, make

__all__ = ["ENVIRONMENTS", "make"]

if importlib.util.find_spec("gymnasium") and importlib.util.find_spec("gymnax"):
    from agalite.envs.gymnasium.wrapper import register

    register()
