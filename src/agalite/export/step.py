"""One step of a trained agent as a function of plain arrays: what is exported.

    observation (N, ...), reset (N,), [previous_action,] [previous_reward,] state...
        -> distribution..., value (N,), new state...

N is the batch size. An agent whose memory reads the previous action or reward takes them too. The
state starts as zeros, with `reset` true at the first observation of an episode. Leaves of the
memory state that never change (a random key, a checksum of the weights) are constants of the
function and not part of its state.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from agalite import validation
from agalite.export.onnx.program import trace
from agalite.networks.actor_critic import ActorCritic
from agalite.networks.heads import Categorical, DiagonalNormal, Distribution, MultiCategorical


class Tensor(NamedTuple):
    """An input or output of the step."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class Step(NamedTuple):
    """The function to export and a description of its arguments and results."""

    function: Callable[..., list[Array]]
    """Takes the arrays of `inputs`, returns those of `outputs`."""
    inputs: list[Tensor]
    outputs: list[Tensor]
    state: list[Tensor]
    """The last inputs; the last outputs are their new values."""


def parameters(policy: Distribution) -> dict[str, Array]:
    """The arrays that define a distribution, by the names of their outputs."""
    match policy:
        case Categorical() | MultiCategorical():
            return {"logits": policy.logits}
        case DiagonalNormal():
            return {"mean": policy.mean, "std": jnp.exp(policy._log_std())}
    raise ValueError(f"a policy that is a {type(policy).__name__} cannot be exported")


def make_step(model: ActorCritic, observation_dtype: Any, batch_size: int = 1) -> Step:
    """The step of an agent.

    **Arguments:**

    - `model`: the agent; its weights become constants.
    - `observation_dtype`: of the environment's observations.
    - `batch_size`: N.
    """
    validation.check_integer("batch_size", batch_size, minimum=1)
    start = model.initial_state(batch_size)
    paths, tree = jax.tree_util.tree_flatten_with_path(start)
    leaves = [leaf for _, leaf in paths]
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(observation_dtype))  # 32 bits, usually
    observation = Tensor("observation", (batch_size, *model.encoder.shape), dtype)
    reset = Tensor("reset", (batch_size,), np.dtype(bool))
    action = jax.eval_shape(lambda: model.actor.no_action((batch_size,)))
    previous: dict[str, Tensor] = {}
    if model.previous_action:
        name = "previous_action"
        previous[name] = Tensor(name, action.shape, np.dtype(action.dtype))
    if model.previous_reward:
        name = "previous_reward"
        previous[name] = Tensor(name, (batch_size,), np.dtype(np.float32))
    full_state = [Tensor(_name(path), leaf.shape, np.dtype(leaf.dtype)) for path, leaf in paths]
    given = [observation, reset, *previous.values()]
    shapes = [x.like for x in (*given, *full_state)]

    def run(*arrays: Array) -> tuple[dict[str, Array], Any, Any]:
        observation, reset, *rest = arrays
        before = dict(zip(previous, rest, strict=False))
        inputs = model.inputs(
            observation, before.get("previous_action"), before.get("previous_reward")
        )
        state = jax.tree.unflatten(tree, rest[len(previous) :])
        memory, policy, value = jax.vmap(model.step)(state, inputs, reset)
        return parameters(policy), value, jax.tree.leaves(memory)

    traced = trace(lambda *inputs: run(*inputs)[2], shapes)
    before = traced.inputs[len(given) :]
    changing = [
        i
        for i, (old, new) in enumerate(zip(before, traced.outputs, strict=True))
        if new is not old and not isinstance(new, jax.Array)
    ]
    policy, value, _ = jax.eval_shape(run, *shapes)
    heads = [Tensor(n, x.shape, np.dtype(x.dtype)) for n, x in [*policy.items(), ("value", value)]]

    def step(*arrays: Array) -> list[Array]:
        full = list(leaves)
        for i, array in zip(changing, arrays[len(given) :], strict=True):
            full[i] = array
        distribution, value, new = run(*arrays[: len(given)], *full)
        return [*(distribution[name] for name in policy), value, *(new[i] for i in changing)]

    state = [full_state[i] for i in changing]
    new = [x._replace(name=f"new_{x.name}") for x in state]
    return Step(step, [*given, *state], [*heads, *new], state)


def zeros(step: Step) -> list[np.ndarray]:
    """The state before the first observation."""
    return [np.zeros(x.shape, x.dtype) for x in step.state]


def _name(path: Any) -> str:
    words = re.findall(r"\w+", jax.tree_util.keystr(path))
    return ".".join(["state", *words])
