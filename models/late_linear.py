"""A dense layer that multiplies late (see `jaxcomm.late_multiply`)."""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

import jaxcomm as jc


class LateLinear(nnx.Linear):
    """`nnx.Linear` whose kernel gradient is computed already reduced, where that moves fewer bytes.

    It has the same parameters and initial values. Its gradients must bypass the exchange: pass `where=plan.exchanges`
    to the exchange. Outside of the axis of workers it is `nnx.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mode: str = "auto",
        use_bias: bool = True,
        axis_name: str | tuple[str, ...] = "data",
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        """Makes the layer.

        Args:
          in_features: N.
          out_features: M.
          mode: "late", "reduce" or "auto", as in `jc.late_multiply`; `plan.mode(path)` of
            `jc.planner.plan_late_multiply` for an exchange that is not dense.
          use_bias: whether there is a bias.
          axis_name: the axis of workers, or the axes.
          dtype: the type to compute in and to send; that of the inputs if not given. The parameters are float32.
          rngs: the source of the initial parameters.
          **options: `kernel_init`, `bias_init` and `param_dtype` of `nnx.Linear`.
        """
        super().__init__(in_features, out_features, use_bias=use_bias, dtype=dtype, rngs=rngs, **options)
        self.mode, self.axis_name = mode, axis_name

    def __call__(self, inputs: jax.Array, out_sharding: None = None) -> jax.Array:
        """Returns (..., M) for inputs (..., N); `out_sharding` must be None."""
        if out_sharding is not None:
            raise ValueError(
                f"out_sharding must be None, since a worker's rows are its own; got {out_sharding}. Leave it out."
            )
        x = inputs if self.dtype is None else inputs.astype(self.dtype)
        bias = None if self.bias is None else self.bias[...]
        return jc.late_multiply(x, self.kernel[...], bias, axis_name=self.axis_name, mode=self.mode)
