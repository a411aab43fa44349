"""Bottlenecks: linear layers around the cuts of a model, between which a token is a few learned numbers.

Sources: Aboudib et al., "ResBM: Residual Bottleneck Models for Low-Bandwidth Pipeline Parallelism", arXiv 2604.11947,
2026 (layers that are trained with the model, and a path of low rank from the first step on); Janson et al., "Learned
Subspace Compression for Communication-Efficient Pipeline Parallelism", arXiv 2606.05484, 2026 (anchors of tokens).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.blocks import Batch, Model, take_rows
from models.functional import apply, cut

# A matrix is so many times its parameter, so that Adam changes it by a tenth of the learning rate. At the whole rate,
# layers that could have left all as it was cost a GPT of 48 features 0.06 nats. SGD changes it by a hundredth.
MULTIPLIER = 0.1
_orthonormal = nnx.initializers.orthogonal(1 / MULTIPLIER)
Tokens = tuple[Callable[[Batch], jax.Array], int]


class Encoder(nnx.Module):
    """The last block of a stage: the features of a token, (..., d), become r numbers."""

    def __init__(self, width: int, rank: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.encoder = nnx.Param(_orthonormal(rngs.params(), (width, rank)))
        self.dtype = dtype

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns (..., r)."""
        return x @ (MULTIPLIER * self.encoder[...]).astype(self.dtype)


class Decoder(nnx.Module):
    """The first block of the next stage: r numbers of a token become features, to which those of its anchor are added.

    An anchor is a vector of each token of the vocabulary. It need not travel, since every stage has the batch.
    """

    def __init__(self, encoder: Encoder, tokens: Tokens | None):
        self.decoder = nnx.Param(encoder.encoder[...].T)  # at first, the two project onto r directions
        self.tokens, self.dtype = None if tokens is None else tokens[0], encoder.dtype
        if tokens is not None:
            self.anchors = nnx.Param(jnp.zeros((tokens[1], encoder.encoder.shape[0])))

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns (..., d)."""
        y = x @ (MULTIPLIER * self.decoder[...]).astype(self.dtype)
        return y if self.tokens is None else y + take_rows(self.anchors[...], self.tokens(batch)).astype(self.dtype)


class Layers(nnx.Module):
    """The last block of a stage, or the first of the next, where several arrays cross: a layer for each of them."""

    def __init__(self, layers: Sequence[Encoder] | Sequence[Decoder]):
        self.layers = nnx.List(layers)

    def __call__(self, arrays: Any, batch: Batch) -> Any:
        """Returns arrays in a tree like the one given."""
        leaves, treedef = jax.tree.flatten(arrays)
        return treedef.unflatten([layer(x, batch) for layer, x in zip(self.layers, leaves, strict=True)])


def add_bottlenecks(
    model: Model,
    cuts: Sequence[int],
    rank: int,
    batch: Any,
    *,
    tokens: Callable[[int], Sequence[Tokens]] | None = None,
    rngs: nnx.Rngs,
) -> tuple[int, ...]:
    """Adds an encoder before every cut of a model, and a decoder after it.

    Args:
      model: the model; its blocks are replaced.
      cuts: the first block of every stage but the first, as for `models.functional.cut`.
      rank: r, the numbers that cross for a token, or for another place of an array (B, ..., d).
      batch: a batch, or its shapes.
      tokens: (cut) -> for the arrays that cross there, in the order of their leaves: (batch) -> the token at every
        place, (B, ...) int32; and the size of the vocabulary. Arrays beyond those have no anchors.
      rngs: the source of the initial parameters.

    Returns:
      The new cuts.

    Raises:
      ValueError: if an array that crosses a cut has fewer than `rank` features.
    """
    x, blocks = None, []
    for stage, (first, last) in zip(cut(model, cuts)[:-1], pairwise([0, *cuts]), strict=True):
        blocks += model.blocks[first:last]
        x, _ = jax.eval_shape(partial(apply, stage.graph, training=False), stage.params, stage.stats, batch, x)
        arrays = jax.tree.leaves(x)
        if not all(1 <= rank <= array.shape[-1] for array in arrays):
            raise ValueError(
                f"Arrays of at least rank={rank} features must cross where a bottleneck is; got "
                f"{jax.tree.map(jnp.shape, x)} before the block {last}. Cut elsewhere, or lower rank."
            )
        encoders = [Encoder(array.shape[-1], rank, dtype=array.dtype, rngs=rngs) for array in arrays]
        anchors = [] if tokens is None else tokens(last)[: len(arrays)]
        pairs = (encoders, [Decoder(*pair) for pair in zip_longest(encoders, anchors)])
        blocks += [layers[0] if len(layers) == 1 else Layers(layers) for layers in pairs]
    model.blocks = nnx.List([*blocks, *model.blocks[cuts[-1] :]])
    return decoders(cuts)


def decoders(cuts: Sequence[int]) -> tuple[int, ...]:
    """Returns the cuts of a model with bottlenecks, from those of the model without: its decoders."""
    return tuple(first + 2 * place + 1 for place, first in enumerate(cuts))
