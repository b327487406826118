"""`check_env`: the contract of a JAX environment (base.py), checked for anybody's.

`agalite.testing` exports it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces
from gymnax.environments.environment import Environment
from jaxtyping import Array, PRNGKeyArray

from agalite import validation
from agalite.envs.base import JaxEnvironment


class _Reset(NamedTuple):
    obs: Any
    state: Any


class _Step(NamedTuple):
    """What a step returned; `fresh` is the reset that would replace it at the end of an episode."""

    obs: Any
    state: Any
    reward: Any
    terminated: Any
    truncated: Any
    final_obs: Any
    fresh: _Reset


def check_env(
    env: Environment[Any, Any],
    *,
    key: PRNGKeyArray | None = None,
    steps: int = 200,
    render: bool = True,
) -> None:
    """Check that a JAX environment keeps the contract that trainers rely on.

    Takes `steps` random actions. The time limit is lowered to a quarter of them, if it is longer,
    so that episodes end. The promises are:

    - *signature*: `reset` and `step` return two and six values, and `step` a state with the
      structure, shapes and dtypes of `reset`'s; `info` has "final_observation".
    - *observation*: observations have the shape, the dtype and the bounds of
      `observation_space`.
    - *reward*: a finite floating-point scalar.
    - *end*: `terminated` and `truncated` are boolean scalars and never both true.
    - *time*: `state.time` is 0 after a reset and grows by 1 in each step; no episode is longer
      than `params.max_steps_in_episode`.
    - *final observation*: where the episode goes on, `info["final_observation"]` is the
      observation.
    - *autoreset*: at the end of an episode, `step` returns the observation and the state that
      `reset_env` gives for the second half of its key.
    - *determinism*: the same key gives the same episodes.
    - *render*: a frame is (height, width, 3) uint8.

    **Arguments:**

    - `env`: a `JaxEnvironment`, or another environment of gymnax 1.0.
    - `key`: draws the episodes and the actions; None is `jax.random.key(0)`.
    - `steps`: how many steps to take, at least 4.
    - `render`: whether to check `render`, if the environment has it.

    **Raises:**

    An `AssertionError` that names the promise and the step, from 1; step 0 is the first reset.
    """
    if not isinstance(env, Environment):
        raise ValueError(f"env={env!r} must be a gymnax environment")
    validation.check_integer("steps", steps, minimum=4)
    params: Any = env.default_params
    limit = min(int(params.max_steps_in_episode), steps // 4)
    params = params.replace(max_steps_in_episode=limit)
    space = env.observation_space(params)
    _check_signatures(env, params)

    reset_key, step_key = jax.random.split(jax.random.key(0) if key is None else key)
    keys = jax.random.split(step_key, steps)

    @jax.jit
    def play(reset_key: Array, keys: Array) -> tuple[_Reset, _Step]:
        start = _Reset(*env.reset(reset_key, params))

        def one_step(state: Any, key: Array) -> tuple[Any, _Step]:
            act_key, key = jax.random.split(key)
            action = env.action_space(params).sample(act_key)
            obs, state, reward, terminated, truncated, info = env.step(key, state, action, params)
            fresh = _Reset(*env.reset_env(jax.random.split(key)[1], params))
            final_obs = info["final_observation"]
            return state, _Step(obs, state, reward, terminated, truncated, final_obs, fresh)

        return start, jax.lax.scan(one_step, start.state, keys)[1]

    start, taken = jax.tree.map(np.asarray, play(reset_key, keys))
    _check_observation(env, "the observation", 0, start.obs, space)
    _require(env, "time", 0, start.state.time == 0, f"state.time is {start.state.time}")
    time = 0
    for i in range(steps):
        step: _Step = jax.tree.map(lambda x, i=i: x[i], taken)
        time = _check_step(env, i + 1, step, time, limit, space)
    again = jax.tree.map(np.asarray, play(reset_key, keys))
    _require(env, "determinism", None, _equal((start, taken), again), "two runs differ")
    if render and getattr(type(env), "render", None) not in (None, JaxEnvironment.render):
        frame: Any = jax.eval_shape(getattr(env, "render"), start.state, params)  # noqa: B009
        image = frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == jnp.uint8
        _require(env, "render", 0, image, f"a frame is {frame.shape} {frame.dtype}")


def _check_signatures(env: Any, params: Any) -> None:
    """What can be told from shapes and dtypes alone, without compiling."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    result = jax.eval_shape(lambda k: env.reset(k, params), key)
    _require(env, "signature", 0, len(result) == 2, f"reset returns {len(result)} values, not 2")
    state = result[1]

    def step(method: Any) -> Any:
        """The result of `env.step` or `env.step_env`, as shapes and dtypes."""
        return jax.eval_shape(
            lambda k, s: method(k, s, env.action_space(params).sample(k), params), key, state
        )

    # First without the autoreset, which JAX refuses for states that do not fit together.
    before, after = _describe(state), _describe(step(env.step_env)[1])
    changed = f"step changes the state from {before} to {after}"
    _require(env, "signature", 1, before == after, changed)
    result = step(env.step)
    _require(env, "signature", 1, len(result) == 6, f"step returns {len(result)} values, not 6")
    _, _, reward, terminated, truncated, info = result
    has = "final_observation" in info
    _require(env, "signature", 1, has, f"info has no 'final_observation', only {sorted(info)}")
    scalar = reward.shape == () and jnp.issubdtype(reward.dtype, jnp.floating)
    _require(env, "reward", 1, scalar, f"it is {reward.dtype}{list(reward.shape)}")
    for name, end in (("terminated", terminated), ("truncated", truncated)):
        scalar = end.shape == () and end.dtype == jnp.bool_
        _require(env, "end", 1, scalar, f"{name} is {end.dtype}{list(end.shape)}, not a boolean")


def _check_step(env: Any, i: int, step: _Step, time: int, limit: int, space: Any) -> int:
    """Check step `i`, which began at `time` of its episode; returns the time after it."""
    done = bool(step.terminated | step.truncated)
    _require(env, "reward", i, bool(np.isfinite(step.reward)), f"it is {step.reward}")
    both = bool(step.terminated & step.truncated)
    _require(env, "end", i, not both, "terminated and truncated are both true")
    _check_observation(env, "the observation", i, step.obs, space)
    _check_observation(env, "info['final_observation']", i, step.final_obs, space)
    time += 1
    if done:
        # Not exactly: XLA may round the two computations differently.
        same = _equal(step.state, step.fresh.state, tolerance=1e-5)
        _require(env, "autoreset", i, same, "the state is not that of a reset")
        same = _equal(step.obs, step.fresh.obs, tolerance=1e-5)
        _require(env, "autoreset", i, same, "the observation is not that of a reset")
        return 0
    _require(env, "time", i, time < limit, f"the episode is longer than {limit} steps, its limit")
    found = step.state.time
    _require(env, "time", i, found == time, f"state.time is {found}; {time} steps were taken")
    same = _equal(step.obs, step.final_obs)
    _require(env, "final observation", i, same, "it is not the observation of a running episode")
    return time


def _check_observation(env: Any, name: str, i: int, obs: Any, space: Any) -> None:
    if not isinstance(space, spaces.Box):
        inside = bool(jnp.all(jnp.asarray(space.contains(obs))))
        _require(env, "observation", i, inside, f"{name} is not in {space!r}")
        return
    shape, dtype = tuple(space.shape), np.dtype(space.dtype)
    fits = obs.shape == shape and obs.dtype == dtype
    found = f"{obs.dtype}{list(obs.shape)}"
    _require(env, "observation", i, fits, f"{name} is {found}; the space {dtype}{list(shape)}")
    inside = (obs >= np.asarray(space.low)) & (obs <= np.asarray(space.high))  # false for NaN
    if not inside.all():
        where = tuple(int(k) for k in np.argwhere(~inside)[0])
        bad = f"{name}{list(where)} is {obs[where]}"
        _require(env, "observation", i, False, f"{bad}, outside of observation_space")


def _require(env: Any, promise: str, step: int | None, kept: Any, problem: str) -> None:
    if not kept:
        where = "" if step is None else f" at step {step}"
        raise AssertionError(f"{env.name}, promise {promise!r}{where}: {problem}")


def _describe(tree: Any) -> list[str]:
    leaves = jax.tree.leaves_with_path(tree)
    return [f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}" for path, x in leaves]


def _equal(one: Any, other: Any, tolerance: float = 0.0) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if a.dtype.kind == "f":
            return np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        return np.array_equal(a, b)

    return all(map(equal, jax.tree.leaves(one), jax.tree.leaves(other)))
