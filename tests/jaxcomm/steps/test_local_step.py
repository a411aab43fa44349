"""Local methods of workers with shards on several devices: equal to workers that hold everything."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from tests.jaxcomm.steps import sharded
from tests.marks import slow_except

BY_FSDP = {"bottom": P("fsdp"), "up": {"kernel": P("fsdp"), "bias": P()}, "down": {"kernel": P("fsdp"), "bias": P()}}
BY_BOTH = {
    "bottom": P("fsdp"),
    "up": {"kernel": P("fsdp", "model"), "bias": P("model")},
    "down": {"kernel": P("model", "fsdp"), "bias": P("fsdp")},
}
MESHES = {
    "tensor parallel": (2, {"model": 2}, sharded.OVER_MODEL, sharded.tensor_parallel, {}),
    "partitioned": (2, {"model": 2}, sharded.OVER_MODEL, sharded.whole, {"auto": ("model",)}),
    "fsdp": (2, {"fsdp": 4}, BY_FSDP, sharded.whole, {"auto": ("fsdp",)}),
    "both": (2, {"fsdp": 2, "model": 2}, BY_BOTH, sharded.whole, {"auto": ("fsdp", "model")}),
}
# A worker's optimizer clips by the norm of all its shards. AdamW would amplify the rounding of tiny gradients.
LOCAL = jc.chain(optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.01), optax.sgd(0.3, momentum=0.9))
METHODS = {
    "diloco": jc.local_sgd(3, exchange=jc.plump_dp()),
    "averaging": jc.plump_dp(p=2),
    "all at once": jc.local_sgd(1, exchange=jc.plump_dp(), outer=optax.sgd(1.0)),
}


def make(name, tx, **options):
    """The step, and the mesh; a worker's rows are spread over its devices."""
    workers, size, specs, loss, extra = MESHES[name]
    mesh = jc.make_mesh(data=workers, **size)
    return jc.make_train_step(loss, tx, mesh, specs=specs, donate=False, **extra, **options), mesh


def spread(mesh, batch):
    axes = ("data", "fsdp") if "fsdp" in mesh.shape else "data"
    return jax.device_put(batch, NamedSharding(mesh, P(axes)))


def places(mesh):
    """The shardings of parameters on a mesh with an axis "fsdp"."""
    tree, specs = sharded.params(), BY_FSDP
    specs = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=is_spec)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def is_spec(node):
    return isinstance(node, P)


def assert_near(result, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), result, expected)


@pytest.mark.parametrize(
    ("name", "method"),
    slow_except(
        [("fsdp", "diloco"), ("partitioned", "diloco"), ("both", "averaging"), ("fsdp", "all at once")],
        ("fsdp", "diloco"),
    ),
)
def test_shards_are_whole_workers(name, method):
    """Local parameters and optimizers, the global model and the losses, over seven steps."""
    tx = jc.chain(LOCAL, METHODS[method])
    step, mesh = make(name, tx)
    whole = jc.simulate(sharded.whole, tx, 2, donate=False)
    state, expected = step.init(sharded.params()), whole.init(sharded.params())
    for batch in sharded.batches(7):
        state, metrics = step(state, spread(mesh, batch))
        expected, expected_metrics = whole(expected, batch)
        assert metrics.keys() == expected_metrics.keys()
        for key in metrics:
            np.testing.assert_allclose(metrics[key], expected_metrics[key], rtol=1e-4)
    assert_near(state.params.rows, expected.params.rows)
    assert_near(step.params(state), whole.params(expected))
    rows = [node.rows for node in jax.tree.leaves(state.opt_state.rest, is_leaf=is_rows)]
    expected_rows = [node.rows for node in jax.tree.leaves(expected.opt_state[:-1], is_leaf=is_rows)]
    assert_near(jax.tree.leaves(rows), jax.tree.leaves(expected_rows))


def is_rows(node):
    return isinstance(node, jc.PerWorker)


@pytest.mark.parametrize("name", slow_except(["tensor parallel", "both"], "both"))
def test_the_state_is_sharded(name):
    """A device has its shards of its worker's state; `shapes` says so before there is a state."""
    specs = MESHES[name][2]
    step, mesh = make(name, jc.chain(optax.adamw(0.1), jc.local_sgd(2, exchange=jc.topk(0.9, dense_below=0))))
    state, shapes = step.init(sharded.params()), step.shapes(sharded.params())
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), state) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), shapes
    )
    moments = state.opt_state.rest.rows[0][0]
    for rows in (state.params.rows, moments.mu, moments.nu):
        assert rows["up"]["kernel"].sharding.spec == P(("data",), *specs["up"]["kernel"])
    total = sum(
        np.prod(rows.sharding.shard_shape(rows.shape)) for rows in jax.tree.leaves(state.params.rows)
    )  # its parameters, two moments, the anchor and the outer momentum; and the residual, in blocks, of each group
    blocks = sum(group.memory.exchange.residual.rows.shape[-1] for (group,) in state.opt_state.exchange.exchanges)
    local_total = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state))
    assert 0 < local_total - 5 * total - blocks < 100
    repeat = step(state, spread(mesh, next(sharded.batches(1))))[0]
    assert jax.tree.map(lambda a: a.sharding, repeat) == jax.tree.map(lambda a: a.sharding, state)


@pytest.mark.parametrize("name", slow_except(["tensor parallel", "both"], "tensor parallel"))
def test_bad_numbers_on_all(name):
    """In a local step, its worker stays unchanged; in an exchange step, all do. Training then goes on."""
    tx = jc.chain(LOCAL, jc.local_sgd(3, exchange=jc.plump_dp()))
    step, mesh = make(name, tx)
    whole = jc.simulate(sharded.whole, tx, 2, donate=False)
    state, expected = step.init(sharded.params()), whole.init(sharded.params())
    for i, batch in enumerate(sharded.batches(8)):
        if i in (1, 5):
            batch["label"][-1, -1] = np.inf  # of the last worker
        before = state
        state, metrics = step(state, spread(mesh, batch))
        expected, expected_metrics = whole(expected, batch)
        assert int(metrics["skipped"]) == int(expected_metrics["skipped"]) == (i == 5)
        if i == 1:
            kernels = [np.asarray(x["up"]["kernel"]) for x in (state.params.rows, before.params.rows)]
            assert np.abs(kernels[0][0] - kernels[1][0]).max() > 1e-4
            np.testing.assert_array_equal(kernels[0][1], kernels[1][1])
    assert_near(state.params.rows, expected.params.rows)
    assert_near(step.params(state), whole.params(expected))


@pytest.mark.parametrize("bad", [np.nan, -1e7], ids=["gradient", "update"])
def test_a_bad_number_in_one_shard(bad):
    """Of the loss of a sum over elements: the worker's other shard has finite updates, and stays, too."""
    bursts = optax.stateless(lambda updates, _: jax.tree.map(lambda x: jnp.where(x < -1e5, -jnp.inf, x), updates))
    tx = jc.chain(optax.trace(0.9), optax.sgd(0.1), bursts, jc.slim_dp(0.5, 0.2, p=3))
    mesh = jc.make_mesh(data=2, fsdp=2)

    def loss(w, batch):
        return ((w - batch) ** 2).sum(-1).mean()

    step = jc.make_train_step(loss, tx, mesh, specs=P("fsdp"), auto=("fsdp",), donate=False)
    batch = np.ones((2, 8), np.float32)
    first, _ = step(step.init(np.zeros(8, np.float32)), batch)
    spoiled = batch.copy()  # the first step may still be reading the other
    spoiled[1, 0] = bad
    second, metrics = step(first, spoiled)
    assert int(metrics["skipped"]) == 0

    def own(state):
        """Parameters, momentum, and what is to be pushed, (K, 8) each."""
        (group,) = state.opt_state.exchange.exchanges[0]
        rows = (state.params.rows, state.opt_state.rest.rows[0].trace, group.memory.delta.rows)
        return [np.asarray(x).reshape(2, 8) for x in rows]

    for before, after in zip(own(first), own(second), strict=True):
        np.testing.assert_array_equal(after[1], before[1])
        assert (after[0] != before[0]).all()
    third, metrics = step(second, spoiled)  # a communication, which all skip
    assert int(metrics["skipped"]) == 1
    for before, after in zip(own(second), own(third), strict=True):
        np.testing.assert_array_equal(after, before)


@pytest.mark.slow
def test_model_state():
    """A row for each; that of a worker whose gradient is not finite stays."""
    tx = jc.chain(optax.sgd(0.1), jc.local_sgd(3, exchange=jc.plump_dp()))

    def with_state(loss):
        def own(params, model_state, batch):
            running = 0.5 * model_state["mean"] + 0.5 * jnp.mean(batch["label"], axis=0)
            return loss(params, batch), ({"first": jnp.mean(batch["label"][:, 0])}, {"mean": running})

        return own

    means = {"mean": np.ones(sharded.CLASSES, np.float32)}
    mesh = jc.make_mesh(data=2, model=2)
    loss = with_state(sharded.tensor_parallel)
    step = jc.make_train_step(loss, tx, mesh, specs=sharded.OVER_MODEL, has_state=True)
    whole = jc.simulate(with_state(sharded.whole), tx, 2, has_state=True)
    state, expected = step.init(sharded.params(), means), whole.init(sharded.params(), means)
    for i, batch in enumerate(sharded.batches(4)):
        if i == 1:
            batch["image"][-1] = np.nan
        (state, metrics), (expected, expected_metrics) = step(state, batch), whole(expected, batch)
        np.testing.assert_allclose(metrics["first"], expected_metrics["first"], rtol=1e-5)
    assert_near(state.model_state, expected.model_state)


EXCHANGES = {
    "sparse_loco": jc.sparse_loco(2, chunk=1024),
    "powersgd": jc.local_sgd(2, exchange=jc.powersgd(2)),
    "slim_dp": jc.slim_dp(0.5, 0.2, p=2, q=2),
}


@pytest.mark.parametrize("method", slow_except(EXCHANGES, "powersgd"))
def test_a_shard_is_a_model(method):
    """With a loss that is a sum over elements, each half is exchanged as if alone."""
    tx = jc.chain(optax.sgd(0.1, momentum=0.9), EXCHANGES[method])
    first = {"kernel": np.random.default_rng(0).normal(size=(40, 128)).astype(np.float32)}
    rows = [np.random.default_rng(i).normal(size=(4, 40, 128)).astype(np.float32) for i in range(4)]

    def loss(params, batch):
        return ((params["kernel"] - batch) ** 2).sum() / batch.shape[0]

    mesh = jc.make_mesh(data=2, fsdp=2)
    whole = jc.make_train_step(loss, tx, mesh, specs=P(None, "fsdp"), auto=("fsdp",))
    single = jc.simulate(loss, tx, 2)
    halves = [slice(None, 64), slice(64, None)]
    state, states = whole.init(first), [single.init({"kernel": first["kernel"][:, half]}) for half in halves]
    for batch in rows:
        state, metrics = whole(state, batch)
        states, shard_metrics = zip(
            *(single(shard_state, batch[..., half]) for shard_state, half in zip(states, halves, strict=True)),
            strict=True,
        )
        for count in ("sent", "overflow"):
            assert int(metrics[count]) == sum(int(shard[count]) for shard in shard_metrics)
    kernel = whole.params(state)["kernel"]
    for shard_state, half in zip(states, halves, strict=True):
        np.testing.assert_allclose(kernel[:, half], single.params(shard_state)["kernel"], rtol=1e-4, atol=1e-5)
        result, reference = (shard.params.rows["kernel"] for shard in (state, shard_state))
        np.testing.assert_allclose(result[..., half], reference, rtol=1e-4, atol=1e-5)
    assert np.abs(kernel - first["kernel"]).max() > 0.1


@pytest.mark.parametrize("method", slow_except(["diloco", *EXCHANGES], "diloco"))
def test_bytes_of_shards(method):
    """Predicted, traced and compiled."""
    exchange = (METHODS | EXCHANGES)[method]
    step, mesh = make("tensor parallel", jc.chain(LOCAL, exchange))
    state, batch = step.shapes(sharded.params()), spread(mesh, next(sharded.batches(1)))
    report = step.verify(state, batch)
    assert report.every == communication_period(exchange)
    params_ = sharded.params()
    kernels = [params_["up"]["kernel"][:, :32], params_["up"]["bias"][:32], params_["down"]["kernel"][:32]]
    copies = [params_["bottom"]["kernel"], params_["down"]["bias"]]
    predicted = sum(jc.wire_report(exchange, shapes, 2).received_in_exchange for shapes in (kernels, copies))
    counts = 2 * 3 / 4 * 16  # over all four devices; no loss: it is a worker's own
    assert float(report.program.received) == predicted + counts
    assert float(step.report(state, batch).program.over("data").received) == predicted + counts
    assert report.of_step(1).received == 0


def communication_period(exchange):
    return exchange.init({"w": jnp.zeros(2048)}).method.period


def test_bytes_of_fsdp():
    """The compiled collectives of one worker on its four devices, and small ones for what is not sharded."""
    step, mesh = make("fsdp", jc.chain(optax.adamw(0.1), jc.local_sgd(2, exchange=jc.plump_dp())))
    batch = next(sharded.batches(1))
    text = step.compile(step.shapes(sharded.params()), spread(mesh, batch)).as_text()
    counts = Counter((t.op, t.operand_bytes) for _, t in read_program(text, mesh).operations() if "data" not in t.axes)

    single, tx = jc.make_mesh(fsdp=4), optax.adamw(0.1)
    place = places(single)
    params = jax.device_put(sharded.params(), place)

    def plain(params, state, batch):
        loss, gradient = jax.value_and_grad(sharded.whole)(params, batch)
        updates, state = tx.update(gradient, state, params)
        return loss, jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), place), state

    half = jax.tree.map(lambda rows: rows[: sharded.ROWS // 2], batch)
    half = jax.device_put(half, NamedSharding(single, P("fsdp")))
    text_of_optax = jax.jit(plain).lower(params, tx.init(params), half).compile().as_text()
    expected = Counter((t.op, t.operand_bytes) for _, t in read_program(text_of_optax, single).operations())
    smallest = 4 * sharded.PIXELS * sharded.FEATURES // 4  # shard of a tensor
    assert expected.total() > 5
    assert expected - counts == Counter()
    assert all(size < smallest for _, size in counts - expected), counts - expected


@pytest.mark.parametrize("method", slow_except(["diloco", "slim_dp"], "diloco"))
def test_resizing_keeps_the_mean(method):
    """For shards: the global model, the mean of the workers' parameters, and the residual of their exchange."""
    step, mesh = make("tensor parallel", jc.chain(optax.sgd(0.1, momentum=0.9), (METHODS | EXCHANGES)[method]))
    state = step.init(sharded.params())
    for batch in sharded.batches(3):
        state, _ = step(state, spread(mesh, batch))
    wide = jc.make_mesh(data=4, model=2)
    wider = jc.make_train_step(sharded.tensor_parallel, step.tx, wide, specs=sharded.OVER_MODEL, donate=False)
    shapes = wider.shapes(sharded.params())
    resized = jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), s.sharding), step.resize(state, 4), shapes)
    assert jax.tree.map(jnp.shape, resized) == jax.tree.map(jnp.shape, shapes)
    assert_near(wider.params(resized), jax.tree.map(np.asarray, step.params(state)))
    means = [jax.tree.map(lambda x: np.asarray(x).mean(0), state.params.rows) for state in (resized, state)]
    assert_near(*means)
    repeat, metrics = wider(resized, jax.device_put(batch, NamedSharding(wide, P("data"))))
    assert int(metrics["skipped"]) == 0
    assert np.isfinite(metrics["loss"])
    back = step.resize(repeat, 2)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, state)


def whitened(updates, state, params=None):
    total = optax.tree.norm(updates)
    return jax.tree.map(lambda x: x / total, updates), state


REFUSED = {
    "outer": (
        jc.local_sgd(2, exchange=jc.plump_dp(), outer=optax.GradientTransformation(lambda _: (), whitened)),
        {},
        r"must work element by element, since it sees shards; got outer",
    ),
    "workers": (jc.plump_dp(p=2), {"specs": P("data")}, r"sharded over the workers, .* Shard it along another axis"),
    "explicit": (
        jc.plump_dp(p=2),
        {"mesh": lambda: sharded.explicit_mesh(2, 2)},
        r"must be of type Auto for a local method, .* got \(.*Explicit",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    exchange, options, message = REFUSED[case]
    mesh = options.get("mesh", lambda: jc.make_mesh(data=2, model=2))()
    tx, specs = jc.chain(optax.sgd(0.1), exchange), options.get("specs", sharded.OVER_MODEL)
    with pytest.raises(ValueError, match=message):
        jc.make_train_step(sharded.whole, tx, mesh, specs=specs, auto=("model",)).shapes(sharded.params())


def test_the_model_of_a_step():
    step, _ = make("fsdp", jc.chain(LOCAL, METHODS["diloco"]))
    with pytest.raises(ValueError, match=r"must be put together by their step; got such a state. Call step.params"):
        jc.state.global_params(step.shapes(sharded.params()))


def test_line_searches():
    tx = jc.chain(optax.lbfgs(), jc.local_sgd(2, exchange=jc.plump_dp()))
    step, mesh = make("tensor parallel", tx)
    with pytest.raises(ValueError, match=r"must take the loss at most beside gradients; got .*value_fn"):
        step.trace(step.shapes(sharded.params()), spread(mesh, next(sharded.batches(1))))


def test_sharded_parameters_stay():
    tx = jc.chain(LOCAL, METHODS["diloco"])
    mesh = jc.make_mesh(data=2, fsdp=4)
    params_ = jax.device_put(sharded.params(), places(mesh))
    step = jc.make_train_step(sharded.whole, tx, mesh, donate=False)
    state, batch = step.init(params_), spread(mesh, next(sharded.batches(1)))
    after, _ = step(state, batch)
    by_specs, _ = make("fsdp", tx)
    assert_near(after.params.rows, by_specs(by_specs.init(sharded.params()), batch)[0].params.rows)
    repeat = jc.make_train_step(sharded.whole, tx, mesh, donate=False)  # from a checkpoint, without init
    assert_near(repeat.params(after), step.params(after))
    assert repeat.params(after)["up"]["kernel"].sharding.spec == P("fsdp")
