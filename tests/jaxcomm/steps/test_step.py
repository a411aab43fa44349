"""The train step: three ways that agree, skipped steps, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from tests.jaxcomm.methods import dct_dp, plump_dp, topk
from tests.jaxcomm.train_steps import init_state
from tests.marks import slow_except

K, ROWS = 4, 8
BAD_STEP = 3  # of 7; with a life-span of 3 a refresh is due in it, with 2 it is between two refreshes


def params():
    rng = np.random.default_rng(0)
    return {"b": jnp.zeros(3), "w": jnp.asarray(rng.normal(size=(300, 3)) * 0.1, jnp.float32)}


def batches():
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(300, 3))
    for i in range(7):
        x = rng.normal(size=(ROWS, 300)).astype(np.float32)
        y = (x @ truth).astype(np.float32)
        if i == BAD_STEP:
            y[-1, -1] = np.nan  # a row of the last worker
        yield {"x": x, "y": y}


def loss_fn(params, batch):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.mean(error**2)


def with_make_train_step(tx, mesh):
    state = init_state(params(), tx, mesh)
    step = jc.make_train_step(loss_fn, tx, mesh)
    return run(step, state)


def with_simulate(tx, mesh):
    del mesh
    return run(jc.simulate(loss_fn, tx, K), init_state(params(), tx, K))


def with_own_shard_map(tx, mesh, check_vma=True):
    """A user's step without `make_train_step`; transformations after the exchange see means, and skip by themselves."""
    start = init_state(params(), tx, mesh)
    specs = jc.state_specs(start.opt_state)

    def worker(params, opt_state, batch):
        local_params = lax.pcast(params, "data", to="varying") if check_vma else params
        loss, grads = jax.value_and_grad(loss_fn)(local_params, batch)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        ok = jc.exchange_metrics(new_opt_state).skipped == 0
        exchange, tail = new_opt_state[0], new_opt_state[1:]
        tail = jax.tree.map(lambda new, old: jnp.where(ok, new, old), tail, opt_state[1:])
        new_params = jax.tree.map(
            lambda new, old: jnp.where(ok, new, old), optax.apply_updates(params, updates), params
        )
        return new_params, (exchange, *tail), lax.pmean(loss, "data")

    mapped = jax.jit(
        jax.shard_map(
            worker, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()), check_vma=check_vma
        )
    )

    def step(state, batch):
        new_params, opt_state, loss = mapped(state.params, state.opt_state, batch)
        metrics = {"loss": loss, **jc.exchange_metrics(opt_state)._asdict()}
        return jc.state.TrainState(new_params, opt_state, state.step + 1), metrics

    return run(step, start)


def run(step, state):
    """Runs all batches: (metrics of every step, parameters after every step, state)."""
    metrics, parameters = [], []
    for batch in batches():
        state, m = step(state, batch)
        metrics.append({name: np.asarray(value) for name, value in m.items()})
        parameters.append(jax.tree.map(np.asarray, state.params))
    return metrics, parameters, state


METHODS = {
    "plump_dp": jc.plump_dp(),
    "dct_dp": jc.dct_dp(0.9, life_span=3),
    "dct_dp-drain": jc.dct_dp(0.95, life_span=2, drain_every=3, seed=1),
}


@pytest.mark.parametrize("name", slow_except(["plump_dp", "dct_dp-drain"], "plump_dp"))
def test_three_ways_agree(name):
    """Losses and parameters to float tolerance, with a skipped step among them."""
    tx, mesh = optax.chain(METHODS[name], optax.adam(0.01)), jc.make_mesh(data=K)
    metrics, parameters, state = with_make_train_step(tx, mesh)
    for make in (with_simulate, with_own_shard_map):
        other_metrics, other_parameters, other_state = make(tx, mesh)
        for metric, reference in zip(metrics, other_metrics, strict=True):
            np.testing.assert_allclose(metric["loss"], reference["loss"], rtol=1e-5)
            for count in jc.types.ExchangeMetrics._fields:
                assert metric[count] == reference[count]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), parameters, other_parameters)
        assert state.step == other_state.step == 7
    assert [int(m["skipped"]) for m in metrics] == [int(i == BAD_STEP) for i in range(7)]
    jax.tree.map(np.testing.assert_array_equal, parameters[BAD_STEP], parameters[BAD_STEP - 1])
    for before, after in ((0, 1), (BAD_STEP, BAD_STEP + 1), (5, 6)):
        assert np.abs(parameters[after]["w"] - parameters[before]["w"]).max() > 1e-4


@pytest.mark.parametrize("name", slow_except(["plump_dp", "dct_dp"], "plump_dp"))
def test_without_check_vma(name):
    tx, mesh = optax.chain(METHODS[name], optax.adam(0.01)), jc.make_mesh(data=K)
    metrics, parameters, _ = with_simulate(tx, mesh)
    other_metrics, other_parameters, _ = with_own_shard_map(tx, mesh, check_vma=False)
    for metric, reference in zip(metrics, other_metrics, strict=True):
        np.testing.assert_allclose(metric["loss"], reference["loss"], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), parameters, other_parameters)


@pytest.mark.parametrize("name", slow_except(METHODS, "plump_dp"))
def test_a_skip_changes_nothing(name):
    tx = optax.chain(METHODS[name], optax.adam(0.01))
    state, step = init_state(params(), tx, K), jc.simulate(loss_fn, tx, K, donate=False)
    for i, batch in enumerate(batches()):
        new, metrics = step(state, batch)
        if i == BAD_STEP:
            break
        state = new
    assert int(metrics["skipped"]) == 1
    assert np.isnan(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
    (exchange, adam), (old_exchange, old_adam) = new.opt_state, state.opt_state
    jax.tree.map(np.testing.assert_array_equal, adam, old_adam)
    assert int(old_adam[0].count) == BAD_STEP
    state_after, old = (
        (state.residual, getattr(state.memory, "threshold", None)) for state in (exchange, old_exchange)
    )
    jax.tree.map(np.testing.assert_array_equal, state_after, old)
    assert int(new.step) == BAD_STEP + 1


def test_auxiliary_scalars():
    def loss_with_aux(params, batch):
        return loss_fn(params, batch), {"largest": jnp.max(batch["x"]), "rows": len(batch["x"])}

    batch = next(batches())
    for workers, maker in ((K, jc.simulate), (jc.make_mesh(data=K), jc.make_train_step)):
        tx = optax.chain(jc.plump_dp(), optax.sgd(0.1))
        step = maker(loss_with_aux, tx, workers, has_aux=True, max="largest", sum="rows")
        _, metrics = step(init_state(params(), tx, workers), batch)
        assert sorted(metrics) == sorted(["largest", "loss", "rows", *jc.types.ExchangeMetrics._fields])
        assert float(metrics["largest"]) == batch["x"].max()
        assert float(metrics["rows"]) == ROWS
        with pytest.raises(ValueError, match=r"a tuple of 2\. Pass has_aux=True"):
            maker(loss_with_aux, tx, workers)(init_state(params(), tx, workers), batch)


@pytest.mark.slow
def test_another_axis_name():
    tx = optax.chain(jc.dct_dp(0.5, axis_name="workers", drain_every=2), optax.sgd(0.1))
    mesh = jc.make_mesh(workers=2)
    state = init_state(params(), tx, mesh, axis_name="workers")
    state, metrics = jc.make_train_step(loss_fn, tx, mesh, axis_name="workers")(state, next(batches()))
    result, expected = jc.simulate(loss_fn, tx, 2, axis_name="workers")(
        init_state(params(), tx, 2, axis_name="workers"), next(batches())
    )
    np.testing.assert_allclose(state.params["w"], result.params["w"], rtol=1e-5, atol=1e-6)
    assert int(metrics["sent"]) == int(expected["sent"])


@pytest.mark.slow
def test_donation():
    metric = params()
    for workers, maker in ((2, jc.simulate), (jc.make_mesh(data=2), jc.make_train_step)):
        tx = optax.chain(jc.topk(0.5), optax.sgd(0.1))
        state = init_state(metric, tx, workers)
        maker(loss_fn, tx, workers)(state, next(batches()))
        np.testing.assert_array_equal(metric["w"], params()["w"])
        assert state.opt_state[0].step.is_deleted()
        assert state.opt_state[0].residual.rows.is_deleted()


@pytest.mark.parametrize("case", [method.CASES[0] for method in (plump_dp, topk, dct_dp)], ids=str)
def test_the_trap(case):
    """jax.grad with respect to replicated parameters has already inserted a dense all-reduce."""
    tx, mesh = case.make(), jc.make_mesh(data=2)
    state = init_state(params(), tx, mesh).opt_state
    specs = jc.state_specs(state)

    def worker(params, state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return tx.update(grads, state)

    step = jax.shard_map(worker, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    with pytest.raises(ValueError, match=r"each worker's own gradient; got one at .*'b'") as error:
        jax.jit(step).trace(params(), state, next(batches()))
    assert "params = jax.lax.pcast(params, 'data', to='varying')" in str(error.value)


@pytest.mark.parametrize("case", [method.CASES[0] for method in (plump_dp, topk, dct_dp)], ids=str)
def test_outside_any_axis(case):
    tx = case.make()
    with pytest.raises(ValueError, match="got no axis 'data'") as error:
        tx.update(params(), tx.init(params()))
    for place in ("jax.shard_map", "jaxcomm.make_train_step", "jax.vmap(..., axis_name='data')"):
        assert place in str(error.value)


@pytest.mark.parametrize("maker", [jc.make_train_step, jc.simulate])
@pytest.mark.parametrize(("rows", "size", "remedy"), [(6, 6, 4), (9, 9, 8), (3, 3, 4), (0, 0, 4)])
def test_a_batch_that_does_not_divide(maker, rows, size, remedy):
    tx = optax.chain(jc.plump_dp(), optax.sgd(0.1))
    workers = jc.make_mesh(data=4) if maker is jc.make_train_step else 4
    batch = {"x": np.zeros((rows, 300), np.float32), "y": np.zeros((rows, 3), np.float32)}
    message = (
        rf"multiple of the number of workers; got {size} rows at .*'x'.* for 4 workers. Use a batch size of {remedy},"
    )
    with pytest.raises(ValueError, match=message):
        maker(loss_fn, tx, workers)(init_state(params(), tx, workers), batch)


@pytest.mark.parametrize("maker", [jc.make_train_step, jc.simulate])
def test_scalars_and_keys_in_a_batch(maker):
    def loss(params, batch):
        noise = jax.random.normal(batch["key"], ())
        return batch["scale"] * loss_fn(params, batch) + 0 * noise, {"noise": noise, "scale": batch["scale"]}

    rows = {"x": np.ones((4, 300), np.float32), "y": np.ones((4, 3), np.float32)}
    tx = jc.chain(jc.plump_dp(), optax.sgd(0.1))
    step = maker(loss, tx, jc.make_mesh(data=2) if maker is jc.make_train_step else 2, has_aux=True)
    _, metrics = step(step.init(params()), rows | {"scale": 3.0, "key": jax.random.key(7)})
    plain = maker(loss_fn, tx, jc.make_mesh(data=2) if maker is jc.make_train_step else 2)
    _, expected = plain(plain.init(params()), rows)
    np.testing.assert_allclose(metrics["loss"], 3 * expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["noise"], jax.random.normal(jax.random.key(7), ()), rtol=1e-6)


def test_a_mesh_without_the_axis():
    mesh = jc.make_mesh(workers=2)
    message = r"got 'data' and a mesh with \('workers',\). Make it with make_mesh\(data=...\), or pass axis_name="
    with pytest.raises(ValueError, match=message):
        jc.make_train_step(loss_fn, jc.plump_dp(), mesh)


def test_a_second_axis_of_one():
    tx, mesh = optax.chain(jc.topk(0.9), optax.sgd(0.1)), jc.make_mesh(data=2, model=1)
    _, metrics = jc.make_train_step(loss_fn, tx, mesh)(init_state(params(), tx, mesh), next(batches()))
    assert int(metrics["sent"]) == 2 * 90


def test_other_parameters():
    tx = optax.chain(jc.topk(0.9), optax.sgd(0.1))
    state = init_state({"b": jnp.zeros(3), "w": jnp.zeros((3000, 3))}, tx, 2)
    state = state._replace(params=params())
    message = r"one row of state, \(1, 1024\) for this gradient; got \(1, 9216\). Initialise the state with the param"
    with pytest.raises(ValueError, match=message):
        jc.simulate(loss_fn, tx, 2)(state, next(batches()))


def test_rows_that_are_not_sharded():
    tx, mesh = jc.topk(0.9), jc.make_mesh(data=2)
    state = init_state(params(), tx, 2).opt_state  # two rows, meant for `simulate`

    def worker(params, state):
        return tx.update(lax.pcast(params, "data", to="varying"), state)

    step = jax.shard_map(worker, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    with pytest.raises(ValueError, match=r"got \(2, 1\).*step.init of jaxcomm.make_train_step does both"):
        jax.jit(step).trace(params(), state)
