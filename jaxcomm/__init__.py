"""Communication-efficient distributed training for JAX: compressed gradients as Optax transformations."""

from jaxcomm.transforms import dct_dp, plump_dp, topk

__all__ = ["dct_dp", "plump_dp", "topk"]
