"""Chains that exchange the gradients of the step before: what they compute, keep, refuse, and allow to overlap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.exchange import get_exchange
from jaxcomm.steps.overlap import HostOverlap
from tests.jaxcomm.cases import FIRST
from tests.jaxcomm.train_steps import KINDS, make_step

K, ROWS, FEATURES, HIDDEN = 4, 32, 24, 48
make = functools.partial(make_step, workers=K)
SHAPES = {"w": (60, 50), "v": (40, 30), "b": (50,)}
PARAMS = {"w": np.linspace(-0.3, 0.3, FEATURES * HIDDEN, dtype=np.float32).reshape(FEATURES, HIDDEN)}


def optimizer():
    return optax.adam(1e-2)


def linear(params, batch):
    """A loss whose gradient is the batch."""
    return sum(jnp.vdot(params[name], rows[0]) for name, rows in batch.items())


def given_gradients(count):
    random = np.random.default_rng(0)
    return [
        {name: random.normal(size=(K, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
        for _ in range(count)
    ]


def batches(count):
    random = np.random.default_rng(1)
    return [random.normal(size=(ROWS, FEATURES)).astype(np.float32) for _ in range(count)]


def loss_fn(params, model_state, batch, key):
    hidden = jnp.tanh(batch @ params["w"])
    noise = jax.random.normal(key, hidden.shape)
    mean = 0.5 * model_state["mean"] + 0.5 * batch.mean()
    return ((hidden + 0.1 * noise) ** 2).mean(), ({"size": jnp.abs(hidden).mean()}, {"mean": mean})


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# One without state, one with thresholds, one with momentum and a warm-up, and one that draws by its step's number.
DELAYED = ("plump_dp", "dct_dp", "dgc", "quant_dp")


@pytest.mark.parametrize(("name", "kind"), [("dct_dp", "mesh"), *((name, "simulated") for name in DELAYED)])
def test_an_exchange_is_one_step_late(name, kind):
    """Equal to the bit to a run that gets zeros first, then the same gradients; the state keeps the last ones."""
    data, zeros = given_gradients(4), {name: np.zeros((K, *shape), np.float32) for name, shape in SHAPES.items()}
    start = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    (exchange,) = (case.make() for case in FIRST if case.name == name)
    delayed = make(kind, linear, jc.chain(exchange, optax.sgd(0.1, momentum=0.0), delay=1))
    at_once = make(kind, linear, jc.chain(exchange, optax.sgd(0.1, momentum=0.0)))
    late, at_once_state = delayed.init(start), at_once.init(start)
    for batch, before in zip(data, [zeros, *data], strict=False):
        late, metrics = delayed(late, batch)
        at_once_state, expected = at_once(at_once_state, before)
        equal(late.params, at_once_state.params)
        equal(late.opt_state.inner, at_once_state.opt_state)
        assert {**metrics, "loss": 0} == {**expected, "loss": 0}
        equal(late.opt_state.gradients.rows, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_model_state(kind):
    tx, key = jc.chain(jc.topk(0.5, dense_below=0), optax.sgd(0.0), delay=1), jax.random.key(3)
    delayed = make(kind, loss_fn, tx, has_state=True, rng=key)
    at_once = make(kind, loss_fn, jc.chain(jc.topk(0.5, dense_below=0), optax.sgd(0.0)), has_state=True, rng=key)
    late, at_once_state = (step.init(PARAMS, {"mean": jnp.zeros(())}) for step in (delayed, at_once))
    for batch in batches(3):
        late, metrics = delayed(late, batch)
        at_once_state, expected = at_once(at_once_state, batch)
        assert (metrics["loss"], metrics["size"]) == (expected["loss"], expected["size"])
        equal(late.model_state, at_once_state.model_state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_skip_is_one_step_late(kind):
    tx = jc.chain(jc.topk(0.5, dense_below=0), optimizer(), delay=1)
    step = make(kind, loss_fn, tx, has_state=True, rng=jax.random.key(0))
    state, data = step.init(PARAMS, {"mean": jnp.zeros(())}), batches(5)
    data[1] = np.full_like(data[1], np.nan)
    skipped, counts, means = [], [], []
    for batch in data:
        before = jax.tree.map(np.array, state.params)
        state, metrics = step(state, batch)
        skipped.append(int(metrics["skipped"]))
        counts.append(int(state.opt_state.inner[1][0].count))
        means.append(float(state.model_state["mean"]))
        if skipped[-1]:
            equal(state.params, before)
    assert skipped == [0, 0, 1, 0, 0]
    assert counts == [1, 2, 2, 3, 4]  # Adam's steps: not of the one that was skipped
    assert means[1] == means[0]
    assert means[2] != means[1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("new", [3, 8, 1])
def test_another_number_of_workers(new):
    step = jc.simulate(linear, jc.chain(jc.topk(0.9, dense_below=0), optax.sgd(0.1), delay=1), K)
    (gradient,) = given_gradients(1)
    state, _ = step(step.init({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}), gradient)
    rows = jc.resize_workers(state, new).opt_state.gradients.rows
    for name, owed in gradient.items():
        assert rows[name].shape == (new, *SHAPES[name])
        np.testing.assert_allclose(rows[name].mean(0), owed.mean(0), atol=1e-6)


def test_programs_of_cpu_hosts(monkeypatch):
    """Three programs in two threads, as with several processes; here on one mesh."""
    tx, key = jc.chain(jc.topk(0.5, dense_below=0), optimizer(), delay=1), jax.random.key(3)
    options = {"has_state": True, "rng": key, "accumulate": 2}
    whole, overlap = (jc.make_train_step(loss_fn, tx, jc.make_mesh(data=K), **options) for _ in range(2))
    one, two = (step.init(PARAMS, {"mean": jnp.zeros(())}) for step in (whole, overlap))
    data = batches(4)
    data[1] = np.full_like(data[1], np.nan)
    for batch in data:
        one, expected = whole(one, batch)
        with monkeypatch.context() as patch:
            patch.setattr(HostOverlap, "serves", lambda *_: True)
            two, metrics = overlap(two, batch)
        assert jax.tree.structure(one) == jax.tree.structure(two)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), one, two)
        assert metrics.keys() == expected.keys()
        np.testing.assert_allclose([metrics[name] for name in expected], list(expected.values()), rtol=1e-5)


@pytest.mark.parametrize("exchange", [jc.plump_dp(), jc.topk(0.9)], ids=["plump_dp", "topk"])
def test_the_exchange_waits_for_nothing(exchange):
    """Without a delay, almost nothing can be computed at the same time."""
    names = []
    for delay in (0, 1):
        tx = jc.chain(exchange, optax.sgd(0.1), delay=delay)
        step = jc.make_train_step(lambda p, x: (jnp.tanh(x @ p["w"]) ** 2).mean(), tx, jc.make_mesh(data=2))
        names.append(step.verify(step.init({"w": np.ones((256, 256), np.float32)}), np.ones((64, 256), np.float32)))
    at_once, delayed = names
    assert at_once.overlap < 0.1
    assert delayed.overlap > 0.99
    assert delayed.received == at_once.received
    assert f"{delayed.overlap:.1%} of the products" in str(delayed)


def test_foreign_steps():
    """`data_parallel` with a delayed chain equals the step of `make_train_step`."""

    def loss(params, x):
        return (jnp.tanh(x @ params["w"]) ** 2).mean()

    tx = jc.chain(jc.topk(0.5, dense_below=0), optax.sgd(0.1), delay=1)

    def update(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    parallel, step = jc.data_parallel(update, jc.make_mesh(data=K)), make("mesh", loss, tx)
    start, state = (PARAMS, tx.init(PARAMS)), step.init(PARAMS)
    for batch in batches(3):
        start, _ = parallel(start, batch)
        state, _ = step(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), start[0], state.params)
    assert get_exchange(start[1]).step == 3


def test_refusals():
    local = jc.chain(optax.sgd(0.1), jc.local_sgd(2, exchange=jc.plump_dp()), delay=1)
    with pytest.raises(ValueError, match="delay must be 0 for local_sgd, whose workers train on their own; got 1"):
        local.init(PARAMS)
    with pytest.raises(ValueError, match="delay must be 0 where gradients bypass topk"):
        jc.chain(jc.topk(0.5, where="v"), delay=1).init(PARAMS)
    for wrong in ({"delay": 2}, {"delay": 1, "accumulate": 2}):
        with pytest.raises(ValueError, match=r"delay must be 0 or 1, and 0 with accumulate=; got"):
            jc.chain(jc.topk(0.5), **wrong)
    searching = jc.chain(jc.plump_dp(), optax.scale_by_backtracking_linesearch(3), delay=1)
    step = make("mesh", lambda p, x: ((x @ p["w"]) ** 2).mean(), searching)
    with pytest.raises(ValueError, match=r"delay must be 0 with a link that takes the loss.*Leave delay out, or that"):
        step(step.init(PARAMS), batches(1)[0])
    mesh, tx = jc.make_mesh(data=2, model=2), jc.chain(jc.topk(0.5), optax.sgd(0.1), delay=1)
    with pytest.raises(ValueError, match=r"delay must be 0 in a chain that is split at its exchange.*Leave it out"):
        jc.make_train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), tx, mesh, specs={"w": jax.P("model")}).init(PARAMS)


def test_gradients_of_another_type():
    """The state's types stay, so that a loop over steps can carry it."""
    tx, params = jc.chain(jc.plump_dp(), optax.sgd(0.1), delay=1), {"w": jnp.ones(3, jnp.bfloat16)}
    gradients = {"w": jnp.ones(3, jnp.float32)}

    def run(gradients):
        state = tx.init(params)
        return jax.tree.map(lambda a, b: (a.dtype, b.dtype), state, tx.update(gradients, state, params)[1])

    spec, found = P(), []
    mapped = jax.shard_map(
        lambda x: found.append(run(x)) or x, mesh=jc.make_mesh(data=2), in_specs=spec, out_specs=spec, check_vma=False
    )
    jax.eval_shape(mapped, gradients)
    pairs = jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, tuple) and len(node) == 2)
    assert all(before == after for before, after in pairs if isinstance(before, np.dtype))
