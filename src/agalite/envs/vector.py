"""Many copies of one world, stepping together: what a trainer drives."""

from typing import Any

import jax
import jax.numpy as jnp
from gymnax.environments.environment import Environment
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from agalite import validation

# Of the environments that end together, this share of the batch begins again in one go.
_BLOCKS = 32


class Vector:
    """`count` copies of `env`, each beginning a new episode by itself when the old one ends.

    Equal, bit for bit, to `jax.vmap(env.step)` with `jax.random.split(key, count)`. The
    difference is in the work: where beginning an episode is costly (`env.costly_reset`), only
    the environments whose episode ended do it, a block of them at a time, instead of all of
    them at every step.
    """

    def __init__(self, env: Environment, count: int) -> None:
        validation.integer("count", count, minimum=1)
        if not isinstance(env, Environment):
            raise ValueError(f"env={env!r} must be a gymnax environment; make(name) makes one")
        self.env = env
        self.count = count
        self._amortise = bool(getattr(env, "costly_reset", False)) and count > 1

    def reset(self, key: Array) -> tuple[PyTree[Shaped[Array, "B ..."]], Any]:
        """key -> obs (B, ...), state."""
        return jax.vmap(lambda k: self.env.reset(k))(jax.random.split(key, self.count))

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
        """actions (B, ...) -> obs (B, ...), state, reward, terminated and truncated (B,), info.

        Where an episode ended, `obs` is the first of the next one and
        `info["final_observation"]` the last of the old one.
        """
        for leaf in jax.tree.leaves(actions):
            if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != self.count:
                raise ValueError(
                    f"actions has shape {jnp.shape(leaf)}; expected ({self.count}, ...)"
                )
        keys = jax.random.split(key, self.count)
        if not self._amortise:
            return jax.vmap(lambda k, s, a: self.env.step(k, s, a))(keys, state, actions)
        return self._step_amortised(keys, state, actions)

    def _step_amortised(self, keys: Array, state: Any, actions: Any) -> Any:
        env = self.env
        params = env.default_params
        halves = jax.vmap(jax.random.split)(keys)  # as Environment.step splits its key
        final, state, reward, terminated, info = jax.vmap(
            lambda k, s, a: env.step_env(k, s, a, params)
        )(halves[:, 0], state, actions)
        truncated = jax.vmap(lambda s: env.is_truncated(s, params))(state)
        obs, state = self._begin_again(halves[:, 1], terminated | truncated, final, state, params)
        info = {
            **info,
            "terminated": terminated,
            "truncated": truncated,
            "final_observation": final,
        }
        return obs, state, reward, terminated, truncated, info

    def _begin_again(
        self, keys: Array, done: Bool[Array, " B"], obs: Any, state: Any, params: Any
    ) -> tuple[Any, Any]:
        """obs and state, a fresh start where `done`; the work grows with how many those are."""
        block = max(1, self.count // _BLOCKS)
        # The rows that ended come first in `order`; rows past their number are left alone.
        order = jnp.argsort(jnp.logical_not(done), stable=True)
        padded = jnp.concatenate([order, jnp.full(block, self.count, order.dtype)])
        total = jnp.sum(done)

        def more(carry: tuple[Any, Any, Any]) -> Bool[Array, ""]:
            return carry[0] < total

        def one_block(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            start, obs, state = carry
            rows = jax.lax.dynamic_slice_in_dim(padded, start, block)
            fresh = jax.vmap(lambda k: env_reset(k, params))(keys[rows % self.count])
            where = jnp.where(start + jnp.arange(block) < total, rows, self.count)
            obs, state = jax.tree.map(
                lambda old, new: old.at[where].set(_merged(new), mode="drop"), (obs, state), fresh
            )
            return start + block, obs, state

        env_reset = self.env.reset_env
        flat = jax.tree.map(_merged, (obs, state))
        _, *done_with = jax.lax.while_loop(more, one_block, (jnp.int32(0), *flat))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), tuple(done_with), (obs, state))


def _merged(x: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """Pixels' last two axes as one: XLA copies rows of three bytes one by one."""
    return x.reshape(*x.shape[:-2], -1) if x.ndim > 3 else x
