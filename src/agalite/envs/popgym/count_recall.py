"""CountRecall: how often has the card that is asked for been shown?"""

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from agalite.envs.popgym.base import (
    KINDS,
    POPGymEnvironment,
    check_deck,
    deck_counts,
    one_hots,
    shuffled,
)


@struct.dataclass
class CountRecallState(environment.EnvState):
    """Two decks, one to show and one to ask for, and how often each kind has been shown."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    values: UInt8[Array, " cards"]
    queries: UInt8[Array, " cards"]
    counts: Int[Array, " kinds"]


class CountRecall(POPGymEnvironment[CountRecallState]):
    """CountRecall: obs (2 kinds,) float32, the card shown and the card asked for.

    The action is a count, 0 to the number of cards of a kind. It is right if the card asked for
    has been shown so often, the card shown at the same time included. A right answer gives
    1 / (cards - 1), a wrong one costs as much. Terminated with the last card.

    The hidden state (4 kinds,) is how often each kind has been shown and been asked for, divided
    by the number of cards of a kind, and the observation.

    **Arguments:**

    - `decks`: decks of 52 cards.
    - `match`: what tells cards apart: "colours" (2 kinds), "suits" (4) or "ranks" (13).
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(
        self, decks: int = 1, *, match: str = "colours", observe_state: bool = False
    ) -> None:
        self.cards, self.match = check_deck(decks, match), match
        self.kinds = KINDS[match]
        self.most = self.cards // self.kinds
        super().__init__(self.cards - 1, 2 * self.kinds, 4 * self.kinds, observe_state)

    def start(self, key: PRNGKeyArray) -> CountRecallState:
        value_key, query_key = jax.random.split(key)
        values = shuffled(value_key, self.cards, self.match)
        queries = shuffled(query_key, self.cards, self.match)
        counts = deck_counts(values[:1], jnp.int32(1), self.kinds)
        return CountRecallState(time=jnp.int32(0), values=values, queries=queries, counts=counts)

    def advance(
        self, state: CountRecallState, action: Array, draw: None
    ) -> tuple[CountRecallState, Float[Array, ""]]:
        del draw
        kind = jnp.arange(self.kinds, dtype=jnp.uint8)
        asked = jnp.sum(jnp.where(kind == state.queries[state.time], state.counts, 0))
        worth = 1 / (self.cards - 1)
        shown = (kind == state.values[state.time + 1]).astype(state.counts.dtype)
        return (
            state.replace(counts=state.counts + shown),  # pyright: ignore[reportAttributeAccessIssue]
            jnp.where(action == asked, worth, -worth),
        )

    def observation(self, state: CountRecallState) -> Float[Array, " size"]:
        cards = jnp.stack([state.values[state.time], state.queries[state.time]])
        return one_hots(cards, self.kinds)

    def hidden_state(self, state: CountRecallState) -> Float[Array, " state_size"]:
        asked = deck_counts(state.queries, state.time + 1, self.kinds)
        counts = jnp.concatenate([state.counts, asked]).astype(jnp.float32)
        return jnp.concatenate([counts / self.most, self.observation(state)])

    def is_terminated(
        self, state: CountRecallState, params: environment.EnvParams
    ) -> Bool[Array, ""]:
        del params
        return state.time >= self.cards - 1

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(self.most + 1)
