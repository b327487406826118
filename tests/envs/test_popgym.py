"""POPGym: step by step against the package, what an episode begins with, and the options."""

from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.envs import make
from agalite.envs.popgym import table
from agalite.testing import check_env

twin = pytest.importorskip("popgym_twin", reason="popgym is not installed")

TASKS = {task.name: task for task in table.tasks()}
EASY = [name for name in TASKS if name.endswith("easy")]
PHYSICS = ("cartpole", "pendulum")


def compare(name, count, seed=0):
    """Record `count` episodes of the package, replay them, compare everything; the episodes."""
    episodes = twin.record(TASKS[name], count, seed)
    # The package computes motions in float64. They are unstable: float32 drifts off, and after
    # 300 steps float64 does too.
    physics = any(part in name for part in PHYSICS)
    resync = physics and max(len(e.actions) for e in episodes) > 200
    obs, hidden, reward, terminated, truncated = twin.replay(
        TASKS[name], episodes, x64=physics, resync=resync
    )
    atol = 2e-6 if physics else 0.0
    for i, e in enumerate(episodes):
        t = len(e.actions)
        np.testing.assert_allclose(obs[i, : t + 1], e.obs, rtol=0, atol=atol)
        known = hidden[i, : t + 1, : e.hidden.shape[1]]
        np.testing.assert_allclose(known, e.hidden, rtol=1e-6, atol=atol)
        np.testing.assert_allclose(reward[i, :t], e.reward, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(terminated[i, :t], e.terminated)
        np.testing.assert_array_equal(truncated[i, :t], e.truncated)
    return episodes


@pytest.mark.parametrize("name", EASY)
def test_episodes_are_those_of_the_package(name):
    count = 5 if "labyrinth" in name else 12
    compare(name, count)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_many_episodes_are_those_of_the_package(name):
    count = 20 if "labyrinth" in name else 100
    episodes = compare(name, count, seed=1)
    # Random players and perfect ones have both been seen.
    returns = [e.reward.sum() for e in episodes]
    assert np.std(returns) > 0


@pytest.mark.parametrize("name", ["position-only-cartpole", "position-only-pendulum"])
def test_single_steps_in_float32_are_those_of_the_package(name):
    """From every state of the package's episodes: float32 differs by its rounding only."""
    task = TASKS[f"popgym-{name}-easy"]
    episodes = twin.record(task, 6)
    obs, hidden, *_ = twin.replay(task, episodes, resync=True)
    for i, e in enumerate(episodes):
        t = len(e.actions)
        np.testing.assert_allclose(obs[i, : t + 1], e.obs, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(hidden[i, : t + 1], e.hidden, rtol=1e-5, atol=1e-5)


def test_all_of_the_packages_environments_are_here():
    import popgym.envs

    ours = {task.package_class for task in TASKS.values()}
    assert ours == {c.__name__ for c in popgym.envs.ALL}
    assert len(TASKS) == 48
    for task in TASKS.values():
        env, package = make(task.name), twin.package_env(task)
        size = gymnasium.spaces.flatdim(package.observation_space)
        assert env.observation_space().shape == (size,), task.name
        space = package.action_space
        if isinstance(space, gymnasium.spaces.Box):
            assert env.action_space().shape == space.shape
        else:
            assert env.action_space().n == np.prod(getattr(space, "nvec", getattr(space, "n", 0)))


# Mistakes that other ports in JAX have.


def play(env, choose, key=0):
    """One episode with `choose(state)`: observations (T + 1, ...), rewards (T,), the last state,
    and how it ended."""
    params = env.default_params
    step = jax.jit(lambda key, state, action: env.step_env(key, state, action, params))
    obs, state = env.reset_env(jax.random.key(key), params)
    seen, rewards = [obs], []
    while True:
        obs, state, reward, terminated, _ = step(
            jax.random.key(len(rewards)), state, jnp.int32(choose(state))
        )
        seen.append(obs)
        rewards.append(float(reward))
        if terminated or env.is_truncated(state, params):
            return np.array(seen), np.array(rewards), state, bool(terminated)


def test_autoencode_shows_the_cards_first_and_asks_for_the_last_of_them_first():
    env = make("popgym-autoencode-easy")
    shown = []

    def answer(state):
        time = int(state.time)
        if time < 51:
            return 0
        return shown[51 - (time - 51)]

    _, state = env.reset_env(jax.random.key(0), env.default_params)
    shown = np.asarray(state.suits)
    seen, rewards, *_ = play(env, answer)
    watching = seen[:, 1] == 1
    np.testing.assert_array_equal(watching, np.arange(104) < 51)
    # The last card comes with the flag to play, and is the first to be named.
    np.testing.assert_array_equal(seen[:52, 2:].argmax(1), shown)
    np.testing.assert_array_equal(seen[52:, 2:].argmax(1), 0)
    assert rewards.sum() == pytest.approx(1)
    np.testing.assert_array_equal(rewards[:51], 0)


@pytest.mark.parametrize(("difficulty", "actions"), [("easy", 27), ("medium", 27), ("hard", 17)])
def test_count_recall_is_answered_with_a_count(difficulty, actions):
    env = make(f"popgym-count-recall-{difficulty}")
    assert env.action_space().n == actions
    answers = []

    def count(state):
        t = int(state.time)
        shown, asked = np.asarray(state.values)[: t + 1], np.asarray(state.queries)[t]
        answers.append(int((shown == asked).sum()))
        return answers[-1]

    _, rewards, *_ = play(env, count)
    assert rewards.sum() == pytest.approx(1)
    assert len(set(answers)) > 10, "more than two different counts are asked for"


def test_mine_sweeper_can_be_won():
    env = make("popgym-minesweeper-easy")

    def clear(state):
        return int(np.argmin(np.asarray(state.mines) | np.asarray(state.viewed)))

    _, rewards, state, terminated = play(env, clear)
    assert terminated
    assert not state.exploded
    assert len(rewards) == 14
    assert rewards.sum() == pytest.approx(1)
    # One wasted step, and the time is over before the last square.
    first = []

    def wasteful(state):
        first.append(clear(state) if not first else first[0])
        return first[-1] if len(first) == 2 else clear(state)

    _, rewards, state, terminated = play(env, wasteful)
    assert not terminated
    assert int(state.left) == 1


# Options and contracts.

QUICK = ["autoencode-easy", "minesweeper-easy", "position-only-pendulum-easy"]


@pytest.mark.parametrize(
    "name",
    [
        name
        if name.removeprefix("popgym-") in QUICK
        else pytest.param(name, marks=pytest.mark.slow)
        for name in TASKS
    ],
)
def test_they_keep_the_contract(name):
    env = make(name)
    check_env(env, steps=40)
    _, state = env.reset(jax.random.key(0))
    frame = np.asarray(env.render(state, env.default_params))
    assert len(np.unique(frame)) > 1, "a frame of one colour shows nothing"


@pytest.mark.parametrize(
    "name", ["higher-lower-easy", pytest.param("labyrinth-escape-easy", marks=pytest.mark.slow)]
)
def test_the_hidden_state_follows_the_observation(name):
    env, twin_env = make(f"popgym-{name}"), make(f"popgym-{name}", observe_state=True)
    size = env.observation_space().shape[0]
    assert twin_env.observation_space().shape[0] > size
    check_env(twin_env, steps=24)
    obs, state = env.reset(jax.random.key(3))
    full, same_state = twin_env.reset(jax.random.key(3))
    np.testing.assert_array_equal(full[:size], obs)
    np.testing.assert_array_equal(full[size:], env.hidden_state(state))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, same_state))


def test_the_labyrinths_twin_knows_what_the_packages_state_lacks():
    env = make("popgym-labyrinth-explore-easy")
    _, state = env.reset(jax.random.key(0))
    rest = np.asarray(env.hidden_state(state))[5 * 121 :]
    grid, row, column = np.split(rest, [4 * 121, 4 * 121 + 11])
    np.testing.assert_array_equal(grid.reshape(121, 4).argmax(1), state.grid)
    assert (row.argmax(), column.argmax()) == (int(state.y), int(state.x))


@pytest.mark.parametrize("task", ["RepeatFirstEasy", "PositionOnlyPendulumEasy"])
def test_gymnasium_has_them(task):
    env = gymnasium.make(f"agalite/popgym-{task}-v0")
    obs, _ = env.reset(seed=0)
    assert obs in env.observation_space
    env.action_space.seed(0)
    obs, reward, *_ = env.step(env.action_space.sample())
    assert obs in env.observation_space
    assert isinstance(reward, float)
    if isinstance(env.action_space, gymnasium.spaces.Box):
        with pytest.raises(ValueError, match=r"must have shape \(1,\), from \[-2.0\] to \[2.0\]"):
            env.step(np.array([2.5], np.float32))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("autoencode-easy", {"observe_state": 2}, "observe_state=2"),
        ("autoencode-easy", {"decks": 2}, "has no option 'decks'; it has: observe_state"),
        ("battleship-easy", {"ships": (9,)}, "ships=9 must be a whole number from 1 to 8"),
        ("noisy-position-only-cartpole-easy", {"max_steps": 0}, "max_steps=0"),
    ],
)
def test_bad_options(name, options, words):
    with pytest.raises(ValueError, match=words):
        make(f"popgym-{name}", **options)


def test_bad_arguments():
    from agalite.envs.popgym.concentration import Concentration
    from agalite.envs.popgym.count_recall import CountRecall
    from agalite.envs.popgym.minesweeper import MineSweeper

    with pytest.raises(ValueError, match="match='suits' has 13 cards of a kind"):
        Concentration(match="suits")
    with pytest.raises(ValueError, match="match='hearts' is unknown"):
        CountRecall(match="hearts")
    with pytest.raises(ValueError, match="mines=14 must be a whole number from 1 to 13"):
        MineSweeper(4, mines=14)


def test_the_documentation_has_their_sizes():
    page = (Path(__file__).parents[2] / "docs/popgym.md").read_text()
    cells = (line.split("|") for line in page.split("\n|"))
    rows = {row[0].strip(" `"): row for row in cells}
    families = {name.removeprefix("popgym-").rsplit("-", 1)[0] for name in TASKS}
    assert families <= set(rows)
    for family in families:
        envs = [make(f"popgym-{family}-{d}") for d in table.DIFFICULTIES]
        twins = [make(f"popgym-{family}-{d}", observe_state=True) for d in table.DIFFICULTIES]
        sizes = (
            [env.observation_space().shape[0] for env in envs],
            [env.observation_space().shape[0] for env in twins],
            [getattr(env.action_space(), "n", "torque") for env in envs],
            [env.default_params.max_steps_in_episode for env in envs],
        )
        for cell, values in zip(rows[family][1:], sizes, strict=False):
            shown = [str(v) for v in (values[:1] if len(set(values)) == 1 else values)]
            assert cell.strip() == " / ".join(shown), family
