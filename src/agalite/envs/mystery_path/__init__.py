"""Mystery Path, a port of Memory Gym's two variants: `MysteryPathGrid` and `MysteryPath`.

env.py has the rules, generator.py the random paths, and pixels.py draws the observations.
"""

from agalite.envs.mystery_path.env import (
    Directions,
    MysteryPath,
    MysteryPathGrid,
    MysteryPathParams,
    MysteryPathState,
)

__all__ = ["Directions", "MysteryPath", "MysteryPathGrid", "MysteryPathParams", "MysteryPathState"]
