"""Beam search: a transformer's most probable translations."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models.attention import positions
from models.bottleneck import Layers
from models.transformer import BEGIN, END, PADDING, DecoderAttention, Embedding, Logits, TargetEmbedding, TiedDecoder


class Decoder(NamedTuple):
    """The parts of a transformer, for one token at a time.

    Attributes:
      encoder: the encoder's blocks.
      embedding: the target embedding.
      blocks: the two halves of every decoder layer, and bottlenecks between them.
      logits: (B, T, width) -> (B, T, tokens).
    """

    encoder: Sequence[Any]
    embedding: Embedding
    blocks: Sequence[Any]
    logits: Callable[[jax.Array], jax.Array]


class Search(NamedTuple):
    """The state of a search after some steps; L is the length limit.

    Attributes:
      step: the number of tokens of the open hypotheses, without BEGIN.
      tokens: the tokens of the open hypotheses, (B, beam, 1 + L); the first is BEGIN.
      scores: the log-probabilities of the open hypotheses, (B, beam); -inf for a missing one.
      ended_tokens: the tokens of the best ended hypotheses, (B, beam, 1 + L).
      ended_scores: the log-probabilities of the ended hypotheses, divided by length^penalty, (B, beam).
      cache: keys and values of the open hypotheses, for every layer a pair of (B * beam, L, heads, width / heads).
    """

    step: jax.Array
    tokens: jax.Array
    scores: jax.Array
    ended_tokens: jax.Array
    ended_scores: jax.Array
    cache: Any


def beam_search(
    blocks: Sequence[Any],
    source: jax.Array,
    *,
    max_length: int,
    beam: int = 5,
    length_penalty: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Searches for the best translations of every source.

    At every step the `beam` best open hypotheses of a source are kept, and its `beam` best ended hypotheses. A score is
    the log-probability divided by length^length_penalty, where the length includes END (fairseq's `--lenpen`; Wu et
    al., "Google's Neural Machine Translation System", 2016, without its constant 5). The search stops when no open
    hypothesis can become one of the best, or at `max_length`, where all must end. If `beam` is at least the number of
    prefixes, the search is exact. The function can be compiled.

    Args:
      blocks: the blocks of a transformer in evaluation mode: `model.blocks`, or `merge(graph, params, stats,
        training=False)`.
      source: (B, S) int32.
      max_length: the largest number of tokens of a translation, including END.
      beam: the number of hypotheses.
      length_penalty: 0 prefers short translations; larger values prefer longer ones.

    Returns:
      Translations (B, beam, max_length) int32, the best first, each with END after its last token and then padding; and
      their scores (B, beam) float32, -inf where there are fewer than `beam` translations.

    Raises:
      ValueError: for other blocks, for numbers out of range, or for a model in training mode that has dropout.
    """
    if max_length < 1 or beam < 1 or length_penalty < 0:
        raise ValueError(
            f"max_length and beam must be at least 1, and length_penalty at least 0; got {max_length}, {beam} and "
            f"{length_penalty}. Give larger ones."
        )
    decoder = _parts(blocks)
    B, K, L = source.shape[0], beam, max_length
    x: Any = None
    for block in decoder.encoder:
        x = block(x, {"source": source})
    memory = jnp.repeat(x, K, axis=0)  # (B K, S, width)
    sources, cross = {"source": jnp.repeat(source, K, axis=0)}, []  # (B K, S)
    places = jnp.asarray(positions(L, memory.shape[-1]))  # (L, width)
    for block in decoder.blocks:
        if isinstance(block, DecoderAttention):
            cross.append(block.cross.keys_values(memory))
        elif isinstance(block, Layers):
            memory = block.layers[0](memory, sources)

    def predict(tokens: jax.Array, step: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Returns log-probabilities (B K, tokens) of the token after the last ones (B K,), and the new cache."""
        y = decoder.embedding(tokens[:, None], lax.dynamic_slice_in_dim(places, step, 1))  # (B K, 1, width)
        batch = sources | {"target": jnp.stack([tokens, tokens], axis=1)}  # the last one is not read
        arrays, before, new_cache = (y,), jnp.arange(L) <= step, []
        for block in decoder.blocks:
            if isinstance(block, DecoderAttention):
                layer = len(new_cache)
                keys, values = (
                    lax.dynamic_update_slice_in_dim(old, new, step, axis=1)
                    for old, new in zip(cache[layer], block.own.keys_values(arrays[0]), strict=True)
                )
                new_cache.append((keys, values))
                arrays = block.attend(arrays[0], (keys, values), before, cross[layer], batch)
            elif isinstance(block, Layers):
                arrays = tuple(layer(x, batch) for layer, x in zip(block.layers[1:], arrays, strict=True))
            else:
                arrays = (block(arrays, batch),)
        return jax.nn.log_softmax(decoder.logits(arrays[0])[:, 0]), new_cache

    def go_on(search: Search) -> Search:
        step = search.step
        last = lax.dynamic_index_in_dim(search.tokens, step, axis=2, keepdims=False)  # (B, K)
        log_p, cache = predict(last.reshape(-1), step, search.cache)
        total = search.scores[..., None] + log_p.reshape(B, K, -1)  # (B, K, tokens)
        place = jnp.arange(1 + L) == step + 1
        ending = total[..., END] / (step + 1.0) ** length_penalty  # (B, K)
        ended_scores, best_endings = lax.top_k(jnp.concatenate([search.ended_scores, ending], axis=1), K)
        ends = jnp.concatenate([search.ended_tokens, jnp.where(place, END, search.tokens)], axis=1)  # (B, 2 K, 1 + L)
        special = jnp.isin(jnp.arange(total.shape[-1]), jnp.asarray([PADDING, BEGIN, END]))
        going = jnp.where(special, -jnp.inf, total)
        scores, best = lax.top_k(going.reshape(B, -1), K)
        parents, tokens = best // total.shape[-1], best % total.shape[-1]  # (B, K)
        rows = (jnp.arange(B)[:, None] * K + parents).reshape(-1)  # (B K,)
        return Search(
            step + 1,
            jnp.where(place, tokens[..., None], jnp.take_along_axis(search.tokens, parents[..., None], axis=1)),
            scores,
            jnp.take_along_axis(ends, best_endings[..., None], axis=1),
            ended_scores,
            jax.tree.map(lambda a: a[rows], cache),
        )

    def is_open(search: Search) -> jax.Array:
        # Log-probabilities only decrease, and no translation is longer than L.
        best = search.scores.max(axis=1) / float(L) ** length_penalty
        return (search.step < L) & jnp.any(best > search.ended_scores.min(axis=1))

    no_scores = jnp.full((B, K), -jnp.inf)
    tokens = jnp.full((B, K, 1 + L), PADDING, jnp.int32).at[..., 0].set(BEGIN)
    cache = [tuple(jnp.zeros((B * K, L, *a.shape[2:]), a.dtype) for a in pair) for pair in cross]
    start = Search(jnp.int32(0), tokens, no_scores.at[:, 0].set(0.0), jnp.full_like(tokens, PADDING), no_scores, cache)
    final = lax.while_loop(is_open, go_on, start)
    return final.ended_tokens[..., 1:], final.ended_scores


def _parts(blocks: Sequence[Any]) -> Decoder:
    last = blocks[-1]
    if isinstance(last, TiedDecoder):
        encoder, target, layers, logits = blocks[:-1], last.target, last.layers, last.target.embedding.logits
    else:
        starts = [index for index, block in enumerate(blocks) if isinstance(block, TargetEmbedding)]
        if not isinstance(last, Logits) or not starts:
            raise ValueError(
                "A search must get all blocks of a transformer; got "
                f"{', '.join(type(block).__name__ for block in blocks)}. Give model.blocks, or merge a graph that is "
                "not cut."
            )
        start = starts[0]
        encoder, target, layers, logits = blocks[:start], blocks[start], blocks[start + 1 : -1], last.logits
    return Decoder(encoder, target.embedding, layers, logits)
