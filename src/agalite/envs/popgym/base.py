"""What the POPGym environments share: encoding, the hidden state, drawing.

The package's spaces are Discrete, MultiDiscrete, Tuple and Box. Here every observation is one
float32 vector, the one that `gymnasium.spaces.flatten` makes of the package's: discrete parts
are one-hot, parts follow each other. Actions of several whole numbers become one, row by row, as
the package's `DiscreteAction` wrapper does.

The hidden state is the package's `get_state()`, encoded in the same way. With
`observe_state=True` it follows the observation, which makes a task without memory: its score
less that of an agent with the observation alone is the price of partial observability.
"""

from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped, UInt8

from agalite import validation
from agalite.envs.base import JaxEnvironment

State = TypeVar("State", bound=environment.EnvState)
Limits = tuple[Float[np.ndarray, " size"], Float[np.ndarray, " size"]]

_SIDE, _COLUMNS = 8, 40  # of a frame: pixels of a square, squares of a row
_PAPER, _GAP = 235, 120


class POPGymEnvironment(JaxEnvironment[State, environment.EnvParams]):
    """Base class of the POPGym environments: obs (size,) float32.

    A subclass implements `start`, `advance`, `observation`, `hidden_state`, `is_terminated` and
    `action_space`. All randomness of a step comes from `draw`, so that a test can replace it by
    the package's, and observations are functions of the state alone.

    **Arguments:**

    - `max_steps`: the episode is truncated after so many steps, if it has not terminated.
    - `observation`, `state`: the limits (low, high) of both vectors, or their sizes if the
      limits are 0 and 1.
    - `observe_state`: whether the hidden state follows the observation.
    """

    costly_reset: ClassVar[bool] = True
    render_fps: ClassVar[int] = 4

    def __init__(
        self, max_steps: int, observation: int | Limits, state: int | Limits, observe_state: bool
    ) -> None:
        validation.check_boolean("observe_state", observe_state)
        super().__init__(environment.EnvParams(max_steps_in_episode=max_steps))
        self.observe_state = bool(observe_state)
        parts = [_limits(observation), _limits(state)][: 1 + self.observe_state]
        self._low, self._high = (np.concatenate(side) for side in zip(*parts, strict=True))

    def start(self, key: PRNGKeyArray) -> State:
        """The state in which an episode begins."""
        raise NotImplementedError

    def draw(self, key: PRNGKeyArray) -> Any:
        """The random numbers of one step; None if it has none."""
        del key

    def advance(
        self, state: State, action: Array, draw: Any
    ) -> tuple[State, Float[Array, ""] | float]:
        """The state after a step, but for `time`, which counts itself, and the reward."""
        raise NotImplementedError

    def observation(self, state: State) -> Float[Array, " size"]:
        """The package's observation, encoded."""
        raise NotImplementedError

    def hidden_state(self, state: State) -> Float[Array, " state_size"]:
        """The package's `get_state()`, encoded."""
        raise NotImplementedError

    def reset_env(
        self, key: PRNGKeyArray, params: environment.EnvParams
    ) -> tuple[Float[Array, " size"], State]:
        del params
        state = self.start(key)
        return self._observe(state), state

    def step_env(
        self,
        key: PRNGKeyArray,
        state: State,
        action: Int[Array, ""] | int | float,
        params: environment.EnvParams,
    ) -> tuple[Float[Array, " size"], State, Float[Array, ""], Bool[Array, ""], dict[str, Array]]:
        return self.step_with(self.draw(key), state, action, params)

    def step_with(
        self,
        draw: Any,
        state: State,
        action: Int[Array, ""] | int | float,
        params: environment.EnvParams,
    ) -> tuple[Float[Array, " size"], State, Float[Array, ""], Bool[Array, ""], dict[str, Array]]:
        """`step_env` with the random numbers `draw` in place of a key."""
        after, reward = self.advance(state, jnp.asarray(action), draw)
        after = after.replace(time=state.time + 1)  # pyright: ignore[reportAttributeAccessIssue]
        reward = jnp.asarray(reward, jnp.float32)
        return self._observe(after), after, reward, self.is_terminated(after, params), {}

    def observe(
        self, key: PRNGKeyArray, state: State, action: Any, params: environment.EnvParams
    ) -> Float[Array, " size"]:
        del key, action, params
        return self._observe(state)

    def _observe(self, state: State) -> Float[Array, " size"]:
        obs = self.observation(state)
        if self.observe_state:
            obs = jnp.concatenate([obs, self.hidden_state(state)])
        return obs

    @property
    def num_actions(self) -> int:
        space: Any = self.action_space(self._params)
        return int(space.n) if isinstance(space, spaces.Discrete) else int(space.shape[0])

    def observation_space(self, params: environment.EnvParams | None = None) -> spaces.Box:
        del params
        low: Any = self._low
        high: Any = self._high
        return spaces.Box(low, high, self._low.shape, jnp.float32)

    def render(
        self, state: State, params: environment.EnvParams | None = None
    ) -> UInt8[Array, "height width 3"]:
        """The numbers of the observation as squares, dark for large ones; under a bar, those of
        the hidden state."""
        del params
        bar = jnp.full((_SIDE // 2, _COLUMNS * _SIDE), _GAP, jnp.uint8)
        parts = [_squares(self.observation(state)), bar, _squares(self.hidden_state(state))]
        grey = jnp.concatenate(parts)
        return jnp.broadcast_to(grey[..., None], (*grey.shape, 3))


def one_hots(values: Int[Array, "*shape"], choices: int) -> Float[Array, " size"]:
    """The one-hot vectors (choices,) of whole numbers, one after the other."""
    wide = jnp.asarray(values).reshape(-1, 1) == jnp.arange(choices, dtype=values.dtype)
    return wide.astype(jnp.float32).reshape(-1)


def _limits(size: int | Limits) -> Limits:
    if isinstance(size, int):
        return np.zeros(size, np.float32), np.ones(size, np.float32)
    low, high = size
    return np.asarray(low, np.float32), np.asarray(high, np.float32)


def _squares(numbers: Float[Array, " size"]) -> UInt8[Array, "height width"]:
    rows = -(-numbers.shape[0] // _COLUMNS)
    # Numbers without limits, the velocities, are squashed into -1 to 1.
    size = jnp.abs(jnp.where(jnp.abs(numbers) > 1, jnp.tanh(numbers), numbers))
    grey = (_PAPER * (1 - size)).astype(jnp.uint8)
    grey = jnp.pad(grey, (0, rows * _COLUMNS - numbers.shape[0]), constant_values=_PAPER)
    return jnp.repeat(jnp.repeat(grey.reshape(rows, _COLUMNS), _SIDE, 0), _SIDE, 1)


def deck_counts(
    cards: UInt8[Array, " cards"], shown: Int[Array, ""], kinds: int
) -> Int[Array, " kinds"]:
    """How many of the first `shown` cards are of each kind."""
    dealt = jnp.arange(cards.shape[0], dtype=jnp.int32) < shown
    same = cards[None, :] == jnp.arange(kinds, dtype=cards.dtype)[:, None]
    return jnp.sum(same & dealt, axis=1, dtype=jnp.int32)


SUITS, RANKS, COLOURS, DECK = 4, 13, 2, 52
KINDS = {"colours": COLOURS, "suits": SUITS, "ranks": RANKS}


def check_deck(decks: int, match: str = "suits") -> int:
    """How many cards so many decks have."""
    validation.check_integer_between("decks", decks, 1, 100)
    validation.check_one_of("match", match, KINDS)
    return DECK * int(decks)


def shuffled(key: PRNGKeyArray, cards: int, match: str) -> UInt8[Array, " cards"]:
    """The kinds of the shuffled cards: their colours, suits or ranks."""
    card = random_order(key, cards)
    kind = card % DECK // SUITS if match == "ranks" else card % KINDS[match]
    return kind.astype(jnp.uint8)


def random_order(key: PRNGKeyArray, size: int) -> Int[Array, " size"]:
    """The numbers from 0 to size - 1 in random order: the ranks of random numbers.

    They are counted, with size^2 comparisons, which on a CPU takes a tenth of the time of sorting
    at the size of a deck. Of two equal random numbers the first is the smaller.
    """
    draws = jax.random.bits(key, (size,))
    index = np.arange(size)
    before = (draws[:, None] < draws) | (
        (draws[:, None] == draws) & jnp.asarray(index[:, None] < index)
    )
    return jnp.sum(before, axis=0, dtype=jnp.int32)


def at(values: Shaped[Array, " size"], index: Int[Array, ""]) -> Shaped[Array, ""]:
    """values[index], as a sum over all.

    XLA's CPU backend would repeat an indexing for every number that is computed from it, for a
    board for every square. A sum is computed once.
    """
    here = jnp.arange(values.shape[0], dtype=jnp.int32) == index
    if values.dtype == bool:
        return jnp.any(values & here)
    return jnp.sum(jnp.where(here, values, jnp.zeros_like(values)), dtype=values.dtype)
