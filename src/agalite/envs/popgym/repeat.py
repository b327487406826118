"""RepeatFirst and RepeatPrevious: name the suit of the first card, or of a card seen before.

The cards of one or more shuffled decks are shown one after the other. The action is a suit. Right
and wrong are worth the same, so that a perfect episode returns 1 and guessing -0.5 on average.
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from agalite import validation
from agalite.envs import drawing
from agalite.envs.popgym.base import (
    SUITS,
    POPGymEnvironment,
    check_deck,
    deck_counts,
    one_hots,
    shuffled,
)


@struct.dataclass
class RepeatState(environment.EnvState):
    """The suits of the shuffled cards; those up to index `time` have been shown."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    suits: UInt8[Array, " cards"]


class _Repeat(POPGymEnvironment[RepeatState]):
    """Cards shown one after the other; terminated with the last."""

    render_fps: ClassVar[int] = 4

    def __init__(self, decks: int, state_size: int, observe_state: bool) -> None:
        self.cards = check_deck(decks)
        super().__init__(self.cards - 1, SUITS, state_size, observe_state)

    def start(self, key: PRNGKeyArray) -> RepeatState:
        return RepeatState(time=jnp.int32(0), suits=shuffled(key, self.cards, "suits"))

    def observation(self, state: RepeatState) -> Float[Array, "4"]:
        return one_hots(state.suits[state.time], SUITS)

    def is_terminated(self, state: RepeatState, params: environment.EnvParams) -> Bool[Array, ""]:
        del params
        return state.time >= self.cards - 1

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(SUITS)

    def _left(self, state: RepeatState) -> Float[Array, "4"]:
        """The share of each suit that has not been shown."""
        of_a_suit = self.cards // SUITS
        left = of_a_suit - deck_counts(state.suits, state.time + 1, SUITS)
        return left.astype(jnp.float32) / of_a_suit


class RepeatFirst(_Repeat):
    """RepeatFirst: obs (4,) float32, the suit of the card shown; actions 0 to 3, a suit.

    An action is right if it is the suit of the episode's first card, the one to remember. The
    hidden state (8,) is that suit, and the share of each suit that is still to come.

    **Arguments:**

    - `decks`: decks of 52 cards.
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(self, decks: int = 1, *, observe_state: bool = False) -> None:
        super().__init__(decks, 2 * SUITS, observe_state)

    def advance(
        self, state: RepeatState, action: Array, draw: None
    ) -> tuple[RepeatState, Float[Array, ""]]:
        del draw
        worth = 1 / (self.cards - 1)
        return state, jnp.where(action == state.suits[0], worth, -worth)

    def hidden_state(self, state: RepeatState) -> Float[Array, "8"]:
        return jnp.concatenate([one_hots(state.suits[0], SUITS), self._left(state)])


class RepeatPrevious(_Repeat):
    """RepeatPrevious: obs (4,) float32, the suit of the card shown; actions 0 to 3, a suit.

    An action is right if it is the suit of the k-th card from the end of those shown so far: k = 1
    is the card that is shown. As long as fewer than k cards have been shown the reward is 0.
    The hidden state (4 k + 4,) is the last k suits, oldest first and suit 0 where there is no card
    yet, and the share of each suit that is still to come. POPGym's Easy has k = 4 and one deck,
    Medium 32 and two, Hard 64 and three.

    **Arguments:**

    - `k`: which card to name, from the last one backwards; at most the number of cards less one.
    - `decks`: decks of 52 cards.
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(self, k: int = 4, *, decks: int = 1, observe_state: bool = False) -> None:
        validation.check_integer_between("k", k, 1, check_deck(decks) - 1)
        self.k = int(k)
        super().__init__(decks, SUITS * self.k + SUITS, observe_state)

    def advance(
        self, state: RepeatState, action: Array, draw: None
    ) -> tuple[RepeatState, Float[Array, ""]]:
        del draw
        asked = state.time + 1 - self.k
        right = action == state.suits[jnp.maximum(asked, 0)]
        worth = 1 / (self.cards - self.k)
        return state, jnp.where(asked < 0, 0.0, jnp.where(right, worth, -worth))

    def hidden_state(self, state: RepeatState) -> Float[Array, " state_size"]:
        index = state.time + 1 - self.k + jnp.arange(self.k, dtype=jnp.int32)
        last = jnp.where(index < 0, jnp.uint8(0), state.suits[jnp.maximum(index, 0)])
        return jnp.concatenate([one_hots(last, SUITS), self._left(state)])

    def render(
        self, state: RepeatState, params: environment.EnvParams | None = None
    ) -> UInt8[Array, "48 320 3"]:
        """The last 16 cards, each suit a colour, the newest on the right; a bar is under the card
        that is asked for, if it is among them."""
        del params
        colours = jnp.asarray(_COLOURS, jnp.uint8)
        frame = drawing.blank(48, 320, _TABLE)
        for back in range(_SHOWN):
            index = state.time - back
            colour = colours[state.suits[jnp.maximum(index, 0)]]
            colour = jnp.where(index >= 0, colour, jnp.asarray(_TABLE, jnp.uint8))
            right = 320 - 20 * back
            frame = drawing.rectangle(frame, right - 18, 8, right - 2, 34, colour)
            if back + 1 == self.k:
                frame = drawing.rectangle(frame, right - 18, 38, right - 2, 43, _BAR)
        return frame


_SHOWN = 16
_TABLE, _BAR = (40, 40, 40), (255, 200, 0)
_COLOURS = ((225, 225, 225), (200, 80, 70), (60, 170, 90), (33, 102, 204))
