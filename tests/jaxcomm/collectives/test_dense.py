import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.collectives import dense, dense_mean, fuse, split_words


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_shape_type_and_sum(dtype):
    x = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(dtype)
    small = np.full(4, 2**-7, dtype)
    small[0] = 1

    def worker(x, s):
        return dense_mean([x, s], "data")

    (mean, mean_of_small), finite = jax.vmap(worker, axis_name="data", out_axes=None)(x, small)
    assert bool(finite)
    assert mean.dtype == mean_of_small.dtype == dtype
    np.testing.assert_array_equal(mean, (x.astype(np.float32).sum(0) / np.float32(4)).astype(dtype))
    np.testing.assert_array_equal(mean_of_small, np.asarray((1 + 3 * 2**-7) / 4, dtype))


def test_no_tensors():
    means, finite = dense_mean([], "data")
    assert means == []
    assert bool(finite)


@pytest.mark.parametrize(
    ("numbers", "finite"), [((1, 2), True), ((np.inf, 2), False), ((1, np.nan), False), ((3e38, 3e38), False)]
)
def test_bad_numbers(numbers, finite):
    x = np.zeros((2, 5), np.float32)
    x[:, 3] = numbers
    _, ok = jax.vmap(lambda x: dense_mean([x], "data"), axis_name="data", out_axes=None)(x)
    assert bool(ok) == finite


def test_one_all_reduce():
    mesh = jc.make_mesh(data=2)

    def worker(x):
        return dense_mean([x, 2 * x[0], x.astype(jnp.bfloat16)], "data")

    text = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=P("data"), out_specs=P())).lower(np.ones((4, 3))).as_text()
    assert text.count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16"])
def test_the_last_tensors_first(monkeypatch, value_dtype):
    """In buckets of at least so many bytes, with the same means, and the same word on whether they are finite."""
    random, sizes = np.random.default_rng(0), (40, 0, 300, 7, 90, 64)
    rows = [random.normal(size=(4, size)).astype(np.float32) for size in sizes]
    mesh = jc.make_mesh(data=4)

    def averaged(rows):
        def worker(*leaves):
            return dense_mean([leaf[0] for leaf in leaves], "data", value_dtype)

        run = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=P("data"), out_specs=P()))
        sums = re.findall(r"psum\w*\[.*?\] |all_to_all\[.*?\] ", str(run.trace(*rows).jaxpr), re.DOTALL)
        return *run(*rows), len(sums)

    result, ok, count = averaged(rows)
    assert ok
    monkeypatch.setattr(dense, "traced_platform", lambda: "gpu")
    monkeypatch.setattr(dense, "_BUCKET", 4 * 100)
    parts, ok, counts = averaged(rows)
    assert ok
    assert counts == 3 * count
    for one, two in zip(result, parts, strict=True):
        np.testing.assert_array_equal(one, two)
    assert [[x.size for x in bucket] for bucket in dense._buckets([x[0] for x in rows])] == [
        [90, 64],
        [300, 7],
        [40, 0],
    ]
    for place in (0, 2, 5):  # one of each bucket
        spoiled = [row.copy() for row in rows]
        spoiled[place][1, 3] = np.inf
        assert not averaged(spoiled)[1]


@pytest.mark.parametrize("value_dtype", ["bfloat16", "float16", "float32"])
def test_one_all_reduce_of_each_type(monkeypatch, value_dtype):
    """On a GPU, in the type on the wire, of what the workers divided by K and rounded."""
    x = np.random.default_rng(0).normal(size=(4, 3000)).astype(np.float32)
    monkeypatch.setattr(dense, "traced_platform", lambda: "gpu")
    run = jax.jit(
        jax.shard_map(
            lambda x: dense_mean([x[0]], "data", value_dtype, collective="all_reduce"),
            mesh=jc.make_mesh(data=4),
            in_specs=P("data"),
            out_specs=P(),
        )
    )
    text = run.lower(x).as_text()
    assert re.findall(r"stablehlo\.\w*(?:reduce_scatter|gather|to_all|all_reduce)", text) == ["stablehlo.all_reduce"]
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[value_dtype]
    assert f"tensor<3000x{short}>) -> tensor<3000x{short}>" in text
    (mean,), ok = run(x)
    assert ok
    eps = float(jnp.finfo(value_dtype).eps)  # each of 4 summands and of 3 sums is rounded by half of it
    np.testing.assert_allclose(mean, x.mean(0), rtol=0, atol=3.5 * eps * np.abs(x).max())
    x[2, 5] = np.nan
    assert not run(x)[1]


def test_no_all_reduce_of_bfloat16_on_cpus():
    tx = jc.plump_dp(value_dtype="bfloat16", collective="all_reduce")
    step = jc.make_train_step(
        lambda params, x: (params["w"] * x).mean(), jc.chain(tx, optax.sgd(0.1)), jc.make_mesh(data=2)
    )
    with pytest.raises(ValueError, match=r"must be 'two_shot' for bfloat16 on CPUs.*Leave it out"):
        step(step.init({"w": np.ones(8, np.float32)}), np.ones((2, 8), np.float32))
    with pytest.raises(ValueError, match="unless value_dtype='bfloat16'; got 'all_reduce'"):
        jc.plump_dp(collective="all_reduce")
    with pytest.raises(ValueError, match="in two shots"):
        jc.plump_dp(value_dtype="bfloat16", collective="all_reduce", checksum=True)


def test_fused_words():
    payload = {
        "b": jnp.arange(3, dtype=jnp.uint32),
        "a": jnp.arange(10, 12, dtype=jnp.uint32),
        "c": jnp.zeros(0, jnp.uint32),
    }
    words = fuse(payload)
    assert words.tolist() == [10, 11, 0, 1, 2]
    for name, part in split_words(words, payload).items():
        assert part.tolist() == payload[name].tolist()


def test_float16_divides_first():
    x = np.random.default_rng(0).normal(size=(2, 3000)).astype(np.float32)
    (mean,), finite = jax.vmap(lambda x: dense_mean([x], "data", "float16"), axis_name="data", out_axes=None)(x)
    halves = (x / 2).astype(np.float16)
    assert bool(finite)
    assert mean.dtype == np.float32
    np.testing.assert_array_equal(mean, halves[0] + halves[1])


@pytest.mark.parametrize(("number", "finite"), [(60_000, True), (65_504, True), (131_100, False)])
def test_float16_beyond_its_range(number, finite):
    x = np.zeros((2, 5), np.float32)
    x[:, 3] = number
    (mean,), ok = jax.vmap(lambda x: dense_mean([x], "data", "float16"), axis_name="data", out_axes=None)(x)
    assert (bool(ok), bool(np.isfinite(mean[3]))) == (finite, finite)
