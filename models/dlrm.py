"""DLRM: a recommendation model of dense features and categories."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from models.blocks import Batch, Model, take_rows


class Dlrm(Model):
    """A bottom MLP of the dense features, embeddings of the categories, their dot products, and a top MLP.

    Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019, with the
    sizes of Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism",
    KDD 2021: 508,753 parameters in the two MLPs, and 16 for every row of the tables (Criteo's Kaggle log has
    33,762,577 categories). Initial values as in facebookresearch/dlrm.

    Each dense layer is a block, and the embeddings with their dot products are one. What crosses between blocks is one
    array; the categories come from the batch, wherever they are looked up:

      block       0      1      2     3     4          5      6      7      8
      is          dense  dense  dense dense embeddings dense  dense  dense  dense
      (B, ...)    512    256    64    16    367        512    256    128    logits

    The paper cuts after two layers of each MLP: `cut(model, (2,))` and `cut(model, (2, 7))`; 256 features a row cross
    at both. A third cut costs least at 4 (16 features a row), and parts the tables from the layers before them.

    All tables are one array (rows, 16) with the rows of one after those of the other. Two ways to split it over a mesh:
    by rows, with `row_multiple` the size of the axis, which leaves the exchange to the compiler; and by columns, with
    `columns_over`, in a loss that is written for one worker.

    A small twin: table_sizes=(5, 7, 3), dim=4, bottom=(8, 6), top=(8, 6), which has 2 dense layers less.
    """

    def __init__(
        self,
        table_sizes: Sequence[int],
        *,
        dense_features: int = 13,
        dim: int = 16,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256, 128),
        row_multiple: int = 1,
        columns_over: str | None = None,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers. The model returns the logits of a click, (B,) float32, before the sigmoid.

        Args:
          table_sizes: the number of categories of every feature.
          dense_features: columns of batch["dense"].
          dim: of an embedding, and outputs of the bottom MLP.
          bottom: outputs of the bottom MLP's layers but the last.
          top: outputs of the top MLP's layers but the last, which has 1.
          row_multiple: the tables' rows are filled up to a multiple of it, with rows that are never looked up.
          columns_over: an axis of workers that each hold `dim / K` columns of all tables, for use inside
            `jax.shard_map`: give every worker its columns of blocks[4]'s `table`, `P(None, axis)`. Every worker then
            looks up its columns for the rows of all, and receives (K-1) * B * features indices of 4 bytes and
            (K-1)/K * B * features * dim values of 4 bytes, and as many values backward. The gradient of its columns is
            that of the sum of the workers' losses: K times that of their mean.
          dtype: to compute in; the parameters are float32.
          rngs: the source of the initial parameters.
        """
        features = len(table_sizes)
        crossed = dim + (features + 1) * features // 2
        below, above = (dense_features, *bottom, dim), (crossed, *top)
        embeddings = Interaction(table_sizes, dim, row_multiple, columns_over, dtype=dtype, rngs=rngs)
        layers = [
            [Layer(i, o, is_last=False, dtype=dtype, rngs=rngs) for i, o in itertools.pairwise(sizes)]
            for sizes in (below, above)
        ]
        last = Layer(above[-1], 1, is_last=True, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([*layers[0], embeddings, *layers[1], last])


class Layer(nnx.Module):
    """A dense layer and ReLU; the first reads the dense features, the last returns logits."""

    def __init__(self, inputs: int, outputs: int, *, is_last: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        self.linear = nnx.Linear(
            inputs,
            outputs,
            kernel_init=nnx.initializers.glorot_normal(),  # standard deviation sqrt(2 / (inputs + outputs))
            bias_init=nnx.initializers.normal(outputs**-0.5),
            dtype=dtype,
            rngs=rngs,
        )
        self.is_last = is_last

    def __call__(self, x: jax.Array | None, batch: Batch) -> jax.Array:
        """Returns (B, outputs), or the logits (B,)."""
        x = self.linear(batch["dense"] if x is None else x)
        return x[:, 0].astype(jnp.float32) if self.is_last else nnx.relu(x)


class Interaction(nnx.Module):
    """The categories' embeddings, and the dot products of all pairs of them and of the bottom MLP's output.

    Attributes:
      table: (rows, dim), the tables one after the other; of a worker alone (rows, dim / K) with `columns_over`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        row_multiple: int,
        columns_over: str | None,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        if not sizes or min(sizes) < 1 or row_multiple < 1:
            raise ValueError(
                f"There are tables, each with rows, and a multiple of at least 1, got sizes {tuple(sizes)} and "
                f"row_multiple={row_multiple}: give every feature its number of categories."
            )
        rows = -(-sum(sizes) // row_multiple) * row_multiple
        # Uniform within sqrt(1 / rows of the table); rows that fill up are zero.
        counts = np.asarray([*sizes, rows - sum(sizes)])
        widths = jnp.asarray([*(size**-0.5 for size in sizes), 0.0], jnp.float32)
        drawn = jax.random.uniform(rngs.params(), (rows, dim), jnp.float32, -1, 1)
        self.table = nnx.Param(drawn * jnp.repeat(widths, counts, total_repeat_length=rows)[:, None])
        self.sizes, self.columns_over, self.dtype = tuple(sizes), columns_over, dtype

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns (B, dim + pairs) of x (B, dim).

        A category outside of its table gives NaN: prepare the data with the same table sizes.
        """
        vectors = jnp.concatenate([x[:, None], self.lookup(batch["categories"]).astype(self.dtype)], axis=1)
        products = jnp.einsum("bif,bjf->bij", vectors, vectors)  # (B, features + 1, features + 1)
        first, second = np.tril_indices(vectors.shape[1], -1)
        return jnp.concatenate([x, products[:, first, second]], axis=1)

    def lookup(self, categories: jax.Array) -> jax.Array:
        """Returns the embeddings (B, features, dim) of categories (B, features)."""
        sizes = np.asarray(self.sizes)
        if categories.shape[1:] != sizes.shape:
            raise ValueError(
                f"batch['categories'] has a column for every table, got shape {categories.shape} for {len(sizes)} "
                "tables: give (B, tables)."
            )
        if self.columns_over is not None:
            categories = lax.all_gather(categories, self.columns_over, tiled=True)  # (K B, features)
        starts = np.cumsum(sizes) - sizes
        there = (categories >= 0) & (categories < sizes)
        vectors = take_rows(self.table[...], jnp.where(there, categories + starts, -1))  # (K B, features, dim / K)
        if self.columns_over is None:
            return vectors
        return lax.all_to_all(vectors, self.columns_over, split_axis=0, concat_axis=2, tiled=True)
