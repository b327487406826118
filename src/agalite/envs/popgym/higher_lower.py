"""HigherLower: is the next card higher or lower than this one?"""

import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from agalite.envs.popgym.base import (
    RANKS,
    SUITS,
    POPGymEnvironment,
    check_deck,
    deck_counts,
    one_hots,
    shuffled,
)

HIGHER, LOWER = range(2)


@struct.dataclass
class HigherLowerState(environment.EnvState):
    """The ranks of the shuffled cards, ace lowest; those up to index `time` have been shown."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    ranks: UInt8[Array, " cards"]


class HigherLower(POPGymEnvironment[HigherLowerState]):
    """HigherLower: obs (13,) float32, the rank of the card; actions 0 (higher) and 1 (lower).

    A right guess gives 1 / cards, a wrong one costs as much, and an equal card gives 0. To count
    the cards that are gone makes better guesses. Terminated with the last card.

    The hidden state (13,) is the share of each rank that has been shown.

    **Arguments:**

    - `decks`: decks of 52 cards.
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(self, decks: int = 1, *, observe_state: bool = False) -> None:
        self.cards = check_deck(decks)
        super().__init__(self.cards - 1, RANKS, RANKS, observe_state)

    def start(self, key: PRNGKeyArray) -> HigherLowerState:
        return HigherLowerState(time=jnp.int32(0), ranks=shuffled(key, self.cards, "ranks"))

    def advance(
        self, state: HigherLowerState, action: Array, draw: None
    ) -> tuple[HigherLowerState, Float[Array, ""]]:
        del draw
        before, after = state.ranks[state.time], state.ranks[state.time + 1]
        right = (after > before) == (action == HIGHER)
        worth = 1 / self.cards
        return state, jnp.where(after == before, 0.0, jnp.where(right, worth, -worth))

    def observation(self, state: HigherLowerState) -> Float[Array, "13"]:
        return one_hots(state.ranks[state.time], RANKS)

    def hidden_state(self, state: HigherLowerState) -> Float[Array, "13"]:
        shown = deck_counts(state.ranks, state.time + 1, RANKS)
        return shown.astype(jnp.float32) / (SUITS * (self.cards // 52))

    def is_terminated(
        self, state: HigherLowerState, params: environment.EnvParams
    ) -> Bool[Array, ""]:
        del params
        return state.time >= self.cards - 1

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(2)
