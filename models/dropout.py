"""Dropout whose masks depend on the rows of a batch, and not on where they are computed."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcomm.kernels.noise import make_key, uniform


class Dropout(nnx.Module):
    """Sets a fraction of every row's elements to zero, and scales the others up.

    The mask is a function of the row's seed `batch["seed"]`, the layer's number and the element's place alone. So it is
    the same on any mesh, in any micro-batch and in any stage of a pipeline, and no state is kept. A layer that is
    called twice with the same seeds drops the same elements.

    Source: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 2014.

    Attributes:
      rate: the fraction that is dropped.
      layer: the layer's number.
      deterministic: True in evaluation mode (`model.eval()`): nothing is dropped.
    """

    def __init__(self, rate: float, layer: int):
        """Makes the layer.

        Args:
          rate: the fraction that is dropped, at least 0 and below 1.
          layer: the layer's number, unique among the dropout layers of the model.

        Raises:
          ValueError: for another rate.
        """
        if not 0 <= rate < 1:
            raise ValueError(f"rate must be at least 0 and below 1; got {rate}. Give the fraction that is dropped.")
        self.rate, self.layer, self.deterministic = rate, layer, False

    def __call__(self, x: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Returns x (B, ...) with elements dropped.

        Raises:
          ValueError: in training mode, if the batch does not have a seed for every row.
        """
        if self.deterministic or self.rate == 0:
            return x
        if "seed" not in batch:
            raise ValueError(
                f"A batch must have a seed for dropout, (B,) uint32, a number for every row; got a batch of "
                f"{', '.join(sorted(batch))}. Add batch['seed'], or put the model into evaluation mode."
            )
        if batch["seed"].shape != x.shape[:1]:
            raise ValueError(
                f"batch['seed'] must have a number for every row; got shape {batch['seed'].shape} for {x.shape[0]} "
                "rows. Give (B,)."
            )
        n = int(np.prod(x.shape[1:]))
        noise = jax.vmap(lambda seed: uniform(make_key(seed, self.layer), n))(batch["seed"])  # (B, n)
        mask = noise.reshape(x.shape) >= self.rate
        return jnp.where(mask, x / jnp.asarray(1 - self.rate, x.dtype), jnp.zeros((), x.dtype))
