"""Memory Maze, a Gymnasium environment on the host, simulated by MuJoCo.

env.py has the environment, engine.py the simulation (the only module that imports MuJoCo, at the
first reset), headless.py selects the OpenGL to draw with, and oracle.py walks the shortest way.
"""

from agalite.envs.memory_maze.env import ACTIONS, SIZES, MemoryMaze, Size

__all__ = ["ACTIONS", "SIZES", "MemoryMaze", "Size"]
