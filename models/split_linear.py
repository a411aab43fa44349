"""A dense layer that is sharded over the workers (see `jaxcomm.split_dense`)."""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

import jaxcomm as jc


class SplitLinear(nnx.Linear):
    """`nnx.Linear` for the rows of all workers, of whose kernel each worker holds a shard.

    The same parameters with the same initial values. For the loss of `jc.make_train_step(specs=)`, where `kernel` is a
    worker's shard, as `jc.layers.narrowing_spec` says. The bias is copied.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: str = "data",
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        """Makes the layer; arguments as of `nnx.Linear`, and the axis of workers."""
        super().__init__(in_features, out_features, dtype=dtype, rngs=rngs, **options)
        self.axis_name = axis_name

    def __call__(self, inputs: jax.Array, out_sharding: None = None) -> jax.Array:
        """Returns this worker's own rows (B/K, M) of its own rows (B/K, N)."""
        if out_sharding is not None:
            raise ValueError(f"A worker's rows are its own, got out_sharding={out_sharding}: leave it out.")
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...].astype(inputs.dtype)
        return jc.split_dense(inputs, kernel.astype(inputs.dtype), bias, axis_name=self.axis_name)
