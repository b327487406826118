"""Memory Maze's simulation, the package's own in all it computes, several times as fast.

The package builds a `composer.Environment` of dm_control around its task. This one takes its place
and differs in nothing that can be seen: same mazes, frames, rewards and targets, bit for bit, which
tests/test_memory_maze.py holds against the package itself. What it does not do:

- go through MuJoCo's list of contacts in Python for every target, 50 times a step: one lookup says
  whether any target is touched at all (two thirds of the time);
- draw what lies outside of the camera's view, make a new scene for every frame, or clear a frame
  buffer a hundred times as large as the frame;
- compute what the task can report and nobody asked for;
- decode and upload the eighty textures that a maze might have had, at every reset.

Importing this imports MuJoCo: `headless.choose` first.
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

# Compiled, and without types.
mujoco: Any = importlib.import_module("mujoco")
etree: Any = importlib.import_module("lxml.etree")

_HIDDEN = 5  # a group of geoms that MuJoCo does not draw unless told to
_ABOUT_VELOCITY = "Cannot set velocity on Entity"  # of every reset, and of no consequence
_CAMERA = "walker/egocentric_camera"
_REPORTED = ("maze_layout", "absolute_position", "absolute_orientation", "target_index")
_import = threading.Lock()

logging.getLogger("absl").addFilter(lambda record: _ABOUT_VELOCITY not in record.getMessage())

# A maze's textures are decoded in many threads, and glibc keeps what each of them frees, in blocks
# of up to 32 MB, for that thread: 1.4 GB after 20 resets. Blocks of 4 MB and more go back at once,
# and it stays at 0.7 GB.
_LARGEST_KEPT = 4 * 2**20
_M_MMAP_THRESHOLD = -3
with contextlib.suppress(OSError, AttributeError, TypeError):  # elsewhere than with glibc
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


def tasks() -> Any:
    """The module `memory_maze.tasks`, without the package's own `__init__`.

    That one fails where the old `gym` is missing, and it has nothing else in it.
    """
    with _import:
        if "memory_maze.tasks" not in sys.modules and "memory_maze" not in sys.modules:
            spec = importlib.util.find_spec("memory_maze")
            assert spec is not None
            sys.modules["memory_maze"] = importlib.util.module_from_spec(spec)
            try:
                importlib.import_module("memory_maze.tasks")
            finally:
                # Who imports the package later gets the real one, or its error.
                del sys.modules["memory_maze"]
        return importlib.import_module("memory_maze.tasks")


def build(size: int, *, buffer: int, reports: bool, **options: Any) -> dm_env.Environment:
    """The package's task of `size` x `size`, with an `Engine` where it puts its environment.

    buffer: the side of the largest picture, in pixels. options are the package's.
    """
    package = tasks()
    # The package's functions, read with other eyes: where they say `composer.Environment` they
    # get an Engine. The package itself is left as it is, for whoever else uses it.
    names = dict(vars(package))

    def environment(**kwargs: Any) -> Engine:
        return Engine(buffer=buffer, reports=reports, **kwargs)

    names["composer"] = types.SimpleNamespace(Environment=environment)
    names["_memory_maze"] = _seen_through(package._memory_maze, names)
    make = _seen_through(getattr(package, f"memory_maze_{size}x{size}"), names)
    return make(global_observables=reports, **options)


def engine_of(env: Any) -> "Engine":
    """What is inside the package's wrappers."""
    while not isinstance(env, Engine):
        env = env.env
    return env


def _seen_through(function: types.FunctionType, names: dict[str, Any]) -> Callable[..., Any]:
    twin = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


class Engine(composer.Environment):
    """See the module. `reports` adds what the package's ExtraObs and Oracle variants need."""

    _physics: Any = None

    def __init__(self, *, buffer: int, reports: bool, **kwargs: Any) -> None:
        self._made = False
        super().__init__(**kwargs)
        self._made = True
        self.reports = reports
        visual = self._task.root_entity.mjcf_model.visual
        size = getattr(visual, "global")
        size.offwidth = size.offheight = buffer
        visual.quality.shadowsize = 0  # the maze has no lights that throw any: 64 MB

    def _recompile_physics_and_update_observables(self) -> None:
        # Not yet in the constructor: the first reset makes another maze and compiles that.
        if self._made:
            super()._recompile_physics_and_update_observables()

    def _recompile_physics(self) -> None:
        self._free()
        model = self._task.root_entity.mjcf_model
        xml, assets = _with_needed_textures(model.to_xml(), model.get_assets())
        self._physics = mjcf.Physics.from_xml_string(etree.tostring(xml), assets=assets)
        self._physics.legacy_step = self._legacy_step

    def _make_observation_updater(self) -> Any:
        return _Observer(self._task, reports=self.reports)

    def observation_spec(self) -> dict[str, specs.Array]:
        """The names alone: the package's wrappers look at nothing else."""
        names = _observed(self._task, reports=self.reports)
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
        """All the physics of one step, and which targets were touched on the way."""
        model, data = physics.model.ptr, physics.data.ptr
        first_half, second_half = mujoco.mj_step1, mujoco.mj_step2
        targets = self._task._targets
        is_target = np.zeros(model.ngeom, bool)
        is_target[[target._geom_id for target in targets]] = True
        warnings = data.warning.number
        before = warnings.copy()
        for _ in range(self._n_sub_steps):
            second_half(model, data)  # of the step before: dm_control keeps positions up to date
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
        """Of the object that is asked for, 0 to 1."""
        return self._task._target_colors[self._task._current_target_ix]

    def picture(self, camera: str, side: int) -> UInt8[np.ndarray, "side side 3"]:
        """What a camera sees: "walker/egocentric" or "top_camera"."""
        observer: Any = self._observation_updater
        return observer.picture(self._physics, camera, side)

    def place(self, camera: str, side: int) -> tuple[int, int]:
        """Row and column of the agent in a `picture`."""
        position = self._physics.bind(self._task._walker.root_body).xpos
        seen = Camera(self._physics, side, side, camera)
        column, row, depth = seen.matrix @ np.append(position, 1.0)
        seen.scene.free()
        return round(row / depth), round(column / depth)

    def close(self) -> None:
        """May be called twice, and before anything was made."""
        self._free()
        self._reset_next_step = True

    def _free(self) -> None:
        if self._physics is None:
            return
        observer: Any = self._observation_updater
        observer.free()
        self._physics.free()
        self._physics = None


def _observed(task: Any, *, reports: bool) -> list[str]:
    if not reports:
        return []
    kinds = ("rel", "abs")
    vectors = [f"walker/target_{kind}_{i}" for kind in kinds for i in range(task.n_targets)]
    return [*_REPORTED, *vectors]


class _Observer:
    """The camera's picture and the target's colour; with `reports` also where everything is."""

    def __init__(self, task: Any, *, reports: bool) -> None:
        self._task = task
        self._names = _observed(task, reports=reports)
        self._read: dict[str, Callable[[], Any]] = {}
        self._camera: Camera | None = None
        self._resets = 0

    def reset(self, physics: Any, random_state: np.random.RandomState) -> None:
        self._resets += 1
        if self._resets == 1:
            return  # the walker is not yet in its place: nobody will see this
        if self._camera is None:
            seen = self._task.observables[_CAMERA]
            name = self._task._walker.egocentric_camera.full_identifier
            self._camera = Camera(physics, seen.height, seen.width, name)
            self._view = _View(physics, name)
        self._read = {
            name: self._task.observables[name].observation_callable(physics, random_state)
            for name in self._names
        }
        self.update()

    def update(self) -> None:
        assert self._camera is not None
        self._view.hide_the_rest()
        image = np.array(self._camera.render())  # it draws the next one into the same array
        task = self._task
        self._observation = {name: np.array(read()) for name, read in self._read.items()}
        self._observation[_CAMERA] = image
        self._observation["target_color"] = task._target_colors[task._current_target_ix]

    def get_observation(self) -> dict[str, Any]:
        return self._observation

    def picture(self, physics: Any, camera: str, side: int) -> Any:
        self._view.hide_nothing()
        return np.array(physics.render(side, side, camera))

    def free(self) -> None:
        if self._camera is not None:
            self._camera.scene.free()
            self._camera = None


class _View:
    """Hides the geoms that lie outside of what a camera sees, so that they are not drawn.

    Each is taken for the ball around it. If that is wholly on the outer side of one of the four
    planes through the camera and the edges of its picture, nothing of it can be in the picture.
    """

    def __init__(self, physics: Any, camera: str) -> None:
        self._data = physics.data.ptr
        self._model = model = physics.model.ptr
        self._camera = physics.model.name2id(camera, "camera")
        self._groups = model.geom_group.copy()
        half = np.deg2rad(model.cam_fovy[self._camera]) / 2  # as wide as it is high
        c, s = np.cos(half), np.sin(half)
        # Inward normals as columns, in the camera's axes: right, up, and back.
        self._normals = np.array([[-c, c, 0, 0], [0, 0, -c, c], [-s, -s, -s, -s]])
        radius = model.geom_rbound.copy()
        plane = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
        sides = model.geom_size[:, :2]
        radius[plane] = np.hypot(sides[plane, 0], sides[plane, 1])
        radius[plane & (sides == 0).any(1)] = np.inf  # MuJoCo's word for endless
        # Mirrors and shadows show what the camera itself does not.
        if model.nlight or model.mat_reflectance.any():
            radius[:] = np.inf
        self._reach = -(1.01 * radius + 0.01)[:, None]

    def hide_the_rest(self) -> None:
        self._model.geom_group[:] = np.where(self._seen(), self._groups, _HIDDEN)

    def hide_nothing(self) -> None:
        self._model.geom_group[:] = self._groups

    def _seen(self) -> Bool[np.ndarray, " geoms"]:
        data, camera = self._data, self._camera
        normals = data.cam_xmat[camera].reshape(3, 3) @ self._normals
        distances = data.geom_xpos @ normals - data.cam_xpos[camera] @ normals
        return (distances >= self._reach).all(axis=1)


def _with_needed_textures(xml: Any, assets: dict[str, bytes]) -> tuple[Any, dict[str, bytes]]:
    """Without the textures that no material refers to, and without their files."""
    used = {element.get("texture") for element in xml.iter()}
    for texture in list(xml.iter("texture")):
        if texture.get("type") != "skybox" and texture.get("name") not in used:
            texture.getparent().remove(texture)
    files = {element.get("file") for element in xml.iter()}
    # A cube may have six files, under other names; there is none here, and it would fail loudly.
    return xml, {name: data for name, data in assets.items() if name in files}
