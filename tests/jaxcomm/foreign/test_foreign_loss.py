"""Losses and optimizers as written for one device: loops and branches over constants, collectives of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.exchange import is_local

K, ROWS, TIME, WIDTH = 4, 16, 3, 8


def params():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 3, jnp.float32) for name in ("u", "w")}


def batch():
    rng = np.random.default_rng(1)
    return {"x": jnp.asarray(rng.normal(size=(ROWS, TIME, WIDTH)), jnp.float32)}


def scan_from_zeros(params, batch):
    def cell(h, x):
        return jnp.tanh(x @ params["w"] + h @ params["u"]), None

    h, _ = lax.scan(cell, jnp.zeros((len(batch["x"]), WIDTH)), jnp.swapaxes(batch["x"], 0, 1))
    return jnp.mean(h**2)


def sum_from_zero(params, batch):
    def add(total, row):
        return total + jnp.mean((row @ params["w"] @ params["u"]) ** 2), None

    return lax.scan(add, 0.0, batch["x"])[0] / len(batch["x"])


def fori_loop_on_zeros(params, batch):
    def put(t, out):
        return out.at[:, t].set(batch["x"][:, t] @ params["w"] @ params["u"])

    return jnp.mean(lax.fori_loop(0, TIME, put, jnp.zeros(batch["x"].shape)) ** 2)


def while_loop_from_zeros(params, batch):
    def more(carry):
        return carry[0] < TIME

    def turn(carry):
        return carry[0] + 1, carry[1] + batch["x"] @ params["w"]

    scale = lax.stop_gradient(lax.while_loop(more, turn, (0, jnp.zeros(batch["x"].shape)))[1])
    return jnp.mean(scale * (batch["x"] @ params["w"] @ params["u"]))


def branch_of_a_constant(params, batch):
    def of_row(row):
        return lax.cond(row[0, 0] > 0, lambda: jnp.mean((row @ params["w"] @ params["u"]) ** 2), lambda: 0.0)

    return jnp.mean(lax.map(of_row, batch["x"]))


@jax.custom_vjp
def _cut(x):
    return x


_cut.defvjp(lambda x: (x, x.shape), lambda shape, _: (jnp.zeros(shape),))


def gradient_of_a_constant(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2) + jnp.mean(_cut(batch["x"] @ params["u"]))


LOOPS = [
    scan_from_zeros,
    sum_from_zero,
    fori_loop_on_zeros,
    while_loop_from_zeros,
    branch_of_a_constant,
    gradient_of_a_constant,
]
SGD = jc.chain(jc.plump_dp(), optax.sgd(1.0))


def all_of_them(params, batch):
    return sum(loss(params, batch) for loss in LOOPS)


def change_of(step, steps=1, **options):
    state = step.init(params(), **options)
    for _ in range(steps):
        state, metrics = step(state, batch())
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), params(), step.params(state)), metrics


def mesh(**axes):
    return jc.make_mesh(**(axes or {"data": K}))


STEPS = {
    "workers": lambda loss, tx: jc.make_train_step(loss, tx, mesh()),
    "two axes": lambda loss, tx: jc.make_train_step(
        loss, jc.chain(jc.plump_dp(axis_name=("host", "chip")), optax.sgd(1.0)), mesh(host=2, chip=2)
    ),
    "micro-batches": lambda loss, tx: jc.make_train_step(loss, tx, mesh(), accumulate=2),
    "fsdp": lambda loss, tx: jc.make_train_step(
        loss, tx, mesh(data=K, fsdp=2), specs={"u": P("fsdp"), "w": P(None, "fsdp")}, auto=("fsdp",)
    ),
    "simulated": lambda loss, tx: jc.simulate(loss, tx, K),
}


@pytest.mark.parametrize(
    ("loss", "make"),
    [*((loss, "workers") for loss in LOOPS), *((all_of_them, make) for make in STEPS if make != "workers")],
)
def test_gradient_of_a_loop(loss, make):
    value, right = jax.value_and_grad(loss)(params(), batch())
    result, metrics = change_of(STEPS[make](loss, SGD))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result, right)


@pytest.mark.parametrize(
    "method", [jc.topk(0.9), jc.powersgd(2), jc.iwp(5.0, density=0.1)], ids=["topk", "powersgd", "iwp"]
)
def test_bytes_of_a_loop(method):
    step = jc.make_train_step(scan_from_zeros, jc.chain(method, optax.sgd(0.1)), mesh())
    state = step.init(params())
    step.verify(state, batch())
    simulated = jc.simulate(scan_from_zeros, step.tx, K)
    for variant, start in ((step, state), (simulated, simulated.init(params()))):
        for _ in range(2):
            start, _ = variant(start, batch())
        state = start if variant is step else state
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, start.params)


@pytest.mark.parametrize("layout", ["workers", "fsdp"])
def test_a_loop_with_a_local_method(layout):
    tx = jc.chain(optax.sgd(0.5), jc.local_sgd(2, exchange=jc.plump_dp(), outer=optax.sgd(1.0)))
    result, _ = change_of(STEPS[layout](scan_from_zeros, tx), steps=2)
    totals = jax.tree.map(jnp.zeros_like, params())
    for rows in np.split(batch()["x"], K):
        local_params = params()
        for _ in range(2):
            gradient = jax.grad(scan_from_zeros)(local_params, {"x": rows})
            local_params = jax.tree.map(lambda p, g: p - 0.5 * g, local_params, gradient)
        totals = jax.tree.map(lambda total, p, q: total + (p - q) / K, totals, params(), local_params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result, totals)


def test_an_optimizer_with_a_branch():
    def init(params):
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        del params
        count, old = state
        new = lax.cond(count % 2 == 0, lambda: updates, lambda: jax.tree.map(jnp.zeros_like, updates))
        return jax.tree.map(lambda a, b: -(a + b), new, old), (count + 1, new)

    optimizer = optax.GradientTransformation(init, update)
    tx = jc.chain(optimizer, jc.local_sgd(2, exchange=jc.plump_dp(), outer=optax.sgd(1.0)))
    result, _ = change_of(jc.make_train_step(scan_from_zeros, tx, mesh()), steps=2)
    simulated, _ = change_of(jc.simulate(scan_from_zeros, tx, K), steps=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result, simulated)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_loop_in_a_stage(schedule):
    def first(params, x, batch):
        del x
        return lax.scan(
            lambda h, x: (jnp.tanh(x @ params + h), None), jnp.zeros((len(batch["x"]), WIDTH)), swapped(batch)
        )[0]

    def swapped(batch):
        return jnp.swapaxes(batch["x"], 0, 1)

    def second(params, x, batch):
        del batch
        return lax.fori_loop(0, 2, lambda _, y: y + x @ params, jnp.zeros(x.shape))

    def loss_fn(x, batch):
        return lax.scan(lambda total, row: (total + jnp.mean(row**2), None), 0.0, x)[0] / len(x), {}

    start = [params()["w"], params()["u"]]
    pipeline = jc.Pipeline([first, second], loss_fn, start, micro_batches=2, schedule=schedule)
    step = jc.make_train_step(pipeline, SGD, mesh(data=2, stage=2))
    state, metrics = step(step.init(start), batch())

    def whole(params):
        return loss_fn(second(params[1], first(params[0], None, batch()), batch()), batch())[0]

    value, right = jax.value_and_grad(whole)(start)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for old, new, gradient in zip(start, step.params(state), right, strict=True):
        np.testing.assert_allclose(np.asarray(old) - np.asarray(new), gradient, atol=1e-6)


def test_a_loop_in_a_line_search():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=3, store_grad=True)
    tx = jc.chain(jc.plump_dp(), optax.sgd(1.0), search)
    result, _ = change_of(jc.make_train_step(scan_from_zeros, tx, mesh()), steps=2)
    single = optax.chain(optax.sgd(1.0), search)
    local_params, state = params(), single.init(params())
    for _ in range(2):
        value, gradient = jax.value_and_grad(scan_from_zeros)(local_params, batch())
        arguments = {"value": value, "grad": gradient, "value_fn": lambda at: scan_from_zeros(at, batch())}
        updates, state = single.update(gradient, state, local_params, **arguments)
        local_params = optax.apply_updates(local_params, updates)
    jax.tree.map(lambda a, p, q: np.testing.assert_allclose(a, p - q, atol=1e-5), result, params(), local_params)


def test_a_loop_in_a_delayed_step():
    tx = jc.chain(jc.plump_dp(), optax.sgd(1.0), delay=1)
    result, _ = change_of(jc.make_train_step(scan_from_zeros, tx, mesh()), steps=2)
    right = jax.grad(scan_from_zeros)(params(), batch())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result, right)


def test_an_untracked_output_is_refused():
    def update(updates, state, params=None):
        del params
        return updates, state + lax.axis_index("data").astype(jnp.float32)

    counter = optax.GradientTransformation(lambda _: jnp.zeros(()), update)
    step = jc.make_train_step(scan_from_zeros, optax.chain(jc.plump_dp(), counter, optax.sgd(0.1)), mesh())
    with pytest.raises(ValueError, match=r"must be the same on all workers; got others at \[0\]\.opt_state\[1\]"):
        step(step.init(params()), batch())


# Losses that communicate by themselves.


def averaged(params, batch):
    return lax.pmean(jnp.mean(jnp.tanh(batch["x"] @ params["w"] @ params["u"]) ** 2), "data")


def averaged_of_one_device(params, batch):
    return jnp.mean(jnp.tanh(batch["x"] @ params["w"] @ params["u"]) ** 2)


def normalised(params, batch, over=None):
    """The mean over valid numbers, whose count differs between workers."""
    valid = (batch["x"][..., 0] > 0).astype(jnp.float32)
    norms = jnp.mean((batch["x"] @ params["w"] @ params["u"]) ** 2, axis=-1)
    count = valid.sum() if over is None else lax.pmean(valid.sum(), over)
    return (norms * valid).sum() / count


def synchronised(params, batch, over=None):
    """Batch normalisation by the statistics of all rows, and a loop over a constant beside it."""
    x = batch["x"] @ params["w"]
    mean, square = x.mean((0, 1)), (x**2).mean((0, 1))
    if over is not None:
        mean, square = lax.pmean((mean, square), over)
    x = (x - mean) / jnp.sqrt(square - mean**2 + 1e-3)
    h, _ = lax.scan(lambda h, x: (jnp.tanh(x @ params["u"] + h), None), jnp.zeros(x[:, 0].shape), jnp.swapaxes(x, 0, 1))
    return jnp.mean(h**2)


def centred(params, batch, over=("rows",)):
    """Rows of `jax.vmap`, less the mean of all of them, as in the batch normalisation of Equinox."""

    def row(x):
        h = jnp.tanh(x @ params["w"])
        return jnp.mean(((h - lax.pmean(h, over)) @ params["u"]) ** 2)

    return jax.vmap(row, axis_name="rows")(batch["x"]).mean()


OWN_COLLECTIVES = {
    "a loss that is averaged already": (averaged, averaged_of_one_device),
    "a count of all workers": (lambda p, b: normalised(p, b, "data"), normalised),
    "SyncBN before a loop": (lambda p, b: synchronised(p, b, "data"), synchronised),
    "SyncBN over an axis of vmap": (lambda p, b: centred(p, b, ("rows", "data")), centred),
}


@pytest.mark.parametrize("make", ["workers", "fsdp", "simulated"])
@pytest.mark.parametrize("case", OWN_COLLECTIVES)
def test_gradient_of_collectives(case, make):
    loss, whole = OWN_COLLECTIVES[case]
    value, right = jax.value_and_grad(whole)(params(), batch())
    result, metrics = change_of(STEPS[make](loss, SGD))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result, right)


def counted(params, batch):
    losses = ((batch["x"] @ params["w"]) ** 2).mean((1, 2))
    return losses.mean(), {
        "right": (losses < 1).sum(),
        "most": losses.max(),
        "any": (losses > 2).any(),
        "mean": losses.mean(),
    }


# Any two of the three settings meet.
@pytest.mark.parametrize(
    ("workers", "accumulate", "method"),
    [
        ("mesh", 1, jc.plump_dp()),
        ("simulated", 2, jc.plump_dp()),
        ("mesh", 2, jc.plump_dp(p=2)),
        ("simulated", 1, jc.plump_dp(p=2)),
    ],
)
def test_scalars_are_of_all_rows(workers, accumulate, method):
    expected = counted(params(), batch())[1]
    tx = jc.chain(optax.sgd(0.0), method) if is_local(method) else jc.chain(method, optax.sgd(0.0))
    options = {"has_aux": True, "sum": "right", "max": "most|any", "accumulate": accumulate}
    if workers == "mesh":
        step = jc.make_train_step(counted, tx, jc.make_mesh(data=K), **options)
    else:
        step = jc.simulate(counted, tx, workers=K, **options)
    _, metrics = step(step.init(params()), batch())
    for name in ("right", "mean", "most", "any"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)


def test_outputs_without_a_mean_are_refused():
    tx, mesh = jc.chain(jc.plump_dp(), optax.sgd(0.1)), jc.make_mesh(data=K)

    def run(**options):
        step = jc.make_train_step(counted, tx, mesh, has_aux=True, **options)
        step(step.init(params()), batch())

    with pytest.raises(ValueError, match=r"must be a float; got int32 for 'right'\. Pass sum='right'.*max='right'"):
        run(max="any")
    with pytest.raises(ValueError, match=r"max= must .* finds a scalar of the loss; got 'typo' for \['right', 'most',"):
        run(sum="right|any", max="typo")
    with pytest.raises(ValueError, match=r"One of sum and max must match a scalar; got both for 'any'\. Narrow"):
        run(sum="right|any", max="any")
