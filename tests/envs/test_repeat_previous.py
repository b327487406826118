"""RepeatPrevious: POPGym's rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agalite.envs import make
from agalite.envs.popgym.repeat import RepeatPrevious


def play(env, choose):
    """One episode: the suits shown (T,), and the rewards (T,).

    `choose` gets the suits shown so far, the current one last.
    """
    step = jax.jit(env.step)
    obs, state = env.reset(jax.random.key(1))
    shown, rewards = [], []
    while True:
        shown.append(int(jnp.argmax(obs)))
        action = choose(shown)
        obs, state, reward, terminated, truncated, info = step(
            jax.random.key(len(shown)), state, action
        )
        rewards.append(float(reward))
        assert not truncated
        if terminated:
            return [*shown, int(jnp.argmax(info["final_observation"]))], np.array(rewards)


@pytest.mark.parametrize(("k", "decks"), [(1, 1), (4, 1), (32, 2)])
def test_an_agent_that_remembers_gets_one(k, decks):
    shown, rewards = play(
        RepeatPrevious(k, decks=decks), lambda shown: shown[-k] if len(shown) >= k else 0
    )
    assert len(rewards) == 52 * decks - 1
    np.testing.assert_array_equal(rewards[: k - 1], 0)
    assert rewards.sum() == pytest.approx(1)
    # Every deck has 13 cards of each suit.
    np.testing.assert_array_equal(np.bincount(shown), [13 * decks] * 4)


def test_wrong_answers_cost_what_right_ones_give():
    _, rewards = play(make("repeat-previous"), lambda shown: (shown[max(-4, -len(shown))] + 1) % 4)
    assert rewards.sum() == pytest.approx(-1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 52}, "k=52 must be a whole number from 1 to 51"),
        ({"decks": 0}, "decks=0"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        make("repeat-previous", **options)
