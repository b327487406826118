"""Battleship: sink hidden ships, told only whether the last shot was a hit."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from agalite import validation
from agalite.envs.popgym.base import POPGymEnvironment, at, one_hots


@struct.dataclass
class BattleshipState(environment.EnvState):
    """Where the ships are, where shots fell, both row by row, and how many hits are needed."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    ships: Bool[Array, " squares"]
    shots: Bool[Array, " squares"]
    hit: Bool[Array, ""]
    afloat: Int[Array, ""]


class Battleship(POPGymEnvironment[BattleshipState]):
    """Battleship: obs (2,) float32, miss or hit; actions 0 to board^2 - 1, a square, row by row.

    A hit gives 1 / (squares of ships), a miss costs 1 / (squares without). A shot at a square
    that has been hit before is a miss. Terminated when all ships are sunk; truncated after as many
    shots as there are squares.

    The hidden state (4 board^2 + 2,) is the ships, the shots, and the observation; each square is
    one-hot.

    **Arguments:**

    - `board`: side of the board.
    - `ships`: their lengths, at most `board`. They are placed in this order, each uniformly over
      the positions that are free.
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(
        self,
        board: int = 10,
        *,
        ships: Sequence[int] = (2, 3, 3, 4),
        observe_state: bool = False,
    ) -> None:
        validation.check_integer_between("board", board, 2, 100)
        for length in ships:
            validation.check_integer_between("ships", length, 1, board)
        # Ships of a quarter of the board always find a place.
        squares = board**2
        validation.check_integer_between("sum(ships)", sum(ships), 1, max(1, squares // 4))
        self.board, self.ships = int(board), tuple(int(length) for length in ships)
        super().__init__(squares, 2, 4 * squares + 2, observe_state)
        self._placements = [_placements(self.board, length) for length in self.ships]

    def start(self, key: PRNGKeyArray) -> BattleshipState:
        draws = jax.random.uniform(key, (len(self.ships),))
        square = jnp.arange(self.board**2, dtype=jnp.int32)
        ships = jnp.zeros(self.board**2, bool)
        for placements, draw in zip(self._placements, draws, strict=True):
            # (placements,): which positions are free, and the free one whose turn it is.
            free = ~jnp.any(ships[placements], axis=1)
            rank = jnp.cumsum(free)
            chosen = jnp.sum(rank <= jnp.floor(draw * rank[-1]).astype(rank.dtype))
            taken = jnp.asarray(placements)[chosen]
            ships = ships | jnp.any(square[:, None] == taken, axis=1)
        return BattleshipState(
            time=jnp.int32(0),
            ships=ships,
            shots=jnp.zeros(self.board**2, bool),
            hit=jnp.bool_(False),
            afloat=jnp.int32(sum(self.ships)),
        )

    def advance(
        self, state: BattleshipState, action: Array, draw: None
    ) -> tuple[BattleshipState, Float[Array, ""]]:
        del draw
        hit = at(state.ships & ~state.shots, action)
        squares, needed = self.board**2, sum(self.ships)
        here = jnp.arange(squares, dtype=jnp.int32) == action.astype(jnp.int32)
        after = BattleshipState(
            time=state.time,
            ships=state.ships,
            shots=state.shots | here,
            hit=hit,
            afloat=state.afloat - hit,
        )
        return after, jnp.where(hit, 1 / needed, -1 / (squares - needed))

    def observation(self, state: BattleshipState) -> Float[Array, "2"]:
        return one_hots(state.hit.astype(jnp.int32), 2)

    def hidden_state(self, state: BattleshipState) -> Float[Array, " state_size"]:
        squares = jnp.stack([state.ships, state.shots]).astype(jnp.int32)
        return jnp.concatenate([one_hots(squares, 2), self.observation(state)])

    def is_terminated(
        self, state: BattleshipState, params: environment.EnvParams
    ) -> Bool[Array, ""]:
        del params
        return state.afloat == 0

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(self.board**2)


def _placements(board: int, length: int) -> Int[np.ndarray, "placements length"]:
    """The squares of every position of a ship, across and down."""
    squares = np.arange(board**2).reshape(board, board)
    across = np.lib.stride_tricks.sliding_window_view(squares, length, axis=1)
    down = np.lib.stride_tricks.sliding_window_view(squares, length, axis=0)
    both = [across.reshape(-1, length), down.reshape(-1, length)]
    return np.concatenate(both).astype(np.int32)
