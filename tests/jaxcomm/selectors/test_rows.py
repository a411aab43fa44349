"""The k largest of every row against NumPy: exactly k, ties to the lowest index, whatever the numbers."""

import functools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxcomm.selectors.topk import select_rows
from tests.jaxcomm.numbers import numbers
from tests.reference.dct_mp import largest_of_row

SHAPES = [(1, 1), (5, 2), (3, 7), (2, 64), (4, 33)]
USUAL = SHAPES[:3]
KINDS = ("normal", "ties", "zeros", "heavy", "infinite", "nan", "tiny")

marked = functools.partial(jax.jit, static_argnums=1)(select_rows)


def rows_of(kind, seed, shape):
    return numbers(np.random.default_rng(seed), kind, shape)


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, id=str(shape), marks=() if shape in USUAL else pytest.mark.slow) for shape in SHAPES]
)
@hypothesis.given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**20), share=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_k_of_every_row(shape, kind, seed, share):
    x = rows_of(kind, seed, shape)
    k = max(1, int(share * shape[1]))
    mask = np.asarray(marked(x, k))
    assert mask.dtype == bool
    for row, row_mask in zip(x, mask, strict=True):
        assert np.flatnonzero(row_mask).tolist() == largest_of_row(row, k)


def test_the_reference_is_a_sort():
    for kind in ("normal", "ties", "zeros", "heavy", "infinite"):
        for row in rows_of(kind, 0, (20, 9)):
            for k in range(10):
                assert largest_of_row(row, k) == sorted(np.argsort(-np.abs(row), kind="stable")[:k])
    assert largest_of_row(np.float32([np.inf, np.nan, 1, np.nan]), 1) == [1]
    assert largest_of_row(np.float32([np.inf, np.nan, 1, np.nan]), 3) == [0, 1, 3]


def test_under_vmap():
    x = rows_of("normal", 0, (3, 4, 9))
    result = jax.vmap(lambda rows: select_rows(rows, 4))(x)
    np.testing.assert_array_equal(result, np.stack([marked(rows, 4) for rows in x]))
