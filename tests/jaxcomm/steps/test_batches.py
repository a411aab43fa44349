"""Batches: which axis has the rows, what is replicated, what is refused, and where a batch may come from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.steps.batch import check_batch, check_global

K, ROWS, TIME, WIDTH, CLASSES = 4, 16, 8, 4, 8
TX = jc.chain(jc.plump_dp(), optax.sgd(1.0))


def params():
    rng = np.random.default_rng(0)
    return {"u": rng.normal(size=(WIDTH, CLASSES)).astype(np.float32), "w": np.eye(WIDTH, dtype=np.float32)}


def arrays(**options):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(TIME, ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, ROWS).astype(np.int32)} | options


def loss_fn(params, batch):
    """A recurrent network over arrays with time first; classes and features are weighted, times masked, if asked."""
    x = batch["x"] * batch.get("scale", 1.0)
    mask = batch.get("mask", jnp.ones(TIME))[:, None, None]

    def cell(h, x):
        return jnp.tanh(x @ params["w"] + h), h

    h, _ = jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x * mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(h @ params["u"], batch["y"])
    return jnp.mean(losses * batch.get("weights", jnp.ones(CLASSES))[batch["y"]])


def by_one_line(loss, mesh, **options):
    """A step with the calls of a `TrainStep`, by `data_parallel`."""

    def train_step(state, batch):
        params, opt_state = state
        loss_value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = TX.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss_value}

    step = jc.data_parallel(train_step, mesh, **options)
    step.init = lambda params: (params, TX.init(params))
    step.params = lambda state: state[0]
    return step


STEPS = {
    "workers": lambda loss, **options: jc.make_train_step(loss, TX, jc.make_mesh(data=K), **options),
    "micro-batches": lambda loss, **options: jc.make_train_step(
        loss, TX, jc.make_mesh(data=K), accumulate=2, **options
    ),
    "fsdp": lambda loss, **options: jc.make_train_step(
        loss, TX, jc.make_mesh(data=K, fsdp=2), specs={"u": P("fsdp"), "w": P("fsdp")}, auto=("fsdp",), **options
    ),
    "simulated": lambda loss, **options: jc.simulate(loss, TX, K, **options),
    "one line": lambda loss, **options: by_one_line(loss, jc.make_mesh(data=K), **options),
}
WHOLE = {
    "weights": np.linspace(0.1, 5, CLASSES, dtype=np.float32),
    "mask": (np.arange(TIME) > 2).astype(np.float32),
    "scale": np.linspace(1, 2, WIDTH, dtype=np.float32),
}


@pytest.mark.parametrize("make", STEPS)
def test_gradient_with_axes(make):
    batch = arrays(**WHOLE)
    axes = {"x": 1, "y": 0} | dict.fromkeys(WHOLE)
    value, right = jax.value_and_grad(loss_fn)(params(), batch)
    step = STEPS[make](loss_fn, batch_axis=axes)
    state, metrics = step(step.init(params()), batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    gradient = jax.tree.map(lambda old, new: old - np.asarray(new), params(), step.params(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, right)


@pytest.mark.parametrize("make", STEPS)
def test_one_axis(make):
    def loss(params, x):
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(x @ params["w"] + h), None), jnp.zeros(x.shape[1:]), x)
        return jnp.mean((h @ params["u"]) ** 2)

    right = jax.grad(loss)(params(), arrays()["x"])
    step = STEPS[make](loss, batch_axis=np.int64(-2))
    state, _ = step(step.init(params()), arrays()["x"])
    gradient = jax.tree.map(lambda old, new: old - np.asarray(new), params(), step.params(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, right)


@pytest.mark.parametrize("make", STEPS)
def test_an_array_without_rows(make):
    rows = {"x": np.moveaxis(arrays()["x"], 1, 0), "y": arrays()["y"]}

    def loss(params, batch):
        return loss_fn(params, batch | {"x": jnp.moveaxis(batch["x"], 0, 1)})

    refusing = STEPS[make](loss)
    state = refusing.init(params())
    for name, whole in WHOLE.items():
        batch, axes = rows | {name: whole}, {"x": 0, "y": 0, name: None}
        message = (
            rf"must have the same number of rows.*got .*{len(whole)} at \"(\['batch'\])?\['{name}'\]\".*None for "
            rf"what every worker needs whole.*: batch_axis=.*'{name}': None"
        )
        with pytest.raises(ValueError, match=message) as refusal:
            refusing(state, batch)
        assert str(dict(sorted(axes.items()))) in str(refusal.value)
    step = STEPS[make](loss, batch_axis=axes)
    _, metrics = step(step.init(params()), batch)
    np.testing.assert_allclose(metrics["loss"], loss(params(), batch), rtol=1e-5)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"x": 1}, r"batch_axis must be an axis, or a tree of axes like the batch; got .*\{'x': 1\}.*Name every array"),
        (
            {"x": 3, "y": 0},
            r"must be an axis of each array; got 3 for the shape \(8, 16, 4\) at \"(\['batch'\])?\['x'\]\"",
        ),
        (
            1,
            r"must be an axis of each array; got 1 for the shape \(16,\) at \"(\['batch'\])?\['y'\]\".*by a tree like",
        ),
        ({"x": 0, "y": 0}, r"same number of rows.*got 8 at \"(\['batch'\])?\['x'\]\", 16 at \"(\['batch'\])?\['y'\]\""),
    ],
)
@pytest.mark.parametrize("make", ["workers", "one line"])
def test_bad_axes(make, axes, message):
    step = STEPS[make](loss_fn, batch_axis=axes)
    with pytest.raises(ValueError, match=message):
        step(step.init(params()), arrays())


def test_of_many_arrays_one_of_each_number_is_named():
    batch = {"x": [np.ones((8, 2))] * 30, "y": np.ones(16)}
    with pytest.raises(ValueError, match=r"got 8 at \"\['x'\]\[0\]\" and 29 more, 16 at \"\['y'\]\"\. Say"):
        check_batch(batch, K)


def test_an_axis_as_the_remedy():
    with pytest.raises(ValueError, match=r"got 6 rows at .*'x'.* along another axis \(time first\), pass batch_axis="):
        check_batch({"x": np.ones((6, ROWS, WIDTH)), "y": np.ones(6)}, K)
    check_batch({"x": np.ones((6, ROWS, WIDTH))}, K, batch_axis=1)


def test_pipelines_refuse_axes():
    def first(params, x, batch):
        del x
        return batch["x"] @ params

    start = [params()["w"], params()["w"]]
    pipeline = jc.Pipeline([first, lambda params, x, _: x @ params], lambda x, _: (jnp.mean(x**2), {}), start)
    mesh = jc.make_mesh(data=2, stage=2)
    with pytest.raises(ValueError, match=r"batch_axis must be 0 with a Pipeline.*got 1"):
        jc.make_train_step(pipeline, TX, mesh, batch_axis=1)
    step = jc.make_train_step(pipeline, TX, mesh)
    with pytest.raises(ValueError, match=r"same number of rows.*got 4 at \"\['mask'\]\", 16 at \"\['x'\]\""):
        step(step.init(start), {"x": arrays()["x"][0], "mask": np.ones(4, np.float32)})


# Where a batch comes from.


def elsewhere():
    devices = np.array(jax.devices())
    reverse = Mesh(devices[:K][::-1], ("data",))
    return {
        "one device of the mesh": devices[1],
        "a device that is not in the mesh": devices[K],
        "the devices in another order": NamedSharding(reverse, P("data")),
        "some of the devices": NamedSharding(Mesh(devices[:2], ("rows",)), P("rows")),
        "all devices": NamedSharding(Mesh(devices, ("rows",)), P("rows")),
    }


@pytest.mark.parametrize("make", STEPS)
def test_a_batch_elsewhere_is_placed(make):
    def loss(params, batch):
        return jnp.mean((batch @ params["w"] @ params["u"]) ** 2)

    batch = arrays()["x"][0]
    step = STEPS[make](loss)
    for place in elsewhere().values():
        state = step.init(params())
        for _ in range(2):  # the state of the second step is on the mesh
            value = loss(step.params(state), batch)
            state, metrics = step(state, jax.device_put(batch, place))
            np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)


@pytest.mark.parametrize("make", ["workers", "fsdp", "one line"])
def test_a_state_elsewhere_is_placed(make):
    def loss(params, batch):
        return jnp.mean((batch @ params["w"] @ params["u"]) ** 2)

    batch, step = arrays()["x"][0], STEPS[make](loss)
    state, _ = step(step.init(params()), batch)
    state_elsewhere = jax.device_put(jax.device_get(state), jax.devices()[2])
    right, _ = step(state, batch)
    result, _ = step(state_elsewhere, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), step.params(result), step.params(right))


def test_arrays_of_one_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = r"must be of global arrays.*got one of this process alone, of 2, at \"\['y'\]\".*make_array_from_process"
    with pytest.raises(ValueError, match=message):
        check_global({"weights": np.ones(3), "scale": 2.0, "y": arrays()["y"]}, {"weights": None, "scale": 0, "y": 0})
    check_global({"weights": np.ones(3), "scale": 2.0}, {"weights": None, "scale": 0})


# A mesh that the script has set.


@pytest.mark.parametrize("make", STEPS)
def test_any_mesh_may_be_set(make):
    def loss(params, batch):
        return jnp.mean((batch @ params["w"] @ params["u"]) ** 2)

    batch, step = arrays()["x"][0], STEPS[make](loss)
    right, _ = step(step.init(params()), batch)
    for axes in ({"data": 4}, {"data": 2, "model": 2}, {"rows": 8}):
        with jax.set_mesh(jax.make_mesh(tuple(axes.values()), tuple(axes))):  # of type Explicit
            step = STEPS[make](loss)
            result, metrics = step(step.init(jax.tree.map(jnp.asarray, params())), batch)  # arrays of that type
            assert jc.wire_report(TX, params(), workers=K).received == 3 * 2 * 4 * WIDTH * (WIDTH + CLASSES) // K
            if make in ("workers", "fsdp"):
                step.verify(result, batch)
        np.testing.assert_allclose(metrics["loss"], loss(params(), batch), rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), step.params(result), step.params(right))
