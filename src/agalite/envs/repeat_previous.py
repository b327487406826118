"""RepeatPrevious of POPGym (Morad et al., 2023): name the suit of the card seen k - 1 steps ago.

The cards of one or more shuffled decks are shown one after the other. The action is a suit. It is
right if it is that of the k-th card from the end of those shown so far: k = 1 is the card that is
shown now. Right and wrong are worth the same, so that a perfect episode returns 1 and guessing -0.5
on average. As long as fewer than k cards have been shown the reward is 0.

The observation is the suit as a one-hot vector, where POPGym has its number.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from agalite import validation
from agalite.envs import drawing
from agalite.envs.base import JaxEnvironment

SUITS, DECK = 4, 52


@struct.dataclass
class RepeatPreviousState(environment.EnvState):
    """The shuffled cards; those up to index `time` have been shown."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    suits: Int[Array, " cards"]


@struct.dataclass
class RepeatPreviousParams(environment.EnvParams):
    """The arguments of `RepeatPrevious`."""

    max_steps_in_episode: int = DECK - 1
    k: int = 4


class RepeatPrevious(JaxEnvironment[RepeatPreviousState, RepeatPreviousParams]):
    """RepeatPrevious: obs (4,) float32, one-hot; actions 0 to 3, a suit.

    The episode is truncated with the last card, after 52 * decks - 1 steps. POPGym's Easy has
    k = 4 and one deck, Medium 32 and two, Hard 64 and three.

    **Arguments:**

    - `k`: which card to name, from the last one backwards; at most the number of cards less one.
    - `decks`: decks of 52 cards.
    """

    render_fps: ClassVar[int] = 4

    def __init__(self, k: int = 4, *, decks: int = 1) -> None:
        validation.check_integer_between("decks", decks, 1, 100)
        self.cards = DECK * int(decks)
        validation.check_integer_between("k", k, 1, self.cards - 1)
        super().__init__(RepeatPreviousParams(self.cards - 1, int(k)))

    def reset_env(
        self, key: PRNGKeyArray, params: RepeatPreviousParams
    ) -> tuple[Float[Array, "4"], RepeatPreviousState]:
        del params
        ordered = jnp.arange(self.cards, dtype=jnp.int32) % SUITS
        state = RepeatPreviousState(time=jnp.int32(0), suits=jax.random.permutation(key, ordered))
        return _observe(state), state

    def step_env(
        self,
        key: PRNGKeyArray,
        state: RepeatPreviousState,
        action: Int[Array, ""] | int | float,
        params: RepeatPreviousParams,
    ) -> tuple[Float[Array, "4"], RepeatPreviousState, Float[Array, ""], Bool[Array, ""], dict]:
        del key
        asked = state.time + 1 - params.k
        right = jnp.asarray(action, jnp.int32) == state.suits[jnp.maximum(asked, 0)]
        worth = 1 / (self.cards - params.k)
        reward = jnp.where(asked < 0, 0.0, jnp.where(right, worth, -worth)).astype(jnp.float32)
        state = RepeatPreviousState(time=state.time + 1, suits=state.suits)
        return _observe(state), state, reward, self.is_terminated(state, params), {}

    def observe(
        self,
        key: PRNGKeyArray,
        state: RepeatPreviousState,
        action: Any,
        params: RepeatPreviousParams,
    ) -> Float[Array, "4"]:
        del key, action, params
        return _observe(state)

    def is_terminated(
        self, state: RepeatPreviousState, params: RepeatPreviousParams
    ) -> Bool[Array, ""]:
        del state, params
        return jnp.bool_(False)

    @property
    def num_actions(self) -> int:
        return SUITS

    def action_space(self, params: RepeatPreviousParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(SUITS)

    def observation_space(self, params: RepeatPreviousParams | None = None) -> spaces.Box:
        del params
        return spaces.Box(0.0, 1.0, (SUITS,), jnp.float32)

    def render(
        self, state: RepeatPreviousState, params: RepeatPreviousParams | None = None
    ) -> UInt8[Array, "48 320 3"]:
        """The last 16 cards, each suit a colour, the newest on the right; a bar is under the card
        that is asked for, if it is among them."""
        asked = (self.default_params if params is None else params).k
        colours = jnp.asarray(_COLOURS, jnp.uint8)
        frame = drawing.blank(48, 320, _TABLE)
        for back in range(_SHOWN):
            index = state.time - back
            colour = colours[state.suits[jnp.maximum(index, 0)]]
            colour = jnp.where(index >= 0, colour, jnp.asarray(_TABLE, jnp.uint8))
            right = 320 - 20 * back
            frame = drawing.rectangle(frame, right - 18, 8, right - 2, 34, colour)
            bar = jnp.where(back + 1 == asked, jnp.asarray(_BAR, jnp.uint8), jnp.uint8(_TABLE[0]))
            frame = drawing.rectangle(frame, right - 18, 38, right - 2, 43, bar)
        return frame


_SHOWN = 16
_TABLE, _BAR = (40, 40, 40), (255, 200, 0)
_COLOURS = ((225, 225, 225), (200, 80, 70), (60, 170, 90), (33, 102, 204))


def _observe(state: RepeatPreviousState) -> Float[Array, "4"]:
    return jax.nn.one_hot(state.suits[state.time], SUITS)
