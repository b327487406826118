"""The simulation of Memory Maze: the package's own results, several times as fast.

The package builds a `composer.Environment` of dm_control around its task. `Engine` replaces it with
equal mazes, frames, rewards and targets, bit for bit; tests/envs/test_memory_maze.py compares the
two. It saves this work:

- For every target, 50 times a step, the package goes through MuJoCo's contacts in Python. Here one
  lookup says whether any target is touched at all (two thirds of the time).
- Geoms outside of the camera's view are not drawn, the scene is not rebuilt for every frame, and
  the frame buffer is not a hundred times as large as the frame.
- Observables that nobody reads are not computed.
- Of the eighty textures a maze may have, only those it has are decoded and uploaded at a reset.

Importing this module imports MuJoCo: call `headless.select_backend` first.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import dm_env
import numpy as np
from dm_control import composer, mjcf
from dm_control.mujoco.engine import Camera
from dm_control.rl.control import PhysicsError
from dm_env import specs
from jaxtyping import Bool, Float, UInt8

# Compiled modules without type hints.
mujoco: Any = importlib.import_module("mujoco")
etree: Any = importlib.import_module("lxml.etree")

_HIDDEN = 5  # a group of geoms that MuJoCo does not draw by default
_VELOCITY_WARNING = "Cannot set velocity on Entity"  # logged at every reset, harmless
_CAMERA = "walker/egocentric_camera"
_STATE_OBSERVABLES = ("maze_layout", "absolute_position", "absolute_orientation", "target_index")
_import_lock = threading.Lock()

logging.getLogger("absl").addFilter(lambda record: _VELOCITY_WARNING not in record.getMessage())

# A maze's textures are decoded in many threads, and glibc keeps blocks of up to 32 MB that a thread
# frees for that thread: 1.4 GB after 20 resets. If blocks of 4 MB and more go back to the system at
# once, the process stays at 0.7 GB.
_MMAP_THRESHOLD = 4 * 2**20
_M_MMAP_THRESHOLD = -3
with contextlib.suppress(OSError, AttributeError, TypeError):  # without glibc
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)


def tasks() -> Any:
    """The module `memory_maze.tasks`, without running the package's `__init__`.

    The latter only registers with the old `gym`, and fails where that is not installed.
    """
    with _import_lock:
        if "memory_maze.tasks" not in sys.modules and "memory_maze" not in sys.modules:
            spec = importlib.util.find_spec("memory_maze")
            assert spec is not None
            sys.modules["memory_maze"] = importlib.util.module_from_spec(spec)
            try:
                importlib.import_module("memory_maze.tasks")
            finally:
                # A later import of the package itself runs its `__init__`, or gets its error.
                del sys.modules["memory_maze"]
        return importlib.import_module("memory_maze.tasks")


def build(size: int, *, buffer_side: int, with_state: bool, **options: Any) -> dm_env.Environment:
    """The package's environment of `size` x `size` cells, with an `Engine` inside.

    **Arguments:**

    - `size`: cells per side.
    - `buffer_side`: pixels per side of the largest frame that will be rendered.
    - `with_state`: whether observations include the state of the maze.
    - `options`: the package's.
    """
    package = tasks()
    # Copies of the package's functions, in whose globals `composer.Environment` makes an Engine.
    # The package itself is not changed.
    names = dict(vars(package))

    def environment(**kwargs: Any) -> Engine:
        return Engine(buffer_side=buffer_side, with_state=with_state, **kwargs)

    names["composer"] = types.SimpleNamespace(Environment=environment)
    names["_memory_maze"] = _with_globals(package._memory_maze, names)
    make = _with_globals(getattr(package, f"memory_maze_{size}x{size}"), names)
    return make(global_observables=with_state, **options)


def engine_of(env: Any) -> "Engine":
    """The engine inside the package's wrappers."""
    while not isinstance(env, Engine):
        env = env.env
    return env


def _with_globals(function: types.FunctionType, names: dict[str, Any]) -> Callable[..., Any]:
    copied = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class Engine(composer.Environment):
    """A faster `composer.Environment` for Memory Maze's task; see the module's docstring.

    **Arguments:**

    - `buffer_side`: pixels per side of the frame buffer.
    - `with_state`: add the observables of the package's ExtraObs and Oracle variants.
    - `kwargs`: those of `composer.Environment`.
    """

    _physics: Any = None

    def __init__(self, *, buffer_side: int, with_state: bool, **kwargs: Any) -> None:
        self._constructed = False
        super().__init__(**kwargs)
        self._constructed = True
        self.with_state = with_state
        visual = self._task.root_entity.mjcf_model.visual
        size = getattr(visual, "global")
        size.offwidth = size.offheight = buffer_side
        visual.quality.shadowsize = 0  # no light in the maze casts shadows: saves 64 MB

    def _recompile_physics_and_update_observables(self) -> None:
        # Not in the constructor: the first reset generates another maze and compiles that.
        if self._constructed:
            super()._recompile_physics_and_update_observables()

    def _recompile_physics(self) -> None:
        self._free()
        model = self._task.root_entity.mjcf_model
        xml, assets = _with_needed_textures(model.to_xml(), model.get_assets())
        self._physics = mjcf.Physics.from_xml_string(etree.tostring(xml), assets=assets)
        self._physics.legacy_step = self._legacy_step

    def _make_observation_updater(self) -> Any:
        return _Observer(self._task, with_state=self.with_state)

    def observation_spec(self) -> dict[str, specs.Array]:
        """The names only: the package's wrappers read nothing else."""
        names = _observed(self._task, with_state=self.with_state)
        return {name: specs.Array((), np.float64, name) for name in names}

    def step(self, action: Any) -> dm_env.TimeStep:
        if self._reset_next_step:
            return self.reset()
        physics, task = self._physics, self._task
        self._hooks.before_step(self._physics_proxy, action, self._random_state)
        self._simulate(physics)
        self._hooks.after_step(self._physics_proxy, self._random_state)
        observer: Any = self._observation_updater
        observer.update()
        reward = task.get_reward(self._physics_proxy)
        discount = task.get_discount(self._physics_proxy)
        last = (
            task.should_terminate_episode(self._physics_proxy) or physics.time() >= self._time_limit
        )
        self._reset_next_step = bool(last)
        kind = dm_env.StepType.LAST if last else dm_env.StepType.MID
        return dm_env.TimeStep(kind, reward, discount, observer.get_observation())

    def _simulate(self, physics: Any) -> None:
        """The physics of one step; activates the targets that are touched during it."""
        model, data = physics.model.ptr, physics.data.ptr
        first_half, second_half = mujoco.mj_step1, mujoco.mj_step2
        targets = self._task._targets
        is_target = np.zeros(model.ngeom, bool)
        is_target[[target._geom_id for target in targets]] = True
        warnings = data.warning.number
        before = warnings.copy()
        for _ in range(self._n_sub_steps):
            second_half(
                model, data
            )  # of the previous substep: dm_control keeps positions up to date
            first_half(model, data)
            touching = data.contact.geom
            if is_target[touching].any():
                for target in targets:
                    if not target.activated and (touching == target._geom_id).any():
                        target._update_activation(physics)
        if (warnings > before).any():
            names = np.array(list(mujoco.mjtWarning.__members__))[warnings > before]
            raise PhysicsError(f"the simulation went wrong: {', '.join(names)}")

    @property
    def color(self) -> Float[np.ndarray, "3"]:
        """The requested colour, RGB from 0 to 1."""
        return self._task._target_colors[self._task._current_target_ix]

    def render_camera(self, camera: str, side: int) -> UInt8[np.ndarray, "side side 3"]:
        """The image of the camera "walker/egocentric" or "top_camera"."""
        observer: Any = self._observation_updater
        return observer.render_camera(self._physics, camera, side)

    def agent_pixel(self, camera: str, side: int) -> tuple[int, int]:
        """Row and column of the agent in the image of a camera."""
        position = self._physics.bind(self._task._walker.root_body).xpos
        view = Camera(self._physics, side, side, camera)
        column, row, depth = view.matrix @ np.append(position, 1.0)
        view.scene.free()
        return round(row / depth), round(column / depth)

    def close(self) -> None:
        """Free the physics; a second call does nothing."""
        self._free()
        self._reset_next_step = True

    def _free(self) -> None:
        if self._physics is None:
            return
        observer: Any = self._observation_updater
        observer.free()
        self._physics.free()
        self._physics = None


def _observed(task: Any, *, with_state: bool) -> list[str]:
    if not with_state:
        return []
    kinds = ("rel", "abs")
    vectors = [f"walker/target_{kind}_{i}" for kind in kinds for i in range(task.n_targets)]
    return [*_STATE_OBSERVABLES, *vectors]


class _Observer:
    """Observes the camera's image and the target's colour, and `with_state` the maze's state."""

    def __init__(self, task: Any, *, with_state: bool) -> None:
        self._task = task
        self._names = _observed(task, with_state=with_state)
        self._read: dict[str, Callable[[], Any]] = {}
        self._camera: Camera | None = None
        self._resets = 0

    def reset(self, physics: Any, random_state: np.random.RandomState) -> None:
        self._resets += 1
        if self._resets == 1:
            return  # from the recompilation, before the walker is positioned
        if self._camera is None:
            observable = self._task.observables[_CAMERA]
            name = self._task._walker.egocentric_camera.full_identifier
            self._camera = Camera(physics, observable.height, observable.width, name)
            self._culling = _ViewCulling(physics, name)
        self._read = {
            name: self._task.observables[name].observation_callable(physics, random_state)
            for name in self._names
        }
        self.update()

    def update(self) -> None:
        assert self._camera is not None
        self._culling.hide_invisible()
        image = np.array(
            self._camera.render()
        )  # a copy: the next frame is rendered into the same array
        task = self._task
        self._observation = {name: np.array(read()) for name, read in self._read.items()}
        self._observation[_CAMERA] = image
        self._observation["target_color"] = task._target_colors[task._current_target_ix]

    def get_observation(self) -> dict[str, Any]:
        return self._observation

    def render_camera(self, physics: Any, camera: str, side: int) -> Any:
        self._culling.show_all()
        return np.array(physics.render(side, side, camera))

    def free(self) -> None:
        if self._camera is not None:
            self._camera.scene.free()
            self._camera = None


class _ViewCulling:
    """Hides the geoms outside of a camera's view, so that they are not drawn.

    Each geom is represented by its bounding sphere. If that is wholly on the outer side of one of
    the four planes through the camera and the edges of its image, the geom is not in the image.
    """

    def __init__(self, physics: Any, camera: str) -> None:
        self._data = physics.data.ptr
        self._model = model = physics.model.ptr
        self._camera = physics.model.name2id(camera, "camera")
        self._groups = model.geom_group.copy()
        half = np.deg2rad(model.cam_fovy[self._camera]) / 2  # the image is square
        c, s = np.cos(half), np.sin(half)
        # Inward normals as columns, in the camera's axes: right, up, and back.
        self._normals = np.array([[-c, c, 0, 0], [0, 0, -c, c], [-s, -s, -s, -s]])
        radius = model.geom_rbound.copy()
        plane = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
        sides = model.geom_size[:, :2]
        radius[plane] = np.hypot(sides[plane, 0], sides[plane, 1])
        radius[plane & (sides == 0).any(1)] = np.inf  # how MuJoCo writes an infinite plane
        # Mirrors and shadows show geoms outside of the view.
        if model.nlight or model.mat_reflectance.any():
            radius[:] = np.inf
        self._min_distance = -(1.01 * radius + 0.01)[:, None]

    def hide_invisible(self) -> None:
        self._model.geom_group[:] = np.where(self._visible(), self._groups, _HIDDEN)

    def show_all(self) -> None:
        self._model.geom_group[:] = self._groups

    def _visible(self) -> Bool[np.ndarray, " geoms"]:
        data, camera = self._data, self._camera
        normals = data.cam_xmat[camera].reshape(3, 3) @ self._normals
        distances = data.geom_xpos @ normals - data.cam_xpos[camera] @ normals
        return (distances >= self._min_distance).all(axis=1)


def _with_needed_textures(xml: Any, assets: dict[str, bytes]) -> tuple[Any, dict[str, bytes]]:
    """`xml` and `assets` without the textures that no material refers to."""
    used = {element.get("texture") for element in xml.iter()}
    for texture in list(xml.iter("texture")):
        if texture.get("type") != "skybox" and texture.get("name") not in used:
            texture.getparent().remove(texture)
    files = {element.get("file") for element in xml.iter()}
    # Cube textures may name six files by other attributes. The maze has none; MuJoCo would raise.
    return xml, {name: data for name, data in assets.items() if name in files}
