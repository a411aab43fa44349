"""Activations that cross from one position of a mesh to another, and what every boundary promises about them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.accounting.jaxpr import jaxpr_program
from jaxcomm.steps.pipeline.pipeline import Cut
from tests.jaxcomm.formulas import BITS, index_words, words
from tests.jaxcomm.numbers import numbers
from tests.reference.dct_mp import n_kept_of_row

kinds = st.sampled_from(["normal", "heavy", "ties", "zeros", "few", "infinite", "nan"])
seeds = st.integers(0, 2**20)

# Shapes, sparsity, the number of positions on the axis, sender and receiver: samples of one and of three dimensions; so
# many that a mask is written with one bit for each; from the last position to the first; a tree.
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

    def __init__(self, shapes, sparsity, size, source, target, dtype="float32", make=jc.dct_mp, **options):
        self.shapes, self.size, self.source, self.target = shapes, size, source, target
        self.dtype, self.boundary = jnp.dtype(dtype), make(sparsity, **options)

        def cross(x, gradient, seed):
            def send(x):
                # The seed is replicated, though the axis is manual.
                route = {"source": source, "target": target, "boundary": self.boundary}
                return jc.layers.masked_boundary(x, **route, seed=seed[0])

            out, pull = jax.vjp(send, jax.tree.map(lambda leaf: leaf[0], x))
            pulled = pull(jax.tree.map(lambda leaf: leaf[0], gradient))
            return jax.tree.map(lambda leaf: leaf[None], (out, *pulled))

        specs = (P("stage"), P("stage"), P())
        mapped = jax.shard_map(cross, mesh=jc.make_mesh(stage=size), in_specs=specs, out_specs=P("stage"))
        self.jitted = jax.jit(mapped)

    @functools.cached_property
    def traced(self):
        x = self.zeros()
        return self.jitted.trace(x, x, jnp.zeros(1, jnp.uint32))

    @functools.cached_property
    def compiled(self):
        return self.traced.lower().compile()

    def __call__(self, x, gradient, seed=0):
        """(received, gradient with respect to x), each as float32 with the positions first."""
        arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, self.dtype), (x, gradient))
        out = self.compiled(*arrays, jnp.full(1, seed, jnp.uint32))
        assert all(leaf.dtype == self.dtype for leaf in jax.tree.leaves(out))
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), out)

    def zeros(self):
        return jax.tree.map(lambda s: jnp.zeros((self.size, *s), self.dtype), self.shapes, is_leaf=is_shape)

    def draw(self, kind, seed):
        """Activations or gradients of every position, as float32 values that the type can hold."""
        rng = np.random.default_rng(seed)
        tree = jax.tree.map(lambda s: numbers(rng, kind, (self.size, *s)), self.shapes, is_leaf=is_shape)
        return jax.tree.map(lambda leaf: leaf.astype(self.dtype).astype(np.float32), tree)


crossing = functools.cache(lambda name, **options: Crossing(*CROSSINGS[name], **options))


def only_at(position, tree, size):
    """Arrays for every position: the tree's at one position, zeros at the others."""
    return jax.tree.map(
        lambda leaf: np.stack([leaf if i == position else np.zeros_like(leaf) for i in range(size)]), tree
    )


def at(position, tree):
    return jax.tree.map(lambda leaf: leaf[position], tree)


def assert_same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def widths(value_dtype):
    return value_dtype if value_dtype is not None else "float32"


def assert_permutes(make):
    """With sparsity 0: exact to the bit, gradients included, in one buffer without indices."""
    shapes = {"a": (3, 7), "b": (3, 2, 2)}
    run = Crossing(shapes, 0.0, 3, 0, 2, make=make)

    def permute(x, gradient):
        out, pull = jax.vjp(lambda x: lax.ppermute(x, "stage", [(0, 2)]), x)
        return out, *pull(gradient)

    mesh = jc.make_mesh(stage=3)
    plain = jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=P("stage"), out_specs=P("stage")))
    for kind in ("normal", "nan"):
        x, gradient = run.draw(kind, 0), run.draw(kind, 1)
        assert_same(run(x, gradient), jax.tree.map(np.asarray, plain(x, gradient)))
    assert read_program(run.compiled.as_text()).links() == {(0, 2): 4 * 33, (2, 0): 4 * 33}


def bytes_by_hand(shapes, sparsity, value_dtype):
    """Bytes of (all values, kept values, their positions in whole blocks of 1024, their gradients), over all arrays."""
    total, of_values = np.zeros(4, int), functools.partial(value_words, value_dtype=widths(value_dtype))
    for B, *shape in jax.tree.leaves(shapes, is_leaf=is_shape):
        d = math.prod(shape)
        k = n_kept_of_row(d, sparsity)
        n = math.ceil(B * d / 1024) * 1024
        positions = min(index_words(codec, n, B * k) for codec in ("plain", "bitmap", "elias_fano")) if k < d else 0
        total += [of_values(B * d), of_values(B * k), positions, of_values(B * k, gradients=True)]
    return 4 * total


def value_words(n, value_dtype, gradients=False):
    if not value_dtype.startswith("int"):
        return words(n, BITS[value_dtype])
    width, tiles = int(value_dtype[3:]), math.ceil(n / 64)
    if gradients:
        return math.ceil(n / 32) * (1 + max(width, 6))
    return tiles + 6 * math.ceil(tiles / 32) + 2 * tiles * width


def predicted_bytes(boundary, shapes):
    structs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_shape)
    leaves, tree = jax.tree.flatten(structs)
    return Cut([boundary.plan(leaf) for leaf in leaves], tree).bytes_each_way()


def assert_bytes(name, documented, **options):
    """Predicted and compiled bytes are (forward, backward) of `documented`, in one buffer each way."""
    run, (shapes, sparsity, *_) = crossing(name, **options), CROSSINGS[name]
    forward, backward = documented(*bytes_by_hand(shapes, sparsity, options["value_dtype"]))
    assert predicted_bytes(run.boundary, shapes) == (forward, backward)
    traced, compiled = jaxpr_program(run.traced.jaxpr), read_program(run.compiled.as_text())
    route, back = (run.source, run.target), (run.target, run.source)
    assert traced.links() == compiled.links() == {route: forward, back: backward}
    for program in (traced, compiled):
        assert [traffic.op for _, traffic in program.operations()] == ["permute"] * 2


def assert_bytes_of_large_activations(make, sparsity, documented):
    for shapes in ((32, 1024), {"a": (64, 7, 7, 96), "b": (64, 300), "c": (64,)}):
        for value_dtype in ("float32", "bfloat16"):
            expected = documented(*bytes_by_hand(shapes, sparsity, value_dtype))
            assert predicted_bytes(make(sparsity, value_dtype=value_dtype), shapes) == expected
