"""MemoryChain of bsuite (Osband et al., 2020), as gymnax has it: repeat a cue after a delay.

The first observation shows a context of one or more bits. The last action of the episode must equal
the bit that a query asks for; it is worth 1, any other -1, and nothing else is rewarded.

Like gymnax's, the observation after a step is that of the state *before* the step. So the context
is shown twice, in the first two observations, and the query in the last one that is acted on.
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

LONGEST = 100_000


@struct.dataclass
class MemoryChainState(environment.EnvState):
    """The bits to remember and which of them is asked for."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    context: Int[Array, " bits"]
    query: Int[Array, ""]


@struct.dataclass
class MemoryChainParams(environment.EnvParams):
    """The arguments of `MemoryChain`; the time limit is never reached."""

    max_steps_in_episode: int = 6
    length: int = 5


class MemoryChain(JaxEnvironment[MemoryChainState, MemoryChainParams]):
    """MemoryChain: obs (2 + bits,) float32; actions 0 and 1, a bit.

    The observation is the fraction of the episode that is left, the index of the bit that is asked
    for (zero before the last step), and the context as -1 and 1 (zero after it was shown).

    `length` is gymnax's `memory_length`: an episode has `length` + 1 steps, and between the cue and
    the answer are `length` - 1 observations without either. It is the L of Farr et al. (2026,
    "Streaming Reinforcement Learning under Partial Observability with Real-Time Recurrent
    Learning"): a cue at t = 0, the answer at t = L, and a chain is solved by a run whose final
    return is above 0.5. Guessing returns 0 on average.

    **Arguments:**

    - `length`: steps between the first observation and the answer.
    - `bits`: bits of the context.
    """

    render_fps: ClassVar[int] = 8

    def __init__(self, length: int = 64, *, bits: int = 1) -> None:
        validation.check_integer_between("length", length, 1, LONGEST)
        validation.check_integer_between("bits", bits, 1, 64)
        self.bits = int(bits)
        super().__init__(MemoryChainParams(int(length) + 1, int(length)))

    def reset_env(
        self, key: PRNGKeyArray, params: MemoryChainParams
    ) -> tuple[Float[Array, " n"], MemoryChainState]:
        # The draws are gymnax's: the same key gives the same episode.
        context_key, query_key = jax.random.split(key)
        context = jax.random.bernoulli(context_key, p=0.5, shape=(self.bits,))
        query = jax.random.randint(query_key, minval=0, maxval=self.bits, shape=())
        state = MemoryChainState(
            time=jnp.int32(0), context=context.astype(jnp.int32), query=query.astype(jnp.int32)
        )
        return self._observe(state, params), state

    def step_env(
        self,
        key: PRNGKeyArray,
        state: MemoryChainState,
        action: Int[Array, ""] | int | float,
        params: MemoryChainParams,
    ) -> tuple[Float[Array, " n"], MemoryChainState, Float[Array, ""], Bool[Array, ""], dict]:
        del key
        obs = self._observe(state, params)
        right = jnp.asarray(action, jnp.int32) == state.context[state.query]
        answered = state.time >= params.length
        reward = jnp.where(answered, jnp.where(right, 1.0, -1.0), 0.0).astype(jnp.float32)
        state = MemoryChainState(time=state.time + 1, context=state.context, query=state.query)
        info = {"success": answered & right}
        return obs, state, reward, self.is_terminated(state, params), info

    def observe(
        self, key: PRNGKeyArray, state: MemoryChainState, action: Any, params: MemoryChainParams
    ) -> Float[Array, " n"]:
        """The observation that a step *from* `state` gives."""
        del key, action
        return self._observe(state, params)

    def _observe(self, state: MemoryChainState, params: MemoryChainParams) -> Float[Array, " n"]:
        left = 1 - state.time / params.length
        query = jnp.where(state.time == params.length - 1, state.query, 0)
        context = jnp.where(state.time == 0, 2 * state.context - 1, 0)
        return jnp.concatenate([left[None], query[None], context]).astype(jnp.float32)

    def is_terminated(self, state: MemoryChainState, params: MemoryChainParams) -> Bool[Array, ""]:
        return state.time > params.length

    @property
    def num_actions(self) -> int:
        return 2

    def action_space(self, params: MemoryChainParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(2)

    def observation_space(self, params: MemoryChainParams | None = None) -> spaces.Box:
        # gymnax's limits, 0 and 2 * bits, leave out the -1 of a context.
        del params
        return spaces.Box(-1.0, float(max(1, self.bits - 1)), (2 + self.bits,), jnp.float32)

    def render(
        self, state: MemoryChainState, params: MemoryChainParams | None = None
    ) -> UInt8[Array, "48 320 3"]:
        """The asked bit as a colour on the left, bright while it is shown; the episode as a bar
        that ends at the answer."""
        bit = jnp.asarray(_COLOURS, jnp.uint8)[state.context[state.query]]
        shown = jnp.where(state.time <= 1, bit, bit // 4)
        frame = drawing.blank(48, 320, _BACKGROUND)
        frame = drawing.rectangle(frame, 8, 8, 40, 40, shown)
        length = (self.default_params if params is None else params).length
        done = jnp.minimum(state.time, length) * 248 // length
        frame = drawing.rectangle(frame, 56, 20, 304, 28, jnp.asarray(_BAR, jnp.uint8) // 4)
        return drawing.rectangle(frame, 56, 20, 56 + done, 28, jnp.asarray(_BAR, jnp.uint8))


_BACKGROUND, _BAR = (40, 40, 40), (255, 200, 0)
_COLOURS = ((33, 102, 204), (200, 80, 70))
