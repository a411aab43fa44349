import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.beam_search import beam_search
from models.bottleneck import add_bottlenecks
from models.functional import apply, cut, merge, split
from models.transformer import Transformer
from tests.models.twins import filled, make

SOURCE = jnp.asarray([[3, 4, 5, 6], [5, 3, 0, 0], [6, 6, 4, 3]])
L = 4


WORDS = [words for n in range(L) for words in itertools.product((3, 4), repeat=n)]


@cache
def small(tied, is_narrow=False):
    """Five target tokens, of which two are words, so that there are 1 + 2 + 4 + 8 translations.

    A narrow one has bottlenecks, before and after layers of the encoder and the decoder, and inside of one.
    """
    make = partial(Transformer, 7, 5, layers=1 if tied else 2, width=8, hidden=12, heads=2, tied=tied)
    return split(filled(partial(narrowed, make) if is_narrow else make))


def narrowed(make, rngs):
    model, batch = make(rngs=rngs), {"source": SOURCE, "target": jnp.ones((3, L + 1), jnp.int32)}
    source, target = (lambda batch: batch["source"], 7), (lambda batch: batch["target"][:, :-1], 5)
    tokens = {3: [source], 6: [source, target], 7: [source, target, target], 10: [source, target]}
    add_bottlenecks(model, tuple(tokens), 4, batch, tokens=tokens.__getitem__, rngs=rngs)
    return model


@cache
def what_comes_next(*kind):
    """The whole model's log-probabilities (5,) of the token after any words, for every source."""
    graph, params, stats = small(*kind)
    targets = np.zeros((len(WORDS), L + 1), np.int32)
    for row, words in zip(targets, WORDS, strict=True):
        row[: len(words) + 1] = (1, *words)
    batch = {"source": jnp.repeat(SOURCE, len(WORDS), axis=0), "target": jnp.tile(targets, (len(SOURCE), 1))}
    logits, _ = jax.jit(partial(apply, graph, training=False))(params, stats, batch)
    log_p = np.asarray(jax.nn.log_softmax(logits)).reshape(len(SOURCE), len(WORDS), L, 5)
    return [{words: rows[i, len(words)] for i, words in enumerate(WORDS)} for rows in log_p]


def every_translation(log_p, penalty):
    """Brute force: (score, tokens) of all translations of a source, the best first."""
    scored = []
    for words in WORDS:
        tokens = (*words, 2)
        total = sum(log_p[words[:n]][token] for n, token in enumerate(tokens))
        scored.append((total / len(tokens) ** penalty, [*tokens, 0, 0, 0][:L]))
    return sorted(scored, reverse=True)


def every_step(log_p, beam, penalty):
    """Scores of a beam search that goes on to the last step."""
    going, ended = [(0.0, ())], []
    for step in range(L):
        ended += [(score + log_p[words][2]) / (step + 1) ** penalty for score, words in going]
        longer = [(score + log_p[words][w], (*words, w)) for score, words in going for w in (3, 4)]
        going = sorted(longer, reverse=True)[:beam]
    return sorted(ended, reverse=True)[:beam]


def search(*kind, **options):
    graph, params, stats = small(*kind)

    @jax.jit
    def run(params):
        return beam_search(merge(graph, params, stats, training=False), SOURCE, max_length=L, **options)

    return run(params)


@pytest.mark.slow
def test_full_beams():
    winners = set()
    for tied, penalty in ((True, 1.0), (False, 0.0), (False, 3.0)):
        tokens, scores = search(tied, beam=16, length_penalty=penalty)
        assert tokens.shape == (3, 16, L)
        for score, row, log_p in zip(scores, tokens, what_comes_next(tied), strict=True):
            expected = every_translation(log_p, penalty)
            np.testing.assert_allclose(score[:15], [score for score, _ in expected], rtol=1e-4)
            assert score[15] == -np.inf
            assert row[0].tolist() == expected[0][1]
            assert sorted(row[:15].tolist()) == sorted(tokens for _, tokens in expected)
            winners.add((tied, tuple(row[0].tolist())))
    assert winners >= {(False, (2, 0, 0, 0)), (False, (3, 3, 3, 2))}  # the penalty matters


@pytest.mark.parametrize(("beam", "is_narrow"), [(1, False), (3, False), (3, True)])
def test_narrow_beams(beam, is_narrow):
    _, scores = search(False, is_narrow, beam=beam, length_penalty=3.0)
    expected = [every_step(log_p, beam, 3.0) for log_p in what_comes_next(False, is_narrow)]
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


def test_refusals():
    model = make("tied transformer")
    with pytest.raises(ValueError, match=r"batch\['seed'\].*evaluation mode"):
        beam_search(model.blocks, SOURCE, max_length=L)
    model.eval()
    with pytest.raises(ValueError, match="must get all blocks of a transformer; got SourceEmbedding, EncoderAttention"):
        beam_search(model.blocks[:2], SOURCE, max_length=L)
    second = cut(make("transformer"), (4,))[1]
    with pytest.raises(ValueError, match="must get all blocks of a transformer"):
        beam_search(merge(*second, training=False), SOURCE, max_length=L)
    for options in ({"max_length": 0}, {"max_length": L, "beam": 0}, {"max_length": L, "length_penalty": -1.0}):
        with pytest.raises(ValueError, match="max_length and beam must be at least 1"):
            beam_search(model.blocks, SOURCE, **options)
