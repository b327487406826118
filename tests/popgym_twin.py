"""The package popgym beside this library's environments: recorded episodes, and their replay.

The package's random draws are read from it: the state after its reset becomes the first state
here, and what it draws in a step (`Recorder`) becomes the argument `draw` of `step_with`.
"""

import warnings
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from agalite.envs import make
from agalite.envs.popgym import (
    autoencode,
    bandit,
    battleship,
    cartpole,
    count_recall,
    higher_lower,
    minesweeper,
    pendulum,
    repeat,
    table,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import popgym.envs

flatten = gymnasium.spaces.flatten


class Recorder:
    """A NumPy generator that remembers the single numbers and the noise it gave."""

    def __init__(self, generator):
        self.generator = generator
        self.taken = []

    def __getattr__(self, name):
        return getattr(self.generator, name)

    def random(self, *args, **kwargs):
        value = self.generator.random(*args, **kwargs)
        if not args:
            self.taken.append(value)
        return value

    def normal(self, *args):
        value = self.generator.normal(*args)
        self.taken.append(value)
        return value


class Episode(NamedTuple):
    """One episode of the package's: T actions, T + 1 observations and hidden states.

    `hidden` and `obs` are flattened by Gymnasium, which is the encoding of this library.
    """

    start: Any
    actions: np.ndarray
    draws: Any
    obs: np.ndarray
    hidden: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    motion: np.ndarray
    """(T, ...) float64, what moves, before every step; empty where nothing does."""


def package_env(task):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = getattr(popgym.envs, task.package_class)()
    env.reset(seed=0)
    env._np_random = Recorder(env._np_random)
    return env


def record(task, count, seed=0):
    """`count` episodes, from random ones to those of a player who sees all."""
    env, family = package_env(task), task.package_class.removesuffix(_difficulty(task))
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)  # seeds the global generators of the labyrinths too
    env._np_random = Recorder(np.random.default_rng(seed))
    return [_episode(env, family, rng, skill) for skill in np.linspace(0, 1, count)]


def _difficulty(task):
    return task.name.rsplit("-", 1)[1].capitalize()


def _episode(env, family, rng, skill):
    draws = env._np_random.taken
    draws.clear()
    first, _ = env.reset()
    start = START[family](env)
    obs, hidden = [flatten(env.observation_space, first)], [_hidden(env)]
    rows, motion, done = [], [], False
    while not done:
        motion.append(np.ravel(env.state) if hasattr(env, "gravity") or hasattr(env, "g") else [])
        skilled = rng.random() < skill
        action = SKILL[family](env, rng) if skilled else _random_action(env, rng)
        seen, reward, terminated, truncated, _ = env.step(action)
        obs.append(flatten(env.observation_space, seen))
        hidden.append(_hidden(env))
        rows.append((_as_ours(env, action), reward, terminated, truncated))
        done = terminated or truncated
    actions, reward, terminated, truncated = (np.array(c) for c in zip(*rows, strict=True))
    # Environments that draw nothing get zeros: no noise.
    taken = np.array(draws if draws else np.zeros((len(rows), 2)), np.float32)
    return Episode(
        start,
        actions,
        taken[len(taken) - len(rows) :],
        np.array(obs, np.float32),
        np.array(hidden, np.float32),
        reward.astype(np.float32),
        terminated,
        truncated & ~terminated,  # here an episode never ends in both ways
        np.array(motion, np.float64),
    )


def _hidden(env):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flatten(env.state_space, env.get_state())


def _random_action(env, rng):
    space = env.action_space
    if isinstance(space, gymnasium.spaces.Box):
        return rng.uniform(space.low, space.high).astype(np.float32)
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return tuple(int(rng.integers(n)) for n in space.nvec)
    return int(rng.integers(space.n))


def _as_ours(env, action):
    if isinstance(env.action_space, gymnasium.spaces.MultiDiscrete):
        return np.ravel_multi_index(action, env.action_space.nvec)
    return action


def replay(task, episodes, *, x64=False, resync=False):
    """The same with this library: (obs, hidden, reward, terminated, truncated), (E, T, ...) each.

    Shorter episodes are filled up with their last action; what comes after their end is to be
    ignored. With `x64` in float64, and with `resync` every step starts from the package's state.
    """
    env = make(task.name, observe_state=True)
    size = make(task.name).observation_space().shape[0]
    steps = max(len(e.actions) for e in episodes)

    def padded(values):
        return np.stack([np.concatenate([v, v[-1:].repeat(steps - len(v), 0)]) for v in values])

    @jax.jit
    @jax.vmap
    def play(start, actions, draws, motion):
        params = env.default_params

        def one(state, inputs):
            action, draw, motion = inputs
            if resync:
                state = state.replace(**dict(zip(_moving(state), motion, strict=True)))
            obs, state, reward, terminated, _ = env.step_with(draw, state, action, params)
            truncated = env.is_truncated(state, params)
            return state, (obs, reward, terminated, truncated)

        first = env.observe(jax.random.key(0), start, None, params)
        _, (obs, *rest) = jax.lax.scan(one, start, (actions, draws, motion))
        return jnp.concatenate([first[None], obs]), *rest

    with jax.enable_x64(x64):
        start = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[e.start for e in episodes])
        actions = jnp.asarray(padded([e.actions for e in episodes]))
        draws = jnp.asarray(padded([e.draws for e in episodes]))
        motion = jnp.asarray(padded([e.motion for e in episodes]))
        obs, *rest = jax.tree.map(np.asarray, play(start, actions, draws, motion))
    return obs[..., :size], obs[..., size:], *rest


def _moving(state):
    """The fields of the package's `state`, in its order."""
    names = ("x", "x_dot", "theta", "theta_dot")
    return [name for name in names if hasattr(state, name)]


def _time():
    return np.int32(0)


def _dealt(deck, kinds):
    """Kinds of cards in the order in which the package deals them: from the end."""
    return kinds[deck.idx[::-1]].astype(np.uint8)


def _count_recall(env):
    values = _dealt(env.value_deck, env.deck_idx_type)
    queries = _dealt(env.query_deck, env.deck_idx_type)
    return count_recall.CountRecallState(_time(), values, queries, env.counts.astype(np.int32))


def _concentration(env):
    cards = env.deck_idx_type[env.deck.idx].astype(np.uint8)
    state = make(_our_name(env)).begin(jnp.asarray(cards))
    return jax.tree.map(np.asarray, state)


def _battleship(env):
    ships = env.board.ravel().astype(bool)
    return battleship.BattleshipState(
        _time(), ships, np.zeros_like(ships), np.bool_(False), np.int32(ships.sum())
    )


def _minesweeper(env):
    mines = env.hidden_grid.ravel() == 1
    left = np.int32((~mines).sum())
    off = np.bool_(False)
    return minesweeper.MineSweeperState(
        _time(), mines, np.zeros_like(mines), np.int32(0), left, off
    )


def _cartpole(env):
    taken = env._np_random.taken
    noise = np.asarray(taken[0] if taken else np.zeros(2), np.float32)
    return cartpole.CartPoleState(_time(), *map(np.float64, env.state), noise)


def _pendulum(env):
    taken = env._np_random.taken
    noise = np.asarray(taken[0] if taken else np.zeros(2), np.float32)
    return pendulum.PendulumState(_time(), *map(np.float64, env.state), noise)


def _labyrinth(env):
    """Through `begin`, which places the entrance and the exit."""
    ours = make(_our_name(env))
    bare = np.where(env.maze.grid == 1, 1, 0).astype(np.uint8)
    for y, x in (env.maze.start, env.maze.end):
        bare[y, x] = 1
    state = ours.begin(jnp.asarray(bare.ravel()), env.maze.start, env.maze.end)
    return jax.tree.map(np.asarray, state)


def _our_name(env):
    tasks = {task.package_class: task.name for task in table.tasks()}
    return tasks[type(env).__name__]


START = {
    "Autoencode": lambda e: autoencode.AutoencodeState(_time(), _dealt(e.deck, e.deck.suits_idx)),
    "Battleship": _battleship,
    "Concentration": _concentration,
    "CountRecall": _count_recall,
    "HigherLower": lambda e: higher_lower.HigherLowerState(
        _time(), _dealt(e.deck, e.deck.ranks_idx)
    ),
    "LabyrinthEscape": _labyrinth,
    "LabyrinthExplore": _labyrinth,
    "MineSweeper": _minesweeper,
    "MultiarmedBandit": lambda e: bandit.BanditState(_time(), e.bandits.copy(), np.bool_(False)),
    "NoisyPositionOnlyCartPole": _cartpole,
    "NoisyPositionOnlyPendulum": _pendulum,
    "PositionOnlyCartPole": _cartpole,
    "PositionOnlyPendulum": _pendulum,
    "VelocityOnlyCartPole": _cartpole,
    "RepeatFirst": lambda e: repeat.RepeatState(_time(), _dealt(e.deck, e.deck.suits_idx)),
    "RepeatPrevious": lambda e: repeat.RepeatState(_time(), _dealt(e.deck, e.deck.suits_idx)),
}


def _find_pair(env, rng):
    """A card that is face down, or the one that goes with the card turned."""
    up, values = env.deck["face_up_idx"], env.deck_idx_type[env.deck.idx]
    down = [i for i in range(len(values)) if i not in up]
    if not env.deck["in_play_idx"]:
        return int(rng.choice(down))
    (first,) = env.deck["in_play_idx"]
    return next(i for i in down if i != first and values[i] == values[first])


def _find(grid, value, rng):
    places = np.argwhere(grid == value)
    return tuple(int(i) for i in places[rng.integers(len(places))])


def _sink(env, rng):
    return _find((env.board == 1) & (env.guesses == 0), True, rng)


def _walk(env, rng):
    """The first step of a shortest way to a square not visited, or to the exit."""
    del rng
    grid, goals = env.maze.grid, env.explored == 0
    if (grid == 3).any():
        goals = grid == 3
    moves = ((0, -1), (0, 1), (-1, 0), (1, 0))
    ways, seen = [(env.position, None)], {env.position}
    for (y, x), first in ways:
        if goals[y, x] and first is not None:
            return first
        for action, (dy, dx) in enumerate(moves):
            to = (y + dy, x + dx)
            inside = 0 <= to[0] < grid.shape[0] and 0 <= to[1] < grid.shape[1]
            if inside and to not in seen and grid[to] != 1:
                seen.add(to)
                ways.append((to, action if first is None else first))
    return 0


def _balance(env, rng):
    del rng
    x, x_dot, theta, theta_dot = env.state
    return int(theta + 0.3 * theta_dot + 0.02 * x + 0.05 * x_dot > 0)


def _swing(env, rng):
    """Push with the motion: the pendulum goes round, and its speed reaches its limit."""
    del rng
    return np.array([2.0 if env.state[1] > 0 else -2.0], np.float32)


def _repeat(env, rng):
    hand = env.deck["player"]
    if len(hand) < env.k:
        return int(rng.integers(4))
    return int(env.deck.suits_idx[hand[-env.k]])


SKILL = {
    "Autoencode": lambda e, _: int(e.deck.suits_idx[e.deck["system"][-1]]),
    "Battleship": _sink,
    "Concentration": _find_pair,
    "CountRecall": lambda e, _: int(e.counts[e.query]),
    "HigherLower": lambda e, _: int(e.deck.ranks_idx[e.deck["player"][-1]] > 6),
    "LabyrinthEscape": _walk,
    "LabyrinthExplore": _walk,
    "MineSweeper": lambda e, rng: _find(e.hidden_grid, 0, rng),
    "MultiarmedBandit": lambda e, _: int(np.argmax(e.bandits)),
    "NoisyPositionOnlyCartPole": _balance,
    "NoisyPositionOnlyPendulum": _swing,
    "PositionOnlyCartPole": _balance,
    "PositionOnlyPendulum": _swing,
    "VelocityOnlyCartPole": _balance,
    "RepeatFirst": lambda e, _: int(e.card),
    "RepeatPrevious": _repeat,
}
