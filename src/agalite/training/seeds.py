"""Several seeds in one compiled program, sharded over the devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt32

from agalite import kernels

AXIS = "seeds"


class Seeds:
    """Runs a function of one seed's arrays for `count` seeds: every array gains a first axis.

    The seeds are shared among the devices. A CPU runs its share one after another, which is faster
    there than `vmap`, with which an accelerator runs it.

    **Arguments:**

    - `count`: how many seeds.
    - `uneven`: use devices also when they do not divide the seeds. The arrays are then filled up to
        equal shares, and `take` cuts them to `count`. What fills them up is trained on accelerators
        only, and dropped.
    """

    def __init__(self, count: int, *, uneven: bool = False) -> None:
        self.count = count
        devices = jax.devices()
        if uneven:
            self.share = -(-count // len(devices))
            usable = -(-count // self.share)
        else:
            usable = max(n for n in range(1, len(devices) + 1) if count % n == 0)
            self.share = count // usable
        self.devices = devices[:usable]
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))

    def init(self, function: Callable[..., Any], numbers: UInt32[np.ndarray, " seeds"]) -> Any:
        """function(seed) for each of `numbers`.

        It runs once, so its program is not optimised, which is half of the time to compile it.
        """
        # LLVM's effort; other compilers do not know the option.
        options = None if kernels.on_accelerator() else {"xla_backend_optimization_level": 0}
        program = jax.jit(self.map(function), out_shardings=self.sharding, compiler_options=options)
        return program(self.put(numbers))

    def shapes(self, function: Callable[..., Any], numbers: UInt32[np.ndarray, " seeds"]) -> Any:
        """The shapes of what `init` returns, to restore a checkpoint into."""
        return jax.eval_shape(jax.vmap(function), numbers)

    def put(self, tree: Any) -> Any:
        """Puts arrays (count, ...) onto the devices of their seeds."""
        if self._even:
            return jax.device_put(tree, self.sharding)
        rows = np.minimum(np.arange(self.share * len(self.devices)), self.count - 1)
        return jax.device_put(jax.tree.map(lambda x: x[rows], tree), self.sharding)

    def take(self, tree: Any) -> Any:
        """The arrays (count, ...) of what a compiled function returned."""
        return tree if self._even else jax.tree.map(lambda x: x[: self.count], tree)

    @property
    def _even(self) -> bool:
        return self.share * len(self.devices) == self.count

    def compile(
        self, function: Callable[..., Any], *, shared: int = 0, donate: bool = False
    ) -> Any:
        """`map`, jitted; the results stay on the devices. `donate`: the first argument."""
        return jax.jit(
            self.map(function, shared=shared),
            out_shardings=self.sharding,
            donate_argnums=(0,) if donate else (),
        )

    def map(self, function: Callable[..., Any], *, shared: int = 0) -> Callable[..., Any]:
        """`function` for all seeds.

        **Arguments:**

        - `function`: of one seed's arrays.
        - `shared`: how many of its last arguments are the same for all seeds.
        """

        def on_device(*args: Any) -> Any:
            own, common = args[: len(args) - shared], args[len(args) - shared :]
            if self.share == 1:
                result = function(*jax.tree.map(lambda x: x[0], own), *common)
                return jax.tree.map(lambda x: jnp.asarray(x)[None], result)
            if kernels.on_accelerator():
                axes = (*(0 for _ in own), *(None for _ in common))
                return jax.vmap(function, axes)(*own, *common)
            return self._one_by_one(lambda *mine: function(*mine, *common), own)

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

    def _one_by_one(self, function: Callable[..., Any], own: tuple[Any, ...]) -> Any:
        """`function` of each of a device's seeds; zeros for what only fills the arrays up."""
        if self._even:
            return jax.lax.map(lambda mine: function(*mine), own)
        shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], own))
        first = jax.lax.axis_index(AXIS) * self.share

        def one(numbered: tuple[Any, Any]) -> Any:
            i, mine = numbered
            return jax.lax.cond(
                first + i < self.count,
                lambda mine: function(*mine),
                lambda _: jax.tree.map(_nothing, shapes),
                mine,
            )

        return jax.lax.map(one, (jnp.arange(self.share), own))


def _nothing(like: jax.ShapeDtypeStruct) -> Any:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), like.shape)
    return jnp.zeros(like.shape, like.dtype)
