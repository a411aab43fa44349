"""A dense layer that is sharded over the workers (see `jaxcomm.layers.split_dense`)."""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

import jaxcomm as jc


class SplitLinear(nnx.Linear):
    """`nnx.Linear` whose kernel is sharded over the workers.

    It has the same parameters and initial values. Use it in the loss of `jc.make_train_step(specs=)`, where `kernel` is
    a worker's shard by `jc.layers.narrowing_spec`, and the bias is replicated.
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
        """Makes the layer; takes the arguments of `nnx.Linear`, and the axis of workers."""
        super().__init__(in_features, out_features, dtype=dtype, rngs=rngs, **options)
        self.axis_name = axis_name

    def __call__(self, inputs: jax.Array, out_sharding: None = None) -> jax.Array:
        """Returns (B/K, M) for this worker's rows (B/K, N); `out_sharding` must be None."""
        if out_sharding is not None:
            raise ValueError(
                f"out_sharding must be None, since a worker's rows are its own; got {out_sharding}. Leave it out."
            )
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...].astype(inputs.dtype)
        return jc.layers.split_dense(inputs, kernel.astype(inputs.dtype), bias, axis_name=self.axis_name)
