"""Concentration: find the pairs among cards that lie face down."""

import math

import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from agalite.envs.popgym.base import KINDS, POPGymEnvironment, check_deck, one_hots, shuffled

_NONE = -1


@struct.dataclass
class ConcentrationState(environment.EnvState):
    """The cards by their place on the table, and which of them lie face up for good.

    Both are as wide as the observation, kinds + 1 numbers for each place, so that an observation
    is computed number by number: `cards` is one-hot and `face_up` is repeated. `turned` are the
    places of the cards turned in this turn, -1 where there is none. It is kept until the next turn
    begins, since the cards are seen until then.
    """

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    cards: UInt8[Array, " size"]
    face_up: Bool[Array, " size"]
    turned: Int[Array, "2"]
    in_play: Bool[Array, ""]
    left: Int[Array, ""]


class Concentration(POPGymEnvironment[ConcentrationState]):
    """Concentration: obs (cards (kinds + 1),) float32; actions 0 to cards - 1, a place.

    Every place shows its card's kind, or the kind after the last, "face down". Two cards are
    turned one after the other. If they are equal they stay face up, which gives 2 / cards. If
    not, or if it is one card twice, it costs 2 / steps, and they are turned back in the next turn.
    A card that is face up already ends the turn and costs 1 / steps for each card turned.
    Terminated when all cards are face up; truncated after `steps`, about twice the cards.

    The hidden state (cards (kinds + 3),) is all cards, which of them are face up for good, and the
    places of the first and of the second card turned in this turn. Where there is none, the
    package has the place with the number of "face down".

    **Arguments:**

    - `decks`: decks of 52 cards.
    - `match`: what makes cards equal: "colours" (2 kinds) or "ranks" (13).
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(
        self, decks: int = 1, *, match: str = "ranks", observe_state: bool = False
    ) -> None:
        if match == "suits":
            raise ValueError("match='suits' has 13 cards of a kind, which do not make pairs")
        self.cards = n = check_deck(decks, match)
        self.match, self.kinds = match, KINDS[match]
        # What a perfect player needs on average, in turns, twice.
        self.steps = math.ceil(2 * n - n / (2 * n - 1))
        sizes = n * (self.kinds + 1), n * (self.kinds + 3)
        super().__init__(self.steps, *sizes, observe_state)
        # Of every number of the observation: the place on the table, and the kind.
        self._place = np.repeat(np.arange(n, dtype=np.int32), self.kinds + 1)
        self._kind = np.tile(np.arange(self.kinds + 1, dtype=np.uint8), n)

    def start(self, key: PRNGKeyArray) -> ConcentrationState:
        return self.begin(shuffled(key, self.cards, self.match))

    def begin(self, cards: UInt8[Array, " cards"]) -> ConcentrationState:
        """The first state with these cards on the table."""
        width = self.kinds + 1
        return ConcentrationState(
            time=jnp.int32(0),
            cards=one_hots(cards, width).astype(jnp.uint8),
            face_up=jnp.zeros(self.cards * width, bool),
            turned=jnp.full(2, _NONE, jnp.int32),
            in_play=jnp.bool_(False),
            left=jnp.int32(self.cards),
        )

    def advance(
        self, state: ConcentrationState, action: Array, draw: None
    ) -> tuple[ConcentrationState, Float[Array, ""]]:
        del draw
        action = action.astype(jnp.int32)
        first = jnp.where(state.in_play, state.turned[0], action)
        place = jnp.asarray(self._place)
        # Sums, since XLA's CPU backend would repeat an indexing for every number of the state.
        already_up = jnp.any(state.face_up & (place == action))
        kind = jnp.asarray(self._kind)
        kinds = [
            jnp.sum(jnp.where(place == where, state.cards * kind, jnp.uint8(0)), dtype=jnp.uint8)
            for where in (first, action)
        ]
        pair = state.in_play & ~already_up
        match = pair & (first != action) & (kinds[0] == kinds[1])
        found = match & ((place == first) | (place == action))
        turns = 1.0 + state.in_play
        cost = jnp.where(already_up, turns, jnp.where(pair, 2.0, 0.0)) / self.steps
        reward = jnp.where(match, 2 / self.cards, -cost)
        after = ConcentrationState(
            time=state.time,
            cards=state.cards,
            face_up=state.face_up | found,
            turned=jnp.stack([first, jnp.where(state.in_play, action, _NONE)]),
            in_play=~state.in_play & ~already_up,
            left=state.left - jnp.where(match, 2, 0),
        )
        return after, reward

    def observation(self, state: ConcentrationState) -> Float[Array, " size"]:
        place = jnp.asarray(self._place)
        seen = state.face_up | (place == state.turned[0]) | (place == state.turned[1])
        face_down = jnp.asarray(self._kind == self.kinds)
        return jnp.where(seen, state.cards == 1, face_down).astype(jnp.float32)

    def hidden_state(self, state: ConcentrationState) -> Float[Array, " state_size"]:
        turned = jnp.where(state.turned == _NONE, self.kinds, state.turned)
        cards = state.cards.reshape(self.cards, self.kinds + 1)[:, : self.kinds]
        return jnp.concatenate(
            [
                cards.astype(jnp.float32).reshape(-1),
                state.face_up[:: self.kinds + 1].astype(jnp.float32),
                one_hots(turned, self.cards),
            ]
        )

    def is_terminated(
        self, state: ConcentrationState, params: environment.EnvParams
    ) -> Bool[Array, ""]:
        del params
        return state.left == 0

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(self.cards)
