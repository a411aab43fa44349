"""What crosses where a model is cut: DCT-MP and its two ablations against NumPy, on a mesh, bytes included."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.accounting.jaxpr import jaxpr_program
from jaxcomm.parallel.pipeline import Cut
from tests.jaxcomm.formulas import BITS, index_words, words
from tests.jaxcomm.workers import QUICKLY
from tests.reference.dct_mp import DctMpReference, GaussianSketchReference, TopKGradientReference, n_kept_of_row

KINDS = ("normal", "heavy", "ties", "zeros", "few", "infinite", "nan")
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**20)

# What crosses, the fraction that does not, the positions on the axis, the sender and the receiver: samples of one and
# of three dimensions; so many of them that a mask is written with a bit for each; from the last position to the first;
# a tree.
CROSSINGS = {
    "few": ((3, 5), 0.5, 2, 0, 1),
    "back": ((4, 33), 0.75, 3, 2, 1),
    "half": ((2, 320), 0.5, 3, 1, 2),
    "image": ((2, 3, 3, 7), 0.95, 3, 2, 0),
    "tree": ({"a": (3, 7), "b": {"c": (3, 2, 5)}}, 0.6, 3, 0, 1),
}


def is_shape(node):
    return isinstance(node, tuple)


class Crossing:
    """`masked_boundary` on a mesh of stages, where every position has its own activations and its own gradient."""

    def __init__(self, shapes, sparsity, size, source, target, dtype="float32", **options):
        self.shapes, self.size, self.source, self.target = shapes, size, source, target
        self.dtype, self.route = jnp.dtype(dtype), {"source": source, "target": target}
        self.boundary = jc.dct_mp(sparsity, **options)
        self.keeps_residual = self.boundary.keeps_residual

        def cross(x, gradient, residual, seed):
            def send(x, residual):
                # One seed for all, though the axis is manual.
                return jc.layers.masked_boundary(
                    x, **self.route, sparsity=sparsity, seed=seed[0], residual=residual, **options
                )

            out, pull = jax.vjp(send, *jax.tree.map(lambda leaf: leaf[0], (x, residual)))
            returned = pull(jax.tree.map(lambda leaf: leaf[0], gradient))
            return jax.tree.map(lambda leaf: leaf[None], (out, *returned))

        specs = (P("stage"), P("stage"), P("stage"), P())
        mapped = jax.shard_map(cross, mesh=jc.make_mesh(stage=size), in_specs=specs, out_specs=P("stage"))
        self.jitted = jax.jit(mapped)

    @functools.cached_property
    def traced(self):
        x = self.zeros()
        return self.jitted.trace(x, x, x if self.keeps_residual else None, jnp.zeros(1, jnp.uint32))

    @functools.cached_property
    def compiled(self):
        return self.traced.lower().compile(QUICKLY)

    def __call__(self, x, gradient, residual=None, seed=0):
        """(received, gradient with respect to x, new residual), each as float32 with the positions first."""
        given = jax.tree.map(lambda leaf: jnp.asarray(leaf, self.dtype), (x, gradient, residual))
        out = self.compiled(*given, jnp.full(1, seed, jnp.uint32))
        assert all(leaf.dtype == self.dtype for leaf in jax.tree.leaves(out))
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), out)

    def zeros(self):
        return jax.tree.map(lambda s: jnp.zeros((self.size, *s), self.dtype), self.shapes, is_leaf=is_shape)

    def draw(self, kind, seed):
        """Activations or gradients of every position, as float32 that the type holds."""
        rng = np.random.default_rng(seed)
        made = jax.tree.map(lambda s: numbers(rng, kind, (self.size, *s)), self.shapes, is_leaf=is_shape)
        return jax.tree.map(lambda leaf: leaf.astype(self.dtype).astype(np.float32), made)


crossing = functools.cache(lambda name, **options: Crossing(*CROSSINGS[name], **options))


def numbers(rng, kind, shape):
    x = rng.normal(size=shape)
    if kind == "heavy":
        x = x * 10.0 ** rng.integers(-25, 25, size=shape)
    elif kind == "ties":
        x = rng.integers(-2, 3, size=shape).astype(float)
    elif kind == "zeros":
        x = x * 0
    elif kind == "few":  # fewer numbers than a sample sends
        x = np.where(rng.random(shape) < 0.1, x, 0)
    elif kind in ("infinite", "nan"):
        x = np.where(rng.random(shape) < 0.2, -np.inf if kind == "infinite" else np.nan, x)
        x = np.where(rng.random(shape) < 0.2, np.inf, x)
    return x.astype(np.float32)


def only_at(position, tree, size):
    """Arrays for every position: the tree's at one, zeros at the others."""
    return jax.tree.map(
        lambda leaf: np.stack([leaf if i == position else np.zeros_like(leaf) for i in range(size)]), tree
    )


def at(position, tree):
    return jax.tree.map(lambda leaf: leaf[position], tree)


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def widths(value_dtype):
    return value_dtype if value_dtype is not None else "float32"


@pytest.mark.parametrize("value_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", CROSSINGS)
@hypothesis.given(kind=kinds, gradients=kinds, seed=seeds)
def test_dct_mp_is_the_papers(name, value_dtype, kind, gradients, seed):
    """Forward and backward, to the bit; NaN and infinity cross; everybody else receives zeros."""
    run = crossing(name, value_dtype=value_dtype)
    x, gradient = run.draw(kind, seed), run.draw(gradients, seed + 1)
    received, returned, _ = run(x, gradient)
    eta = CROSSINGS[name][1]

    def one(x, gradient):
        reference = DctMpReference(eta, widths(value_dtype))
        return [reference.forward(x), reference.backward(gradient)]

    expected = jax.tree.map(one, at(run.source, x), at(run.target, gradient))
    forward, backward = jax.tree.transpose(jax.tree.structure(x), None, expected)
    assert_same(received, only_at(run.target, forward, run.size))
    assert_same(returned, only_at(run.source, backward, run.size))


@pytest.mark.parametrize("value_dtype", [None, "float32"])
@hypothesis.given(kind=st.sampled_from(["normal", "ties", "infinite", "nan"]), seed=seeds)
def test_bfloat16_activations_cross_as_they_are(value_dtype, kind, seed):
    run = crossing("back", dtype="bfloat16", value_dtype=value_dtype)
    x, gradient = run.draw(kind, seed), run.draw("normal", seed + 1)
    received, returned, _ = run(x, gradient)
    reference = DctMpReference(0.75)
    assert_same(received, only_at(1, reference.forward(x[2]), 3))
    assert_same(returned, only_at(2, reference.backward(gradient[1]), 3))


def test_float16_activations_come_back_as_float16():
    run = Crossing((2, 6), 0.5, 2, 0, 1, dtype="float16")
    x = run.draw("normal", 0)
    received, returned, _ = run(x, x)
    reference = DctMpReference(0.5)
    assert_same(received, only_at(1, reference.forward(x[0]), 2))
    assert_same(returned, only_at(0, reference.backward(x[1]), 2))


def test_every_sample_sends_its_own_share_on_its_own_mask():
    """Of ties the first ones; a large sample does not take room from a small one."""
    run = crossing("few")  # 3 of 5 a sample
    x = np.zeros((2, 3, 5), np.float32)
    x[0] = [[1, -2, 3, -4, 5], [1e-9, -1e-9, 1e-9, 1e-9, 2e-9], [0, 0, 0, 0, 1e9]]
    received, returned, _ = run(x, np.ones_like(x))
    kept = np.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 1], [1, 1, 0, 0, 1]])
    np.testing.assert_array_equal(received[1], x[0] * kept)
    np.testing.assert_array_equal(returned[0], kept)


def test_what_bfloat16_does_not_hold_arrives_as_infinity():
    """And never as a finite number that somebody could go on with."""
    run = crossing("few", value_dtype="bfloat16")
    largest = np.finfo(np.float32).max
    x = np.broadcast_to(np.float32([largest, -largest, 1, 1, 1]), (2, 3, 5))
    received, returned, _ = run(x, x)
    np.testing.assert_array_equal(received[1], np.broadcast_to([np.inf, -np.inf, 1, 0, 0], (3, 5)))
    np.testing.assert_array_equal(returned[0], np.broadcast_to([np.inf, -np.inf, 1, 0, 0], (3, 5)))


@pytest.mark.parametrize("kind", ["masked", "sketch", "topk_gradient"])
def test_with_sparsity_0_it_is_a_permutation(kind):
    """To the bit, gradients included, in one buffer that has no index."""
    shapes = {"a": (3, 7), "b": (3, 2, 2)}
    run = Crossing(shapes, 0.0, 3, 0, 2, kind=kind)

    def permute(x, gradient):
        out, pull = jax.vjp(lambda x: lax.ppermute(x, "stage", [(0, 2)]), x)
        return out, *pull(gradient)

    mesh = jc.make_mesh(stage=3)
    plain = jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=P("stage"), out_specs=P("stage")))
    for what in ("normal", "nan"):
        x, gradient = run.draw(what, 0), run.draw(what, 1)
        assert_same(run(x, gradient)[:2], jax.tree.map(np.asarray, plain(x, gradient)))
    assert read_program(run.compiled.as_text()).links() == {(0, 2): 4 * 33, (2, 0): 4 * 33}


@pytest.mark.parametrize("kind", ["masked", "topk_gradient"])
def test_a_sample_of_one_number_is_sent_whole_beside_others_that_are_not(kind):
    run = Crossing({"a": (6,), "b": (6, 5)}, 0.9, 2, 0, 1, kind=kind)
    x, gradient = run.draw("normal", 0), run.draw("normal", 1)
    residual = jax.tree.map(np.asarray, run.zeros()) if run.keeps_residual else None
    received, returned, new = run(x, gradient, residual)
    assert_same([received["a"], returned["a"]], [only_at(1, x["a"][0], 2), only_at(0, gradient["a"][1], 2)])
    assert np.count_nonzero(returned["b"]) == 6
    if run.keeps_residual:
        assert not new["a"].any()
        np.testing.assert_array_equal(new["b"][1] + returned["b"][0], gradient["b"][1])


@pytest.mark.parametrize("value_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["back", "tree"])
@hypothesis.given(kind=st.sampled_from(["normal", "heavy", "ties", "zeros", "few"]), seed=seeds)
def test_topk_of_the_gradient_is_the_papers_and_loses_nothing(name, value_dtype, kind, seed):
    """Three steps, each with the residual of the one before; activations arrive whole."""
    run, eta = crossing(name, kind="topk_gradient", value_dtype=value_dtype), CROSSINGS[name][1]
    references = jax.tree.map(lambda _: TopKGradientReference(eta, widths(value_dtype)), run.zeros())
    residual = jax.tree.map(np.asarray, run.zeros())
    for step in range(3):
        x, gradient = run.draw("normal", seed + step), run.draw(kind, seed + 5 * step)
        received, returned, new = run(x, gradient, residual)
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(widths(value_dtype))).astype(np.float32), x)
        assert_same(received, only_at(run.target, at(run.source, rounded), run.size))
        own = at(run.target, gradient)
        sent = jax.tree.map(lambda reference, g: reference.backward(g), references, own)
        assert_same(at(run.target, new), jax.tree.map(lambda reference: reference.residual, references))
        assert_same(returned, only_at(run.source, sent, run.size))
        total = jax.tree.map(np.add, own, at(run.target, residual))
        assert_same(jax.tree.map(np.add, at(run.source, returned), at(run.target, new)), total)
        residual = new


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_crosses_by_topk_too(bad):
    run = crossing("back", kind="topk_gradient", value_dtype=None)
    x, gradient = run.draw("normal", 0), run.draw("normal", 1)
    gradient[1, 3, 32] = bad
    _, returned, _ = run(x, gradient, np.zeros_like(x))
    np.testing.assert_array_equal(returned[2, 3, 32], bad)


D, SEEDS = 12, 400


def test_a_sketch_is_a_projection_of_every_sample_and_returns_the_whole_gradient():
    """S S^T is what becomes of the unit vectors; another seed has another."""
    run, reference = Crossing((D, D), 0.7, 2, 0, 1, kind="sketch"), GaussianSketchReference(0.7)
    rng = np.random.default_rng(0)
    x, gradient = rng.normal(size=(2, 2, D, D)).astype(np.float32)
    products = [run(only_at(0, np.eye(D, dtype=np.float32), 2), x, seed=seed)[0][1] for seed in (5, 6)]
    assert np.abs(products[0] - products[1]).max() > 0.1
    values, vectors = np.linalg.eigh(products[0])
    m = reference.width(D)
    assert np.all(values[: D - m] < 1e-5)
    assert values[D - m] > 1e-3
    S = vectors[:, -m:] * np.sqrt(values[-m:])
    received, returned, _ = run(x, gradient, seed=5)
    np.testing.assert_allclose(received, only_at(1, reference.forward(x[0], S), 2), rtol=1e-4, atol=1e-4)
    assert_same(returned, only_at(0, reference.backward(gradient[1]), 2))


def test_a_sketch_is_unbiased():
    """(x S S^T)_i has the mean x_i and the variance (|x|^2 + x_i^2) / m.

    The mean of N of them is within 5 standard errors for each of 60 numbers (which fails by chance once in 30,000
    draws of seeds, and the seeds are fixed), and their squared errors add up to what the variance says within 40%.
    """
    run = Crossing((5, D), 0.7, 2, 0, 1, kind="sketch")
    x = run.draw("normal", 3)
    got = np.stack([run(x, x, seed=seed)[0][1] for seed in range(SEEDS)]).astype(np.float64)
    own = x[0].astype(np.float64)
    variance = ((own**2).sum(1, keepdims=True) + own**2) / n_kept_of_row(D, 0.7)
    assert np.abs((got.mean(0) - own) / np.sqrt(variance / SEEDS)).max() < 5
    assert 0.6 < np.mean((got - own) ** 2 / variance) < 1.4


def documented_bytes(shapes, sparsity, kind, bits):
    """(forward, backward), by hand: values of all arrays, and their positions in whole blocks of 1024."""
    forward = backward = 0
    for B, *rest in jax.tree.leaves(shapes, is_leaf=is_shape):
        d = math.prod(rest)
        k = n_kept_of_row(d, sparsity)
        n = math.ceil(B * d / 1024) * 1024
        whole, chosen = words(B * d, bits), words(B * k, bits)
        positions = min(index_words(codec, n, B * k) for codec in ("plain", "bitmap", "elias_fano")) if k < d else 0
        forward += {"masked": chosen + positions, "sketch": chosen, "topk_gradient": whole}[kind]
        backward += {"masked": chosen, "sketch": whole, "topk_gradient": chosen + positions}[kind]
    return 4 * forward, 4 * backward


def predicted_bytes(boundary, shapes):
    structs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_shape)
    leaves, tree = jax.tree.flatten(structs)
    return Cut([boundary.plan(leaf) for leaf in leaves], tree).bytes_each_way()


@pytest.mark.parametrize("value_dtype", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "masked") for name in CROSSINGS),
        ("back", "topk_gradient"),
        ("tree", "topk_gradient"),
        ("few", "sketch"),
    ],
)
def test_bytes_are_predicted_compiled_and_those_of_the_formula(name, kind, value_dtype):
    options = {} if kind == "masked" else {"kind": kind}
    run, (shapes, sparsity, *_) = crossing(name, value_dtype=value_dtype, **options), CROSSINGS[name]
    forward, backward = documented_bytes(shapes, sparsity, kind, BITS[widths(value_dtype)])
    assert predicted_bytes(run.boundary, shapes) == (forward, backward)
    traced, compiled = jaxpr_program(run.traced.jaxpr), read_program(run.compiled.as_text())
    there, back = (run.source, run.target), (run.target, run.source)
    assert traced.links() == compiled.links() == {there: forward, back: backward}
    for program in (traced, compiled):
        assert [traffic.op for _, traffic in program.operations()] == ["permute"] * 2  # one buffer each way


@pytest.mark.parametrize("kind", ["masked", "sketch", "topk_gradient"])
@pytest.mark.parametrize("sparsity", [0.05, 0.5, 0.9, 0.99])
def test_bytes_of_large_activations_are_those_of_the_formula(sparsity, kind):
    for shapes in ((32, 1024), {"a": (64, 7, 7, 96), "b": (64, 300), "c": (64,)}):
        for value_dtype in ("float32", "bfloat16"):
            boundary = jc.dct_mp(sparsity, kind=kind, value_dtype=value_dtype)
            expected = documented_bytes(shapes, sparsity, kind, BITS[value_dtype])
            assert predicted_bytes(boundary, shapes) == expected


def test_large_activations_take_the_bits_that_are_documented():
    """64 samples of 4096 at 5%: 2 + log2(d/k) bits a position, and never more than d bits a sample."""
    like = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    for sparsity in (0.5, 0.95, 0.999):
        k = n_kept_of_row(4096, sparsity)
        forward, backward = Cut([jc.dct_mp(sparsity).plan(like)], None).bytes_each_way()
        assert backward == 2 * 64 * k
        assert forward - backward <= 64 * min(4096, k * (2 + math.log2(4096 / k))) / 8 + 8


def traced(x=None, size=2, **arguments):
    x = jnp.ones((2, 6)) if x is None else x
    arguments = {"source": 0, "target": 1, "sparsity": 0.5, **arguments}
    cross = jax.vmap(
        lambda x: jc.layers.masked_boundary(x, **arguments), axis_name="stage", in_axes=None, axis_size=size
    )
    return jax.eval_shape(cross, x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity must be at least 0 and below 1 .*, got 1\.0: use 0\.99"),
        ({"sparsity": -0.1}, r"sparsity must be at least 0 and below 1 .*, got -0\.1: "),
        ({"kind": "top"}, r"kind must be one of masked, sketch, topk_gradient, got 'top': pass 'masked' for DCT-MP"),
        ({"value_dtype": "float16"}, r"one of float32, bfloat16, got 'float16': pass value_dtype='bfloat16' or "),
        ({"source": 2}, r"source must be a position on the axis of 2, got 2: positions count from 0"),
        ({"target": -1}, r"target must be a position on the axis of 2, got -1: positions count from 0"),
        ({"target": 0}, r"target must be another position than source, got 0: nothing has to move"),
        ({"axis_name": "stages"}, r"in scope, got no axis 'stages': call it inside jax\.shard_map"),
        (
            {"kind": "topk_gradient"},
            r"kept where gradients are sent by top-k, got none for \['LargestGradient'\]: pass",
        ),
        ({"residual": np.zeros((2, 6))}, r"got one for \['Largest'\]: pass zeros like the activations with kind="),
        ({"x": jnp.ones((2, 6), jnp.int32)}, r"real activations .*, got int32\[2, 6\]: let the next stage take integ"),
        ({"x": jnp.ones((2, 6), jnp.complex64)}, r"real activations with the samples as first .*, got complex64\[2, 6"),
        ({"x": jnp.ones((0, 6))}, r"real activations with the samples as first dimension, got float32\[0, 6\]: let"),
        ({"x": jnp.ones(())}, r"real activations with the samples as first dimension, got float32\[\]: let"),
    ],
)
def test_errors_name_the_rule_what_came_and_the_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        traced(**arguments)


def test_a_float_is_no_position():
    with pytest.raises(ValueError, match=r"source must be a position on the axis of 2, got 0\.0"):
        traced(source=0.0)
