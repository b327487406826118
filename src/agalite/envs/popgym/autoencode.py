"""Autoencode: watch a deck of cards, then name their suits in reverse order."""

import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from agalite.envs.popgym.base import SUITS, POPGymEnvironment, check_deck, one_hots, shuffled

PLAY, WATCH = range(2)


@struct.dataclass
class AutoencodeState(environment.EnvState):
    """The suits in the order in which they are shown."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    suits: UInt8[Array, " cards"]


class Autoencode(POPGymEnvironment[AutoencodeState]):
    """Autoencode: obs (6,) float32, the mode and a suit; actions 0 to 3, a suit.

    The mode is 1 (watch) while cards are shown, and 0 (play) from the last card on: this card is
    the first to be named, then the one before it, and so on to the first. In play the suit that
    is observed is 0. A right answer gives 1 / cards, a wrong one costs as much; watching gives
    nothing. Terminated after 2 cards - 1 steps.

    The hidden state (4 cards + 3,) is all suits, the last card first, the mode, and the share of
    the cards that were shown and are not yet named.

    **Arguments:**

    - `decks`: decks of 52 cards.
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(self, decks: int = 1, *, observe_state: bool = False) -> None:
        self.cards = check_deck(decks)
        steps = 2 * self.cards - 1
        super().__init__(steps, 2 + SUITS, SUITS * self.cards + 3, observe_state)

    def start(self, key: PRNGKeyArray) -> AutoencodeState:
        return AutoencodeState(time=jnp.int32(0), suits=shuffled(key, self.cards, "suits"))

    def advance(
        self, state: AutoencodeState, action: Array, draw: None
    ) -> tuple[AutoencodeState, Float[Array, ""]]:
        del draw
        playing = state.time >= self.cards - 1
        asked = state.suits[jnp.minimum(2 * self.cards - 2 - state.time, self.cards - 1)]
        worth = 1 / self.cards
        return state, jnp.where(playing, jnp.where(action == asked, worth, -worth), 0.0)

    def observation(self, state: AutoencodeState) -> Float[Array, "6"]:
        shown = state.suits[jnp.minimum(state.time, self.cards - 1)]
        suit = jnp.where(state.time < self.cards, shown, jnp.uint8(0))
        return jnp.concatenate([one_hots(self._mode(state), 2), one_hots(suit, SUITS)])

    def hidden_state(self, state: AutoencodeState) -> Float[Array, " state_size"]:
        held = jnp.minimum(state.time + 1, 2 * self.cards - 1 - state.time)
        share = held.astype(jnp.float32) / self.cards
        parts = [one_hots(state.suits[::-1], SUITS), one_hots(self._mode(state), 2), share[None]]
        return jnp.concatenate(parts)

    def _mode(self, state: AutoencodeState) -> Int[Array, ""]:
        return (state.time < self.cards - 1).astype(jnp.int32)

    def is_terminated(
        self, state: AutoencodeState, params: environment.EnvParams
    ) -> Bool[Array, ""]:
        del params
        return state.time >= 2 * self.cards - 1

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(SUITS)
