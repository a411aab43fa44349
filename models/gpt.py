"""A decoder-only transformer that predicts the next byte of a text."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.attention import Attention, distance_bias, linear
from models.blocks import Batch, Model, take_rows

_small = nnx.initializers.normal(0.02)


class Gpt(Model):
    """Layers of causal attention and a feed-forward part, each with a normalisation before it and a residual sum.

    Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, with its initial values, but
    without dropout, and with untied input and output tables. With 256 tokens, 256 places, 8 layers and 256 features:
    6,515,200 parameters.

    The batch has "text" (B, places + 1), integers. The model returns logits (B, places, tokens) of text[:, 1:], each
    given the tokens before it. Block 0 is the embedding, blocks 1 to n are the layers, block n + 1 the logits. The
    output of each but the last is x (B, places, width), so the model can be cut anywhere.

    A small twin: 256 tokens, 8 places, layers=2, width=8, heads=2.
    """

    def __init__(
        self,
        tokens: int,
        places: int,
        *,
        layers: int = 8,
        width: int = 256,
        heads: int = 4,
        near: bool = False,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layers.

        Args:
          tokens: size of the vocabulary.
          places: the largest number of tokens that are read at once.
          layers: number of layers.
          width: features of a token, a multiple of `heads`; four times as many inside the feed-forward parts.
          heads: number of heads of every attention.
          near: whether attention begins near, instead of with embeddings of places: it falls with the distance
            (`models.attention.distance_bias`), and its keys and values are of a token mixed with the one before
            (`TokenShift`). A text may then be longer than `places`.
          dtype: the type to compute in; the parameters and the logits are float32.
          rngs: the source of the initial parameters.
        """
        options = {"dtype": dtype, "rngs": rngs}
        self.blocks = nnx.List(
            [
                Embedding(tokens, None if near else places, width, **options),
                *(Layer(width, heads, layers, near, **options) for _ in range(layers)),
                Logits(tokens, width, **options),
            ]
        )


class Embedding(nnx.Module):
    """The embeddings of tokens and, if there is a number of places, of these."""

    def __init__(self, tokens: int, places: int | None, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.table = nnx.Param(_small(rngs.params(), (tokens, width)))
        self.places = None if places is None else nnx.Param(_small(rngs.params(), (places, width)))
        self.dtype = dtype

    def __call__(self, x: None, batch: Batch) -> jax.Array:
        """Returns (B, places, width) for all tokens but the last.

        Raises:
          ValueError: for more tokens than places.
        """
        text = batch["text"][:, :-1].astype(jnp.int32)
        x = take_rows(self.table[...], text)
        if self.places is None:
            return x.astype(self.dtype)
        if text.shape[1] > self.places.shape[0]:
            raise ValueError(
                f"A text must have a place for every token but the last; got {text.shape[1]} of them for "
                f"{self.places.shape[0]} places. Make the model with more, or cut the text."
            )
        return (x + self.places[: text.shape[1]]).astype(self.dtype)


class Layer(nnx.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int, heads: int, layers: int, near: bool, *, dtype: DTypeLike, rngs: nnx.Rngs):
        # The residual sum has 2 * layers terms, so they start smaller the more there are.
        term = nnx.initializers.normal(0.02 / np.sqrt(2 * layers))
        self.shift = TokenShift(width) if near else None
        self.attention = Attention(width, heads, dtype=dtype, rngs=rngs, kernel_init=_small, out_init=term)
        self.norms = nnx.List(nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.expand = linear(width, 4 * width, dtype, rngs, _small)
        self.contract = linear(4 * width, width, dtype, rngs, term)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns (B, places, width)."""
        length = x.shape[1]
        before = jnp.tril(jnp.ones((length, length), bool))
        y = memory = self.norms[0](x)
        bias = None
        if self.shift is not None:
            memory, bias = self.shift(y), distance_bias(length, self.attention.heads)
        x = x + self.attention(y, self.attention.keys_values(memory), before, bias)
        return x + self.contract(nnx.gelu(self.expand(self.norms[1](x))))


class TokenShift(nnx.Module):
    """Mixes every token with the one before, feature by feature, in equal parts at first.

    An attention that reads these finds what came after an earlier token like this one, which otherwise takes two
    layers. Source: Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", EMNLP 2023, in which a model without
    attention reads them.
    """

    def __init__(self, width: int):
        self.own = nnx.Param(jnp.zeros(width))  # a logistic function of it is the part of the token itself

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns (B, T, width); before the first token are zeros."""
        own = jax.nn.sigmoid(self.own[...]).astype(x.dtype)
        before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        return own * x + (1 - own) * before


class Logits(nnx.Module):
    """The last normalisation, and the last layer."""

    def __init__(self, tokens: int, width: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.dense = nnx.Linear(width, tokens, use_bias=False, kernel_init=_small, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns (B, places, tokens) float32."""
        return self.dense(self.norm(x)).astype(jnp.float32)
