"""Memory Maze (Pasukonis et al., 2022): find the object of the requested colour, again and again.

The maze is seen from within, so an agent that remembers where objects are finds them sooner. The
task is that of the `memory-maze` package, simulated by MuJoCo on the host; engine.py says what is
done to make it faster.

    gymnasium.make("agalite/MemoryMaze-9x9-v0")
    agalite.envs.make("memory-maze-9x9", num_envs=8, seed=0, asynchronous=True)

Episodes are never terminated. The package stops them after 1000 to 4000 steps with a discount of 1
and calls that a time limit, so they are truncated here.
"""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from jaxtyping import UInt8

from agalite import validation
from agalite.envs.memory_maze import headless


class Size(NamedTuple):
    """A size of the maze. The scores are mean returns published by the package's authors."""

    objects: int
    max_steps: int
    human: float
    """Score of a person."""
    oracle: float
    """Score of an agent trained with the shortest way drawn into its observation."""


SIZES = {
    9: Size(3, 1000, 26.4, 34.8),
    11: Size(4, 2000, 44.3, 58.0),
    13: Size(5, 3000, 55.5, 74.5),
    15: Size(6, 4000, 67.7, 87.7),
}
ACTIONS = ("wait", "forward", "left", "right", "forward and left", "forward and right")

_OBS_SIDE = 64  # pixels of an observation
_RENDER_SIDE = 192  # pixels of each half of a rendered frame
_BORDER = 4


class MemoryMaze(gymnasium.Env[UInt8[np.ndarray, "64 64 3"], int]):
    """Memory Maze: obs (64, 64, 3) uint8; 6 `ACTIONS`; reward 1 for each object found.

    The border of an observation has the requested colour. `reset(seed=s)` gives the episodes of
    the package with seed=s. MuJoCo is imported and OpenGL started at the first reset, and both
    belong to the thread that calls it.

    **Arguments:**

    - `size`: 9, 11, 13 or 15 cells per side.
    - `max_steps`: the episode is truncated after so many, at most the package's own limit
      (`SIZES`), which is the default.
    - `oracle`: draw a map with the shortest way to the object into the observation, as in the
      package's Oracle variant. The score of an agent trained on it is an upper bound.
    - `good_visibility`: low walls and raised objects.
    - `randomize_colors`: new colours in each episode, of six.
    - `extras`: `info` has the state of the maze under the names of the package's ExtraObs variant,
      in cells: `agent_pos` (2,), `agent_dir` (2,), `targets_pos` and `targets_vec` (objects, 2),
      `target_pos` and `target_vec` (2,), `target_color` (3,), and `maze_layout` (size, size), 1
      where one can walk.
    - `render_mode`: None or "rgb_array".
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(
        self,
        size: int,
        *,
        max_steps: int | None = None,
        oracle: bool = False,
        good_visibility: bool = False,
        randomize_colors: bool = False,
        extras: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if size not in SIZES:
            raise ValueError(f"size={size!r} must be one of {', '.join(map(str, SIZES))}")
        longest = SIZES[size].max_steps
        if max_steps is not None:
            validation.check_integer_between("max_steps", max_steps, 1, longest)
        for name, value in (
            ("oracle", oracle),
            ("good_visibility", good_visibility),
            ("randomize_colors", randomize_colors),
            ("extras", extras),
        ):
            validation.check_boolean(name, value)
        if render_mode is not None:
            validation.check_one_of("render_mode", render_mode, self.metadata["render_modes"])
        self.size = size
        self.max_steps = longest if max_steps is None else int(max_steps)
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(0, 255, (_OBS_SIDE, _OBS_SIDE, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(ACTIONS))
        self.metadata = dict(self.metadata)
        self._options = {
            "show_path": bool(oracle),
            "good_visibility": bool(good_visibility),
            "randomize_colors": bool(randomize_colors),
        }
        self._extras = bool(extras)
        self._env: Any = None  # the package's, made at the first reset
        self._steps: int | None = None  # taken in this episode; None when a reset is due

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[UInt8[np.ndarray, "64 64 3"], dict[str, Any]]:
        if options:
            raise ValueError(f"reset(options={options!r}): Memory Maze takes none here")
        if seed is not None:
            validation.check_integer_between("seed", seed, 0, 2**32 - 1)
        super().reset(seed=seed)
        if seed is not None or self._env is None:
            self.close()
            self._env = self._build(int(self.np_random.integers(2**32)) if seed is None else seed)
        self._steps = 0
        return self._split(self._env.reset().observation)

    def step(
        self, action: Any
    ) -> tuple[UInt8[np.ndarray, "64 64 3"], float, bool, bool, dict[str, Any]]:
        if self._steps is None:
            raise ResetNeeded("step() without an episode: call env.reset() to begin one")
        if not self.action_space.contains(action):
            raise ValueError(
                f"action={action!r} must be a whole number from 0 to {len(ACTIONS) - 1}"
            )
        now = self._env.step(int(action))
        self._steps += 1
        ended = bool(now.last())
        terminated = ended and now.discount == 0.0
        truncated = not terminated and (ended or self._steps >= self.max_steps)
        if terminated or truncated:
            self._steps = None
        obs, info = self._split(now.observation)
        return obs, float(now.reward), terminated, truncated, info

    def render(self) -> UInt8[np.ndarray, "192 384 3"] | None:
        """The agent's view in a higher resolution, beside the maze from above with the agent."""
        if self.render_mode is None:
            gymnasium.logger.warn('render() without a render_mode; make(..., "rgb_array") has one')
            return None
        if self._env is None:
            raise ResetNeeded("render() before the first reset(): call env.reset() to begin")
        from agalite.envs.memory_maze.engine import engine_of

        engine = engine_of(self._env)
        view, above = (
            engine.render_camera(name, _RENDER_SIDE) for name in ("walker/egocentric", "top_camera")
        )
        colour = (engine.color * 255 * 0.7).astype(np.uint8)  # as in the package's observations
        for edge in (np.s_[:_BORDER], np.s_[-_BORDER:], np.s_[:, :_BORDER], np.s_[:, -_BORDER:]):
            view[edge] = colour
        row, column = engine.agent_pixel("top_camera", _RENDER_SIDE)
        for half, paint in ((5, 255), (3, colour)):  # a marker: the agent itself is too small
            above[row - half : row + half + 1, column - half : column + half + 1] = paint
        return np.concatenate([view, above], axis=1)

    def close(self) -> None:
        """Free the simulation and OpenGL. `reset` may start again."""
        if self._env is not None:
            self._env.close()
        self._env = self._steps = None

    def _build(self, seed: int) -> Any:
        engine = _engine()
        with_state = self._extras or self._options["show_path"]
        buffer_side = _RENDER_SIDE if self.render_mode else _OBS_SIDE
        return engine.build(
            self.size, buffer_side=buffer_side, with_state=with_state, seed=seed, **self._options
        )

    def _split(self, observed: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The image, and copies of the rest if `extras`."""
        image = observed["image"]
        if not self._extras:
            return image, {}
        return image, {name: np.array(x) for name, x in observed.items() if name != "image"}


def _engine() -> Any:
    headless.select_backend()
    try:
        from agalite.envs.memory_maze import engine
    except Exception as error:
        # MuJoCo, dm_control and PyOpenGL raise errors of all kinds where a library is missing.
        missing = isinstance(error, ModuleNotFoundError)
        hint = 'pip install "agalite[envs,memory-maze]"' if missing else headless.install_hint()
        raise RuntimeError(
            f"Memory Maze cannot start ({type(error).__name__}: {error}). {hint}"
        ) from error
    return engine
