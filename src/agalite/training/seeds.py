"""Several seeds in one program, spread over the devices that there are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt32

AXIS = "seeds"


class Seeds:
    """Runs a function of one seed's arrays for `count` of them: every array gains a first axis.

    Each device takes an equal share. A share of one is run as it is, without `vmap`: on a CPU a
    program for each core is the fastest there is.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        devices = jax.devices()
        usable = max(n for n in range(1, len(devices) + 1) if count % n == 0)
        self.devices = devices[:usable]
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))

    def compile(
        self,
        function: Callable[..., Any],
        *,
        shared: int = 0,
        donate: bool = False,
        one_by_one: bool = False,
    ) -> Any:
        """`over`, compiled; arrays stay on the devices that use them."""
        return jax.jit(
            self.over(function, shared=shared, one_by_one=one_by_one),
            out_shardings=self.sharding,
            donate_argnums=(0,) if donate else (),
        )

    def begin(self, function: Callable[..., Any], numbers: UInt32[np.ndarray, " seeds"]) -> Any:
        """function(seed) for every one of `numbers`, one by one on each device: see `over`."""
        return self.compile(function, one_by_one=True)(self.put(numbers))

    def shapes(self, function: Callable[..., Any], numbers: UInt32[np.ndarray, " seeds"]) -> Any:
        """Of what `begin` gives, to read a checkpoint by."""
        return jax.eval_shape(self.over(function), numbers)

    def put(self, tree: Any) -> Any:
        """Arrays (count, ...) onto the devices that will use them."""
        return jax.device_put(tree, self.sharding)

    def over(
        self, function: Callable[..., Any], *, shared: int = 0, one_by_one: bool = False
    ) -> Callable[..., Any]:
        """`function` for all seeds; its last `shared` arguments are the same for all.

        `one_by_one` is for what must not be batched: two devices that each factorise a batch of
        matrices, as orthogonal weights are drawn, wait for ever for the same threads (jax 0.10).
        """
        share = self.count // len(self.devices)

        def local(*args: Any) -> Any:
            own, common = args[: len(args) - shared], args[len(args) - shared :]
            if share > 1 and one_by_one:
                return jax.lax.map(lambda mine: function(*mine, *common), own)
            if share > 1:
                axes = (*(0 for _ in own), *(None for _ in common))
                return jax.vmap(function, axes)(*own, *common)
            result = function(*jax.tree.map(lambda x: x[0], own), *common)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

        if len(self.devices) == 1:
            return local

        def spread(*args: Any) -> Any:
            each = PartitionSpec(AXIS)
            specs = tuple(
                each if i < len(args) - shared else PartitionSpec() for i in range(len(args))
            )
            return jax.shard_map(
                local, mesh=self.mesh, in_specs=specs, out_specs=each, check_vma=False
            )(*args)

        return spread
