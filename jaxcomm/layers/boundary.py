"""A model cut in two: what its boundary sends, and the boundary as a function.

Source: Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism", KDD
2021, sections 2.2 and appendix A.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxcomm import noise
from jaxcomm.checks import check_range, check_sparsity
from jaxcomm.codecs.values import ValueCodec, value_codec
from jaxcomm.collectives.axis import AxisName, axis_size
from jaxcomm.collectives.boundary import send
from jaxcomm.layers.activations import Largest, LargestGradient, Sketch, Whole
from jaxcomm.selectors.topk import kept

BOUNDARIES = ("masked", "sketch", "topk_gradient")


@dataclass(frozen=True)
class Boundary:
    """What crosses where a model is cut; made by `dct_mp`.

    Attributes:
      sparsity: fraction of a sample's activations that is not sent; 0 sends them whole.
      kind: one of `BOUNDARIES`.
      value_dtype: the type of a value on the wire; None for that of the activations.
    """

    sparsity: float
    kind: str
    value_dtype: str | None

    @property
    def keeps_residual(self) -> bool:
        """Whether the receiver keeps what it does not send back."""
        return self.kind == "topk_gradient" and self.sparsity > 0

    def plan(self, like: Any) -> Whole:
        """Plans how one array of activations (B, ...), or a `jax.ShapeDtypeStruct` of it, is written.

        Raises:
          ValueError: if the activations are no real floating numbers, or have no samples.
        """
        shape, dtype = tuple(like.shape), jnp.dtype(like.dtype)
        if not jnp.issubdtype(dtype, jnp.floating) or not shape or not math.prod(shape):
            raise ValueError(
                "What crosses a boundary are real activations with the samples as first dimension, got "
                f"{dtype}{list(shape)}: let the next stage take integers and masks from its own batch."
            )
        values_as = self._value_codec(dtype)
        d = math.prod(shape[1:])
        k = kept(d, self.sparsity)
        if k == d:
            return Whole(shape, dtype, values_as)
        formats = {"masked": Largest, "sketch": Sketch, "topk_gradient": LargestGradient}
        return formats[self.kind](shape, dtype, values_as, k)

    def _value_codec(self, dtype: Any) -> ValueCodec:
        if self.value_dtype is not None:
            return value_codec(self.value_dtype)
        return value_codec("bfloat16" if dtype == jnp.bfloat16 else "float32")


def dct_mp(
    sparsity: float,
    *,
    kind: Literal["masked", "sketch", "topk_gradient"] = "masked",
    value_dtype: Any = None,
) -> Boundary:
    """Dynamic communication thresholding for model parallelism, as the boundary of a pipeline.

    1. Of every sample's d activations the ceil((1 - sparsity) d) of largest magnitude are selected, exactly (ties: the
       lowest index).
    2. Their values and their coded positions travel forward; the next stage sees zeros elsewhere.
    3. In the backward pass the gradient of these activations travels back, values alone: both sides know the mask.

    With sparsity 0 everything is sent, and nothing is changed.

    The two ablations of the paper lose accuracy there, and are here to show it. `"sketch"` sends a random projection to
    as many numbers forward, and all of the gradient backward. `"topk_gradient"` sends whole activations forward, and of
    the gradient the largest of every sample with their positions, with error feedback: the rest waits for whichever
    sample has the same row in the next step.

    Args:
      sparsity: eta, the fraction of a sample's activations that is not sent, at least 0 and below 1.
      kind: "masked", or one of the ablations.
      value_dtype: "float32" or "bfloat16", the type of a value on the wire in both directions; None for that of the
        activations (float32 for float16).

    Returns:
      A boundary for `Pipeline` or `masked_boundary`.

    Raises:
      ValueError: for an argument out of range.

    On the wire, for B samples of d activations at k kept: forward 4 or 2 bytes for each of B k values, and positions (a
    bit for each of B d, in whole blocks of 1024, or 2 + log2(d/k) bits each where that is less); backward the values'
    bytes again.
    """
    check_sparsity(sparsity)
    check_range("kind", kind, f"one of {', '.join(BOUNDARIES)}", kind in BOUNDARIES, "pass 'masked' for DCT-MP")
    if value_dtype is not None:
        value_dtype = value_codec(value_dtype).dtype.name
    return Boundary(float(sparsity), kind, value_dtype)


def masked_boundary(
    x: Any,
    *,
    axis_name: AxisName = "stage",
    source: int,
    target: int,
    sparsity: float,
    kind: Literal["masked", "sketch", "topk_gradient"] = "masked",
    value_dtype: Any = None,
    seed: jax.Array | int = 0,
    residual: Any = None,
) -> Any:
    """Moves activations from one position of a mesh axis to another, the largest of every sample alone.

    For use in a function that is manual over the axis, where every position runs the same program: all call it, the
    sender's `x` is read, the receiver gets it, everybody else zeros. Differentiable: see `dct_mp` for what comes back.
    `Pipeline` does the same for whole models.

    Args:
      x: a pytree of activations (B, ...), any trailing shape, of the same shapes everywhere.
      axis_name: the axis of stages.
      source: the sender's position on the axis.
      target: the receiver's.
      sparsity: as for `dct_mp`.
      kind: as for `dct_mp`.
      value_dtype: as for `dct_mp`.
      seed: of the sketch, the same on both sides; another one in every step.
      residual: for "topk_gradient" a tree like `x` of what was not sent back so far, zeros in the first step. The
        gradient with respect to it is the new residual.

    Returns:
      A tree like `x`.

    Raises:
      ValueError: for an argument out of range, or a residual that is missing or not wanted.

    On the wire the receiver receives what `dct_mp` says, in one permutation for all arrays, and the sender in another.
    """
    boundary = dct_mp(sparsity, kind=kind, value_dtype=value_dtype)
    size = axis_size(axis_name)
    for name, position in (("source", source), ("target", target)):
        holds = isinstance(position, int) and 0 <= position < size
        check_range(name, position, f"a position on the axis of {size}", holds, "positions count from 0")
    check_range("target", target, "another position than source", source != target, "nothing has to move")
    leaves, tree = jax.tree.flatten(x)
    formats = [boundary.plan(leaf) for leaf in leaves]
    residuals = residuals_of(formats, tree, residual)
    encoded = [each.encode(leaf) for each, leaf in zip(formats, leaves, strict=True)]
    arrived = send(formats, encoded, axis_name, source, noise.make_key(seed), residuals, target)
    return tree.unflatten([each.decode(one) for each, one in zip(formats, arrived, strict=True)])


def residuals_of(formats: list[Whole], tree: Any, residual: Any) -> list[Any]:
    """Returns the residual of every array, None for those without.

    Raises:
      ValueError: if a residual is missing, or given where none is kept.
    """
    wanted = any(each.has_residual for each in formats)
    if (residual is not None) != wanted:
        raise ValueError(
            "A residual is kept where gradients are sent by top-k, got "
            f"{'one' if residual is not None else 'none'} for {[type(each).__name__ for each in formats]}: pass "
            "zeros like the activations with kind='topk_gradient' where something is left out, and none otherwise."
        )
    if not wanted:
        return [None] * len(formats)
    return [
        leaf if each.has_residual else None for each, leaf in zip(formats, tree.flatten_up_to(residual), strict=True)
    ]
