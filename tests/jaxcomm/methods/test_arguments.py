"""What the factories refuse, when they are called or when they see a gradient."""

import dataclasses
import inspect
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.checks import count
from jaxcomm.exchange import Exchange
from jaxcomm.kernels.noise import make_key
from tests.jaxcomm.cases import CASES, FIRST
from tests.marks import slow_except
from tests.refusals import refused


def taking(argument):
    return [case.factory for case in FIRST if argument in inspect.signature(case.factory).parameters]


METHODS = [x for x in vars(jc.methods).values() if inspect.isclass(x) and issubclass(x, Exchange)]
OWN_COORDINATES = taking("chunk")
SPARSE = taking("sparsity")
COMPRESSORS = taking("dense_below")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("method", METHODS)
def test_families_take_keywords(method):
    """A field that is written again without `kw_only=True` would become the first positional argument."""
    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(method).parameters
    for base in method.__mro__[1:]:
        if issubclass(base, Exchange):
            keywords = [name for name, x in inspect.signature(base).parameters.items() if x.kind is by_name]
            assert [name for name in keywords if parameters[name].kind is not by_name] == []


@pytest.mark.parametrize("factory", SPARSE)
@pytest.mark.parametrize("number", [np.float64(0.75), np.float32(0.75), 0])
def test_sparsity(factory, number):
    """Such as np.linspace returns, in a sweep."""
    layout = jax.eval_shape(factory(number, dense_below=0).init, jnp.zeros(1000))
    assert layout.residual.rows.shape == (1, 1024)


def test_slack():
    jax.eval_shape(jc.dct_dp(0.75, slack=np.float32(1.5)).init, jnp.zeros(1000))


# (argument, who takes it, values that break its rule)
NUMBERS = [
    ("sparsity", SPARSE, [1.0, -0.1, NAN, 99, "0.9", None]),
    ("dense_below", COMPRESSORS, [-1, 1.5]),
    ("life_span", [jc.dct_dp], [0, -1, 2.5, True, None]),
    ("slack", [jc.dct_dp], [0.5, INF, NAN, -1, None, "1.1"]),
    ("drain_every", [jc.dct_dp], [0, -5, 0.5]),
    ("bits", [jc.quant_dp], [3, 1, 12, "8", None]),
    ("bucket", [jc.quant_dp], [0, 31, 16, 500, 2048, 512.0]),
    ("norm", [jc.quant_dp], ["max_abs", 2, None]),
    ("clip", [jc.terngrad], [0, -1.0, NAN, INF, "2"]),
    ("learning_rate", [jc.pulse], [0, -1, NAN, INF, "1"]),
    ("density", [jc.iwp], [0, 1.1, -0.1, NAN, "0.1"]),
    ("publishers", [jc.iwp], [0, 1.5, True, None]),
    ("life_span", [jc.iwp], [0, 2.5]),
    ("alpha", [jc.iwp], [0, -1, NAN, INF, "1"]),
    ("beta", [jc.iwp], [-0.1, NAN, INF, None]),
    ("floor", [jc.iwp], [0, -1, NAN, INF]),
    ("eps", [jc.iwp], [0, -1e-6, NAN]),
    ("C", [jc.iwp], [-1, NAN, "1"]),
    ("mask_codec", [jc.iwp], ["rice"]),
    ("momentum", [jc.dgc, jc.iwp], [1, -0.1, NAN, "0.9"]),
    ("clip", [jc.dgc, jc.iwp], [0, -1, NAN, INF, "1"]),
    ("warmup_steps", [jc.dgc, jc.iwp], [-1, 1.5, None]),
]


@pytest.mark.parametrize(
    ("name", "factory", "values"), [(name, x, values) for name, takers, values in NUMBERS for x in takers]
)
def test_numbers(name, factory, values):
    for value in values:
        refused(lambda value=value: factory(**{name: value}), f"{name} must be ", f"; got {value!r}. ")


SEEDED = [jc.dct_dp, jc.iwp, jc.powersgd, jc.quant_dp, jc.random_k, jc.slim_dp, jc.terngrad]


@pytest.mark.parametrize("factory", SEEDED)
def test_seeds(factory):
    for value in (1.5, None, "1", True):
        refused(lambda value=value: factory(seed=value), "seed must be an integer", f"got {value!r}")


def test_seeds_of_any_size():
    keys = [int(make_key(seed, 7)) for seed in (0, 1, -1, 2**31, 2**32 - 1, 2**40 + 1)]
    assert keys[1] == keys[5]  # the words are 32 bits
    assert keys[2] == keys[4]
    assert len(set(keys)) == 4
    assert keys[0] == int(make_key(jnp.int32(0), 7))


@pytest.mark.parametrize(
    ("name", "make", "value"),
    [
        ("axis_name", jc.topk, None),
        ("axis_name", jc.topk, ["data"]),
        ("axis_name", jc.plump_dp, 3),
        ("checksum", jc.topk, "no"),
        ("exchange", lambda exchange: jc.hierarchical(exchange), jc.topk),
        ("exchange", lambda exchange: jc.local_sgd(2, exchange=exchange), None),
        ("others", lambda others: jc.topk(where="w", others=others), "plump_dp"),
        ("outer", lambda outer: jc.local_sgd(2, exchange=jc.plump_dp(), outer=outer), 0.7),
        ("fragments", lambda fragments: jc.local_sgd(2, exchange=jc.plump_dp(), fragments=[fragments]), "("),
    ],
)
def test_other_kinds_of_values(name, make, value):
    got = getattr(value, "__name__", None) or (repr(value) if name in ("axis_name", "checksum", "fragments") else "")
    refused(lambda: make(**{name: value}), f"{name} must be ", "got ", got)


# As above, with what the message offers; a gradient must be seen.
CHOICES = [
    *(("value_dtype", factory, "int8", "bfloat16") for factory in taking("value_dtype")),
    *(("collective", factory, "all_reduce", "gather") for factory in (*OWN_COORDINATES, jc.terngrad, jc.sign)),
    *(("collective", factory, "all_reduce", "psum") for factory in (jc.random_k, jc.iwp, jc.quant_dp)),
]


@pytest.mark.parametrize(("name", "factory", "value", "offered"), CHOICES)
def test_choices(name, factory, value, offered):
    refused(lambda: factory(**{name: value}).init(jnp.zeros(1000)), name, f"'{value}'", offered)


@pytest.mark.parametrize("factory", [jc.random_k, jc.iwp])
def test_psum_of_16_bits(factory):
    tx = factory(value_dtype="bfloat16", collective="psum")
    refused(lambda: tx.init(jnp.zeros(1000)), "collective='psum'", "got 16", "value_dtype='float32'")


def test_rules_of_a_subclass():
    @dataclasses.dataclass(frozen=True)
    class Denser(jc.methods.DctDp):
        sparsity: float = 0.5
        life_span: Annotated[int, count(5, "Take 5")] = 5

    with pytest.raises(ValueError, match="sparsity must be at least 0 and below 1"):
        Denser(1.0)
    with pytest.raises(ValueError, match=r"life_span must be an integer of at least 5; got 4\. Take 5"):
        Denser(life_span=4)


def update_of(tx, tree, K=2, params=None):
    state = tx.init(tree)
    update = jax.vmap(lambda g: tx.update(g, state, params)[0], axis_name="data", out_axes=None)
    return jax.jit(update)(jax.tree.map(lambda x: jnp.stack([x] * K), tree))


def test_publishers_and_workers():
    w = jnp.ones(1000)
    refused(lambda: update_of(jc.iwp(publishers=3), w, 2, w), "publishers", "workers, 2", "got 3")


def test_importance_needs_parameters():
    refused(lambda: update_of(jc.iwp(), jnp.ones(1000)), "params", "iwp", "got none")


def test_schedules():
    """Such as Optax's, which take the step as a JAX number."""
    tx = jc.iwp(optax.linear_schedule(1e-3, 2.0, 10), beta=lambda step: 0.1 / (step + 1), density=1.0, momentum=0.0)
    w = jnp.ones(1000)
    np.testing.assert_array_equal(update_of(tx, w, 2, w), w)


@pytest.mark.parametrize("factory", taking("axis_name"))
def test_one_axis_in_scope(factory):
    w = jnp.ones(1000)
    refused(lambda: update_of(factory(axis_name="workers"), w, 2, w), "'workers'", "jax.shard_map")


@pytest.mark.parametrize("case", slow_except(FIRST, FIRST[0]), ids=[case.name for case in FIRST])
def test_16_bits_in_and_out(case):
    """Of compressed and dense tensors. Gradients are ones, so that everything is large enough to be sent at once."""
    types = {"a": "float16", "b": "bfloat16", "c": "float32"}
    tree = {name + str(size): jnp.ones(size, dtype) for name, dtype in types.items() for size in (3, 600)}
    means = update_of(case.factory(**case.sends_ones), tree, 2, tree)
    assert {name: mean.dtype for name, mean in means.items()} == {name: x.dtype for name, x in tree.items()}
    for name, mean in means.items():
        np.testing.assert_allclose(np.asarray(mean, np.float32), tree[name].astype(jnp.float32), rtol=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_variant], ids=str)
@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "got an empty tree"),
        ({"w": np.zeros(600, np.int32)}, "got int32 at .*'w'"),
        ({"w": np.zeros(600, np.complex64)}, "got complex64 at .*'w'"),
    ],
)
def test_other_trees(case, tree, message):
    tx = case.make()
    with pytest.raises(ValueError, match=message):
        tx.init(tree)
    state = tx.init({"w": np.zeros(600, np.float32)})
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda g: tx.update(g, state, tree), axis_name="data", axis_size=2)(
            jax.tree.map(lambda x: np.stack([x, x]), tree)
        )


@pytest.mark.parametrize("case", [case for case in CASES if case.compresses and not case.is_variant], ids=str)
def test_2_to_the_31_elements(case):
    shapes = {"w": jax.ShapeDtypeStruct((2**31,), np.float32)}
    with pytest.raises(ValueError, match=r"fewer than 2\^31 elements; got 2147483648\. Shard the parameters"):
        jax.eval_shape(case.make().init, shapes)


@pytest.mark.parametrize("number", [np.int64, np.int32])
def test_numpy_numbers(number):
    """They do not give their type to what they multiply, as in a sweep over np.arange."""
    assert jc.local_sgd(number(2), exchange=jc.plump_dp()).method.steps == 2
    method = jc.dgc(np.float64(0.9), momentum=np.float64(0.5), dense_below=number(7), chunk=number(1024)).method
    assert {type(x) for x in (method.sparsity, method.momentum, method.dense_below, method.chunk)} == {
        int,
        float,
    }
    assert jc.quant_dp(number(4), bucket=number(64)).method == jc.quant_dp(4, bucket=64).method
    assert jc.chain(jc.plump_dp(), accumulate=number(2)).accumulate == 2
    assert (
        jc.wire_report(jc.sparse_loco(number(2), chunk=number(1024)), {"w": np.zeros(5000, np.float32)}, 2).steps == 2
    )


def test_estimates_leave_integers_out():
    tree = {"w": np.zeros((40, 50), np.float32)}
    estimates = [jc.planner.estimate(tree, 4, 1e9) for tree in (tree, {**tree, "n": np.int32(1)})]
    assert estimates[0].parameters == estimates[1].parameters == 2000


LLAMA = {
    f"layer{i}": {
        "q": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),
        "w": jax.ShapeDtypeStruct((4096, 57344), jnp.bfloat16),
    }
    for i in range(10)
}  # 2.5 billion elements, as of a language model's layers
N = 10 * 4096 * (4096 + 57344)


@pytest.mark.parametrize(
    ("tx", "received"),
    [
        (jc.plump_dp(), 2 * 3 / 4 * 4 * N),
        (jc.local_sgd(5, exchange=jc.plump_dp()), 2 * 3 / 4 * 4 * N),
        (jc.plump_dp(p=5), 2 * 3 / 4 * 4 * N),
        (jc.powersgd(4), 2 * 3 / 4 * 4 * 4 * 10 * (4096 + 4096 + 4096 + 57344)),
        (jc.topk(0.5, collective="gather"), 3 * (N / 8 + N + 2 * 12)),
        (jc.random_k(0.5, value_dtype="float32", collective="psum"), 2 * 3 / 4 * (4 * N / 2 + 2 * 4)),
    ],
)
def test_parts_of_large_trees(tx, received):
    """By shapes alone; two parts, with a header each."""
    assert jc.wire_report(tx, LLAMA, 4).received_in_exchange == received


def test_parts_skip_together(monkeypatch):
    monkeypatch.setattr("jaxcomm.exchange.MAX_ELEMENTS", 4096)
    rng = np.random.default_rng(0)
    params = {name: np.zeros(2000, np.float32) for name in "abcd"}
    tx = jc.topk(0.9, value_dtype="float32")
    step = jc.simulate(
        lambda p, b: sum(jnp.vdot(p[name], b[name].mean(0)) for name in p), jc.chain(tx, optax.sgd(1.0)), 2
    )
    first = step.init(params)
    assert (
        sum(
            isinstance(node, jc.PerWorker)
            for node in jax.tree.leaves(first, is_leaf=lambda x: isinstance(x, jc.PerWorker))
        )
        == 8
    )
    batch = {name: rng.normal(size=(2, 2000)).astype(np.float32) for name in params}
    values = {name: np.where(np.abs(x) >= np.sort(np.abs(x))[:, -200:-199], x, 0) for name, x in batch.items()}
    state, metrics = step(step.init(params), batch)
    for name, value in step.params(state).items():
        np.testing.assert_allclose(value, -values[name].mean(0), rtol=1e-6)
    assert int(metrics["sent"]) == 2 * 4 * 200
    batch["a"][1, 3] = np.nan
    before = jax.tree.map(np.asarray, state)
    after, metrics = step(state, batch)
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(step.params(after)["d"], before.params["d"])
    assert step.resize(after, 3).step == 2
