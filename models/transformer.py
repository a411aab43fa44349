"""The encoder-decoder transformer for translation."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.attention import Attention, linear, positions
from models.blocks import Batch, Model, take_rows
from models.dropout import Dropout

PADDING, BEGIN, END = 0, 1, 2


class Transformer(Model):
    """An encoder that reads the source, and a decoder that predicts the target's next token from those before it.

    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, with normalisation after every residual sum, as in
    fairseq's `transformer_iwslt_de_en`. With 8,848 source and 6,632 target tokens (IWSLT'14 German to English):
    39,469,056 parameters tied, as in fairseq, and 42,864,640 untied.

    The batch has "source" (B, S) and "target" (B, T), with 0 for padding, 1 before and 2 after every target. The model
    returns logits (B, T - 1, target tokens) of target[:, 1:], given target[:, :-1].

    Every layer is two blocks, separated after the ReLU of its feed-forward part. With n layers, S source and T - 1
    target places, `width` features, and `hidden` features inside the feed-forward part:

      block        is                              output
      0            source embedding                x (B, S, width)
      2l - 1       encoder layer l, to the ReLU    (x, hidden (B, S, hidden))
      2l           encoder layer l, the rest       x
      2n + 1       target embedding                (memory (B, S, width), y (B, T - 1, width))
      2n + 2l      decoder layer l, to the ReLU    (memory, y, hidden (B, T - 1, hidden))
      2n + 2l + 1  decoder layer l, the rest       (memory, y)
      4n + 2       logits

    `cuts_after_relu` gives the cuts of Gupta et al., KDD 2021. A tied model uses one table at both ends of the decoder.
    A parameter must be in one stage of a pipeline, so a tied model's decoder is a single block, 2n + 1, and the model
    can be cut only before it. With `tied=False` there is a table for each end, and the model can be cut anywhere.

    A small twin: 11 and 13 tokens, layers=2, width=8, hidden=12, heads=2.

    Attributes:
      layers: number of layers of the encoder, and of the decoder.
      tied: whether the decoder's embeddings are also its last layer.
    """

    def __init__(
        self,
        source_tokens: int,
        target_tokens: int,
        *,
        layers: int = 6,
        width: int = 512,
        hidden: int = 1024,
        heads: int = 4,
        dropout: float = 0.3,
        tied: bool = True,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers.

        Args:
          source_tokens: size of the source vocabulary, including the three special tokens.
          target_tokens: size of the target vocabulary, including them too.
          layers: number of layers of the encoder, and of the decoder.
          width: features of a token, even and a multiple of `heads`.
          hidden: features inside the feed-forward parts.
          heads: number of heads of every attention.
          dropout: rate for embeddings, and for the term that every part adds to its input.
          tied: whether the decoder's embeddings are also its last layer.
          dtype: the type to compute in; the parameters are float32.
          rngs: the source of the initial parameters.
        """
        self.layers, self.tied = layers, tied
        sizes = Sizes(width, hidden, heads, dropout, dtype, rngs)
        encoder = [SourceEmbedding(source_tokens, sizes)]
        for _ in range(layers):
            encoder += [EncoderAttention(sizes), Contraction(sizes)]
        embedding, decoder = TargetEmbedding(target_tokens, sizes), []
        for _ in range(layers):
            decoder += [DecoderAttention(sizes), Contraction(sizes)]
        if tied:
            self.blocks = nnx.List([*encoder, TiedDecoder(embedding, decoder)])
        else:
            self.blocks = nnx.List([*encoder, embedding, *decoder, Logits(target_tokens, sizes)])

    def cuts_after_relu(self, *, encoder: Sequence[int] = (), decoder: Sequence[int] = ()) -> tuple[int, ...]:
        """Returns the cuts for `models.functional.cut` after the ReLU of the given layers' feed-forward parts.

        The paper cuts two stages in encoder layer 5; three stages also in decoder layer 5; five stages also in layer 3
        of both (its text names the encoder's layer 5 twice).

        Args:
          encoder: encoder layers, counted from 1.
          decoder: decoder layers, counted from 1.

        Raises:
          ValueError: for a layer that does not exist, or a cut inside a tied decoder.
        """
        wrong = [layer for layer in (*encoder, *decoder) if not 1 <= layer <= self.layers]
        if wrong:
            raise ValueError(f"Layers must be numbered from 1 to {self.layers}; got {wrong[0]}. Name one of these.")
        if decoder and self.tied:
            raise ValueError(
                "A tied model's decoder must not be cut, because one table is used at both its ends; got cuts in "
                f"decoder layers {tuple(decoder)}. Make the model with tied=False, or cut in the encoder."
            )
        return tuple(sorted([2 * layer for layer in encoder] + [2 * (self.layers + layer) + 1 for layer in decoder]))


def smoothed_losses(
    logits: jax.Array, target: jax.Array, smoothing: float = 0.1
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns every row's losses, summed over its tokens; padding is ignored.

    The label has probability 1 - smoothing, and `smoothing` is spread evenly over all tokens, including the label
    (Szegedy et al., "Rethinking the Inception Architecture", CVPR 2016; Vaswani et al., 2017). For the mean loss per
    token, divide the sum of the losses over the rows by the sum of the numbers of tokens.

    Args:
      logits: (B, T - 1, tokens), of target[:, 1:].
      target: (B, T) int32.
      smoothing: 0 for the plain cross entropy.

    Returns:
      Smoothed losses (B,), cross entropies (B,), and numbers of tokens (B,), float32.
    """
    labels = target[:, 1:]
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)  # (B, T - 1)
    entropy = total - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    smoothed = (1 - smoothing) * entropy + smoothing * (total - logits.mean(axis=-1))
    real = labels != PADDING
    losses, entropies = (jnp.sum(values, axis=1, where=real) for values in (smoothed, entropy))
    return losses, entropies, real.sum(axis=1).astype(jnp.float32)


class Sizes:
    """Settings that the layers share while they are made: their sizes, and the next dropout layer's number."""

    def __init__(self, width: int, hidden: int, heads: int, dropout: float, dtype: DTypeLike, rngs: nnx.Rngs):
        self.width, self.hidden = width, hidden
        self.options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self._heads, self._rate = heads, dropout
        self._numbers: Iterator[int] = itertools.count()

    def attention(self) -> Attention:
        """Makes an attention layer."""
        return Attention(self.width, self._heads, **self.options)

    def norm(self) -> nnx.LayerNorm:
        """Makes a normalisation layer."""
        return nnx.LayerNorm(self.width, epsilon=1e-5, **self.options)

    def dropout(self) -> Dropout:
        """Makes the next dropout layer."""
        return Dropout(self._rate, next(self._numbers))


class Embedding(nnx.Module):
    """The embeddings of tokens, with a positional encoding.

    Attributes:
      table: (tokens, width).
    """

    def __init__(self, tokens: int, sizes: Sizes):
        initial = nnx.initializers.normal(sizes.width**-0.5)
        self.table = nnx.Param(initial(sizes.options["rngs"].params(), (tokens, sizes.width), jnp.float32))
        self.dtype = sizes.options["dtype"]

    def __call__(self, tokens: jax.Array, places: jax.Array) -> jax.Array:
        """Returns (B, T, width) for tokens (B, T) at places (T, width); a token outside of the table gives NaN."""
        table = self.table[...]
        return (take_rows(table, tokens) * table.shape[1] ** 0.5 + places).astype(self.dtype)

    def logits(self, y: jax.Array) -> jax.Array:
        """Returns the logits (B, T, tokens) of a tied model."""
        return (y @ self.table[...].astype(self.dtype).T).astype(jnp.float32)


class SourceEmbedding(nnx.Module):
    """Embeds the source."""

    def __init__(self, tokens: int, sizes: Sizes):
        self.embedding, self.dropout = Embedding(tokens, sizes), sizes.dropout()

    def __call__(self, x: None, batch: Batch) -> jax.Array:
        """Returns x (B, S, width)."""
        source = batch["source"]
        places = jnp.asarray(positions(source.shape[1], self.embedding.table.shape[1]))
        return self.dropout(self.embedding(source, places), batch)


class TargetEmbedding(nnx.Module):
    """Embeds the target without its last token; passes the encoder's output on."""

    def __init__(self, tokens: int, sizes: Sizes):
        self.embedding, self.dropout = Embedding(tokens, sizes), sizes.dropout()

    def __call__(self, memory: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns (memory, y (B, T - 1, width))."""
        target = batch["target"][:, :-1]
        places = jnp.asarray(positions(target.shape[1], self.embedding.table.shape[1]))
        return memory, self.dropout(self.embedding(target, places), batch)


class EncoderAttention(nnx.Module):
    """The first half of an encoder layer: attention, and the feed-forward part up to its ReLU."""

    def __init__(self, sizes: Sizes):
        self.attention, self.norm, self.dropout = sizes.attention(), sizes.norm(), sizes.dropout()
        self.expand = linear(sizes.width, sizes.hidden, **sizes.options)

    def __call__(self, x: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns (x, hidden)."""
        attended = self.attention(x, self.attention.keys_values(x), source_mask(batch["source"]))
        x = self.norm(x + self.dropout(attended, batch))
        return x, nnx.relu(self.expand(x))


class DecoderAttention(nnx.Module):
    """The first half of a decoder layer: attention to the target so far and to the source, up to the ReLU."""

    def __init__(self, sizes: Sizes):
        self.own, self.own_norm, self.own_dropout = sizes.attention(), sizes.norm(), sizes.dropout()
        self.cross, self.cross_norm, self.cross_dropout = sizes.attention(), sizes.norm(), sizes.dropout()
        self.expand = linear(sizes.width, sizes.hidden, **sizes.options)

    def __call__(self, x: tuple[jax.Array, jax.Array], batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (memory, y, hidden) for (memory, y)."""
        memory, y = x
        before = jnp.tril(jnp.ones((y.shape[1], y.shape[1]), bool))
        return memory, *self.attend(y, self.own.keys_values(y), before, self.cross.keys_values(memory), batch)

    def attend(
        self,
        y: jax.Array,
        keys_values: tuple[jax.Array, jax.Array],
        local_mask: jax.Array,
        cross: tuple[jax.Array, jax.Array],
        batch: Batch,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (y, hidden), given the keys and values of the target so far and of the encoder's output."""
        y = self.own_norm(y + self.own_dropout(self.own(y, keys_values, local_mask), batch))
        attended = self.cross(y, cross, source_mask(batch["source"]))
        y = self.cross_norm(y + self.cross_dropout(attended, batch))
        return y, nnx.relu(self.expand(y))


class Contraction(nnx.Module):
    """The second half of a layer, of the encoder or the decoder: from the ReLU to the layer's output."""

    def __init__(self, sizes: Sizes):
        self.contract = linear(sizes.hidden, sizes.width, **sizes.options)
        self.norm, self.dropout = sizes.norm(), sizes.dropout()

    def __call__(self, x: tuple[jax.Array, ...], batch: Batch) -> Any:
        """Returns x for (x, hidden), and (memory, y) for (memory, y, hidden)."""
        *memory, y, hidden = x
        y = self.norm(y + self.dropout(self.contract(hidden), batch))
        return (*memory, y) if memory else y


class Logits(nnx.Module):
    """The last layer of an untied model."""

    def __init__(self, tokens: int, sizes: Sizes):
        initial = nnx.initializers.normal(sizes.width**-0.5)
        self.dense = nnx.Linear(sizes.width, tokens, use_bias=False, kernel_init=initial, **sizes.options)

    def __call__(self, x: tuple[jax.Array, jax.Array], batch: Batch) -> jax.Array:
        """Returns the logits (B, T - 1, tokens) for (memory, y)."""
        return self.logits(x[1])

    def logits(self, y: jax.Array) -> jax.Array:
        """Returns the logits (B, T, tokens)."""
        return self.dense(y).astype(jnp.float32)


class TiedDecoder(nnx.Module):
    """The whole decoder, whose embeddings are also its last layer."""

    def __init__(self, embedding: TargetEmbedding, layers: Sequence[nnx.Module]):
        self.target, self.layers = embedding, nnx.List(layers)

    def __call__(self, memory: jax.Array, batch: Batch) -> jax.Array:
        """Returns the logits (B, T - 1, tokens)."""
        x = self.target(memory, batch)
        for layer in self.layers:
            x = layer(x, batch)
        return self.target.embedding.logits(x[1])


def source_mask(source: jax.Array) -> jax.Array:
    """Returns (B, 1, 1, S): True where the source is not padding."""
    return (source != PADDING)[:, None, None]
