"""`VectorEnv`: many copies of one JAX environment, stepped together inside compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
from gymnax.environments.environment import Environment
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite import validation

# Costly resets are done for blocks of num_envs / _BLOCKS environments at a time.
_BLOCKS = 32


class VectorEnv:
    """`num_envs` copies of a JAX environment, each with autoreset.

    Equal, bit for bit, to `jax.vmap(env.step)` with the keys `jax.random.split(key, num_envs)`.
    Where a reset is costly (`env.costly_reset`), it is computed only for the environments whose
    episode ended, in blocks, instead of for all of them at every step.

    **Arguments:**

    - `env`: a gymnax environment, for example `make("tmaze")`.
    - `num_envs`: how many copies, B.
    """

    def __init__(self, env: Environment, num_envs: int) -> None:
        validation.check_integer("num_envs", num_envs, minimum=1)
        if not isinstance(env, Environment):
            raise ValueError(f"env={env!r} must be a gymnax environment; make(name) makes one")
        self.env = env
        self.num_envs = num_envs
        self._reset_in_blocks = bool(getattr(env, "costly_reset", False)) and num_envs > 1

    def reset(self, key: Array) -> tuple[PyTree[Shaped[Array, "B ..."]], Any]:
        """Start an episode in every environment.

        **Arguments:**

        - `key`: a PRNG key.

        **Returns:**

        `obs` (B, ...) and the batched `env_state`.
        """
        return jax.vmap(lambda k: self.env.reset(k))(jax.random.split(key, self.num_envs))

    def step(
        self, key: Array, state: Any, actions: PyTree[Shaped[Array, "B ..."]]
    ) -> tuple[
        PyTree[Shaped[Array, "B ..."]],
        Any,
        Float[Array, " B"],
        Bool[Array, " B"],
        Bool[Array, " B"],
        dict[str, Any],
    ]:
        """Step every environment, and reset those whose episode ended.

        **Arguments:**

        - `key`: a PRNG key.
        - `state`: the batched `env_state` of the last `reset` or `step`.
        - `actions`: (B, ...), one action per environment.

        **Returns:**

        `obs` (B, ...), `env_state`, `reward` (B,), `terminated` (B,), `truncated` (B,) and
        `info`. Where an episode ended, `obs` is the first observation of the next episode and
        `info["final_observation"]` the last one of the episode that ended.
        """
        for leaf in jax.tree.leaves(actions):
            if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != self.num_envs:
                raise ValueError(
                    f"actions has shape {jnp.shape(leaf)}; expected ({self.num_envs}, ...)"
                )
        keys = jax.random.split(key, self.num_envs)
        if not self._reset_in_blocks:
            return jax.vmap(lambda k, s, a: self.env.step(k, s, a))(keys, state, actions)
        return self._step_and_reset_in_blocks(keys, state, actions)

    def _step_and_reset_in_blocks(self, keys: Array, state: Any, actions: Any) -> Any:
        """What `jax.vmap(env.step)` computes, with the resets taken out of it."""
        env = self.env
        params = env.default_params
        step_and_reset = jax.vmap(jax.random.split)(keys)  # as gymnax's `step` splits its key
        final_obs, state, reward, terminated, info = jax.vmap(
            lambda k, s, a: env.step_env(k, s, a, params)
        )(step_and_reset[:, 0], state, actions)
        truncated = jax.vmap(lambda s: env.is_truncated(s, params))(state)
        done = terminated | truncated
        obs, state = self._reset_where(done, step_and_reset[:, 1], final_obs, state, params)
        info = {
            **info,
            "terminated": terminated,
            "truncated": truncated,
            "final_observation": final_obs,
        }
        return obs, state, reward, terminated, truncated, info

    def _reset_where(
        self, done: Bool[Array, " B"], keys: Array, obs: Any, state: Any, params: Any
    ) -> tuple[Any, Any]:
        """`obs` and `state`, reset where `done`: a loop over blocks of the rows that are."""
        env = self.env
        block = max(1, self.num_envs // _BLOCKS)
        # Rows to reset come first in `order`. The last block may reach past them, and past B.
        order = jnp.argsort(jnp.logical_not(done), stable=True)
        padded = jnp.concatenate([order, jnp.full(block, self.num_envs, order.dtype)])
        num_done = jnp.sum(done)

        def more(carry: tuple[Any, Any, Any]) -> Bool[Array, ""]:
            return carry[0] < num_done

        def reset_block(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            start, obs, state = carry
            rows = jax.lax.dynamic_slice_in_dim(padded, start, block)
            fresh = jax.vmap(lambda k: env.reset_env(k, params))(keys[rows % self.num_envs])
            # An index of B is out of bounds, and its row is dropped.
            target = jnp.where(start + jnp.arange(block) < num_done, rows, self.num_envs)
            obs, state = jax.tree.map(
                lambda old, new: old.at[target].set(_merge_last_axes(new), mode="drop"),
                (obs, state),
                fresh,
            )
            return start + block, obs, state

        flat = jax.tree.map(_merge_last_axes, (obs, state))
        _, *after = jax.lax.while_loop(more, reset_block, (jnp.int32(0), *flat))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), tuple(after), (obs, state))


def _merge_last_axes(x: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """Images (B, h, w, c) as (B, h, w * c): XLA copies rows of three bytes one by one."""
    return x.reshape(*x.shape[:-2], -1) if x.ndim > 3 else x
