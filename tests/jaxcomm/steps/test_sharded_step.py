"""Steps for sharded parameters: equal to one device in every way; bytes; skips; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from tests.jaxcomm.steps import sharded
from tests.jaxcomm.train_steps import init_state, state_shapes
from tests.marks import slow_except

SGD = jc.chain(optax.add_decayed_weights(1e-2), optax.sgd(optax.linear_schedule(0.3, 0.1, 10), momentum=0.9))
# The norms are of whole tensors: over all shards, with every block counted once.
ADAMW = jc.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.03, weight_decay=0.1))


def assert_same_params(name, state, expected):
    params_ = jax.tree.map(np.asarray, state.params)
    if name == "one worker":
        for part in ("up", "down"):
            jax.tree.map(lambda rows: np.testing.assert_array_equal(rows[1:], 0), params_[part])
            params_[part] = jax.tree.map(lambda rows: rows[0], params_[part])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), params_, expected)


@pytest.mark.parametrize("name", slow_except(["split, one loss", "one worker", "as given", "unreduced"], "unreduced"))
def test_ten_steps(name):
    """Momentum, a schedule and weight decay included: the paper's two tricks are consequences."""
    state, metrics = sharded.trained(name, jc.chain(jc.plump_dp(), SGD), 10)
    assert_same_params(name, state, sharded.trained_on_one_device(SGD, 10))
    assert int(state.step) == 10
    assert int(metrics["skipped"]) == 0


@pytest.mark.parametrize("name", slow_except(["split", "tensor parallel", "unreduced"], "tensor parallel"))
def test_links_see_whole_arrays(name):
    state, _ = sharded.trained(name, jc.chain(jc.plump_dp(), ADAMW), 5)
    expected = sharded.trained_on_one_device(ADAMW, 5)
    assert_same_params(name, state, expected)
    unclipped = sharded.trained_on_one_device(optax.adamw(0.03, weight_decay=0.1), 5)
    assert np.abs(np.asarray(expected["up"]["kernel"]) - unclipped["up"]["kernel"]).max() > 1e-3


def test_partial_decay():
    """A mask of the parameters' tree, in a transformation after the exchange."""
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, sharded.params())
    links = jc.chain(optax.add_decayed_weights(0.1, mask=mask), optax.masked(optax.trace(0.9), mask), optax.sgd(0.1))
    state, _ = sharded.trained("split", jc.chain(jc.plump_dp(), links), 3)
    assert_same_params("split", state, sharded.trained_on_one_device(links, 3))
    trace = state.opt_state.rest[1].inner_state.trace
    assert trace["up"]["kernel"].sharding.spec == sharded.OVER_WORKERS["up"]["kernel"]


def test_decay_before_the_exchange():
    decay, sgd = optax.add_decayed_weights(0.1), optax.sgd(0.3, momentum=0.9)
    state, _ = sharded.trained("split", jc.chain(decay, jc.plump_dp(), sgd), 5)
    assert_same_params("split", state, sharded.trained_on_one_device(jc.chain(decay, sgd), 5))


@pytest.mark.parametrize("name", slow_except(["split", "unreduced"], "split"))
def test_bad_steps_are_skipped(name):
    make, loss_fn, specs, mesh = sharded.WAYS[name]
    mesh, tx = mesh(), jc.chain(jc.sign(), SGD)
    state = init_state(sharded.params(), tx, mesh, specs=specs)
    step = sharded.compiled(make(loss_fn, tx, mesh, specs, donate=False), state)
    first, second = sharded.batches(2)
    state, _ = step(state, sharded.on(mesh, first))
    bad = {**second, "label": second["label"].copy()}
    bad["label"][-1, -1] = np.inf  # a row of the last worker
    skipped, metrics = step(state, sharded.on(mesh, bad))
    assert int(metrics["skipped"]) == 1
    assert not np.isfinite(metrics["loss"])
    assert int(skipped.step) == 2
    for part in (lambda s: s.params, lambda s: s.opt_state.rest, lambda s: s.opt_state.exchange.exchanges):
        jax.tree.map(np.testing.assert_array_equal, part(skipped), part(state))
    after, metrics = step(skipped, sharded.on(mesh, second))
    assert int(metrics["skipped"]) == 0
    assert np.abs(np.asarray(after.params["up"]["kernel"]) - state.params["up"]["kernel"]).max() > 1e-4


@pytest.mark.parametrize("name", slow_except(["split", "unreduced"], "split"))
def test_scalars_and_statistics(name):
    """A running mean of the rows, and a scalar: means over all workers, kept when a step is skipped."""
    make, loss_fn, specs, mesh = sharded.WAYS[name]
    mesh, tx = mesh(), jc.chain(jc.plump_dp(), optax.sgd(0.1))

    def with_state(params, model_state, batch):
        running = 0.5 * model_state["mean"] + 0.5 * jnp.mean(batch["label"], axis=0)
        return loss_fn(params, batch), ({"first": jnp.mean(batch["label"][:, 0])}, {"mean": running})

    means = {"mean": np.ones(sharded.CLASSES, np.float32)}
    state = init_state(sharded.params(), tx, mesh, specs=specs, model_state=means)
    step = make(with_state, tx, mesh, specs, has_state=True, donate=False)
    batch = next(sharded.batches(1))
    state, metrics = step(state, batch)
    np.testing.assert_allclose(state.model_state["mean"], 0.5 + 0.5 * batch["label"].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["first"], batch["label"][:, 0].mean(), rtol=1e-5)
    bad = {**batch, "image": batch["image"] * np.float32(np.nan)}
    state_after, metrics = step(state, bad)
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(state_after.model_state["mean"], state.model_state["mean"])


@pytest.mark.parametrize("name", ["split", "tensor parallel", "unreduced"])
def test_places_of_the_state(name):
    _, _, specs, mesh = sharded.WAYS[name]
    mesh, tx = mesh(), jc.chain(jc.powersgd(2), optax.adamw(0.1))
    state = init_state(sharded.params(), tx, mesh, specs=specs)
    moments = state.opt_state.rest[0][0]
    for tree in (state.params, moments.mu, moments.nu):
        assert tree["up"]["kernel"].sharding.spec == specs["up"]["kernel"]
        assert tree["bottom"]["kernel"].sharding.is_fully_replicated
    assert moments.count.sharding.is_fully_replicated
    shapes = state_shapes(jax.eval_shape(sharded.params), tx, mesh, specs)
    result = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert result == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)
    jax.tree.map(lambda a, b: pytest.fail(f"{a} {b}") if not same_place(a, b) else None, state, shapes)


def same_place(array, shape):
    return array.sharding.is_equivalent_to(shape.sharding, array.ndim)


def test_places_of_first_parameters():
    """The parameters given to `init` or to `shapes`, or in a restored state; bytes are as with specs."""
    tx, mesh = jc.chain(jc.topk(0.5, dense_below=0), optax.adamw(0.1)), jc.make_mesh(data=2, model=2)
    batch = next(sharded.batches(1))
    by_axes = jc.make_train_step(sharded.whole, tx, mesh, specs=sharded.OVER_MODEL, auto=("model",))
    expected = by_axes.verify(by_axes.init(sharded.params()), batch)
    params_ = by_axes.init(sharded.params()).params
    state = jc.make_train_step(sharded.whole, tx, mesh).init(params_)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params_)
    shapes = jc.make_train_step(sharded.whole, tx, mesh).shapes(like)
    jax.tree.map(lambda a, b: pytest.fail(f"{a} {b}") if not same_place(a, b) else None, state, shapes)
    for tree in (state, shapes):
        assert jc.make_train_step(sharded.whole, tx, mesh).verify(tree, batch).received == expected.received
    new, _ = jc.make_train_step(sharded.whole, tx, mesh)(state, batch)
    assert new.params["up"]["kernel"].sharding.spec == P(None, "model")


def by_value():
    """Descends by an argument that it is given in addition to gradients."""

    def update(updates, state, params=None, *, value, grad, value_fn):
        loss, slope = jax.value_and_grad(value_fn)(params)
        return jax.tree.map(lambda slope_leaf, mean: -0.1 * (value / loss) * (slope_leaf + mean), slope, grad), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize(
    ("name", "search"),
    # Not lbfgs where axes are Explicit: JAX asks for the sharding of each of its inner products.
    [("split", by_value), ("partitioned", by_value), ("unreduced", by_value), ("tensor parallel", optax.lbfgs)],
)
def test_line_search(name, search):
    """It evaluates and differentiates the mean loss of all rows at the whole parameters."""
    tx = jc.chain(jc.plump_dp(), search())
    make, loss_fn, specs, mesh = sharded.WAYS[name]
    mesh, batch = mesh(), next(sharded.batches(1))
    step = make(loss_fn, tx, mesh, specs)
    state, reference = step.init(sharded.params()), (sharded.params(), search().init(sharded.params()))
    for _ in range(3):
        state, _ = step(state, batch)
        params_, inner = reference
        value, grad = jax.value_and_grad(sharded.whole)(params_, batch)
        arguments = {"value": value, "grad": grad, "value_fn": lambda p: sharded.whole(p, batch)}
        updates, inner = optax.with_extra_args_support(search()).update(grad, inner, params_, **arguments)
        reference = optax.apply_updates(params_, updates), inner
    assert_same_params(name, state, reference[0])


@pytest.mark.parametrize("is_local", [False, True])
def test_links_without_arguments(is_local):
    """A link that only claims to take the loss does what it does without a claim."""
    batch, results, sgd = next(sharded.batches(1)), [], optax.sgd(0.1)

    def sloppy(updates, state, params=None):
        return sgd.update(updates, state, params)

    for link in (optax.GradientTransformationExtraArgs(sgd.init, sloppy), sgd):
        links = (link, jc.local_sgd(2, exchange=jc.plump_dp())) if is_local else (jc.plump_dp(), link)
        mesh = jc.make_mesh(data=2, model=2)
        step = jc.make_train_step(sharded.whole, jc.chain(*links), mesh, specs=sharded.OVER_MODEL, auto=("model",))
        state, _ = step(step.init(sharded.params()), batch)
        results.append(jax.device_get(step.params(state)))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_donation():
    """Even if they are on the mesh already, like the state's."""
    tx, mesh, specs = jc.chain(jc.plump_dp(), SGD), jc.make_mesh(data=4), sharded.OVER_WORKERS
    shapes = state_shapes(sharded.params(), tx, mesh, specs).params
    shapes = jax.device_put(sharded.params(), jax.tree.map(lambda leaf: leaf.sharding, shapes))
    state = init_state(shapes, tx, mesh, specs=specs)
    jc.make_train_step(sharded.split, tx, mesh, specs=specs)(state, next(sharded.batches(1)))
    np.testing.assert_array_equal(shapes["up"]["kernel"], sharded.params()["up"]["kernel"])
    assert state.params["up"]["kernel"].is_deleted()


def test_loss_along_another_axis():
    def parts(params, batch):
        hidden = jnp.tanh(sharded.bottom(params, batch["image"]) @ params["up"]["kernel"])
        return jnp.mean((hidden @ params["down"]["kernel"]) ** 2)

    tx, mesh = jc.chain(jc.plump_dp(), SGD), jc.make_mesh(data=2, model=2)
    state = state_shapes(sharded.params(), tx, mesh, sharded.OVER_MODEL)
    with pytest.raises(ValueError, match=r"than 'data'; got one at .*'loss'.* that may differ along \['model'\]"):
        jc.make_train_step(parts, tx, mesh, specs=sharded.OVER_MODEL).trace(state, next(sharded.batches(1)))


def test_bad_losses():
    tx, mesh = jc.chain(jc.plump_dp(), SGD), jc.make_mesh(data=2)
    state, batch = state_shapes(sharded.params(), tx, mesh, P()), next(sharded.batches(1))

    def loss(params, batch):
        return sharded.whole(params, batch), {"rows": batch["label"][:, 0]}

    with pytest.raises(ValueError, match=r"'rows' must be a scalar; got shape \(4,\). Take its mean"):
        jc.make_train_step(loss, tx, mesh, specs=P(), has_aux=True).trace(state, batch)
    with pytest.raises(ValueError, match=r"got a state of 1 arrays for a loss without. Pass has_state=True"):
        jc.make_train_step(sharded.whole, tx, mesh, specs=P()).trace(state._replace(model_state=jnp.ones(3)), batch)


def test_axes_of_another_type():
    tx = jc.chain(jc.plump_dp(), SGD)
    mixture = jax.make_mesh((2, 1), ("data", "model"), (AxisType.Auto, AxisType.Explicit), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"must all be of type Auto, or all of type Explicit; got .*make_mesh"):
        jc.make_train_step(sharded.whole, tx, mixture, specs=P())
    for options in ({"axis_name": "workers"}, {"auto": ("pipe",)}, {"auto": ("data",)}):
        with pytest.raises(ValueError, match=r"axis_name and auto must be different axes of the mesh; got"):
            jc.make_train_step(sharded.whole, tx, sharded.auto_mesh(2, 1), specs=P(), **options)
    with pytest.raises(ValueError, match="auto must go with specs="):
        jc.make_train_step(sharded.whole, tx, sharded.auto_mesh(2, 1), auto=("model",))


def test_other_states_and_batches():
    tx, mesh = jc.chain(jc.plump_dp(), SGD), jc.make_mesh(data=4)
    step, batch = jc.make_train_step(sharded.split, tx, mesh, specs=sharded.OVER_WORKERS), next(sharded.batches(1))
    with pytest.raises(ValueError, match=r"must be made by the step's init; got an optimizer's state of tuple"):
        step.trace(init_state(sharded.params(), tx, mesh), batch)
    state = state_shapes(sharded.params(), tx, mesh, sharded.OVER_WORKERS)
    with pytest.raises(ValueError, match=r"got 6 rows at .* for 4 workers. Use a batch size of 4"):
        step.trace(state, jax.tree.map(lambda x: x[:6], batch))


UNTRAINED = {"times": jnp.int32(2), "on": jnp.asarray([True, False]), "key": jax.random.key(3)}


@pytest.mark.parametrize(
    ("name", "is_local"),
    slow_except(
        [("split", False), ("tensor parallel", True), ("partitioned", False), ("as given", True), ("unreduced", False)],
        ("partitioned", False),
        ("tensor parallel", True),
    ),
)
def test_integers_and_keys(name, is_local):
    """They stay as they are, where the loss reads them as well."""
    make_way, loss_fn, specs, mesh = sharded.WAYS[name]
    mesh, specs = mesh(), dict.fromkeys(UNTRAINED, P()) | {"net": specs}

    def loss(params, batch):
        return loss_fn(params["net"], batch | {"label": params["times"] * batch["label"]})

    exchange = jc.local_sgd(1, exchange=jc.plump_dp(), outer=optax.sgd(1.0))
    tx = jc.chain(SGD, exchange) if is_local else jc.chain(jc.plump_dp(), SGD)
    first = UNTRAINED | {"net": sharded.params()}
    if name == "as given":
        first = sharded.partitioned(loss, jc.chain(jc.plump_dp(), SGD), mesh, specs).init(first).params
    step = make_way(loss, tx, mesh, specs)
    state = step.init(first)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, step.shapes(first))
    step.verify(state, sharded.on(mesh, next(sharded.batches(1))))
    for batch in sharded.batches(3):
        state, metrics = step(state, sharded.on(mesh, batch))
        assert int(metrics["skipped"]) == 0
    model = step.params(state)
    expected = sharded.trained_on_one_device(SGD, 3, times=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), model["net"], expected)
    assert all((model[name] == leaf).all() for name, leaf in UNTRAINED.items())


def test_random_keys_on_a_mesh_of_explicit_axes():
    """The loss has the rows of all workers and one key, as on one device."""
    mesh, tx, key = sharded.explicit_mesh(2, 2), jc.chain(jc.plump_dp(), optax.sgd(0.1)), jax.random.key(3)

    def loss(params, batch, key):
        noise = jax.random.normal(key, batch["image"].shape, out_sharding=jax.typeof(batch["image"]).sharding)
        return sharded.explicit(params, batch | {"image": batch["image"] + noise})

    step = jc.make_train_step(loss, tx, mesh, specs=sharded.OVER_MODEL, rng=key)
    batch = next(sharded.batches(1))
    state, metrics = step(step.init(sharded.params()), sharded.on(mesh, batch))
    image = batch["image"] + jax.random.normal(jax.random.fold_in(key, 0), batch["image"].shape)
    whole = sharded.whole(sharded.params(), batch | {"image": np.asarray(image)})
    assert metrics["loss"] == pytest.approx(float(whole), rel=1e-3)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, state.params, sharded.params())
    assert all(jax.tree.leaves(moved))
