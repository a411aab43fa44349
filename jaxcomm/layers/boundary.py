"""A model cut in two: what its boundary sends, and the boundary as a function.

Source: Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism", KDD
2021, section 2.2.
"""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.checks import SPARSITY, check_range
from jaxcomm.codecs.tiles import Tiles
from jaxcomm.codecs.values import VALUE_DTYPES, ValueCodec, value_codec
from jaxcomm.collectives.axis import AxisName, axis_size
from jaxcomm.collectives.boundary import Route, send
from jaxcomm.kernels import noise
from jaxcomm.layers.activations import Largest, Whole
from jaxcomm.selectors.topk import n_kept
from jaxcomm.types import PyTree

_CODECS = {name: value_codec(name) for name in VALUE_DTYPES} | {f"int{width}": Tiles(width) for width in (3, 4, 8)}


@dataclass(frozen=True)
class Boundary:
    """What crosses where a model is cut: the largest activations of every sample, see `dct_mp`.

    Attributes:
      sparsity: fraction of a sample's activations that is not sent; 0 sends them whole.
      value_dtype: the type of a value on the wire; None for that of the activations.
    """

    sparsity: float
    value_dtype: Any = None

    def __post_init__(self) -> None:
        SPARSITY.check("sparsity", self.sparsity)
        if self.value_dtype is not None:
            _codec_of(self.value_dtype)

    def plan(self, like: PyTree) -> Whole:
        """Returns the format of one array of activations (B, ...), or of a `jax.ShapeDtypeStruct` of it.

        Raises:
          ValueError: if the activations are not real floating numbers, or have no samples.
        """
        shape, dtype = tuple(like.shape), jnp.dtype(like.dtype)
        if not jnp.issubdtype(dtype, jnp.floating) or not shape or not math.prod(shape):
            raise ValueError(
                "What crosses a boundary must be real floating activations with the samples as first dimension; got "
                f"{dtype}{list(shape)}. Let the next stage take integers and masks from its own batch."
            )
        default_dtype = "bfloat16" if dtype == jnp.bfloat16 else "float32"
        values_as = _codec_of(default_dtype if self.value_dtype is None else self.value_dtype)
        d = math.prod(shape[1:])
        k = n_kept(d, self.sparsity)
        return Whole(shape, dtype, values_as) if k == d else Largest(shape, dtype, values_as, k)


def _codec_of(value_dtype: Any) -> ValueCodec | Tiles:
    name = value_dtype if isinstance(value_dtype, str) else jnp.dtype(value_dtype).name
    remedy = "Pass value_dtype='int4' for the fewest bytes, or None for the type of the activations"
    check_range("value_dtype", name, f"one of {', '.join(_CODECS)}", name in _CODECS, remedy)
    return _CODECS[name]


def dct_mp(sparsity: float, *, value_dtype: Any = None) -> Boundary:
    """Dynamic communication thresholding for model parallelism, as the boundary of a pipeline.

    1. Of every sample's d activations, the ceil((1 - sparsity) d) of largest magnitude are selected, exactly (ties: the
       lowest index).
    2. Their values and their coded positions travel forward; the next stage sees zeros elsewhere.
    3. In the backward pass, only the gradient's values at these positions travel back: both sides know the mask.

    With sparsity 0 everything is sent. Activations of 3, 4 or 8 bits are rounded to nearest in tiles of 64 with a zero
    point each, of which those with an outlier are rotated; gradients have at least 6 bits, in buckets of 32, and are
    rounded stochastically, unbiased (`codecs.tiles`, after TAH-Quant, arXiv 2506.01352). There is no residual of
    rounding errors. `dct_mp(0.0, value_dtype="int4")` is the boundary for activations that are not sparse, as between
    the layers of a transformer.

    Args:
      sparsity: eta, the fraction of a sample's activations that is not sent, at least 0 and below 1.
      value_dtype: "float32", "bfloat16", "int8", "int4" or "int3", the type of a value on the wire; None for that of
        the activations (float32 for float16). With "int4" and "int3", gradients have 6 bits.

    Returns:
      A boundary for `Pipeline` or `masked_boundary`.

    Raises:
      ValueError: for an argument out of range.

    On the wire, for B samples of d activations of which k are sent: forward 4 or 2 bytes for each of B k values, or
    4.75 + 8 b bytes for 64 values of b bits (int4: 4.6 bits a value), and positions (a bit for each of B d activations,
    in whole blocks of 1024, or 2 + log2(d/k) bits per value if that is less; none if k is d); backward the values'
    bytes again, or 4 + 4 max(b, 6) bytes for 32 values (int4: 7 bits a value).
    """
    return Boundary(sparsity, value_dtype)


def masked_boundary(
    x: Any,
    *,
    axis_name: AxisName = "stage",
    source: int,
    target: int,
    boundary: Boundary,
    seed: jax.Array | int = 0,
) -> Any:
    """Moves activations across a boundary, from one position of a mesh axis to another.

    For use in a function that is manual over the axis, where every position runs the same program: all call it, the
    sender's `x` is read, the receiver gets it, and all others get zeros. Differentiable: the boundary determines what
    comes back. `Pipeline` does the same for whole models.

    Args:
      x: a pytree of activations (B, ...), any trailing shape, of the same shapes everywhere.
      axis_name: the axis of stages.
      source: the sender's position on the axis.
      target: the receiver's.
      boundary: what crosses, from `dct_mp`.
      seed: seed of random rounding, the same on both sides, and different in every step.

    Returns:
      A tree like `x`.

    Raises:
      ValueError: for an argument out of range.

    On the wire: what the boundary costs, in one permutation for all arrays, and another one back.
    """
    size = axis_size(axis_name)
    for name, position in (("source", source), ("target", target)):
        holds = isinstance(position, Integral) and 0 <= position < size
        check_range(name, position, f"a position on the axis of {size}", holds, "Positions count from 0")
    check_range("target", target, "another position than source", source != target, "Nothing has to move")
    leaves, tree = jax.tree.flatten(x)
    formats = tuple(boundary.plan(leaf) for leaf in leaves)
    encoded = [item.encode(leaf) for item, leaf in zip(formats, leaves, strict=True)]
    (arrived,) = send([Route(formats, int(source), int(target))], [encoded], axis_name, [noise.make_key(seed)])
    return tree.unflatten([item.decode(array) for item, array in zip(formats, arrived, strict=True)])
