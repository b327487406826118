"""`VectorEnv`: many copies of one JAX environment, stepped together inside compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
from gymnax.environments.environment import Environment
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite import validation

# Costly resets are done for blocks of num_envs / _BLOCKS neighbouring environments at a time.
_BLOCKS = 32


class VectorEnv:
    """`num_envs` copies of a JAX environment, each with autoreset.

    Equal, bit for bit, to `jax.vmap(env.step)` with the keys `jax.random.split(key, num_envs)`.
    Where a reset is costly (`env.costly_reset`), it is computed only for blocks of environments
    in which an episode ended, instead of for all of them at every step.

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

        def step(key: Array, state: Any, action: Any) -> Any:
            # As gymnax's `step` splits its key.
            return env.step_env(jax.random.split(key)[0], state, action, params)

        final_obs, state, reward, terminated, info = jax.vmap(step)(keys, state, actions)
        truncated = jax.vmap(lambda s: env.is_truncated(s, params))(state)
        done = terminated | truncated
        obs, state = self._reset_where(done, keys, final_obs, state, params)
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
        """`obs` and `state`, reset where `done`: a loop over the blocks in which an episode ended.

        A block is a slice, which is written in place: XLA's CPU backend scatters row by row. Where
        no episode ends, nothing but the loop's condition is computed.
        """
        env = self.env
        block = max(1, self.num_envs // _BLOCKS)
        num_blocks = -(-self.num_envs // block)
        padded = jnp.pad(done, (0, num_blocks * block - self.num_envs))
        number = jnp.arange(num_blocks, dtype=jnp.int32)

        def more(carry: tuple[Any, Any, Any]) -> Bool[Array, ""]:
            return jnp.any(carry[0])

        def reset_block(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            due, obs, state = carry
            first_due = jnp.argmax(due).astype(jnp.int32)
            # The last block reaches back into the one before it where B is no multiple. A row that
            # is reset twice is the same twice.
            start = jnp.minimum(first_due * block, self.num_envs - block)

            def rows(x: Shaped[Array, "B ..."]) -> Shaped[Array, "block ..."]:
                return jax.lax.dynamic_slice_in_dim(x, start, block)

            fresh = jax.vmap(lambda k: env.reset_env(jax.random.split(k)[1], params))(rows(keys))
            ended = rows(done)

            def merge(old: Shaped[Array, "B ..."], new: Shaped[Array, "block ..."]) -> Array:
                new = _as_rows(new)
                where = ended.reshape((block,) + (1,) * (new.ndim - 1))
                merged = jnp.where(where, new, rows(old))
                return jax.lax.dynamic_update_slice_in_dim(old, merged, start, 0)

            obs, state = jax.tree.map(merge, (obs, state), fresh)
            return due & (number != first_due), obs, state

        due = jnp.any(padded.reshape(num_blocks, block), axis=1)
        flat = jax.tree.map(_as_rows, (obs, state))
        _, *after = jax.lax.while_loop(more, reset_block, (due, *flat))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), tuple(after), (obs, state))


def _as_rows(x: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """Images (B, h, w, c) as (B, h * w * c): XLA's loop over three colours is slow."""
    return x.reshape(x.shape[0], -1) if x.ndim > 2 else x
