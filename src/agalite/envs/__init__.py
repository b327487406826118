"""Environments: those of the paper in JAX, Memory Maze on the host, and any of Gymnasium's.

`make("tmaze", corridor=160)` is the one way in; `ENVIRONMENTS` is the table of names. base.py
holds the contract of a JAX environment and vector.py steps many of them together. Importing this
package registers the environments with Gymnasium, where that is installed:
`gymnasium.make("agalite/TMaze-v0")`.
"""

import importlib.util

from agalite import extras
from agalite.envs.registry import ENVIRONMENTS, EnvSpec, make

__all__ = ["ENVIRONMENTS", "EnvSpec", "make"]

# Gymnax imports both to draw; they take three quarters of the time that importing it does.
for _name in ("seaborn", "matplotlib.pyplot"):
    extras.import_on_use(_name)

if importlib.util.find_spec("gymnasium") and importlib.util.find_spec("gymnax"):
    from agalite.envs.gymnasium import register

    register()
