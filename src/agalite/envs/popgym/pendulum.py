"""PositionOnlyPendulum and NoisyPositionOnlyPendulum: swing up a pendulum without its velocity."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from agalite import validation
from agalite.envs.popgym.base import POPGymEnvironment

# The constants of Gymnasium's Pendulum-v1.
_GRAVITY, _MASS, _LENGTH, _TIME_STEP = 10.0, 1.0, 1.0, 0.05
_MAX_SPEED, _MAX_TORQUE, _START_SPEED = 8.0, 2.0, 1.0
# Half of the largest cost of a step, which becomes a reward of 0; the package's number.
_HALF_COST = 16.2736044 / 2

_HIGH = np.ones(2, np.float32)
_STATE_HIGH = np.array([1.0, 1.0, _MAX_SPEED], np.float32)


@struct.dataclass
class PendulumState(environment.EnvState):
    """Angle from upright and angular velocity; the noise that is added to what is observed."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    theta: Float[Array, ""]
    theta_dot: Float[Array, ""]
    noise: Float[Array, "2"]


class PositionOnlyPendulum(POPGymEnvironment[PendulumState]):
    """Pendulum with its position only: obs (2,) float32, cosine and sine of the angle.

    The action (1,) is a torque from -2 to 2. The cost of Pendulum-v1, which punishes angle,
    velocity and torque, is mapped from 0 to 16.27 onto 1 to -1 and divided by `max_steps`.
    Truncated after `max_steps`. The hidden state (3,) is cosine, sine and angular velocity.

    **Arguments:**

    - `max_steps`: length of an episode.
    - `observe_state`: whether the hidden state follows the observation.
    """

    def __init__(self, max_steps: int = 200, *, observe_state: bool = False) -> None:
        validation.check_integer_between("max_steps", max_steps, 1, 2**31 - 1)
        self.max_steps = int(max_steps)
        limits = (-_HIGH, _HIGH), (-_STATE_HIGH, _STATE_HIGH)
        super().__init__(self.max_steps, *limits, observe_state)

    def start(self, key: PRNGKeyArray) -> PendulumState:
        start_key, noise_key = jax.random.split(key)
        theta, theta_dot = jax.random.uniform(start_key, (2,), jnp.float32, -1.0, 1.0)
        return PendulumState(
            time=jnp.int32(0),
            theta=math.pi * theta,
            theta_dot=_START_SPEED * theta_dot,
            noise=self._noise(noise_key),
        )

    def _noise(self, key: PRNGKeyArray) -> Float[Array, "2"]:
        del key
        return jnp.zeros(2, jnp.float32)

    def draw(self, key: PRNGKeyArray) -> Float[Array, "2"]:
        """What is added to the observation after the step."""
        return self._noise(key)

    def advance(
        self, state: PendulumState, action: Array, draw: Float[Array, "2"]
    ) -> tuple[PendulumState, Float[Array, ""]]:
        theta, speed = state.theta, state.theta_dot
        # In float32, as in the package, also where the state is float64.
        torque = jnp.clip(action.reshape(()), -_MAX_TORQUE, _MAX_TORQUE)
        angle = (theta + math.pi) % (2 * math.pi) - math.pi
        cost = angle**2 + 0.1 * speed**2 + 0.001 * torque**2
        gravity = 3 * _GRAVITY / (2 * _LENGTH) * jnp.sin(theta)
        push = 3.0 / (_MASS * _LENGTH**2) * torque
        speed = speed + (gravity + push) * _TIME_STEP
        speed = jnp.clip(speed, -_MAX_SPEED, _MAX_SPEED)
        after = PendulumState(state.time, theta + speed * _TIME_STEP, speed, draw)
        return after, (_HALF_COST - cost) / _HALF_COST / self.max_steps

    def observation(self, state: PendulumState) -> Float[Array, "2"]:
        return self.hidden_state(state)[:2]

    def hidden_state(self, state: PendulumState) -> Float[Array, "3"]:
        values = jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot])
        return values.astype(jnp.float32)

    def is_terminated(self, state: PendulumState, params: environment.EnvParams) -> Bool[Array, ""]:
        del state, params
        return jnp.bool_(False)

    def action_space(self, params: environment.EnvParams | None = None) -> spaces.Box:
        del params
        return spaces.Box(-_MAX_TORQUE, _MAX_TORQUE, (1,), jnp.float32)


class NoisyPositionOnlyPendulum(PositionOnlyPendulum):
    """`PositionOnlyPendulum` with normal noise on every observation: obs (2,) float32.

    Cosine and sine get their own noise and are clipped to -1 and 1.

    **Arguments:**

    - `noise`: the standard deviation.
    - `max_steps`, `observe_state`: as for `PositionOnlyPendulum`.
    """

    def __init__(
        self, noise: float = 0.1, *, max_steps: int = 200, observe_state: bool = False
    ) -> None:
        self.noise = validation.check_number("noise", noise, minimum=0.0, maximum=1e30)
        super().__init__(max_steps, observe_state=observe_state)

    def _noise(self, key: PRNGKeyArray) -> Float[Array, "2"]:
        return self.noise * jax.random.normal(key, (2,), jnp.float32)

    def observation(self, state: PendulumState) -> Float[Array, "2"]:
        return jnp.clip(super().observation(state) + state.noise, -1.0, 1.0)
