"""The sparse ring all-reduce: nothing is lost, nothing is dropped on the way, and it gets denser with every hop."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks.sparse_ring import hops_of, received_on_ring, ring_dct_dp, ring_dgc, ring_sum, ring_topk
from jaxcomm.accounting.hlo import read_program
from jaxcomm.codecs import value_codec
from jaxcomm.collectives.balanced import Regions
from jaxcomm.collectives.reduced import SparseReduced
from jaxcomm.kernels.bits import pack
from jaxcomm.layout import plan_layout
from tests.jaxcomm.formulas import index_words
from tests.jaxcomm.train_steps import init_state, repeated

EPS = 2.0**-23
# K: (blocks, the fraction that is kept). There are regions of one block and of two, one half beyond the vector (K = 3),
# and with 8 workers hops that are first coded and then dense.
SETTINGS = {1: (3, 0.1), 3: (4, 0.1), 4: (4, 0.1), 8: (8, 0.2)}
every_k = pytest.mark.parametrize("K", [1, 3, 8])


def regions_of(K, value_dtype="bfloat16"):
    blocks, density = SETTINGS[K]
    like = [jax.ShapeDtypeStruct((1024 * blocks,), "float32")]
    layout = plan_layout(like, dense_below=0, capacity=lambda n: math.ceil(n * density))
    return Regions(layout, K, value_codec(value_dtype))


@functools.cache
def ring(K, value_dtype, where="simulation"):
    """The exchange of (vectors (K, n), masks (K, n) bool, flags (K,)), compiled once for all tests."""
    regions = regions_of(K, value_dtype)

    def worker(vector, mask, flag):
        out, nonzeros = ring_sum(regions, vector, pack(mask), jnp.float32(0), flag, "data")
        return out._replace(total=out.total(jnp.asarray(True))), nonzeros

    rows, replicated = P("data"), P()
    if where == "simulation":
        rows, replicated = 0, None
    out = SparseReduced(replicated, rows, replicated, rows, replicated, replicated), replicated
    if where == "simulation":
        return jax.jit(jax.vmap(worker, axis_name="data", out_axes=out))

    def on_device(*rows):
        sums, nonzeros = worker(*(row[0] for row in rows))
        row = jax.tree.map(lambda leaf: leaf[None], {"errors": sums.errors, "sent": sums.sent})
        return sums._replace(**row), nonzeros

    return jax.jit(jax.shard_map(on_device, mesh=jc.make_mesh(data=K), in_specs=P("data"), out_specs=out))


def inputs(K, seed=0, dyadic=False, density=None):
    """Vectors and masks, of about the density that regions have slots for, and much denser in the first half-block."""
    blocks, ratio = SETTINGS[K]
    rng, full = np.random.default_rng(seed), (K, 1024 * blocks)
    vectors = rng.integers(-64, 65, full) / 8 if dyadic else rng.normal(size=full)
    masks = rng.random(full) < (density or ratio)
    if density is None:
        masks[:, :512] |= rng.random((K, 512)) < 0.9
    return vectors.astype(np.float32), masks, np.ones(K, bool)


def accepted(K, masks):
    """The first coordinates that a worker has selected in each region, as many as there are slots."""
    regions = regions_of(K)
    blocks = np.pad(masks, ((0, 0), (0, K * regions.size - masks.shape[1]))).reshape(K, K, regions.size)
    fits = blocks & (np.cumsum(blocks, axis=2) <= regions.region.n_slots)
    return fits.reshape(K, -1)[:, : masks.shape[1]]


def sent_by(out, n):
    """What each worker has sent: its coordinates (K, n) bool, and their values (K, n)."""
    where, values = np.zeros((len(out.sent.position), n), bool), np.zeros((len(out.sent.position), n))
    rows = (np.asarray(field) for field in (out.sent.position, out.sent.filled, out.sent.values))
    for w, (position, filled, payload) in enumerate(zip(*rows, strict=True)):
        assert ((position >= 0) & (position < n)).all()
        assert not payload[~filled].any()
        assert len(set(position[filled])) == filled.sum()
        where[w, position[filled]] = True
        values[w, position[filled]] = payload[filled]
    return where, values


@every_k
def test_nothing_is_lost(K):
    vectors, masks, flags = inputs(K)
    out, _ = ring(K, "bfloat16")(vectors, masks, flags)
    where, values = sent_by(out, vectors.shape[1])
    fits = accepted(K, masks)
    assert masks.sum() > fits.sum()  # some overflowed
    np.testing.assert_array_equal(where, fits)
    np.testing.assert_array_equal(values, np.where(fits, vectors, 0))
    assert out.counts.tolist() == [fits.sum(), (masks & ~fits).sum()]
    assert out.ok

    errors = np.asarray(out.errors[1], np.float64)
    difference = np.asarray(out.total, np.float64) + errors.sum(0) - values.sum(0)
    assert np.all(np.abs(difference) <= K * EPS * np.abs(values).sum(0))
    assert all(row.any() for row in errors)  # every worker has rounded, and keeps the error
    assert np.all(np.abs(errors) <= 2.0**-8 * np.abs(values).sum(0))
    coarse = np.asarray(out.total)
    np.testing.assert_array_equal(coarse, coarse.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("K", [1, 3])
def test_exact_sums(K):
    vectors, masks, flags = inputs(K, seed=1, dyadic=True)
    out, _ = ring(K, "float32")(vectors, masks, flags)
    np.testing.assert_array_equal(out.total, np.where(accepted(K, masks), vectors, 0).sum(0))
    assert not np.any(out.errors[1])


@pytest.mark.slow
@pytest.mark.parametrize("K", [8])
def test_mesh_and_simulation(K):
    rows = inputs(K, seed=2)
    expected = ring(K, "bfloat16")(*rows)
    result = ring(K, "bfloat16", "mesh")(*rows)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    out, nonzeros = result
    for array in (out.total, out.counts, out.ok, nonzeros):
        copies = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert [copy.shape for copy in copies] == [array.shape] * K
        assert len({copy.tobytes() for copy in copies}) == 1


@every_k
def test_hops_carry_unions(K):
    vectors, masks, flags = inputs(K, seed=3)
    _, nonzeros = ring(K, "bfloat16")(vectors, masks, flags)
    fits, size = accepted(K, masks), regions_of(K).size
    expected = np.zeros(K)
    for region in range(K):
        part = slice(region * size, (region + 1) * size)
        union = np.zeros(fits[0, part].shape, bool)
        for hop in range(K):
            union |= fits[(region + 1 + hop) % K, part]
            expected[hop] += union.sum()
    assert nonzeros.tolist() == expected.tolist()
    assert K == 1 or np.all(np.diff(nonzeros) > 0)


def received_by_hand(K, n, capacity, width):
    """The bytes of a ring over n coordinates, of which each worker keeps `capacity`."""
    size = math.ceil(n / (K * 1024)) * 1024
    share = capacity * size / n  # of whole blocks of one tensor; the last region may have fewer
    room = min(size, capacity, math.ceil(max(share * 5 / 4, share + 5 * math.sqrt(share))))
    words = []
    for hop in range(1, K + 1):
        slots = min(size, hop * room)
        coded = index_words("auto", size, slots) + math.ceil(slots * width / 32)
        words.append(min(coded, size * width // 32))
    return 4 * sum(words[:-1]) + 4 * (K - 1) * (words[-1] + 1), 2 * (K - 1) / K * 4 * (K + 2)


@pytest.mark.parametrize(("value_dtype", "width"), [("bfloat16", 16), ("float32", 32)])
@every_k
def test_bytes(K, value_dtype, width):
    regions = regions_of(K, value_dtype)
    payloads, _ = received_by_hand(K, regions.layout.n, regions.layout.n_slots, width)
    assert received_on_ring(regions) == payloads


@pytest.mark.parametrize(("K", "sparsity"), [(1, 0.9), (3, 0.99), (8, 0.8)])
def test_compiled_bytes(K, sparsity):
    n = 1024 * SETTINGS[K][0]
    tx, params = ring_topk(sparsity), {"w": jnp.zeros(n)}
    report = jc.wire_report(tx, params, K)
    ratio = n - math.floor(round(n * sparsity, 6))
    assert report.received == pytest.approx(sum(received_by_hand(K, n, ratio, 16)), abs=1e-6)
    if K not in (1, 4):
        return
    state = init_state(params, tx, jc.make_mesh(data=K)).opt_state
    specs = jc.state_specs(state)
    step = jax.jit(
        jax.shard_map(
            lambda gradients, state: tx.update(jax.tree.map(lambda row: row[0], gradients), state),
            mesh=jc.make_mesh(data=K),
            in_specs=(P("data"), specs),
            out_specs=(P(), specs),
        )
    )
    compiled = step.lower({"w": jnp.zeros((K, n))}, state).compile()
    assert read_program(compiled.as_text()).received == report.program.received


def test_hops_have_room():
    like = [jax.ShapeDtypeStruct((4 * 2**16,), "float32")]
    layout = plan_layout(like, dense_below=0, capacity=lambda n: n // 12)
    regions = Regions(layout, 4, value_codec("bfloat16"))
    region, hops = regions.region, hops_of(regions)
    room = [min(region.n, h * region.n_slots) for h in (1, 2, 3, 4)]
    assert [hop.layout.n_slots for hop in hops] == room
    sums = np.zeros((4, 3, region.n), np.float32)  # at the front, at the end, and far apart
    for rows, slots in zip(sums, room, strict=True):
        rows[0, :slots] = rows[1, region.n - slots :] = 1.5
        rows[2, np.linspace(0, region.n - 1, slots).astype(int)] = -2.5

    def there_and_back(sums):
        payloads = [hop.encode(row) for hop, row in zip(hops, sums, strict=True)]
        return payloads, jnp.stack([hop.decode(payload) for hop, payload in zip(hops, payloads, strict=True)])

    payloads, decoded = jax.jit(jax.vmap(there_and_back, 1, (0, 1)))(sums)
    np.testing.assert_array_equal(decoded, sums)
    for hop, payload in zip(hops, payloads, strict=True):
        assert sum(words.shape[1] for words in payload.values()) == hop.n_words


def test_hops_become_dense():
    assert [hop.indices is None for hop in hops_of(regions_of(8))] == [False] * 3 + [True] * 5


@pytest.mark.parametrize("K", [3, 4])
def test_bad_steps(K):
    vectors, masks, flags = inputs(K, seed=4)
    for worker in range(K):
        flags[:] = True
        flags[worker] = False
        assert not ring(K, "bfloat16")(vectors, masks, flags)[0].ok
    # Finite numbers, two of which have an infinite sum in any order; the next rounding would make it finite.
    place = np.flatnonzero(accepted(K, masks).all(0))[0]
    for pair in ([0, 1], [K - 2, K - 1], [0, K - 1]):
        large = vectors.copy()
        large[pair, place] = 3e38
        assert not ring(K, "bfloat16")(large, masks, np.ones(K, bool))[0].ok
    large[pair, place] = [3e38, -3e38]
    assert ring(K, "bfloat16")(large, masks, np.ones(K, bool))[0].ok


def simulated(tx, n, K):
    """(state, step): K workers of a transformation under vmap; replicated values come out unbatched."""
    state = init_state({"w": jnp.zeros(n)}, tx, K).opt_state

    def is_rows(node):
        return isinstance(node, jc.PerWorker)

    axes = jax.tree.map(lambda node: 0 if is_rows(node) else None, state, is_leaf=is_rows)

    def update(gradient, state):
        rowed = jax.tree.map(lambda s: jax.tree.map(lambda x: x[None], s) if is_rows(s) else s, state, is_leaf=is_rows)
        means, new = tx.update({"w": gradient}, rowed)
        return means["w"], jax.tree.map(
            lambda s: jax.tree.map(lambda x: x[0], s) if is_rows(s) else s, new, is_leaf=is_rows
        )

    return state, jax.jit(jax.vmap(update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data"))


METHODS = {
    "topk": (ring_topk, jc.topk, {}),
    "dct_dp": (ring_dct_dp, jc.dct_dp, {"life_span": 1, "slack": 1.2}),
    "dgc": (ring_dgc, jc.dgc, {"momentum": 0.5}),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_rings_equal_gathers(method):
    K, n = 3, 3072
    on_ring, gathered, options = METHODS[method]
    options = {**options, "value_dtype": "float32", "collective": "gather"}
    runs = [simulated(make(0.9, **options), n, K) for make in (on_ring, gathered)]
    states, steps = [state for state, _ in runs], [step for _, step in runs]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        gradients = rng.permuted(np.tile(np.arange(1, n + 1), (K, 1)), axis=1) * rng.choice([-1, 1], (K, n))
        gradients = gradients.astype(np.float32) / 8  # exact, with few ties
        outs = [step(gradients, state) for step, state in zip(steps, states, strict=True)]
        means, states = zip(*outs, strict=True)
        assert states[0].metrics.sent == states[1].metrics.sent > 0
        assert [state.metrics.overflow for state in states] == [0, 0]
        np.testing.assert_array_equal(*means)
        jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, states))


@pytest.mark.parametrize(
    ("exchange", "ones"), [(ring_dct_dp(0.9, life_span=10**6), 4096), (ring_topk(0.9), 2048)], ids=["dct_dp", "topk"]
)
def test_no_coordinate_starves(exchange, ones):
    gradient = np.zeros((2, 4096), np.float32)
    gradient[:, :ones] = 1
    state, overflow = repeated(optax.chain(exchange, optax.sgd(1.0)), gradient, 120)
    assert overflow > 0
    np.testing.assert_array_equal(state.params["w"] != 0, gradient[0] != 0)


@pytest.mark.slow
def test_recovery():
    """Of more than 4096 elements, where a maximum that XLA compiles for a CPU loses NaN."""
    K, n = 3, 6144
    state, step = simulated(ring_topk(0.9), n, K)
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(K, n)).astype(np.float32)
    _, before = step(gradients, state)
    for bad in (np.nan, np.inf):
        spoiled = gradients.copy()
        spoiled[2, 6000] = bad
        means, after = step(spoiled, before)
        assert (int(after.metrics.skipped), int(after.metrics.sent), int(after.metrics.overflow)) == (1, 0, 0)
        assert not np.any(means)
        np.testing.assert_array_equal(after.residual.rows, before.residual.rows)
    means, after = step(gradients, after)
    assert after.metrics.skipped == 0
    total = np.asarray(means, np.float64) * K + np.asarray(after.residual.rows, np.float64).sum(0)[:n]
    expected = gradients.astype(np.float64).sum(0) + np.asarray(before.residual.rows, np.float64).sum(0)[:n]
    assert np.abs(total - expected).max() <= 8 * EPS * np.abs(expected).max()


@pytest.mark.slow
def test_the_largest_numbers():
    """3.4e38, which only an old residual can hold, is sent as the largest bfloat16; what remains is small."""
    K, n = 2, 1024
    state, step = simulated(ring_topk(0.9), n, K)
    owed = np.array(state.residual.rows)
    owed[1, 5] = 3.4e38
    means, after = step(np.zeros((K, n), np.float32), state.replace(residual=jc.PerWorker(owed)))
    assert after.metrics.skipped == 0
    largest = float(jnp.finfo(jnp.bfloat16).max)
    assert means[5] == np.float32(largest / 2)
    assert np.asarray(after.residual.rows)[:, 5].sum() == np.float32(3.4e38) - np.float32(largest)
