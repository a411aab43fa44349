"""The exchange of shards: each shard as if it were alone; all or nothing; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.chain import split_chain
from jaxcomm.steps.sharding import plan_shards

K, M = 2, 2
SPECS = {"copy": P(), "model": P(None, "model"), "whole": P("data"), "whole_too": P("model", "data")}
SHAPES = {"copy": (24, 32), "model": (24, 64), "whole": (4, 6), "whole_too": (4, 6)}


def numbers(seed, rows=()):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(*rows, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(seed):
    """Gradients: each worker's own (K, ...), or already reduced."""
    per_worker, whole = numbers(seed, (K,)), numbers(seed + 100)
    return {name: (whole if "data" in str(spec) else per_worker)[name] for name, spec in SPECS.items()}


def exchange_of(tx, mesh=None):
    mesh = mesh or jc.make_mesh(data=K, model=M)
    params = numbers(0)
    exchange = plan_shards(tx, mesh, SPECS, params, "data")
    treedef = jax.tree.structure(params)
    place = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(params, place)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), exchange.gradient_specs(treedef))
    state = jax.jit(exchange.init)(params)
    step = jax.jit(lambda gradients, state: exchange(gradients, state, params))
    return lambda gradients, state: step(jax.device_put(gradients, shardings), state), state


def alone(tx, gradients, steps):
    """The exchange of only one group's rows (K, ...), under vmap."""
    one = tx.init(jax.tree.map(lambda rows: jnp.zeros(rows.shape[1:]), gradients[0]))
    axes = jax.tree.map(lambda n: 0 if isinstance(n, jc.PerWorker) else None, one, is_leaf=is_rows)
    state = jax.tree.map(
        lambda n: jax.tree.map(lambda row: jnp.repeat(row[None], K, 0), n) if is_rows(n) else n, one, is_leaf=is_rows
    )
    update = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")
    for step in range(steps):
        means, state = jax.jit(update)(gradients[step], state)
    return means, state


def is_rows(node):
    return isinstance(node, jc.PerWorker)


@pytest.mark.parametrize(
    "tx",
    [pytest.param(jc.topk(0.9), id="topk", marks=pytest.mark.slow), pytest.param(jc.powersgd(2), id="powersgd")],
)
def test_slices_are_exchanged_alone(tx):
    """Means, residuals and counts of two steps, against the same transformation on each shard by itself."""
    step, state = exchange_of(tx)
    for seed in (1, 2):
        means, state = step(gradients(seed), state)
    data = [gradients(seed) for seed in (1, 2)]
    mean_copy, copied_state = alone(tx, [{"copy": g["copy"]} for g in data], 2)
    np.testing.assert_allclose(means["copy"], mean_copy["copy"], rtol=1e-4, atol=1e-5)
    count = float(jc.exchange_metrics(copied_state).sent)
    for m in range(M):
        part = slice(32 * m, 32 * (m + 1))
        mean_slice, own_state = alone(tx, [{"model": g["model"][:, :, part]} for g in data], 2)
        np.testing.assert_allclose(means["model"][:, part], mean_slice["model"], rtol=1e-4, atol=1e-5)
        count += float(jc.exchange_metrics(own_state).sent)
        if hasattr(own_state, "residual"):
            (exchange_state,) = state.exchanges[1]
            assert exchange_state.residual.shards == 1
            rows = np.asarray(exchange_state.residual.rows).reshape(K, M, -1)[:, m]  # workers outermost
            np.testing.assert_allclose(rows, own_state.residual.rows[:, 0], rtol=1e-4, atol=1e-5)
    assert float(state.metrics.sent) == count
    for name in ("whole", "whole_too"):
        np.testing.assert_array_equal(means[name], data[-1][name])


def test_specs_of_rows():
    _, state = exchange_of(jc.topk(0.9))
    specs = jax.tree.leaves(jc.state_specs(state), is_leaf=lambda node: isinstance(node, P))
    assert {str(P("data")), str(P(("data", "model"))), str(P(("model",))), str(P())} >= set(map(str, specs))
    assert P(("data", "model")) in specs


def test_workers_along_two_axes():
    """A hierarchical exchange with an additional model axis: the mean of all four workers."""
    mesh = jc.make_mesh(slice=2, data=2, model=2)
    tx = jc.hierarchical(jc.topk(0.0, value_dtype="float32", axis_name="slice"), inside="data", across="slice")
    specs = {"copy": P(), "model": P(None, "model"), "whole": P(("slice", "data"))}
    params = {name: numbers(0)[name] for name in specs}
    exchange = plan_shards(tx, mesh, specs, params, ("slice", "data"))
    tree = {name: numbers(1, (4,))[name] for name in specs} | {"whole": numbers(2)["whole"]}
    state = jax.jit(exchange.init)(params)
    means, state = jax.jit(exchange)(tree, state, params)
    for name in ("copy", "model"):
        np.testing.assert_allclose(means[name], tree[name].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(means["whole"], tree["whole"])
    assert int(state.metrics.skipped) == 0


@pytest.mark.parametrize(
    "where", [("copy", (1, 0, 0)), ("model", (0, 3, 40)), ("whole", (3, 2)), ("whole_too", (0, 5))]
)
def test_one_bad_number_skips_all(where):
    """In a worker's own gradient, in one shard of one worker, in a reduced one: zeros everywhere, nothing changes."""
    name, place = where
    step, state = exchange_of(jc.sign(dense_below=16))
    _, state = step(gradients(1), state)
    bad = gradients(2)
    bad[name][place] = np.nan
    means, skipped = step(bad, state)
    assert int(skipped.metrics.skipped) == 1
    assert float(skipped.metrics.sent) == 0
    assert jc.exchange_metrics(skipped) is skipped.metrics  # over all groups
    jax.tree.map(lambda mean: np.testing.assert_array_equal(mean, 0), means)
    jax.tree.map(np.testing.assert_array_equal, skipped.exchanges, state.exchanges)
    means, after = step(gradients(2), skipped)
    assert int(after.metrics.skipped) == 0
    assert all(np.abs(mean).max() > 0 for mean in jax.tree.leaves(means))


def test_chains_split_at_the_exchange():
    for tx in (
        jc.chain(optax.add_decayed_weights(0.1), jc.plump_dp(), optax.sgd(0.1, momentum=0.9)),
        jc.chain(jc.chain(optax.add_decayed_weights(0.1), jc.chain(jc.plump_dp())), optax.sgd(0.1, 0.9)),
    ):
        params = {"w": jnp.ones(3)}
        parts = split_chain(tx, params, (K,), "data")
        assert jc.exchange_metrics(parts.exchange.init(params)) is not None
        assert jc.exchange_metrics((parts.before.init(params), parts.after.init(params))) is None
        before, _ = parts.before.update({"w": jnp.zeros(3)}, parts.before.init(params), params)
        np.testing.assert_allclose(before["w"], 0.1)
        after, state = parts.after.update({"w": jnp.ones(3)}, parts.after.init(params), params)
        np.testing.assert_allclose(after["w"], -0.1)
        after, _ = parts.after.update({"w": jnp.ones(3)}, state, params)
        np.testing.assert_allclose(after["w"], -0.19, rtol=1e-6)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.sgd(0.1), "the transformation that averages over the workers; got a chain without"),
        (jc.chain(jc.plump_dp(), jc.plump_dp()), "got plump_dp and plump_dp in one chain"),
        (optax.chain(jc.plump_dp(), optax.sgd(0.1)), "must keep its links; got an optax.chain, .* Write jaxcomm.chain"),
        (
            jc.chain(optax.sgd(0.1), jc.plump_dp(p=2)),
            "With a local method every worker must hold all parameters, or shards of them",
        ),
        (jc.plump_dp(where="copy"), "must have others= where it has where=; got where= alone"),
        (jc.chain(optax.clip_by_global_norm(1.0), jc.topk()), "sees shards; got link 0, which looks at whole"),
        (jc.dgc(0.9, momentum=0.0, clip=1.0), "got dgc with clip=, which looks at whole tensors"),
        (jc.dgc(0.9, momentum=0.9), r"would have none of it; got momentum=0.9"),
    ],
)
def test_chains_that_fail_on_slices(tx, message):
    with pytest.raises(ValueError, match=message):
        plan_shards(tx, jc.make_mesh(data=K, model=M), SPECS, numbers(0), "data")


def test_chains_without_slices():
    tx = jc.chain(optax.clip_by_global_norm(1.0), jc.dgc(0.9, momentum=0.9))
    assert plan_shards(tx, jc.make_mesh(data=K), P(), numbers(0), "data").groups == {(): (True,) * 4}


@pytest.mark.parametrize(
    ("specs", "axis_name", "message"),
    [
        ({"copy": P()}, "data", "must be a tree like that of the parameters, or a prefix of it; got another one"),
        ({**SPECS, "copy": "data"}, "data", r"must be a jax.sharding.PartitionSpec; got 'data'"),
        ({**SPECS, "copy": P("pipe")}, "data", r"got P.*'pipe',?\) for .*'copy'.* on a mesh with"),
        ({**SPECS, "copy": P(None, None, "model")}, "data", "at most one entry for each dimension"),
        ({**SPECS, "whole": P("slice")}, ("slice", "data"), "along all axes of workers or along none"),
        ({**SPECS, "whole": P(None, ("data", "model"))}, "data", r"got 6 for 4 .*'whole'.* of shape \(4, 6\)"),
    ],
)
def test_bad_specs(specs, axis_name, message):
    with pytest.raises(ValueError, match=message):
        plan_shards(jc.plump_dp(), jc.make_mesh(slice=2, data=2, model=2), specs, numbers(0), axis_name)
