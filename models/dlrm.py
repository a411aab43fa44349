"""DLRM: a recommendation model for dense features and categories."""

import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxcomm.layers import late_lookup, sharded_lookup
from models.blocks import Batch, Model, take_rows

Embeddings = Literal["exchange", "late", "columns", "rows"]


class Dlrm(Model):
    """A bottom MLP of the dense features, embeddings of the categories, their dot products, and a top MLP.

    Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019, with the
    sizes of Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism",
    KDD 2021: 508,753 parameters in the two MLPs, and 16 for every row of the tables (Criteo's Kaggle log has
    33,762,577 categories). Initial values as in facebookresearch/dlrm.

    Each dense layer is a block, and the embeddings with their dot products are one. Each block's output is one array;
    the categories come from the batch:

      block       0      1      2     3     4          5      6      7      8
      is          dense  dense  dense dense embeddings dense  dense  dense  dense
      (B, ...)    512    256    64    16    367        512    256    128    logits

    The paper cuts after two layers of each MLP: `cut(model, (2,))` and `cut(model, (2, 7))`; 256 features a row cross
    at both. A third cut is cheapest at 4 (16 features a row), where it separates the tables from the layers before.

    All tables are concatenated into one array (rows, D). `embeddings` selects how K workers train it. The bytes are
    those that each worker receives in a step, for a global batch of B rows of F features:

      embeddings  a worker holds  crosses the network                            bytes received
      exchange    all             the gradient of the table, like all others     2 (K-1)/K * 4 rows D, if dense
      late        all             ids of rows that were touched, and gradients   (K-1)/K * 4 B F (1 + D)
      columns     D / K columns   ids; vectors, and their errors back            (K-1)/K * 4 B F (1 + 2 D/K)
      rows        rows / K        ids; vectors, and their errors back            (K-1)/K * 4 B F (1 + 2 D)

    Only the bytes of "exchange" grow with the tables. "late" leaves them replicated. "columns" needs the fewest bytes,
    and a K that divides D; "rows" takes any K, and costs more: every worker sends vectors, or zeros, for all ids.

    A small twin: table_sizes=(5, 7, 3), dim=4, bottom=(8, 6), top=(8, 6), which has 2 dense layers fewer.
    """

    def __init__(
        self,
        table_sizes: Sequence[int],
        *,
        dense_features: int = 13,
        dim: int = 16,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256, 128),
        embeddings: Embeddings = "exchange",
        row_multiple: int = 1,
        axis_name: str = "data",
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers. The model returns the logits of a click, (B,) float32, before the sigmoid.

        Args:
          table_sizes: the number of categories of every feature.
          dense_features: columns of batch["dense"].
          dim: D, the size of an embedding and of the bottom MLP's output.
          bottom: outputs of the bottom MLP's layers but the last.
          top: outputs of the top MLP's layers but the last, which has 1.
          embeddings: how the table is trained. "late" is for a replicated table whose gradient bypasses the exchange
            (`jaxcomm.layers.late_lookup`). "columns" and "rows" are for the loss of `make_train_step(specs=)`, where
            blocks[4]'s `table` is a worker's shard, with P(None, axis) or P(axis). Its gradient is that of the sum of
            the workers' losses, K times that of their mean.
          row_multiple: the number of rows is padded to a multiple of this, with rows that are never looked up: K with
            "rows", or the size of the axis over which the compiler shards the table.
          axis_name: the axis of workers.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.
        """
        features = len(table_sizes)
        crossed = dim + (features + 1) * features // 2
        bottom_sizes, top_sizes = (dense_features, *bottom, dim), (crossed, *top)
        interaction = Interaction(table_sizes, dim, row_multiple, embeddings, axis_name, dtype=dtype, rngs=rngs)
        layers = [
            [Layer(i, o, is_last=False, dtype=dtype, rngs=rngs) for i, o in itertools.pairwise(sizes)]
            for sizes in (bottom_sizes, top_sizes)
        ]
        last = Layer(top_sizes[-1], 1, is_last=True, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([*layers[0], interaction, *layers[1], last])


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
    """The categories' embeddings, and the dot products of all pairs of embeddings and the bottom MLP's output.

    Attributes:
      table: the concatenated tables, (rows, dim); or a worker's shard, (rows, dim / K) or (rows / K, dim).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        row_multiple: int,
        embeddings: Embeddings,
        axis_name: str,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        if not sizes or min(sizes) < 1 or row_multiple < 1:
            raise ValueError(
                "sizes must have a number of at least 1 for every table, and row_multiple must be at least 1; got "
                f"sizes {tuple(sizes)} and row_multiple={row_multiple}. Give every feature its number of categories."
            )
        if embeddings not in get_args(Embeddings):
            raise ValueError(f"embeddings must be one of {get_args(Embeddings)}; got {embeddings!r}. Pass one.")
        # Uniform within sqrt(1 / rows of the table); padding rows are zero. A number depends on its place alone, so
        # each shard of a sharded table is drawn on its own device.
        widths = jnp.asarray([*(size**-0.5 for size in sizes), 0.0], jnp.float32)
        row = jnp.arange(sum(sizes) + -sum(sizes) % row_multiple)
        table_of = jnp.searchsorted(jnp.cumsum(jnp.asarray(sizes)), row, side="right", method="compare_all")
        uniform = jax.random.uniform(rngs.params(), (row.size, dim), jnp.float32, -1, 1)
        self.table = nnx.Param(uniform * widths[table_of][:, None])
        self.sizes, self.embeddings, self.axis_name, self.dtype = tuple(sizes), embeddings, axis_name, dtype

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns (B, dim + pairs) for x (B, dim).

        A category outside of its table gives NaN: prepare the data with the same table sizes.
        """
        vectors = jnp.concatenate([x[:, None], self.lookup(batch["categories"]).astype(self.dtype)], axis=1)
        products = jnp.einsum("bif,bjf->bij", vectors, vectors)  # (B, features + 1, features + 1)
        first, second = np.tril_indices(vectors.shape[1], -1)
        return jnp.concatenate([x, products[:, first, second]], axis=1)

    def ids(self, categories: jax.Array) -> jax.Array:
        """Returns the table's rows (B, features) for categories (B, features); -1 outside of a feature's table."""
        sizes = np.asarray(self.sizes)
        if categories.shape[1:] != sizes.shape:
            raise ValueError(
                f"batch['categories'] must have a column for every table; got shape {categories.shape} for "
                f"{len(sizes)} tables. Give (B, tables)."
            )
        starts = np.cumsum(sizes) - sizes
        return jnp.where((categories >= 0) & (categories < sizes), categories + starts, -1)

    def lookup(self, categories: jax.Array) -> jax.Array:
        """Returns the embeddings (B, features, dim) of categories (B, features)."""
        table, axis, ids = self.table[...], self.axis_name, self.ids(categories)
        if table.ndim == 3:  # the train step has looked the embeddings up
            rows = table
        elif self.embeddings == "exchange":
            rows = take_rows(table, ids)
        elif self.embeddings == "late":
            rows = late_lookup(table, ids, axis_name=axis)
        else:
            rows = sharded_lookup(table, ids, by=self.embeddings, axis_name=axis)
        return jnp.where(ids[..., None] >= 0, rows, jnp.nan)  # other lookups count from the end
