"""What users' own scripts do around a step: counters, ensembles, checks, pickles. Each is compared with one device."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import checkify

import jaxcomm as jc

K, ROWS = 4, 16


def params_of(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (40, 30)), "b": jnp.zeros(30)}


def batch_of(seed):
    random = np.random.default_rng(seed)
    return {"x": random.normal(size=(ROWS, 40)).astype(np.float32), "y": random.integers(0, 30, ROWS)}


def logits_of(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def losses_of(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["y"])


def loss_of(params, batch):
    return losses_of(params, batch).mean()


def trained(tx, statistics, step, wrap=jax.jit, count=2):
    """Takes steps (state, others, batch) -> (state, others), without and with an exchange; returns the last outputs."""
    state = params_of(0), tx.init(params_of(0))

    def whole(state, statistics, batch):
        params, opt_state = state
        gradients = jax.grad(loss_of)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), step(statistics, params, batch)

    parallel = wrap(whole)
    for number in range(count):
        state, statistics = parallel(state, statistics, batch_of(number))
    return statistics


def on_workers(**options):
    return lambda step: jc.data_parallel(step, jc.make_mesh(data=K), batch=2, **options)


DENSE = jc.chain(jc.plump_dp(), optax.sgd(0.1))


def count_rows(statistics, params, batch):
    del params
    return {"seen": statistics["seen"] + batch["x"].shape[0], "steps": statistics["steps"] + 1}


COUNTS = {"seen": jnp.zeros((), jnp.int32), "steps": jnp.zeros((), jnp.int32)}


def test_a_count_by_shape_is_refused():
    with pytest.raises(ValueError, match=r"got '1/seen' int32\[\] \(state\).*sum='seen'"):
        trained(DENSE, COUNTS, count_rows, on_workers())


def test_a_count_by_shape():
    """The count of steps, which the pattern finds too, goes on as on one device."""
    reference = trained(optax.sgd(0.1), COUNTS, count_rows)
    assert trained(DENSE, COUNTS, count_rows, on_workers(sum="seen|steps")) == reference == {"seen": 32, "steps": 2}


@pytest.mark.parametrize("kind", [float, jnp.float32])
def test_a_number_of_rows_as_a_float(kind):
    def count(statistics, params, batch):
        return {"rows": kind(len(batch["x"]))}

    with pytest.raises(ValueError, match=r"got a sum at '1/rows'. Pass sum="):
        trained(DENSE, {}, count, on_workers())
    assert trained(DENSE, {}, count, on_workers(sum="rows"))["rows"] == ROWS


def test_a_count_that_the_step_sums():
    def count(statistics, params, batch):
        return {"seen": statistics["seen"] + jax.lax.psum(batch["x"].shape[0], "data")}

    assert trained(DENSE, {"seen": 0}, count, on_workers())["seen"] == 32


def losses_by_name(statistics, params, batch):
    losses, old = losses_of(params, batch), statistics["old"]
    return {
        "old": 0.9 * old + losses.sum(),
        "average": 0.9 * old + 0.1 * losses.mean(),
        "loss": {"total": losses.mean(), "count": jnp.float32(1)},
        "both": losses.sum() + jnp.sum(params["w"] ** 2),
        "max": losses.max(),
        "max_mean": losses.mean(),
        "any": losses.mean() > 3,
    }


NAMED = {
    "a mean": ("loss", {"sum": "old|total"}, "'old.total', which finds '1/loss/total', no sum"),
    "a running mean": ("average", {"sum": "old|average"}, "which finds '1/average', no sum"),
    "other terms": ("both", {"sum": "old|both"}, "which finds '1/both', a sum with other terms"),
    "a mean by the name of a maximum": ("max_mean", {"sum": "old", "max": "max"}, "finds '1/max_mean', no extreme"),
    "a maximum": ("max", {"sum": "old", "max": "max"}, ""),
    "whether any": ("any", {"sum": "old", "max": "any"}, ""),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_a_pattern_must_not_find(case):
    name, options, message = NAMED[case]

    def some(statistics, params, batch):
        found = losses_by_name(statistics, params, batch)
        return {"old": found["old"], name: found[name]}

    start = {"old": jnp.float32(1)}
    if message:
        with pytest.raises(ValueError, match=message):
            trained(DENSE, start, some, on_workers(**options), count=1)
        return
    results = trained(DENSE, start, some, on_workers(**options), count=1), trained(optax.sgd(0.1), start, some, count=1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *results)


def test_a_number_equal_to_the_rows():
    def cycle(statistics, params, batch):
        return {"turn": (statistics["turn"] + 1) % (ROWS // K)}

    assert trained(DENSE, {"turn": jnp.zeros((), jnp.int32)}, cycle, on_workers(), count=3)["turn"] == 3


def test_right_answers_and_their_number():
    def score(statistics, params, batch):
        del statistics
        return {"right": (logits_of(params, batch).argmax(-1) == batch["y"]).sum(), "rows": len(batch["y"])}

    reference = trained(optax.sgd(0.1), {}, score)
    assert trained(DENSE, {}, score, on_workers(sum="right|rows")) == reference


def test_a_bare_count():
    def step(right, params, batch):
        return right + (logits_of(params, batch).argmax(-1) == batch["y"]).sum()

    reference = trained(optax.sgd(0.1), jnp.int32(5), step)
    assert trained(DENSE, jnp.int32(5), step, on_workers(sum="^1$")) == reference


@pytest.mark.parametrize("pattern", ["mean", "sum"])
def test_metrics_of_nnx(pattern):
    def run(tx, wrap):
        model = nnx.Linear(40, 30, rngs=nnx.Rngs(0))
        optimizer, metrics = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.metrics.Accuracy()

        def step(model, optimizer, metrics, batch):
            def loss_fn(model):
                logits = model(batch["x"])
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), logits

            gradients, logits = nnx.grad(loss_fn, has_aux=True)(model)
            metrics.update(logits=logits, labels=batch["y"])
            optimizer.update(model, gradients)

        parallel = wrap(step)
        for number in range(2):
            parallel(model, optimizer, metrics, batch_of(number))
        return metrics.compute()

    result = run(DENSE, lambda step: jc.data_parallel(step, jc.make_mesh(data=K), batch=3, **{pattern: "Metric"}))
    np.testing.assert_allclose(result, run(optax.sgd(0.1), nnx.jit), rtol=1e-6)


@pytest.mark.parametrize("is_gathered", [False, True], ids=["own values", "all values"])
def test_a_spread_of_nnx(is_gathered):
    def run(tx, wrap, gather):
        model = nnx.Linear(40, 30, rngs=nnx.Rngs(0))
        optimizer, metric = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.metrics.Welford()

        def step(model, optimizer, metric, batch):
            def loss_fn(model):
                losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
                return losses.mean(), losses

            gradients, losses = nnx.grad(loss_fn, has_aux=True)(model)
            metric.update(values=gather(losses))
            optimizer.update(model, gradients)

        parallel = wrap(step)
        for number in range(2):
            parallel(model, optimizer, metric, batch_of(number))
        return metric.compute().standard_deviation

    def together(gather, **options):
        return run(DENSE, lambda step: jc.data_parallel(step, jc.make_mesh(data=K), batch=3, **options), gather)

    if is_gathered:
        reference = run(optax.sgd(0.1), nnx.jit, lambda losses: losses)
        np.testing.assert_allclose(together(lambda x: jax.lax.all_gather(x, "data", tiled=True)), reference, rtol=1e-5)
    else:
        with pytest.raises(ValueError, match=r"squares of distances.*all_gather"):
            together(lambda losses: losses, mean="Metric")


METHODS = [jc.plump_dp(), jc.topk(0.9), jc.quant_dp(8), jc.powersgd(2), jc.sign()]


@pytest.mark.parametrize("exchange", METHODS, ids=[tx.method.name for tx in METHODS])
def test_members_of_an_ensemble(exchange):
    """An optimizer under `jax.vmap`: members are no workers, and each has rows of its own."""
    tx, mesh = jc.chain(exchange, optax.adam(1e-2)), jc.make_mesh(data=K)

    def alone(seed):
        params = params_of(seed)

        def step(state, batch):
            params, opt_state = state
            updates, opt_state = tx.update(jax.grad(loss_of)(params, batch), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        parallel, state = jc.data_parallel(step, mesh), (params, tx.init(params))
        for number in range(2):
            state = parallel(state, batch_of(number))
        return state[0]

    def step(state, batch):
        params, opt_state = state
        gradients = jax.vmap(jax.grad(loss_of), (0, None))(params, batch)
        updates, opt_state = jax.vmap(tx.update)(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(params_of, range(3)))
    parallel, state = jc.data_parallel(step, mesh, check_every=1), (params, jax.vmap(tx.init)(params))
    for number in range(2):
        state = parallel(state, batch_of(number))
    for seed in range(3):
        for name, leaf in alone(seed).items():
            np.testing.assert_allclose(state[0][name][seed], leaf, rtol=1e-5, atol=1e-5)


def checked_step(state, batch):
    checkify.check(jnp.isfinite(batch["x"]).all(), "rows must be finite")
    params, opt_state = state
    updates, opt_state = DENSE.update(jax.grad(loss_of)(params, batch), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@pytest.mark.parametrize("is_around", [True, False], ids=["around", "inside"])
def test_an_error_of_checkify(is_around):
    mesh = jc.make_mesh(data=K)
    inside = jc.data_parallel(checkify.checkify(checked_step), mesh, max="ErrorEffect")
    step = checkify.checkify(jc.data_parallel(checked_step, mesh)) if is_around else inside
    state, bad = inside.place((params_of(0), DENSE.init(params_of(0)))), batch_of(1)
    bad["x"][5, 2] = np.nan
    error, state = step(state, batch_of(0))
    assert error.get() is None
    error, _ = step(state, bad)
    assert "rows must be finite" in error.get()


def test_the_pattern_of_checkify():
    step = jc.data_parallel(checkify.checkify(checked_step), jc.make_mesh(data=K))
    with pytest.raises(ValueError, match="max='ErrorEffect'"):
        step((params_of(0), DENSE.init(params_of(0))), batch_of(0))


WITH_OTHERS = {
    "a second exchange": lambda: jc.topk(0.9, where="w", others=jc.plump_dp()),
    "frozen": lambda: jc.topk(0.9, where="w", others=optax.set_to_zero()),
}


@pytest.mark.parametrize("case", WITH_OTHERS)
def test_a_state_with_where_is_pickled(case):
    tx = jc.chain(WITH_OTHERS[case](), optax.adam(1e-2))
    state = tx.init(params_of(0))
    copy = pickle.loads(pickle.dumps(state))
    np.testing.assert_array_equal(copy[0].residual.rows, state[0].residual.rows)
    assert copy[0].method == state[0].method

    step = jc.data_parallel(lambda s, b: tx.update(jax.grad(loss_of)(s[0], b), s[1], s[0])[0], jc.make_mesh(data=K))
    result, expected = (step((params_of(0), item), batch_of(0)) for item in (state, copy))
    np.testing.assert_array_equal(result["w"], expected["w"])
    np.testing.assert_array_equal(result["b"], expected["b"])
    assert expected["b"].any() == (case == "a second exchange")


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"delay": 1}], ids=["accumulate", "delay"])
def test_a_map_finds_the_moments(options):
    tx = jc.chain(jc.topk(0.9), optax.adam(1e-2), **options)
    state = tx.init(params_of(0))
    mapped = optax.tree_map_params(tx, lambda leaf: leaf + 5, state)
    change = {
        jax.tree_util.keystr(path)
        for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(mapped), strict=True)
        if (np.asarray(old) != np.asarray(new)).any()
    }
    assert len(change) == 4
    assert all(".mu" in path or ".nu" in path for path in change)


def test_a_tree_without_leaves_is_named():
    with pytest.raises(ValueError, match=r"must have.*; got"):
        jc.topk(0.9, where="a", others=optax.set_to_zero()).init({"a": None})


def test_a_wrapper_that_goes_by_own_gradients_is_refused_with_a_remedy():
    optimizer = optax.sgd(0.1, momentum=0.9)

    def parameters(tx, wrap, keep):
        def step(state, batch):
            params, opt_state = state
            updates, new = tx.update(jax.grad(loss_of)(params, batch), opt_state, params)
            return keep((optax.apply_updates(params, updates), new), state)

        wrapped, state = wrap(step), (params_of(0), tx.init(params_of(0)))
        for number in range(3):
            batch = batch_of(number)
            if number == 1:
                batch["x"][5, 2] = np.nan
            state = wrapped(state, batch)
        return state[0]

    def keep(new, old):
        skipped = jc.exchange_metrics(new[1]).skipped == 1
        return jax.tree.map(lambda n, o: jnp.where(skipped, o, n), new, old)

    on_mesh, chain = lambda step: jc.data_parallel(step, jc.make_mesh(data=K)), jc.chain(jc.plump_dp(), optimizer)
    with pytest.raises(ValueError, match=r"inside optax\.apply_if_finite.*skipped is 1"):
        parameters(optax.apply_if_finite(chain, 3), on_mesh, lambda new, old: new)
    opaque = optax.contrib.sam(chain, optax.sgd(0.01), opaque_mode=True)
    with pytest.raises(ValueError, match=r"inside optax\.contrib\.sam.*Write jaxcomm\.chain\(exchange, sam\)"):
        parameters(opaque, on_mesh, lambda new, old: new)
    alone = parameters(optax.apply_if_finite(optimizer, 3), jax.jit, lambda new, old: new)
    np.testing.assert_allclose(parameters(chain, on_mesh, keep)["w"], alone["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [0, jnp.int32(0)], ids=["a number", "an array"])
def test_a_sum_beside_a_schedule(first):
    """A state of Flax begins with Python's 0, of a weak type."""

    def step(state, batch):
        value, gradients = jax.value_and_grad(lambda p: losses_of(p, batch).sum())(state.params)
        return state.apply_gradients(grads=gradients), {"loss": value, "rate": 0.1 / (1 + state.step)}

    state = TrainState.create(apply_fn=None, params=params_of(0), tx=DENSE).replace(step=first)
    with pytest.raises(ValueError, match="the gradient of a sum"):
        jc.data_parallel(step, jc.make_mesh(data=K))(state, batch_of(0))


def test_a_loop_of_python_warns():
    """Its program is another for other numbers of rows, so that nothing is known of it."""

    def step(statistics, params, batch):
        losses = losses_of(params, batch)
        return sum(losses[i] for i in range(len(losses)))

    with pytest.warns(UserWarning, match="gradients, 1: cannot be told to be a mean over rows"):
        trained(DENSE, 0.0, step, on_workers(), count=1)


@pytest.mark.parametrize("exchange", [jc.plump_dp(), jc.topk(0.5, dense_below=0)])
def test_gradients_of_each_row(exchange):
    aggregate = optax.contrib.differentially_private_aggregate(1.0, 0.0, 0)

    def run(tx, wrap):
        def step(params, opt_state, batch):
            rows = jax.tree.map(lambda x: x[:, None], batch)
            gradients = jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(params, rows)
            updates, opt_state = tx.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return wrap(step)(params_of(0), tx.init(params_of(0)), batch_of(0))[0]

    with pytest.raises(
        ValueError, match=r"shapes of their parameters; got \(4, 30\) for \(30,\).*_aggregate\(\.\.\., noise"
    ):
        run(jc.chain(exchange, optax.sgd(0.1)), on_workers())
    with pytest.warns(UserWarning, match=r"with noise_multiplier=0 \(then ignore"):
        private = run(jc.chain(aggregate, jc.plump_dp(), optax.sgd(0.1)), on_workers())
    np.testing.assert_allclose(private["w"], run(optax.chain(aggregate, optax.sgd(0.1)), jax.jit)["w"], rtol=1e-5)


def test_compiled_ahead_of_time():
    tx = jc.chain(jc.topk(0.9), optax.sgd(0.1, momentum=0.9))

    def step(params, opt_state, batch):
        value, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    parallel = on_workers()(step)
    args = params_of(0), parallel.place(tx.init(params_of(0))), batch_of(0)
    compiled = parallel.lower(*args).compile()
    jax.tree.map(np.testing.assert_array_equal, compiled(*args), parallel(*args))
    assert "all-gather" in compiled.as_text()


def test_a_size_that_is_not_static_is_named():
    def step(params, opt_state, batch, size):
        updates, opt_state = DENSE.update(jax.grad(loss_of)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jnp.zeros(size)

    args = params_of(0), DENSE.init(params_of(0)), batch_of(0), 3
    with pytest.raises(TypeError) as caught:
        on_workers()(step)(*args)
    assert re.search("Name by static= the arguments .*'size'", caught.value.__notes__[0])
    assert on_workers(static="size")(step)(*args)[2].shape == (3,)
