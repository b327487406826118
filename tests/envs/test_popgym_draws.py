"""POPGym's random draws, which cannot be fed in: their distributions against the package's."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from agalite.envs import make
from agalite.envs.popgym import table
from agalite.envs.popgym.base import random_order
from agalite.envs.popgym.labyrinth import hunt_and_kill

twin = pytest.importorskip("popgym_twin", reason="popgym is not installed")

TASKS = {task.name: task for task in table.tasks()}
# A test of a right sampler fails for one of a thousand seeds; the seeds are fixed.
LEVEL = 1e-3


def starts(name, count, seed=0):
    """`count` first states, stacked."""
    env = make(name)
    return jax.jit(jax.vmap(env.start))(jax.random.split(jax.random.key(seed), count))


def uniform_counts(values, choices):
    return stats.chisquare(np.bincount(values, minlength=choices)).pvalue


def same_counts(ours, theirs, choices):
    """Whether two samples of whole numbers have one distribution; rare numbers count together."""
    counts = np.array([np.bincount(x, minlength=choices) for x in (ours, theirs)])
    rare = counts.sum(0) < 20
    counts = np.concatenate([counts[:, ~rare], counts[:, rare].sum(1, keepdims=True)], axis=1)
    return stats.chi2_contingency(counts[:, counts.sum(0) > 0]).pvalue


def test_orders_are_uniform():
    """All 24 orders of four, and every place of a deck."""
    orders = jax.vmap(lambda k: random_order(k, 4))(jax.random.split(jax.random.key(0), 4800))
    number = np.asarray(orders) @ [64, 16, 4, 1]
    _, index = np.unique(number, return_inverse=True)
    assert uniform_counts(index, 24) > LEVEL
    decks = np.asarray(
        jax.vmap(lambda k: random_order(k, 52))(jax.random.split(jax.random.key(1), 4000))
    )
    np.testing.assert_array_equal(np.sort(decks, axis=1), np.tile(np.arange(52), (4000, 1)))
    for place in (0, 25, 51):
        assert uniform_counts(decks[:, place], 52) > LEVEL
    ties = jnp.array([7, 3, 7, 3], jnp.uint32)
    # Of equal random numbers the first is the smaller, so that no card is missing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "bits", lambda *_: ties)
        np.testing.assert_array_equal(random_order(jax.random.key(0), 4), [2, 0, 3, 1])


@pytest.mark.parametrize(
    ("name", "field", "kinds"),
    [
        ("repeat-first-medium", "suits", 4),
        ("count-recall-hard", "queries", 13),
        ("higher-lower-easy", "ranks", 13),
    ],
)
def test_decks_have_all_their_cards(name, field, kinds):
    cards = np.asarray(getattr(starts(f"popgym-{name}", 50), field))
    counts = np.array([np.bincount(row, minlength=kinds) for row in cards])
    np.testing.assert_array_equal(counts, cards.shape[1] // kinds)
    assert len(np.unique(cards, axis=0)) == 50


def test_concentration_has_all_its_cards():
    cards = np.asarray(starts("popgym-concentration-hard", 50).cards).reshape(50, 52, 14)
    np.testing.assert_array_equal(cards.sum(2), 1)
    assert (cards.sum(1) == [4] * 13 + [0]).all()
    assert len(np.unique(cards, axis=0)) == 50


def test_mines_are_uniform():
    mines = np.asarray(starts("popgym-minesweeper-easy", 6000).mines)
    np.testing.assert_array_equal(mines.sum(1), 2)
    _, pair = np.unique(mines, axis=0, return_inverse=True)
    assert uniform_counts(np.ravel(pair), 16 * 15 // 2) > LEVEL


def test_ships_are_placed_as_in_the_package():
    ours = np.asarray(starts("popgym-battleship-easy", 4000).ships).reshape(-1, 8, 8)
    env = twin.package_env(TASKS["popgym-battleship-easy"])
    theirs = []
    for _ in range(2000):
        env.reset()
        theirs.append(env.board)
    theirs = np.array(theirs)
    np.testing.assert_array_equal(ours.sum((1, 2)), 12)

    def first(boards):  # the first square with a ship, row by row
        return boards.reshape(len(boards), -1).argmax(1)

    def edge(boards):  # squares of ships at the edge
        return boards.sum((1, 2)) - boards[:, 1:-1, 1:-1].sum((1, 2))

    def across(boards):  # neighbours in a row that are both ships
        return (boards[:, :, 1:] & boards[:, :, :-1]).sum((1, 2))

    for measure in (first, edge, across):
        assert same_counts(measure(ours), measure(theirs.astype(bool)), 64) > LEVEL


def test_arms_starts_and_noise():
    arms = np.asarray(starts("popgym-multiarmed-bandit-easy", 500).arms).ravel()
    assert stats.kstest(arms, "uniform").pvalue > LEVEL
    env = make("popgym-multiarmed-bandit-easy")
    draws = jax.vmap(env.draw)(jax.random.split(jax.random.key(1), 4000))
    assert stats.kstest(np.asarray(draws), "uniform").pvalue > LEVEL

    cart = starts("popgym-noisy-position-only-cartpole-medium", 4000)
    for values in (cart.x, cart.x_dot, cart.theta, cart.theta_dot):
        assert stats.kstest(np.asarray(values), stats.uniform(-0.05, 0.1).cdf).pvalue > LEVEL
    pendulum = starts("popgym-noisy-position-only-pendulum-hard", 4000)
    assert stats.kstest(pendulum.theta, stats.uniform(-np.pi, 2 * np.pi).cdf).pvalue > LEVEL
    assert stats.kstest(pendulum.theta_dot, stats.uniform(-1, 2).cdf).pvalue > LEVEL
    for name, state, sigma in (("cartpole-medium", cart, 0.2), ("pendulum-hard", pendulum, 0.3)):
        env = make(f"popgym-noisy-position-only-{name}")
        later = jax.vmap(env.draw)(jax.random.split(jax.random.key(2), 4000))
        for noise in (state.noise, later):
            for values in np.asarray(noise).T:
                assert stats.kstest(values, stats.norm(0, sigma).cdf).pvalue > LEVEL


def mazelib_mazes(size, count, seed, hunts=None):
    """Mazes of the package's generator; `hunts` limits how often it looks for a place to go on."""
    import random

    from mazelib.generate.HuntAndKill import HuntAndKill

    class Limited(HuntAndKill):
        def _hunt_random(self, grid, count):
            if hunts is not None and count >= hunts:
                return (-1, -1)
            return super()._hunt_random(grid, count)

    random.seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.random.seed(seed)  # noqa: NPY002  mazelib draws from it
        return np.array([Limited(size, size).generate() for _ in range(count)])


def our_mazes(size, count, seed, hunts=None):
    keys = jax.random.split(jax.random.key(seed), count)
    side = 2 * size + 1
    mazes = jax.jit(jax.vmap(lambda k: hunt_and_kill(k, size, hunts=hunts)))(keys)
    return np.asarray(mazes).reshape(count, side, side)


def compare_mazes(size, count, hunts):
    """The probability of every single maze."""
    ours, theirs = our_mazes(size, 4 * count, 0, hunts), mazelib_mazes(size, count, 0, hunts)
    both = np.concatenate([ours, theirs]).reshape(5 * count, -1)
    kinds, number = np.unique(both, axis=0, return_inverse=True)
    number = np.ravel(number)
    return same_counts(number[: 4 * count], number[4 * count :], len(kinds)), len(kinds)


def test_small_mazes_are_as_likely_as_in_the_package():
    """There are 174 finished mazes of 3x3 cells; with few hunts some stay unfinished."""
    level, kinds = compare_mazes(3, 600, hunts=4)
    assert level > LEVEL
    assert kinds > 174


def reachable_mazes(size):
    """How many finished mazes hunt-and-kill can make: a search over all of its choices."""

    def beside(cell):
        row, column = cell
        around = ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1))
        return [(r, c) for r, c in around if 0 <= r < size and 0 <= c < size]

    cells = [(r, c) for r in range(size) for c in range(size)]
    todo, seen, finished = [(frozenset([c]), frozenset(), c) for c in cells], set(), set()
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        maze, passages, here = state
        fresh = [cell for cell in beside(here) if cell not in maze]
        if len(maze) == len(cells):
            finished.add(passages)
        elif fresh:
            todo += [(maze | {c}, passages | {frozenset((here, c))}, c) for c in fresh]
        else:
            todo += [(maze, passages, c) for c in maze if any(n not in maze for n in beside(c))]
    return len(finished)


@pytest.mark.slow
@pytest.mark.parametrize("hunts", [None, 2, 12])
def test_each_small_maze_is_as_likely_as_in_the_package(hunts):
    level, kinds = compare_mazes(3, 5000, hunts=hunts)
    assert level > LEVEL
    # Not all 192 spanning trees: a walk goes on as long as it can.
    finished = reachable_mazes(3)
    assert finished == 174
    assert kinds == finished if hunts is None else kinds > finished


def dead_ends(mazes):
    cells = mazes[:, 1::2, 1::2] == 0
    walls = (
        mazes[:, 0:-1:2, 1::2]
        + mazes[:, 2::2, 1::2]
        + mazes[:, 1::2, 0:-1:2]
        + mazes[:, 1::2, 2::2]
    )
    return (cells & (walls == 3)).sum((1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 7, 9])
def test_large_mazes_have_the_packages_dead_ends_and_corridors(size):
    ours, theirs = our_mazes(size, 2000, 0), mazelib_mazes(size, 300, 0)
    assert same_counts(dead_ends(ours), dead_ends(theirs), 100) > LEVEL

    def along(mazes):  # openings between neighbours in a row
        return (mazes[:, 1::2, 2:-1:2] == 0).sum((1, 2))

    assert same_counts(along(ours), along(theirs), 100) > LEVEL
    # All cells are part of nearly all mazes, and every passage joins two of them.
    for mazes in (ours, theirs):
        assert ((mazes[:, 1::2, 1::2] == 0).all((1, 2))).mean() > 0.97
        assert (mazes[:, ::2, ::2] == 1).all()


def test_entrances_are_in_opposite_walls():
    states = starts("popgym-labyrinth-escape-easy", 2000)
    grid = np.asarray(states.grid).reshape(-1, 11, 11)
    starts_at, ends_at = (np.argwhere(grid == value)[:, 1:] for value in (2, 3))
    assert len(starts_at) == len(ends_at) == 2000
    np.testing.assert_array_equal(starts_at, np.stack([states.y, states.x], 1))
    assert (np.abs(starts_at - ends_at).max(1) == 10).all()
    # Twenty entrances, each as likely, and five exits for each.
    _, entrance = np.unique(starts_at, axis=0, return_inverse=True)
    assert uniform_counts(np.ravel(entrance), 20) > LEVEL
    across = np.where(np.isin(starts_at[:, 0], (0, 10)), ends_at[:, 1], ends_at[:, 0])
    assert uniform_counts(across // 2, 5) > LEVEL
