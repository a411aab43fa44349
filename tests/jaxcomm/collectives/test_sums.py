"""The compact sums: shared_mask, two_shot, coded_sum. The laws test how methods use them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.codecs import value_codec
from jaxcomm.codecs.quantize import (
    BlockSigns,
    Buckets,
    Integers,
    Ternary,
    _magnitudes_and_masks,
    _magnitudes_in_one_pass,
    encode,
)
from jaxcomm.collectives.checksum import two_shot
from jaxcomm.collectives.coded_sum import coded_sum, integer_sum
from jaxcomm.collectives.shared_mask import SUMS, choose_sum, compact_sum
from jaxcomm.kernels import noise
from jaxcomm.kernels.vectors import Stored
from jaxcomm.layout import plan_layout
from tests.marks import slow_except
from tests.reference.shared_sum import sum_slots
from tests.refusals import refused


def over_workers(worker, *rows, is_shared=True):
    """The result of every worker; `same` says whether it is the same on all."""
    workers = jax.vmap(worker, axis_name="data", out_axes=None if is_shared else 0)
    out = jax.jit(workers)(*rows)
    return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize("K", [1, 5])
def test_parts_go_and_return(K):
    rows = np.arange(K * K * 3, dtype=np.uint32).reshape(K, K, 3)

    def worker(row):
        def at_owner(received):
            return jnp.append(jnp.sum(received, axis=0), received[0, 0]), received

        return two_shot(row, at_owner, "data")

    code, received, is_intact = over_workers(worker, rows, is_shared=False)
    assert is_intact.all()
    for w in range(K):
        np.testing.assert_array_equal(code[w, :, :3], rows.sum(0))
        np.testing.assert_array_equal(code[w, :, 3], rows[0, :, 0])
        np.testing.assert_array_equal(received[w], rows[:, w])


@pytest.mark.parametrize(("K", "slots"), [(1, 33), (2, 257), (3, 257), (8, 100)])
@pytest.mark.parametrize(("name", "dtype"), [("psum", "float32"), ("two_shot", "bfloat16"), ("ring", "bfloat16")])
def test_compact_sums(name, dtype, K, slots):
    """Also with fewer slots than parts, so that some owners own nothing."""
    values = np.random.default_rng(slots).normal(size=(K, slots)).astype(np.float32)

    def worker(row):
        out = compact_sum(row, jnp.asarray(True), name, value_codec(dtype), "data")
        return out.total(out.ok), out.residual(), out.ok

    total, error, finite = over_workers(worker, values, is_shared=False)
    assert np.all(finite)
    expected, errors = sum_slots(list(values), name, dtype)
    for w in range(K):
        np.testing.assert_array_equal(total[w], total[0])
        np.testing.assert_array_equal(error[w], errors[w])
    np.testing.assert_allclose(total[0], expected, rtol=0 if dtype == "bfloat16" else 1e-6, atol=1e-6)
    np.testing.assert_allclose(total[0] + error.sum(0), values.astype(np.float64).sum(0), atol=K * 1e-6)


@pytest.mark.parametrize("K", [2, 3])
@pytest.mark.parametrize("name", SUMS)
def test_bad_compact_steps(name, K):
    def worker(row, flag):
        return compact_sum(row, flag, name, value_codec("float32"), "data").ok

    workers = jax.jit(jax.vmap(worker, axis_name="data", out_axes=None))
    ones, flags = np.ones((K, 70), np.float32), np.ones(K, bool)
    huge, nan = ones.copy(), ones.copy()
    huge[:, 65], nan[K - 1, 0] = 3e38, np.nan
    assert workers(ones, flags)
    assert not workers(ones, np.arange(K) != 1)
    assert not workers(huge, flags)
    assert not workers(nan, flags)


def test_choice_of_sum():
    assert choose_sum("auto", value_codec("float32")) == "psum"
    assert choose_sum("auto", value_codec("bfloat16")) == "two_shot"
    assert [choose_sum(name, value_codec("float32")) for name in SUMS] == list(SUMS)
    with pytest.raises(ValueError, match=r"one of psum, two_shot, ring; got 'gather'. Pass one, or 'auto'"):
        choose_sum("gather", value_codec("float32"))
    refused(lambda: choose_sum("psum", value_codec("bfloat16")), "collective='psum'", "got 16")


def layout_of(*sizes):
    return plan_layout([jax.ShapeDtypeStruct((n,), np.float32) for n in sizes], dense_below=0, capacity=lambda n: n)


LAYOUT = layout_of(2049, 3, 1024)
N = LAYOUT.n
INSIDE = np.concatenate([np.arange(1024 * -(-size // 1024)) < size for size in LAYOUT.sizes])
CODES = {
    "buckets": Buckets(4, 64, "max", noise.make_key(1)),
    "integers": Integers(9),
    "signs": BlockSigns(LAYOUT),
}


@pytest.mark.parametrize("collective", slow_except(["gather", "two_shot"], "gather"))
@pytest.mark.parametrize("K", [3, 8])
@pytest.mark.parametrize("code", slow_except(CODES, "integers", "signs"))
def test_coded_sums(code, K, collective):
    """Also with fewer blocks than workers: eight workers own five blocks."""
    rng = np.random.default_rng(K)
    vectors = rng.integers(-1, 2, size=(K, N)) if code == "integers" else rng.normal(size=(K, N))
    vectors = (vectors * INSIDE).astype(np.float32)

    def worker(row):
        out = coded_sum(Stored(row), jnp.asarray(True), CODES[code], CODES[code], collective, "data")
        return out.total(out.ok), out.residual(), out.ok

    total, residual, finite = over_workers(worker, vectors, is_shared=False)
    assert np.all(finite)
    np.testing.assert_array_equal(total, np.broadcast_to(total[0], total.shape))
    exact = vectors.astype(np.float64).sum(0)
    np.testing.assert_allclose(total[0] + residual.astype(np.float64).sum(0), exact, atol=K * 2e-6)
    assert not total[0][~INSIDE].any()
    if code == "integers":
        np.testing.assert_array_equal(total[0], exact)
        assert not residual.any()


@pytest.mark.parametrize("code", CODES)
def test_words_of_codes(code):
    """Codes are chosen by these numbers of words."""
    words = jax.eval_shape(lambda x: encode(CODES[code], x, 0), jax.ShapeDtypeStruct((2048,), np.float32))
    assert words.shape == (CODES[code].n_words(2048),)


@pytest.mark.parametrize("collective", ["gather", "two_shot"])
def test_bad_coded_steps(collective):
    def worker(row, flag):
        code = Buckets(8, 1024, "max", noise.make_key(0))
        return coded_sum(Stored(row), flag, code, code, collective, "data").ok

    ones, huge = np.ones((3, 4096), np.float32), np.full((3, 4096), 3e38, np.float32)
    assert over_workers(worker, ones, np.ones(3, bool))
    assert not over_workers(worker, ones, np.asarray([True, True, False]))
    assert not over_workers(worker, huge, np.ones(3, bool))


class Bits:
    """A code of a given number of bits per value."""

    def __init__(self, bits):
        self.bits = bits

    def n_words(self, m):
        return m * self.bits // 32

    def codes(self, vector, start):
        return [vector.sum()], jnp.asarray(True)

    def words(self, codes):
        return jnp.zeros(self.n_words(codes[0].size), jnp.uint32) + codes[0][0].astype(jnp.uint32)

    def decode(self, words, m, start):
        return jnp.zeros(m, jnp.float32) + words[0].astype(jnp.float32)


@pytest.mark.parametrize("K", range(1, 12))
@pytest.mark.parametrize("second", [1, 4, 8])
def test_choice_of_coded_sum(K, second):
    n, first = 5 * 1024, 2
    part = math.ceil(n / (K * 1024)) * 1024
    gathered, two_shots = (K - 1) * (n * first / 32 + 1), (K - 1) * (part * (first + second) / 32 + 2)

    def worker(row):
        return coded_sum(Stored(row), jnp.asarray(True), Bits(first), Bits(second), "auto", "data").total(row[0] < 1)

    text = str(jax.make_jaxpr(jax.vmap(worker, axis_name="data"))(jnp.zeros((K, n))))
    # Under vmap, an exchange of parts is a transposition, and only the gather writes a flag for every worker's vector.
    assert (
        f"u32[{K},{n * first // 32 + 1}]" in text
        if gathered <= two_shots
        else f"u32[{K},{n * first // 32 + 1}]" not in text
    )


@pytest.mark.parametrize("limit", slow_except([1, 3, 4, 127, 128], 3, 127, 128))
def test_bits_of_integers(limit):
    values = np.random.default_rng(limit).integers(-limit, limit + 1, size=100).astype(np.float32)
    values[:2] = limit, -limit
    code = Integers(limit)
    words = encode(code, jnp.asarray(values), 0)
    assert words.shape == (code.n_words(100),) == (math.ceil(math.log2(2 * limit + 1)) * 4,)
    np.testing.assert_array_equal(code.decode(words, 100, 0), values)


def test_ternary_numbers():
    values = np.random.default_rng(0).integers(-1, 2, size=1024).astype(np.float32)
    code = Ternary(noise.make_key(0))
    words = encode(code, jnp.asarray(values), 0)
    assert words.shape == (64,)
    np.testing.assert_array_equal(code.decode(words, 1024, 0), values)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e38, 3.4e38])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_levels_of_any_scale(width, scale):
    """XLA multiplies by the inverse, and that of 1e38 would be flushed to zero."""
    code = Buckets(width, 32, "max", noise.make_key(0))
    values = np.random.default_rng(0).integers(-code.levels, code.levels + 1, size=1024) / code.levels
    values = (values * scale).astype(np.float32)
    values[::32] = scale
    result = jax.jit(lambda x: code.decode(encode(code, x, 0), 1024, 0))(values)
    level = np.abs(np.asarray(result, np.float64) - values) / scale * code.levels
    assert np.mean(level > 1e-3) < 0.02  # rarely, an exact level becomes the one below, by rounding of the product
    assert level.max() < 1.001


@pytest.mark.parametrize("code", ["buckets", "l2", "signs"])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_bad_values(code, value):
    codec = CODES[code] if code != "l2" else Buckets(4, 64, "l2", noise.make_key(1))
    values = np.random.default_rng(0).normal(size=N).astype(np.float32) * INSIDE
    assert codec.codes(Stored(values), 0)[1]
    values[1000] = value
    ok = jax.jit(lambda x: codec.codes(Stored(x), 0)[1])
    if np.isfinite(value) and code == "signs":  # one of 1024 is not much of a mean
        assert ok(values)
        values[:1024] = value
    assert ok(values) == (np.isfinite(value) and code == "buckets")


def test_one_pass_or_several():
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    arguments = values, values < 0, values > 1
    total, *words = jax.jit(_magnitudes_in_one_pass)(*arguments)
    expected, *bitmasks = jax.jit(_magnitudes_and_masks)(*arguments)
    np.testing.assert_allclose(total, np.abs(values).astype(np.float64).reshape(-1, 1024).sum(1), rtol=1e-6)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_array_equal(words, bitmasks)


class Highest(Buckets):
    """Draws the largest float32 below 1 for every value."""

    def uniform(self, m, start):
        return jnp.full(m, 1 - 2.0**-24, jnp.float32)


@pytest.mark.parametrize(("width", "levels"), [(8, 31), (8, 127), (4, 7)])
def test_the_highest_level(width, levels):
    """With 31 levels, four workers' largest values just fit an int8."""
    code = Highest(width, 64, "max", noise.make_key(0))
    x = np.repeat(np.linspace(1, 2, 100, dtype=np.float32), 64)
    draws = code.draw(x, code.scale(x)[0], levels, 0)
    assert (draws.min(), draws.max()) == (levels, levels)


@pytest.mark.parametrize("K", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [1, 1024])
def test_halves_of_words(K, n, monkeypatch):
    """Two 16-bit integers in a word of 32 sum exactly, the largest and the smallest too."""
    largest = 32_767 // K
    codes = np.random.default_rng(0).integers(-largest, largest + 1, (K, n)).astype(np.int16)
    codes[:, 0], codes[:, -1] = largest, -largest
    monkeypatch.setattr("jaxcomm.collectives.coded_sum.traced_platform", lambda: "gpu")

    def worker(codes, flag):
        out = integer_sum(codes, flag, "data")
        return out.total(jnp.asarray(True)), out.ok

    run = jax.vmap(worker, axis_name="data", out_axes=None)
    assert str(jax.make_jaxpr(run)(codes, np.ones(K, bool))).count("psum") == 1
    for flags in (np.ones(K, bool), np.arange(K) > 0):
        total, ok = run(codes, flags)
        np.testing.assert_array_equal(total, codes.sum(0, dtype=np.int64).astype(np.float32))
        assert ok == flags.all()
