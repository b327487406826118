"""Several seeds in one compiled program, sharded over the devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt32

AXIS = "seeds"


class Seeds:
    """Runs a function of one seed's arrays for `count` seeds: every array gains a first axis.

    Each device gets an equal share of the seeds, with `vmap` over them. A share of one seed runs
    without `vmap`: on a CPU, one program per core is fastest.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        devices = jax.devices()
        usable = max(n for n in range(1, len(devices) + 1) if count % n == 0)
        self.devices = devices[:usable]
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))

    def init(self, function: Callable[..., Any], numbers: UInt32[np.ndarray, " seeds"]) -> Any:
        """function(seed) for each of `numbers`."""
        return self.compile(function, one_by_one=True)(self.put(numbers))

    def shapes(self, function: Callable[..., Any], numbers: UInt32[np.ndarray, " seeds"]) -> Any:
        """The shapes of what `init` returns, to restore a checkpoint into."""
        return jax.eval_shape(self.map(function), numbers)

    def put(self, tree: Any) -> Any:
        """Puts arrays (count, ...) onto the devices of their seeds."""
        return jax.device_put(tree, self.sharding)

    def compile(
        self,
        function: Callable[..., Any],
        *,
        shared: int = 0,
        donate: bool = False,
        one_by_one: bool = False,
    ) -> Any:
        """`map`, jitted; the results stay on the devices. `donate`: the first argument."""
        return jax.jit(
            self.map(function, shared=shared, one_by_one=one_by_one),
            out_shardings=self.sharding,
            donate_argnums=(0,) if donate else (),
        )

    def map(
        self, function: Callable[..., Any], *, shared: int = 0, one_by_one: bool = False
    ) -> Callable[..., Any]:
        """`function` for all seeds.

        **Arguments:**

        - `function`: of one seed's arrays.
        - `shared`: how many of its last arguments are the same for all seeds.
        - `one_by_one`: loop over a device's seeds instead of `vmap`. Orthogonal initialisation
            needs it: two devices that each factorise a batch of matrices wait indefinitely for
            the same threads (jax 0.10).
        """
        share = self.count // len(self.devices)

        def on_device(*args: Any) -> Any:
            own, common = args[: len(args) - shared], args[len(args) - shared :]
            if share > 1 and one_by_one:
                return jax.lax.map(lambda mine: function(*mine, *common), own)
            if share > 1:
                axes = (*(0 for _ in own), *(None for _ in common))
                return jax.vmap(function, axes)(*own, *common)
            result = function(*jax.tree.map(lambda x: x[0], own), *common)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

        if len(self.devices) == 1:
            return on_device

        def sharded(*args: Any) -> Any:
            each = PartitionSpec(AXIS)
            specs = tuple(
                each if i < len(args) - shared else PartitionSpec() for i in range(len(args))
            )
            return jax.shard_map(
                on_device, mesh=self.mesh, in_specs=specs, out_specs=each, check_vma=False
            )(*args)

        return sharded
