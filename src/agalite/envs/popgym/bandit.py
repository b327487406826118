"""MultiarmedBandit: find the best arm, and keep to it."""

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from agalite import validation
from agalite.envs.popgym.base import POPGymEnvironment, one_hots


@struct.dataclass
class BanditState(environment.EnvState):
    """The probability that each arm pays, and whether the last one did."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    arms: Float[Array, " arms"]
    paid: Bool[Array, ""]


class MultiarmedBandit(POPGymEnvironment[BanditState]):
    """MultiarmedBandit: obs (2,) float32, whether the last arm paid; actions are the arms.

    An arm pays with a probability that is uniform between 0 and 1 and stays for the episode. It
    gives 1 / steps or costs as much. Truncated after `steps`. The hidden state (arms,) is the
    probabilities.

    **Arguments:**

    - `arms`: how many.
    - `steps`: length of an episode.
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(self, arms: int = 10, *, steps: int = 200, observe_state: bool = False) -> None:
        validation.check_integer_between("arms", arms, 2, 4096)
        validation.check_integer_between("steps", steps, 1, 2**31 - 1)
        self.arms, self.steps = int(arms), int(steps)
        super().__init__(self.steps, 2, self.arms, observe_state)

    def start(self, key: PRNGKeyArray) -> BanditState:
        arms = jax.random.uniform(key, (self.arms,), jnp.float32)
        return BanditState(time=jnp.int32(0), arms=arms, paid=jnp.bool_(False))

    def draw(self, key: PRNGKeyArray) -> Float[Array, ""]:
        """A number that is below an arm's probability if it pays."""
        return jax.random.uniform(key, (), jnp.float32)

    def advance(
        self, state: BanditState, action: Array, draw: Float[Array, ""]
    ) -> tuple[BanditState, Float[Array, ""]]:
        paid = draw < state.arms[action]
        after = BanditState(time=state.time, arms=state.arms, paid=paid)
        return after, jnp.where(paid, 1 / self.steps, -1 / self.steps)

    def observation(self, state: BanditState) -> Float[Array, "2"]:
        return one_hots(state.paid.astype(jnp.int32), 2)

    def hidden_state(self, state: BanditState) -> Float[Array, " arms"]:
        return state.arms

    def is_terminated(self, state: BanditState, params: environment.EnvParams) -> Bool[Array, ""]:
        del state, params
        return jnp.bool_(False)

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(self.arms)
