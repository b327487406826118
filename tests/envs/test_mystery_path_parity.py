"""Mystery Path against Memory Gym: the same path and actions give the same episode.

The quick tests compare a few episodes of each variant, the slow ones hundreds.
"""

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from agalite.envs.mystery_path import MysteryPath, MysteryPathGrid, generator, pixels

# What the paper sets; everything else is the original's default.
PAPER: dict[str, Any] = {"show_origin": True, "show_goal": True, "reward_path_progress": 0.1}
SHARED: list[dict[str, Any]] = [
    {"show_origin": False, "show_goal": False, "reward_path_progress": 0.0},
    {"visual_feedback": False, "reward_fall_off": -0.25, "reward_step": -0.01},
    {"show_goal": False, "reward_goal": 5.0, "max_steps": 30},
    {"show_origin": False, "max_steps": 1, "cardinal_origin_choice": [2]},
    {"cardinal_origin_choice": [1, 3, 3], "max_steps": 100, "reward_path_progress": 0.5},
]
# At the multiples of the root of two, single precision would move a diagonal by another pixel.
SPEEDS = [0.5, 2 * 2**0.5, 4.3, 7 * 2**0.5, 12.0, 500.0]
SCALES = [0.04, 0.1, 0.17, 0.34, 0.479]
# Chances of a random action, one after another; otherwise the path is followed.
WANDER = (0.02, 0.1, 0.3, 1.0)
EVENTS = ("goals", "timeouts", "falls", "progress")


class Recording(NamedTuple):
    """Episodes of the original, padded to the same number of steps T."""

    start: np.ndarray
    end: np.ndarray
    on_path: np.ndarray
    actions: np.ndarray
    first: list[np.ndarray]
    frames: list[np.ndarray]
    rewards: list[np.ndarray]
    infos: list[dict[str, Any]]


@pytest.fixture(scope="module")
def memory_gym() -> Iterator[ModuleType]:
    os.environ["SDL_VIDEODRIVER"] = os.environ["SDL_AUDIODRIVER"] = "dummy"
    os.environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"
    try:
        import memory_gym
        import memory_gym.character_controller
        import memory_gym.mystery_path
        import memory_gym.mystery_path_grid
        import memory_gym.pygame_assets
    except ImportError as error:
        pytest.fail(f"the real environment is not installed ({error}); run: make .venv")
    yield memory_gym
    sys.modules["pygame"].quit()


def follow_on_grid(original: Any, ahead: tuple[int, int]) -> int:
    facing = {(0, -1): 0, (-1, 0): 90, (0, 1): 180, (1, 0): 270}[ahead]
    return {0: 3, 90: 1, 180: 1, 270: 2}[(facing - original.agent.rotation) % 360]


def follow_freely(original: Any, ahead: tuple[int, int]) -> int:
    del original
    return 3 * (0, 2, 1)[ahead[0]] + (0, 2, 1)[ahead[1]]


def record(
    original: Any,
    seeds: range,
    options: dict[str, Any],
    count: int,
    follow: Callable[[Any, tuple[int, int]], int],
    steps: int,
) -> Recording:
    """Play the original: random actions and steps along its path, mixed by `WANDER`."""
    grids, actions = np.zeros((len(seeds), 7, 7), bool), np.zeros((len(seeds), steps), np.int32)
    first, frames, rewards, infos, ends = [], [], [], [], []
    for row, seed in enumerate(seeds):
        rng = np.random.default_rng(seed)
        obs, _ = original.reset(seed=seed, options=options)
        path = [(node.x, node.y) for node in reversed(original.mystery_path.path)]
        assert (path[0], path[-1]) == (original.start, original.end)
        grids[row][tuple(np.transpose(path))] = True
        ends.append((original.start, original.end))
        first.append(obs)
        seen, paid, done, info = [], [], False, {}
        while not done:
            column, line = original.normalized_agent_position
            tile = int(column), int(line)
            if tile not in path or rng.random() < WANDER[seed % len(WANDER)]:
                action = int(rng.integers(count))
            else:
                onward = path[path.index(tile) + 1]
                action = follow(original, (onward[0] - tile[0], onward[1] - tile[1]))
            actions[row, len(seen)] = action
            sent = action if count == 4 else [action // 3, action % 3]
            obs, reward, done, truncated, info = original.step(sent)
            assert not truncated
            seen.append(obs)
            paid.append(reward)
        frames.append(np.stack(seen))
        rewards.append(np.array(paid))
        infos.append(info)
    start, end = np.array(ends).transpose(1, 0, 2)
    return Recording(start, end, grids, actions, first, frames, rewards, infos)


def replayer(env: Any) -> Callable[..., Any]:
    """One program for all options: they are its arguments."""

    def episode(params: Any, start: Any, end: Any, on_path: Any, actions: Any) -> Any:
        def step(state: Any, action: Any) -> Any:
            obs, state, reward, terminated, info = env.step_env(
                jax.random.key(0), state, action, params
            )
            return state, (obs, reward, terminated, env.is_truncated(state, params), info)

        state = env.state_from_path(start, end, on_path)
        return env.get_obs(state, params), jax.lax.scan(step, state, actions)[1]

    return jax.jit(jax.vmap(episode, in_axes=(None, 0, 0, 0, 0)))


def compare(replay: Callable[..., Any], params: Any, old: Recording) -> dict[str, int]:
    """Assert equality step by step; -> how often the interesting things happened."""
    first, (obs, reward, terminated, truncated, info) = jax.tree.map(
        np.asarray, replay(params, old.start, old.end, old.on_path, old.actions)
    )
    np.testing.assert_array_equal(first, np.stack(old.first))
    happened: dict[str, int] = dict.fromkeys(EVENTS, 0)
    for row, frames in enumerate(old.frames):
        length, last = len(frames), old.infos[row]
        np.testing.assert_array_equal(obs[row, :length], frames)
        np.testing.assert_allclose(reward[row, :length], old.rewards[row], rtol=1e-6, atol=1e-6)
        ended = terminated[row, :length] | truncated[row, :length]
        assert np.flatnonzero(ended).tolist() == [length - 1]
        assert terminated[row, length - 1] == bool(last["success"])
        assert truncated[row, length - 1] == (not last["success"])
        assert info["success"][row, length - 1] == last["success"]
        assert info["num_fails"][row, length - 1] == last["num_fails"]
        assert length == last["length"]
        np.testing.assert_allclose(
            reward[row, :length].astype(np.float64).sum(), last["reward"], rtol=1e-5, atol=1e-5
        )
        happened["goals"] += last["success"]
        happened["timeouts"] += not last["success"]
        happened["falls"] += last["num_fails"]
        happened["progress"] += int((reward[row, : length - 1] > 0).sum())
    return happened


def test_a_few_episodes_on_the_grid_are_the_original_s(memory_gym: ModuleType) -> None:
    original = memory_gym.mystery_path_grid.GridMysteryPathEnv()
    old = record(original, range(8), PAPER, 4, follow_on_grid, 128)
    happened = compare(replayer(MysteryPathGrid()), MysteryPathGrid().default_params, old)
    assert min(happened.values()) > 0, happened


@pytest.mark.parametrize("options", [{}, {"agent_speed": 4.3, "agent_scale": 0.34}], ids=str)
def test_a_few_continuous_episodes_are_the_original_s(
    memory_gym: ModuleType, options: dict[str, Any]
) -> None:
    original = memory_gym.mystery_path.MysteryPathEnv()
    env = MysteryPath(max_steps=64, **options)
    mixed = PAPER | options | {"max_steps": 64}
    happened = compare(
        replayer(env), env.default_params, record(original, range(8), mixed, 9, follow_freely, 64)
    )
    assert min(happened.values()) > 0, happened


@pytest.mark.slow
def test_the_grid_variant_is_the_original(memory_gym: ModuleType) -> None:
    original = memory_gym.mystery_path_grid.GridMysteryPathEnv()
    replay = replayer(MysteryPathGrid())
    total: dict[str, int] = dict.fromkeys(EVENTS, 0)
    for begin in range(0, 200, 40):
        old = record(original, range(begin, begin + 40), PAPER, 4, follow_on_grid, 128)
        for name, number in compare(replay, MysteryPathGrid().default_params, old).items():
            total[name] += number
    assert min(total.values()) > 25, total
    ignored: dict[str, Any] = {"agent_scale": 0.4}
    for turn, options in enumerate([*SHARED, ignored]):
        mixed = PAPER | options
        old = record(original, range(40 * turn, 40 * turn + 40), mixed, 4, follow_on_grid, 128)
        compare(replay, MysteryPathGrid(**mixed).default_params, old)


@pytest.mark.slow
def test_the_continuous_variant_is_the_original(memory_gym: ModuleType) -> None:
    original = memory_gym.mystery_path.MysteryPathEnv()
    replay = replayer(MysteryPath())
    total: dict[str, int] = dict.fromkeys(EVENTS, 0)
    for begin in range(0, 208, 8):
        old = record(original, range(begin, begin + 8), PAPER, 9, follow_freely, 512)
        for name, number in compare(replay, MysteryPath().default_params, old).items():
            total[name] += number
    assert min(total.values()) > 25, total
    for turn, options in enumerate(SHARED):
        mixed = PAPER | options
        old = record(original, range(8 * turn, 8 * turn + 8), mixed, 9, follow_freely, 512)
        compare(replay, MysteryPath(**mixed).default_params, old)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"agent_speed": x} for x in SPEEDS] + [{"agent_scale": x} for x in SCALES],
    ids=str,
)
def test_speeds_and_scales_are_the_original_s(
    memory_gym: ModuleType, options: dict[str, Any]
) -> None:
    original = memory_gym.mystery_path.MysteryPathEnv()
    env = MysteryPath(max_steps=64, **options)
    mixed = PAPER | options | {"max_steps": 64}
    old = record(original, range(40), mixed, 9, follow_freely, 64)
    compare(replayer(env), env.default_params, old)


def test_every_sprite_is_the_original_s(memory_gym: ModuleType) -> None:
    """At every scale at which any of the drawing's whole numbers changes, and between them."""
    pygame = sys.modules["pygame"]
    pygame.init()
    pygame.display.set_mode((84, 84))
    steps = sorted({k / n for n in (25, 18, 12, 10, 3) for k in range(1, 13)})
    steps = [scale for scale in steps if 0.04 <= scale < 0.48]
    between = [(a + b) / 2 for a, b in zip(steps, [*steps[1:], 0.48], strict=True)]
    for scale in [*steps, *between, 0.25]:
        controller = memory_gym.character_controller.CharacterController(3.0, scale)
        sprites = pixels.atlas(scale)
        rows = sprites.rows.reshape(2, 8, sprites.height + 1, -1, 3)[0, :, :-1]
        for turn in range(8):
            surface, _ = controller.get_rotated_sprite(45 * turn)
            theirs = pygame.surfarray.array3d(surface)
            blue = np.all(theirs == (0, 0, 255), axis=-1)
            ours = np.zeros((2 * 83, 2 * 83, 3), np.uint8)
            ours[83 + sprites.top : 83 + sprites.top + sprites.height] = rows[turn]
            shown = np.any(ours, axis=-1)
            ours = np.where(shown[..., None], ours ^ 1, 0)
            area = slice(83 - len(blue) // 2, 83 - len(blue) // 2 + len(blue))
            np.testing.assert_array_equal(shown[area, area], ~blue)
            assert shown.sum() == (~blue).sum()
            np.testing.assert_array_equal(ours[area, area][~blue], theirs[~blue])


def test_render_is_the_original_s(memory_gym: ModuleType) -> None:
    original = memory_gym.mystery_path_grid.GridMysteryPathEnv(render_mode="rgb_array")
    original.reset(seed=3, options=PAPER)
    env = MysteryPathGrid()
    on_path = np.zeros((7, 7), bool)
    for node in original.mystery_path.path:
        on_path[node.x, node.y] = True
    state = env.state_from_path(original.start, original.end, on_path)
    np.testing.assert_array_equal(jax.jit(env.render)(state), original.render())


class Scripted:
    """Hands the original's path maker prepared draws in place of a random generator.

    It looks at what its caller is doing to know which of them is meant.
    """

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def integers(self, low: int, high: int) -> int:
        at = sys._getframe(1).f_locals
        if (low, high) == (0, 100):
            return 0 if self.draw.interior[7 * at["i"] + at["j"]] else 99
        assert (low, high) == (1, 9)
        here, there = at["current_node"], at["neighbor"]
        side = {(1, 0): 0, (-1, 0): 1, (0, 1): 2, (0, -1): 3}[there.x - here.x, there.y - here.y]
        return int(self.draw.costs[7 * here.x + here.y, side])

    def choice(self, options: list[Any]) -> Any:
        if options == [4, 8]:
            return int(self.draw.number)
        return min(options, key=lambda node: self.draw.shuffle[7 * node.x + node.y])


@pytest.mark.parametrize("number", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_same_draws_make_the_same_path(memory_gym: ModuleType, number: int) -> None:
    """Walls and search of the original, given our draws, make the same walls and paths."""
    keys = jax.random.split(jax.random.key(5), number)

    @jax.jit
    @jax.vmap
    def generate(key: Any) -> Any:
        drawn = generator.draws(key, jnp.arange(4))
        path = generator.path(drawn)
        begin, goal = (7 * tile[0] + tile[1] for tile in (path.start, path.end))
        walls = generator.walls(begin, goal, drawn.interior, drawn.number, drawn.shuffle)
        return drawn, path, walls

    draws, paths, walls = jax.tree.map(np.asarray, generate(keys))
    for row in range(len(keys)):
        start, end = (tuple(int(x) for x in tile[row]) for tile in (paths.start, paths.end))
        script = Scripted(jax.tree.map(lambda leaf, at=row: leaf[at], draws))
        real = memory_gym.pygame_assets.MysteryPath(7, 7, start, end, script)
        theirs = np.zeros((2, 7, 7), bool)
        for node in real.path:
            theirs[0, node.x, node.y] = True
        for node in real.wall_nodes:
            theirs[1, node.x, node.y] = True
        np.testing.assert_array_equal(paths.on_path[row], theirs[0])
        np.testing.assert_array_equal(walls[row].reshape(7, 7), theirs[1])


@pytest.mark.slow
def test_paths_are_as_likely_as_the_original_s(memory_gym: ModuleType) -> None:
    """Ends, lengths and tiles over 3,000 seeds each, under chi-squared tests (fixed seeds)."""
    count = 3000
    theirs = np.zeros((count, 51), np.int64)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        side = rng.choice([0, 1, 2, 3])
        a, b = (int(x) for x in rng.integers(0, 7, 2))
        start, end = [((0, a), (6, b)), ((6, a), (0, b)), ((a, 0), (b, 6)), ((a, 6), (b, 0))][side]
        path = memory_gym.pygame_assets.MysteryPath(7, 7, start, end, rng).path
        theirs[seed, [7 * node.x + node.y for node in path]] = 1
        theirs[seed, 49:] = 7 * start[0] + start[1], 7 * end[0] + end[1]

    env = MysteryPathGrid()
    keys = jax.random.split(jax.random.key(11), count)
    state = jax.jit(jax.vmap(lambda key: env.reset_env(key, env.default_params)[1]))(keys)
    tiles = [7 * tile[:, 0] + tile[:, 1] for tile in (state.start, state.end)]
    ours = np.column_stack([np.asarray(state.on_path).reshape(count, 49), *tiles]).astype(int)

    def likely(x: np.ndarray, y: np.ndarray) -> float:
        """The p-value of the same distribution over small whole numbers; rare ones pooled."""
        table = np.stack([np.bincount(z, minlength=50) for z in (x, y)])
        rare = table.sum(axis=0) < 20
        pooled = table[:, rare].sum(axis=1, keepdims=True)
        table = np.concatenate([table[:, ~rare], pooled[:, : int(pooled.sum() > 0)]], axis=1)
        return float(stats.chi2_contingency(table)[1])  # pyright: ignore

    assert likely(ours[:, :49].sum(axis=1), theirs[:, :49].sum(axis=1)) > 1e-3
    assert likely(ours[:, 49], theirs[:, 49]) > 1e-3
    assert likely(ours[:, 50], theirs[:, 50]) > 1e-3
    # 49 comparisons of how often a tile is on the path.
    often = np.stack([ours[:, :49].mean(axis=0), theirs[:, :49].mean(axis=0)])
    spread = np.sqrt(2 * often.mean(axis=0) * (1 - often.mean(axis=0)) / count)
    assert np.abs(often[0] - often[1]).max() > 0
    assert (np.abs(often[0] - often[1]) / spread).max() < 4
