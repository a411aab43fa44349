"""Messages between workers, and with two workers by an all-reduce: values, gradients, bytes, whole steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractDevice
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.accounting.jaxpr import traced_program
from jaxcomm.collectives import messages
from jaxcomm.collectives.axis import abstract_mesh

ROWS = P("data")
NUMBERS = {
    "float32": np.array([[1, -0.0, np.nan, np.inf, 1e-40], [2**-149, 3e38, -3e38, 0, 7]], np.float32),
    "uint32": np.array([[0, 2**32 - 1, 1, 2**31, 5], [2**32 - 1, 2**32 - 1, 0, 2**31, 6]], np.uint32),
    "int32": np.array([[0, -1, 1, -(2**31), 5], [2**31 - 1, -1, 0, -(2**31), 6]], np.int32),
}


@pytest.fixture(params=["by an all-reduce", "as they are", "in tiles"])
def way(request, monkeypatch):
    choose(request.param, monkeypatch)
    monkeypatch.setattr(messages, "SPLIT_FROM", 0)
    return request.param


def choose(way, monkeypatch):
    monkeypatch.setattr(messages, "LARGE", 1 if way == "by an all-reduce" else 1 << 40)
    if way == "in tiles":
        monkeypatch.setattr(messages, "traced_platform", lambda: "tpu")


def on_mesh(function, out_specs=ROWS, check_vma=True, workers=2):
    mesh = jc.make_mesh(data=workers)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=out_specs, check_vma=check_vma))


def same_bits(result, expected):
    assert np.asarray(result).dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(result).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_bit_arrives(dtype, check_vma, way):
    """Also of numbers that are NaN, infinite, subnormal or minus zero."""
    x = NUMBERS[dtype]  # a row for each worker

    def worker(x):
        local = x[0]
        rows = jnp.stack([local, local[::-1]])
        return (
            messages.all_gather_rows(local, "data"),
            messages.all_to_all(rows, "data"),
            messages.to_next(local, "data"),
        )

    gathered, arrival, shifted = on_mesh(worker, check_vma=check_vma)(x)
    same_bits(gathered.reshape(2, 2, 5), np.stack([x, x]))
    same_bits(arrival.reshape(2, 2, 5), np.stack([x, x[:, ::-1]]))  # row 0 of both to worker 0, row 1 to worker 1
    same_bits(shifted.reshape(2, 5), x[::-1])
    repeat = on_mesh(lambda x: messages.all_gather_same(x[0], "data"), P(), check_vma)(x)
    same_bits(repeat, x)


def test_gathers_are_replicated(way):
    """P() with check_vma proves it; simulated workers get one copy."""
    for workers in (2, 4):
        x = np.arange(3 * workers, dtype=np.float32).reshape(workers, 3)

        def worker(x):
            return messages.all_gather_same(2 * x.reshape(3), "data")

        np.testing.assert_array_equal(on_mesh(worker, P(), workers=workers)(x), 2 * x)
        np.testing.assert_array_equal(jax.vmap(worker, axis_name="data", out_axes=None)(x), 2 * x)


def test_sums_and_gradients(way):
    """Against the sums over all workers in NumPy."""
    random = np.random.default_rng(0)
    x, weights = (random.standard_normal((2, 2, 3)).astype(np.float32) for _ in range(2))

    def gradient_of(collective):
        def worker(x, weights):
            y, backward = jax.vjp(collective, x[0])
            return y[None], backward(weights.reshape(y.shape))[0][None]

        return jax.jit(jax.shard_map(worker, mesh=jc.make_mesh(data=2), in_specs=P("data"), out_specs=P("data")))

    y, gradient = gradient_of(lambda x: messages.sum_scatter(x, "data"))(x, weights[:, 0])
    np.testing.assert_array_equal(y, x[0] + x[1])
    np.testing.assert_array_equal(gradient, np.stack([weights[:, 0]] * 2))
    total = on_mesh(lambda x: messages.sum_of(x.reshape(-1), "data"), P())(x)
    np.testing.assert_array_equal(total, (x[0] + x[1]).reshape(-1))
    y, gradient = gradient_of(lambda x: messages.all_to_all(x, "data"))(x, weights)
    np.testing.assert_array_equal(y, x.swapaxes(0, 1))
    np.testing.assert_array_equal(gradient, weights.swapaxes(0, 1))
    y, gradient = gradient_of(lambda x: messages.all_gather_rows(x, "data", axis=1))(x[:, 0, None], weights)
    np.testing.assert_array_equal(y, np.stack([x[:, 0].reshape(1, 6)] * 2))
    np.testing.assert_allclose(gradient[:, 0], weights.sum(0).reshape(2, 3), rtol=1e-6)


@pytest.mark.parametrize(("smaller", "op"), [(0, "all_reduce"), (1, "all_gather")])
def test_two_workers_all_reduce(smaller, op):
    words = messages.LARGE // 4 - smaller
    x = np.ones((2, words), np.uint32)
    function = on_mesh(lambda x: messages.all_gather_same(x[0], "data"), P())
    compiled, traced = read_program(function.lower(x).compile().as_text()), traced_program(function, x)
    for program in (compiled, traced):
        assert [traffic.op for traffic in program.always] == [op]
        assert program.received == 4 * words


def test_other_types_and_workers(monkeypatch):
    monkeypatch.setattr(messages, "LARGE", 1)
    for workers, dtype in ((2, np.float16), (4, np.float32)):
        x = np.ones((workers, 8), dtype)
        program = traced_program(on_mesh(lambda x: messages.all_gather_same(x[0], "data"), P(), workers=workers), x)
        assert [traffic.op for traffic in program.always] == ["all_gather"]


def traced_for(platform, function, shape, dtype=jnp.float32, workers=4):
    """Returns the collectives of a function of each worker's own array, traced for devices that need not be here."""
    kind = AbstractDevice(device_kind="some", num_cores=1, platform=platform)
    mesh = abstract_mesh({"data": workers}, kind)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return traced_program(sharded, jax.ShapeDtypeStruct(shape, dtype)).always


@pytest.mark.parametrize(
    ("shape", "dtype", "tiles"),
    [((1000,), jnp.uint32, 1), ((1024,), jnp.uint32, 1), ((3, 1000), jnp.float32, 3), ((4097,), jnp.int8, 2)],
)
def test_tiles_of_a_gather(shape, dtype, tiles):
    """XLA turns a gather of anything else into an all-reduce of zeros (seen in libtpu 0.0.42)."""
    (traffic,) = traced_for("tpu", lambda x: messages.all_gather_same(x, "data"), shape, dtype)
    assert (traffic.op, traffic.operand_bytes) == ("all_gather", tiles * 4096)
    (traffic,) = traced_for("cpu", lambda x: messages.all_gather_same(x, "data"), shape, dtype)
    assert traffic.operand_bytes == np.prod(shape) * jnp.dtype(dtype).itemsize


def test_tiles_of_a_scatter():
    (traffic,) = traced_for("tpu", lambda x: messages.sum_scatter(x, "data"), (4, 1000))
    assert (traffic.op, traffic.operand_bytes) == ("reduce_scatter", 4 * 4096)


@pytest.mark.parametrize(("words", "payload"), [(100, 100), (32 * 1024 - 1, 32 * 1024 - 1), (32 * 1024 + 1, 36 * 1024)])
def test_sums_by_tiles(words, payload):
    (traffic,) = traced_for("tpu", lambda x: messages.sum_of(x, "data"), (words,))
    assert (traffic.op, traffic.operand_bytes) == ("all_reduce", 4 * payload)


def test_other_platforms_gather(monkeypatch):
    for platform, op in (("cpu", "all_reduce"), ("gpu", "all_gather"), ("tpu", "all_gather")):
        large = (messages.LARGE,)
        (traffic,) = traced_for(platform, lambda x: messages.all_gather_same(x, "data"), large, workers=2)
        assert traffic.op == op


EXCHANGES = {
    "gather": lambda: jc.topk(0.9, dense_below=0),
    "balanced": lambda: jc.topk(0.9, dense_below=0, collective="balanced"),
    "two shots": lambda: jc.plump_dp(value_dtype="bfloat16"),
    "two shots, checksum": lambda: jc.plump_dp(value_dtype="bfloat16", checksum=True),
    "ring": lambda: jc.iwp(0.01, dense_below=0),
    "slim_dp": lambda: jc.slim_dp(0.5, 0.2, q=3),
    "hierarchical": lambda: jc.hierarchical(jc.plump_dp(axis_name="slice"), inside="data", across="slice"),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("gather", "two shots") else pytest.param(name, marks=pytest.mark.slow) for name in EXCHANGES],
)
def test_whole_steps(name, monkeypatch):
    """Five steps of two workers in each way; `verify` checks the compiled program against its claim."""
    params = {"a": np.linspace(-1, 1, 2048, dtype=np.float32).reshape(64, 32), "b": np.ones(64, np.float32)}
    rows = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)

    def loss(params, batch):
        return jnp.mean((batch @ params["a"].T + params["b"]) ** 2)

    results = []
    for way in ("by an all-reduce", "as they are", "in tiles"):
        choose(way, monkeypatch)
        axes = {"slice": 1, "data": 2} if name == "hierarchical" else {"data": 2}
        step = jc.make_train_step(
            loss,
            jc.chain(EXCHANGES[name](), optax.sgd(0.1))
            if name != "slim_dp"
            else jc.chain(optax.sgd(0.1), EXCHANGES[name]()),
            jc.make_mesh(**axes),
            **({"axis_name": ("slice", "data")} if name == "hierarchical" else {}),
        )
        state = step.init(params)
        report = step.verify(state, rows)
        for _ in range(5):
            state, _ = step(state, rows)
        results.append((jax.tree.leaves(jax.device_get(state.params)), report.received + report.received_at_most))
        plain = {traffic.op for _, traffic in report.program.operations()} - {"all_reduce"}
        assert bool(plain) == (way != "by an all-reduce")
    (one, bytes_of_one), (two, bytes_of_other), (third, bytes_of_tiles) = results
    for a, b, c in zip(one, two, third, strict=True):
        same_bits(a, b)
        same_bits(a, c)
    assert bytes_of_one == bytes_of_other < bytes_of_tiles


def test_foreign_steps(monkeypatch):
    """`data_parallel` turns JAX's own check off, and checks itself what differs between workers."""
    monkeypatch.setattr(messages, "LARGE", 1)
    tx = jc.chain(jc.topk(0.9, dense_below=0), optax.sgd(0.1))

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = np.ones((64, 32), np.float32)
    parallel = jc.data_parallel(step, jc.make_mesh(data=2))
    (result, _), _ = parallel((params, tx.init(params)), np.ones((4, 64), np.float32))
    assert result.shape == params.shape
