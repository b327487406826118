"""CartPole without its velocities, which the agent must estimate from past positions.

The two variants of the paper's "Partially Observable Classic Control": `MaskedCartPole` shows
positions only, and `NoisyMaskedCartPole` adds normal noise to them.
"""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from agalite import validation
from agalite.envs import drawing
from agalite.envs.base import JaxEnvironment

LEFT, RIGHT = range(2)

# The constants of Gymnasium's CartPole-v1.
_GRAVITY, _CART_MASS, _POLE_MASS, _POLE_HALF_LENGTH = 9.8, 1.0, 0.1, 0.5
_FORCE, _TIME_STEP = 10.0, 0.02
_TOTAL_MASS = _CART_MASS + _POLE_MASS
MAX_X, MAX_THETA = 2.4, 12 * 2 * math.pi / 360
START_RANGE = 0.05

# No number JAX draws from the float32 normal distribution is larger (the largest is 5.42).
_LARGEST_NORMAL = 6.0


@struct.dataclass
class CartPoleState(environment.EnvState):
    """Position and velocity of the cart, angle and angular velocity of the pole."""

    time: Int[Array, ""]  # pyright: ignore[reportIncompatibleVariableOverride]
    x: Float[Array, ""]
    x_dot: Float[Array, ""]
    theta: Float[Array, ""]
    theta_dot: Float[Array, ""]


@struct.dataclass
class CartPoleParams(environment.EnvParams):
    """The time limit, and the standard deviation of the observations' noise."""

    max_steps_in_episode: int = 500
    noise: float = 0.0


class MaskedCartPole(JaxEnvironment[CartPoleState, CartPoleParams]):
    """CartPole with positions only: obs (2,) float32, the cart's position and the pole's angle.

    The physics, the initial states and the ends are those of Gymnasium's CartPole-v1: terminated
    when the cart is further than 2.4 from the middle or the pole more than 12 degrees from
    upright. The velocities are removed from the observation, not set to zero. Actions are 0 (push
    left) and 1 (push right); any action but 1 pushes left. The reward is 1 at every step, the
    last included.

    The state may be float64 (under `jax.enable_x64`), and the physics keeps its precision.

    **Arguments:**

    - `max_steps`: the episode is truncated after so many. The paper names no limit; 500 is that
      of CartPole-v1.
    """

    render_fps: ClassVar[int] = 50

    def __init__(self, *, max_steps: int = 500) -> None:
        validation.check_integer_between("max_steps", max_steps, 1, 2**31 - 1)
        super().__init__(CartPoleParams(int(max_steps)))

    def reset_env(
        self, key: PRNGKeyArray, params: CartPoleParams
    ) -> tuple[Float[Array, "2"], CartPoleState]:
        del params
        state = _start(START_RANGE * jax.random.uniform(key, (4,), jnp.float32, -1.0, 1.0))
        return _positions(state), state

    def step_env(
        self,
        key: PRNGKeyArray,
        state: CartPoleState,
        action: Int[Array, ""] | int | float,
        params: CartPoleParams,
    ) -> tuple[
        Float[Array, "2"], CartPoleState, Float[Array, ""], Bool[Array, ""], dict[str, Array]
    ]:
        state = _move(state, jnp.asarray(action, jnp.int32))
        obs = self.observe(key, state, action, params)
        return obs, state, jnp.float32(1.0), self.is_terminated(state, params), {}

    def observe(
        self, key: PRNGKeyArray, state: CartPoleState, action: Any, params: CartPoleParams
    ) -> Float[Array, "2"]:
        del key, action, params
        return _positions(state)

    def is_terminated(self, state: CartPoleState, params: CartPoleParams) -> Bool[Array, ""]:
        del params
        return (jnp.abs(state.x) > MAX_X) | (jnp.abs(state.theta) > MAX_THETA)

    @property
    def num_actions(self) -> int:
        return 2

    def action_space(self, params: CartPoleParams | None = None) -> spaces.Discrete:
        del params
        return spaces.Discrete(2)

    def observation_space(self, params: CartPoleParams | None = None) -> spaces.Box:
        """Twice the limits of the state, as in Gymnasium, plus the largest noise."""
        noise = (self.default_params if params is None else params).noise
        limits = np.array([2 * MAX_X, 2 * MAX_THETA], np.float32)
        high: Any = limits + _LARGEST_NORMAL * noise
        return spaces.Box(-high, high, (2,), jnp.float32)

    def render(
        self, state: CartPoleState, params: CartPoleParams | None = None
    ) -> UInt8[Array, "200 300 3"]:
        """The cart and the pole of the state, without noise."""
        del params
        return _draw(state)


class NoisyMaskedCartPole(MaskedCartPole):
    """`MaskedCartPole` with noisy observations: obs (2,) float32.

    Every observation, the first of an episode included, has its own normal noise. The state has
    none, and nothing is clipped.

    **Arguments:**

    - `noise`: the standard deviation; 0 is the task of `MaskedCartPole`.
    - `max_steps`: as for `MaskedCartPole`.
    """

    def __init__(self, noise: float = 0.1, *, max_steps: int = 500) -> None:
        super().__init__(max_steps=max_steps)
        self._params = self._params.replace(
            noise=validation.check_number("noise", noise, minimum=0.0, maximum=1e30)
        )

    def reset_env(
        self, key: PRNGKeyArray, params: CartPoleParams
    ) -> tuple[Float[Array, "2"], CartPoleState]:
        # One uniform draw for state and noise: the inverse error function makes it normal. The
        # interval is open at -1, where that function is infinite.
        low = jnp.nextafter(jnp.float32(-1.0), jnp.float32(0.0))
        draw = jax.random.uniform(key, (6,), jnp.float32, low, 1.0)
        state = _start(START_RANGE * draw[:4])
        normal = math.sqrt(2.0) * jax.lax.erf_inv(draw[4:])
        return _positions(state) + params.noise * normal, state

    def observe(
        self, key: PRNGKeyArray, state: CartPoleState, action: Any, params: CartPoleParams
    ) -> Float[Array, "2"]:
        del action
        return _positions(state) + params.noise * jax.random.normal(key, (2,), jnp.float32)


def _start(values: Float[Array, "4"]) -> CartPoleState:
    x, x_dot, theta, theta_dot = values
    return CartPoleState(time=jnp.int32(0), x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot)


def _positions(state: CartPoleState) -> Float[Array, "2"]:
    return jnp.stack([state.x, state.theta]).astype(jnp.float32)


def _move(state: CartPoleState, action: Int[Array, ""]) -> CartPoleState:
    values = euler_step(state.x, state.x_dot, state.theta, state.theta_dot, action)
    return CartPoleState(state.time + 1, *values)


def euler_step(
    x: Float[Array, ""],
    x_dot: Float[Array, ""],
    theta: Float[Array, ""],
    theta_dot: Float[Array, ""],
    action: Int[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """One explicit Euler step: positions change by the velocities before the step."""
    force = jnp.where(action == RIGHT, _FORCE, -_FORCE).astype(x.dtype)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    pole = _POLE_MASS * _POLE_HALF_LENGTH
    push = (force + pole * theta_dot**2 * sin) / _TOTAL_MASS
    theta_acc = (_GRAVITY * sin - cos * push) / (
        _POLE_HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cos**2 / _TOTAL_MASS)
    )
    x_acc = push - pole * theta_acc * cos / _TOTAL_MASS
    return (
        x + _TIME_STEP * x_dot,
        x_dot + _TIME_STEP * x_acc,
        theta + _TIME_STEP * theta_dot,
        theta_dot + _TIME_STEP * theta_acc,
    )


def _draw(state: CartPoleState) -> UInt8[Array, "200 300 3"]:
    height, width, track = 200, 300, 150.0
    metre = width / (2 * MAX_X)
    x = width / 2 + metre * state.x.astype(jnp.float32)
    theta = state.theta.astype(jnp.float32)
    axle, length = track - 20.0, 2 * _POLE_HALF_LENGTH * metre
    tip_x, tip_y = x + length * jnp.sin(theta), axle - length * jnp.cos(theta)
    frame = drawing.blank(height, width, (255, 255, 255))
    frame = drawing.line(frame, 0.0, track, float(width), track, 2.0, (120, 120, 120))
    frame = drawing.rectangle(frame, x - 25, track - 28, x + 25, track, (40, 44, 52))
    frame = drawing.line(frame, x, axle, tip_x, tip_y, 8.0, (202, 152, 101))
    return drawing.circle(frame, x, axle, 4.0, (129, 132, 203))
