"""Memory Maze (Pasukonis et al., 2022): find the object of the colour that is asked for, again and
again, in a maze seen from within. Who remembers where things are finds them sooner.

It is the `memory-maze` package's, simulated by MuJoCo on the host; `memory_maze_engine` says what
is done to make it fast.

    gymnasium.make("agalite/MemoryMaze-9x9-v0")
    agalite.envs.make("memory-maze-9x9", count=8, seed=0, asynchronous=True)

An episode never ends by itself: the package stops it after 1000 to 4000 steps with a discount of 1
and calls that a time limit, so here it is truncated, and what would have come after counts.
"""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from jaxtyping import UInt8

from agalite import validation
from agalite.envs.memory_maze import headless


class Size(NamedTuple):
    """What belongs to a size of the maze. The scores are mean returns as the package's authors
    publish them: of a person, and of an agent that is shown the shortest way (`oracle`)."""

    objects: int
    max_steps: int
    human: float
    oracle: float


SIZES = {
    9: Size(3, 1000, 26.4, 34.8),
    11: Size(4, 2000, 44.3, 58.0),
    13: Size(5, 3000, 55.5, 74.5),
    15: Size(6, 4000, 67.7, 87.7),
}
ACTIONS = ("wait", "forward", "left", "right", "forward and left", "forward and right")

_SIDE = 64  # pixels of an observation
_PICTURE = 192  # and of each half of what `render` draws
_BORDER = 4


class MemoryMaze(gymnasium.Env[UInt8[np.ndarray, "64 64 3"], int]):
    """obs (64, 64, 3) uint8, the border in the colour that is asked for; 6 `ACTIONS`; reward 1 for
    each object found.

    size: 9, 11, 13 or 15 cells a side. max_steps: truncate after so many, if the package's own
    limit (`SIZES`) is too long. oracle: draw a map with the shortest way to the object into the
    observation, as in the package's Oracle variant: its score is what memory could reach at best.
    good_visibility: low walls and raised objects. randomize_colors: of six, anew in each episode.
    extras: `info` says where everything is, under the names of the package's ExtraObs variant,
    in cells: agent_pos (2,), agent_dir (2,), targets_pos and targets_vec (objects, 2), target_pos
    and target_vec (2,), target_color (3,), and maze_layout (size, size), 1 where one can walk.

    `reset(seed=s)` gives the same episodes as the package with seed=s. MuJoCo is imported and
    OpenGL started at the first reset, and belong to the thread that calls it.
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
            validation.integer_between("max_steps", max_steps, 1, longest)
        for name, value in (
            ("oracle", oracle),
            ("good_visibility", good_visibility),
            ("randomize_colors", randomize_colors),
            ("extras", extras),
        ):
            validation.boolean(name, value)
        if render_mode is not None:
            validation.one_of("render_mode", render_mode, self.metadata["render_modes"])
        self.size = size
        self.max_steps = longest if max_steps is None else int(max_steps)
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(0, 255, (_SIDE, _SIDE, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(ACTIONS))
        self.metadata = dict(self.metadata)
        self._options = {
            "show_path": bool(oracle),
            "good_visibility": bool(good_visibility),
            "randomize_colors": bool(randomize_colors),
        }
        self._extras = bool(extras)
        self._env: Any = None  # the package's, once there is a seed for it
        self._steps: int | None = None  # of this episode; None when a reset is due

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[UInt8[np.ndarray, "64 64 3"], dict[str, Any]]:
        if options:
            raise ValueError(f"reset(options={options!r}): Memory Maze takes none here")
        if seed is not None:
            validation.integer_between("seed", seed, 0, 2**32 - 1)
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
        """What the agent sees, in more pixels, beside the maze from above with the agent in it."""
        if self.render_mode is None:
            gymnasium.logger.warn('render() without a render_mode; make(..., "rgb_array") has one')
            return None
        if self._env is None:
            raise ResetNeeded("render() before the first reset(): call env.reset() to begin")
        from agalite.envs.memory_maze.engine import engine_of

        engine = engine_of(self._env)
        view, above = (
            engine.picture(name, _PICTURE) for name in ("walker/egocentric", "top_camera")
        )
        colour = (engine.color * 255 * 0.7).astype(np.uint8)  # as in the package's observations
        for edge in (np.s_[:_BORDER], np.s_[-_BORDER:], np.s_[:, :_BORDER], np.s_[:, -_BORDER:]):
            view[edge] = colour
        row, column = engine.place("top_camera", _PICTURE)
        for half, paint in ((5, 255), (3, colour)):  # the agent itself is too small to be seen
            above[row - half : row + half + 1, column - half : column + half + 1] = paint
        return np.concatenate([view, above], axis=1)

    def close(self) -> None:
        """Give memory and OpenGL back. `reset` may begin anew afterwards."""
        if self._env is not None:
            self._env.close()
        self._env = self._steps = None

    def _build(self, seed: int) -> Any:
        engine = _engine()
        reports = self._extras or self._options["show_path"]
        drawn = _PICTURE if self.render_mode else _SIDE
        return engine.build(self.size, buffer=drawn, reports=reports, seed=seed, **self._options)

    def _split(self, seen: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The picture, and the rest if it was asked for: the caller's, to keep and to change."""
        image = seen["image"]
        if not self._extras:
            return image, {}
        return image, {name: np.array(x) for name, x in seen.items() if name != "image"}


def _engine() -> Any:
    headless.choose()
    try:
        from agalite.envs.memory_maze import engine
    except Exception as error:
        # Whatever MuJoCo, dm_control and PyOpenGL raise where a library is missing: of all kinds.
        missing = isinstance(error, ModuleNotFoundError)
        cure = 'pip install "agalite[envs,memory-maze]"' if missing else headless.advice()
        raise RuntimeError(
            f"Memory Maze cannot start ({type(error).__name__}: {error}). {cure}"
        ) from error
    return engine
