"""PositionOnlyCartPole, VelocityOnlyCartPole and NoisyPositionOnlyCartPole.

The physics is that of `agalite.envs.cartpole`, which is Gymnasium's CartPole-v1. The package
means to punish a fall with -1, but tells it by a reward of 0, which CartPole-v1 never gives
before an episode's end: every step gives 1 / max_steps.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from agalite import validation
from agalite.envs import cartpole
from agalite.envs.popgym.base import Limits, POPGymEnvironment

_HIGH = np.array([2 * cartpole.MAX_X, 2 * cartpole.MAX_THETA], np.float32)
# The inverse error function, which makes normal noise of a uniform draw, is infinite at -1.
_ABOVE_MINUS_ONE = np.nextafter(np.float32(-1.0), np.float32(0.0))
_UNLIMITED = np.full(2, np.inf, np.float32)
# Gymnasium's observation space: positions to twice their limits, velocities unlimited.
_STATE_HIGH = np.stack([_HIGH, _UNLIMITED], axis=1).reshape(4)


@struct.dataclass
class CartPoleState(environment.EnvState):
    """Position and velocity of the cart, angle and angular velocity of the pole; the noise that
    is added to what is observed."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    x: Float[Array, ""]
    x_dot: Float[Array, ""]
    theta: Float[Array, ""]
    theta_dot: Float[Array, ""]
    noise: Float[Array, "2"]


class _CartPole(POPGymEnvironment[CartPoleState]):
    """CartPole's physics, ends and rewards."""

    # Episodes are short and a reset is four numbers.
    costly_reset: ClassVar[bool] = False
    noisy: ClassVar[bool] = False

    def __init__(self, high: Limits, max_steps: int, observe_state: bool) -> None:
        validation.check_integer_between("max_steps", max_steps, 1, 2**31 - 1)
        self.max_steps = int(max_steps)
        super().__init__(self.max_steps, high, (-_STATE_HIGH, _STATE_HIGH), observe_state)

    def start(self, key: PRNGKeyArray) -> CartPoleState:
        # One draw for state and noise, since episodes are short.
        draw = jax.random.uniform(key, (4 + self.noisy * 2,), jnp.float32, _ABOVE_MINUS_ONE, 1.0)
        noise = math.sqrt(2.0) * jax.lax.erf_inv(draw[4:]) if self.noisy else jnp.zeros(2)
        return CartPoleState(
            jnp.int32(0), *(cartpole.START_RANGE * draw[:4]), noise=self._scaled(noise)
        )

    def _scaled(self, normal: Float[Array, "2"]) -> Float[Array, "2"]:
        """Noise of the standard normal distribution, scaled."""
        return normal.astype(jnp.float32)

    def draw(self, key: PRNGKeyArray) -> Float[Array, "2"]:
        """What is added to the observation after the step."""
        return self._scaled(jax.random.normal(key, (2,)) if self.noisy else jnp.zeros(2))

    def advance(
        self, state: CartPoleState, action: Array, draw: Float[Array, "2"]
    ) -> tuple[CartPoleState, float]:
        values = cartpole.euler_step(state.x, state.x_dot, state.theta, state.theta_dot, action)
        return CartPoleState(state.time, *values, noise=draw), 1 / self.max_steps

    def hidden_state(self, state: CartPoleState) -> Float[Array, "4"]:
        values = jnp.stack([state.x, state.x_dot, state.theta, state.theta_dot])
        return values.astype(jnp.float32)

    def is_terminated(self, state: CartPoleState, params: environment.EnvParams) -> Bool[Array, ""]:
        del params
        return (jnp.abs(state.x) > cartpole.MAX_X) | (jnp.abs(state.theta) > cartpole.MAX_THETA)

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(2)


class PositionOnlyCartPole(_CartPole):
    """CartPole with positions only: obs (2,) float32, the cart's position and the pole's angle.

    Actions are 0 (push left) and 1 (push right). Every step gives 1 / max_steps. Terminated when
    the cart is further than 2.4 from the middle or the pole more than 12 degrees from upright.
    The hidden state (4,) is positions and velocities.

    **Arguments:**

    - `max_steps`: the episode is truncated after so many.
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(self, max_steps: int = 200, *, observe_state: bool = False) -> None:
        super().__init__((-_HIGH, _HIGH), max_steps, observe_state)

    def observation(self, state: CartPoleState) -> Float[Array, "2"]:
        return jnp.stack([state.x, state.theta]).astype(jnp.float32)


class VelocityOnlyCartPole(_CartPole):
    """`PositionOnlyCartPole` with velocities in place of positions: obs (2,) float32.

    The first observation of an episode is the positions, which the package shows by mistake. It is
    kept: it tells where the episode begins.

    **Arguments:**

    - `max_steps`, `observe_state`: as for `PositionOnlyCartPole`.
    """

    def __init__(self, max_steps: int = 200, *, observe_state: bool = False) -> None:
        super().__init__((-_UNLIMITED, _UNLIMITED), max_steps, observe_state)

    def observation(self, state: CartPoleState) -> Float[Array, "2"]:
        positions = jnp.stack([state.x, state.theta])
        velocities = jnp.stack([state.x_dot, state.theta_dot])
        return jnp.where(state.time == 0, positions, velocities).astype(jnp.float32)


class NoisyPositionOnlyCartPole(PositionOnlyCartPole):
    """`PositionOnlyCartPole` with normal noise on every observation: obs (2,) float32.

    Observations are clipped to twice the limits of the state: the angle to 24 degrees.

    **Arguments:**

    - `noise`: the standard deviation, of metres and of radians alike.
    - `max_steps`, `observe_state`: as for `PositionOnlyCartPole`.
    """

    noisy = True

    def __init__(
        self, noise: float = 0.1, *, max_steps: int = 200, observe_state: bool = False
    ) -> None:
        self.noise = validation.check_number("noise", noise, minimum=0.0, maximum=1e30)
        super().__init__(max_steps, observe_state=observe_state)

    def _scaled(self, normal: Float[Array, "2"]) -> Float[Array, "2"]:
        return self.noise * normal.astype(jnp.float32)

    def observation(self, state: CartPoleState) -> Float[Array, "2"]:
        return jnp.clip(super().observation(state) + state.noise, -_HIGH, _HIGH)
