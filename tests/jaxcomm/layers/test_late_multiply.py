"""Late-multiply: the gradients of a dense exchange, on mesh and simulated; its bytes; what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from tests.jaxcomm.train_steps import init_state
from tests.marks import slow_except
from tests.refusals import refused

ROWS, N, M, OUT = 8, 60, 40, 3
BAD_STEP = 4


def parameters(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        "hidden": {"kernel": (rng.normal(size=(N, M)) / 8).astype(dtype), "bias": rng.normal(size=M).astype(dtype)},
        "last": {"kernel": (rng.normal(size=(M, OUT)) / 8).astype(np.float32), "bias": np.zeros(OUT, np.float32)},
        "scale": np.ones((), np.float32),
    }


def batches(steps=10, rows=ROWS):
    rng = np.random.default_rng(1)
    for index in range(steps):
        x = rng.normal(size=(rows, N)).astype(np.float32)
        if index == BAD_STEP:
            x[-1, 0] = np.inf
        yield x


def loss_with(mode, dtype=jnp.float32, axis_name="data"):
    def loss_fn(params, x):
        hidden, last = params["hidden"], params["last"]
        y = params["scale"].astype(dtype) * x.astype(dtype)
        y = jc.late_multiply(y, hidden["kernel"], hidden["bias"], mode=mode, axis_name=axis_name)
        y = jax.nn.relu(y).astype(jnp.float32) @ last["kernel"] + last["bias"]
        return jnp.mean((y - x[:, :OUT]) ** 2)

    return loss_fn


def but(name, part=""):
    """Chooses all leaves but those of a layer."""
    return lambda path, leaf: not path.startswith(f"{name}/{part}")


def run(loss_fn, tx, workers, params=None, steps=10):
    make = jc.simulate if isinstance(workers, int) else jc.make_train_step
    state, step, losses = init_state(params or parameters(), tx, workers), make(loss_fn, tx, workers), []
    for batch in batches(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        assert int(metrics["skipped"]) == int(len(losses) - 1 == BAD_STEP)
    return state, losses


def sgd(exchange):
    return optax.chain(exchange, optax.sgd(0.1, momentum=0.9))


def assert_close(one, two, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(*np.float32([a, b]), rtol=rtol, atol=atol), one, two)


@functools.cache
def dense(steps, dtype=jnp.float32):
    """Parameters and losses with a dense exchange, for any number of workers."""
    state, losses = run(loss_with("reduce", dtype), sgd(jc.plump_dp()), 4, steps=steps)
    return state.params, losses


@pytest.mark.parametrize("place", slow_except(["mesh", "simulated"], "mesh"))
def test_ten_steps_are_dense_steps(place):
    expected, losses = dense(10)
    workers = 4 if place == "simulated" else jc.make_mesh(data=4)
    state, expected_metrics = run(loss_with("late"), sgd(jc.plump_dp(where=but("hidden"))), workers)
    assert_close(state.params, expected)
    assert_close(expected_metrics, losses)
    for name, start in parameters()["hidden"].items():
        assert np.abs(state.params["hidden"][name] - start).max() > 1e-3


@pytest.mark.slow
def test_a_compressor_beside_it():
    """DCT-DP has thresholds for each tensor, so other tensors do not matter."""
    options = {"where": but("hidden"), "dense_below": 100, "life_span": 2, "value_dtype": "float32"}
    expected, losses = run(loss_with("reduce"), sgd(jc.dct_dp(0.5, **options, others=jc.plump_dp())), 4, steps=4)
    tx = sgd(jc.dct_dp(0.5, **options))
    state, expected_metrics = run(loss_with("late"), tx, jc.make_mesh(data=4), steps=4)
    assert_close(state.params, expected.params)
    assert_close(expected_metrics, losses)
    assert 0 < float(jc.exchange_metrics(state.opt_state).sent) < 4 * M * OUT
    assert np.any(state.opt_state[0].residual.rows)


@pytest.mark.parametrize("dtype", slow_except([jnp.bfloat16, jnp.float32], jnp.float32))
def test_bytes(dtype):
    K, rows = 4, 8 * ROWS
    mesh, tx = jc.make_mesh(data=K), sgd(jc.plump_dp(where=but("hidden")))
    state, step = init_state(parameters(), tx, mesh), jc.make_train_step(loss_with("late", dtype), tx, mesh)
    batch, itemsize = next(batches(rows=rows)), jnp.dtype(dtype).itemsize
    traced = jc.accounting.step_report(step, state, batch, params=parameters(), workers=K)
    compiled = read_program(step.lower(state, batch).compile().as_text())
    assert traced.program.received == compiled.received
    plan = jc.planner.plan_late_multiply({"hidden": (N, M)}, rows, K, activation_bytes=itemsize)
    gathered = [traffic for traffic in compiled.always if traffic.op == "all_gather"]
    assert sorted(t.operand_bytes for t in gathered) == [rows // K * m * itemsize for m in (M, N)]
    assert sorted(plan.layers[0].late, key=lambda t: t.operand_bytes) == sorted(gathered, key=lambda t: t.operand_bytes)
    reduced = [traffic for traffic in compiled.always if traffic not in gathered]
    assert {traffic.op for traffic in reduced} == {"all_reduce"}
    assert sum(traffic.operand_bytes for traffic in reduced) == 4 * (M * OUT + OUT + 1) + 4 < 4 * N * M
    report = jc.verify(step, state, batch, tx=tx, params=parameters(), workers=K, beside=gathered)
    assert report.received == jc.wire_report(tx, parameters(), K, beside=gathered).received + 6
    with pytest.raises(ValueError, match="a dense all-reduce is left"):
        jc.verify(step, state, batch, tx=tx, params=parameters(), workers=K)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_an_odd_number_of_narrow_numbers(dtype):
    """And products of narrow rows are summed in float32: equal to NumPy's on the same rounded numbers to float32."""
    K, rows, n, m = 3, 5, 7, 3
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(K, rows, n)), dtype)
    kernel, bias = rng.normal(size=(n, m)).astype(np.float32), rng.normal(size=m).astype(np.float32)
    errors = jnp.asarray(rng.normal(size=(K, rows, m)), dtype)

    def worker(x, errors):
        def loss(kernel, bias):
            return jnp.sum(jc.late_multiply(x, kernel, bias, mode="late").astype(jnp.float32) * errors)

        return jax.grad(loss, argnums=(0, 1))(kernel, bias)

    simulated = jax.jit(jax.vmap(worker, axis_name="data"))(x, errors)
    mesh, rows_of = jc.make_mesh(data=K), P("data")
    sharded = jax.shard_map(lambda x, e: worker(x[0], e[0]), mesh=mesh, in_specs=rows_of, out_specs=P())
    on_mesh = jax.jit(sharded)(x, errors)
    wide = [np.asarray(part, np.float64).reshape(K * rows, -1) for part in (x, errors)]
    expected = wide[0].T @ wide[1] / K, wide[1].sum(0) / K
    for result in (on_mesh, [part[1] for part in simulated]):
        assert [part.dtype for part in result] == [jnp.float32] * 2
        for part, right in zip(result, expected, strict=True):
            np.testing.assert_allclose(part, right, rtol=1e-5, atol=1e-5)


def test_bfloat16_layers():
    expected, losses = dense(4, jnp.bfloat16)
    tx = sgd(jc.plump_dp(where=but("hidden")))
    state, expected_metrics = run(loss_with("late", jnp.bfloat16), tx, jc.make_mesh(data=4), steps=4)
    assert_close(expected_metrics, losses, rtol=0.01)
    assert_close(state.params["hidden"], expected["hidden"], rtol=0.01, atol=0.003)
    assert state.params["hidden"]["kernel"].dtype == jnp.float32


def test_leading_dimensions_and_two_uses():
    params = {"kernel": np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)}
    batch = np.random.default_rng(1).normal(size=(8, 5, 6)).astype(np.float32)

    def loss_with(multiply):
        return lambda params, x: jnp.mean(multiply(jnp.tanh(multiply(x, params["kernel"])), params["kernel"]) ** 2)

    def late(x, kernel):
        return jc.late_multiply(x, kernel, mode="late")

    expected = params["kernel"] - jax.grad(loss_with(jnp.matmul))(params, batch)["kernel"]
    tx = optax.chain(jc.plump_dp(where=lambda path, leaf: False), optax.sgd(1.0))
    for workers, make in ((jc.make_mesh(data=4), jc.make_train_step), (4, jc.simulate)):
        state, metrics = make(loss_with(late), tx, workers)(init_state(params, tx, workers), batch)
        assert_close(state.params["kernel"], expected, atol=1e-6)
        assert int(metrics["skipped"]) == 0


def test_workers_along_two_axes():
    axes = ("slice", "data")
    mesh = jc.make_mesh(slice=2, data=2)
    exchange = jc.hierarchical(jc.plump_dp(axis_name="slice"), where=but("hidden"), inside="data", across="slice")
    tx = sgd(exchange)
    for workers, make in ((mesh, jc.make_train_step), ((2, 2), jc.simulate)):
        state = init_state(parameters(), tx, workers, axis_name=axes)
        step = make(loss_with("late", axis_name=axes), tx, workers, axis_name=axes)
        for batch in batches(3):
            state, _ = step(state, batch)
        assert_close(state.params, dense(3)[0])


@pytest.mark.parametrize(
    ("rows", "is_late"), slow_except([(8, True), (40, True), (48, False), (64, False)], (40, True))
)
def test_choice_of_mode(rows, is_late):
    """For 60 x 40, both move equal bytes at a batch of 2 N M / (N + M) = 48."""
    K = 4
    assert 2 * N * M == 48 * (N + M)
    tx = sgd(jc.plump_dp(where=but("hidden")) if is_late else jc.plump_dp())
    mesh = jc.make_mesh(data=K)
    state, step = init_state(parameters(), tx, mesh), jc.make_train_step(loss_with("auto"), tx, mesh)
    program = jc.accounting.step_report(step, state, next(batches(rows=rows)), params=parameters(), workers=K).program
    assert any(traffic.op == "all_gather" for traffic in program.always) == is_late
    plan = jc.planner.plan_late_multiply({"hidden": (N, M)}, rows, K)
    assert plan.mode("hidden") == ("late" if is_late else "reduce")
    assert (plan.layers[0].bytes_late == plan.layers[0].bytes_reduce) == (rows == 48)
    single, mesh = sgd(jc.plump_dp()), jc.make_mesh(data=1)  # one worker receives nothing in either way
    state = init_state(parameters(), single, mesh)
    jc.make_train_step(loss_with("auto"), single, mesh)(state, next(batches(rows=rows)))


@pytest.mark.parametrize("mode", ["late", "auto", "reduce"])
def test_no_workers(mode):
    loss, plain = loss_with(mode), loss_with("reduce")
    batch = next(batches())
    one, two = (jax.jit(jax.value_and_grad(f))(parameters(), batch) for f in (loss, plain))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    expected = batch @ parameters()["hidden"]["kernel"] + parameters()["hidden"]["bias"]
    assert_close(jc.late_multiply(batch, *map(jnp.asarray, list(parameters()["hidden"].values())), mode=mode), expected)


PLACES = pytest.mark.parametrize(
    ("workers", "make"), [(2, jc.simulate), ("mesh", jc.make_train_step)], ids=["simulate", "mesh"]
)


def trace(loss_fn, tx, workers, make):
    workers = jc.make_mesh(data=2) if workers == "mesh" else workers
    state = init_state(parameters(), tx, workers)
    make(loss_fn, tx, workers).trace(state, next(batches()))


@PLACES
@pytest.mark.parametrize("leaf", ["kernel", "bias"])
def test_late_and_exchanged(workers, make, leaf):
    two = {"kernel": "bias", "bias": "kernel"}[leaf]
    message = rf"The {leaf} of late_multiply must be replicated, .*; got .* Give the exchange where=plan.exchanges"
    with pytest.raises(ValueError, match=message):
        trace(loss_with("late"), sgd(jc.plump_dp(where=but("hidden", two))), workers, make)


@PLACES
def test_an_exchange_without_the_wrapper(workers, make):
    with pytest.raises(ValueError, match="The kernel of late_multiply must be replicated"):
        trace(loss_with("late"), sgd(jc.plump_dp()), workers, make)


@PLACES
def test_a_parameter_without_a_mean(workers, make):
    tx = sgd(jc.plump_dp(where=but("hidden")))
    message = r"late_multiply alone; got a loss that uses \['hidden'\]\['bias'\], \['hidden'\]\['kernel'\] in another"
    with pytest.raises(ValueError, match=message):
        trace(loss_with("reduce"), tx, workers, make)
    tx = sgd(jc.plump_dp(where=but("last", "kernel")))
    with pytest.raises(ValueError, match=r"a loss that uses \['last'\]\['kernel'\] in another way"):
        trace(loss_with("reduce"), tx, workers, make)


@PLACES
def test_a_second_use(workers, make):
    tx = sgd(jc.plump_dp(where=but("hidden")))

    def with_penalty(params, x):
        return loss_with("late")(params, x) + 0.1 * jnp.sum(params["hidden"]["kernel"] ** 2)

    with pytest.raises(ValueError, match=r"a loss that uses \['hidden'\]\['kernel'\] in another way.*add_decayed_we"):
        trace(with_penalty, tx, workers, make)

    def with_a_norm_for_the_log(params, x):
        return loss_with("late")(params, x), {"norm": jnp.sum(params["hidden"]["kernel"] ** 2)}

    def make_with_aux(*args):
        return make(*args, has_aux=True)

    trace(with_a_norm_for_the_log, tx, workers, make_with_aux)


@PLACES
def test_clipping_before_the_exchange(workers, make):
    tx = optax.chain(optax.clip_by_global_norm(1.0), jc.topk(0.9, where=but("hidden")), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"bypasses the exchange must be already reduced; got one at"):
        trace(loss_with("late"), tx, workers, make)


def test_another_mesh_in_use():
    with jax.set_mesh(jc.make_mesh(data=2)):
        trace(loss_with("late"), sgd(jc.plump_dp(where=but("hidden"))), "mesh", jc.make_train_step)


def test_the_trap():
    """A user's own shard_map that forgets to make the other leaves vary between workers."""
    tx, mesh = jc.plump_dp(where=but("hidden")), jc.make_mesh(data=2)
    state = init_state(parameters(), tx, mesh).opt_state

    def worker(params, state, batch):
        local = {**params, "last": lax.pcast(params["last"], "data", to="varying")}
        return tx.update(jax.grad(loss_with("late"))(local, batch), state)

    specs = jc.state_specs(state)
    step = jax.shard_map(worker, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    with pytest.raises(ValueError, match=r"each worker's own gradient; got one at .*'scale'.*already reduced over"):
        jax.jit(step).trace(parameters(), state, next(batches()))


@pytest.mark.parametrize(
    ("x", "kernel", "bias"),
    [((2, 3), (4, 5), (5,)), ((2, 4), (4, 5), (4,)), ((2, 4), (4, 5, 1), None), ((), (4, 5), None)],
)
def test_other_shapes(x, kernel, bias):
    arrays = [None if shape is None else jnp.zeros(shape) for shape in (x, kernel, bias)]
    with pytest.raises(ValueError, match=r"must have x \(..., N\), a kernel \(N, M\) and a bias \(M,\) or None; got"):
        jc.late_multiply(*arrays)


def test_other_modes_and_types():
    with pytest.raises(ValueError, match="mode must be one of auto, late, reduce; got 'early'"):
        jc.late_multiply(jnp.zeros((2, 3)), jnp.zeros((3, 4)), mode="early")
    with pytest.raises(ValueError, match=r"x must be of float32, bfloat16 or float16; got int32. Cast it"):
        jc.late_multiply(jnp.zeros((2, 3), jnp.int32), jnp.zeros((3, 4)))


def penalty(multiply):
    """WGAN-GP: the gradient's norm for each row is a part of the loss."""

    def loss(params, x):
        def critic(x):
            return (
                jnp.tanh(multiply(x, params["hidden"]["kernel"]) + params["hidden"]["bias"]) @ params["last"]["kernel"]
            )

        return jnp.mean((jnp.linalg.norm(jax.grad(lambda x: critic(x).sum())(x), axis=1) - 1) ** 2)

    return loss


def inner_step(multiply):
    """MAML: the loss after a step of the layer itself."""

    def loss(params, x):
        def inner(kernel):
            return jnp.mean((jnp.tanh(multiply(x, kernel)) @ params["last"]["kernel"] - x[:, :OUT]) ** 2)

        kernel = params["hidden"]["kernel"]
        return inner(kernel - 0.1 * jax.grad(inner)(kernel))

    return loss


@pytest.mark.parametrize("loss_of", [penalty, inner_step])
def test_a_gradient_of_a_gradient_is_refused(loss_of):
    loss = loss_of(functools.partial(jc.late_multiply, mode="late"))
    tx = jc.chain(jc.plump_dp(where="last|scale|bias"), optax.sgd(0.1))
    step = jc.make_train_step(loss, tx, jc.make_mesh(data=2))
    state = step.init(parameters())
    refused(lambda: step(state, next(batches(1))), "differentiated once", "late_multiply", "mode='reduce'")


def test_a_gradient_penalty_of_a_plain_product():
    batch, tx = next(batches(1)), jc.chain(jc.plump_dp(), optax.sgd(0.1))
    loss = penalty(functools.partial(jc.late_multiply, mode="reduce"))
    step = jc.make_train_step(loss, tx, jc.make_mesh(data=2))
    state, _ = step(step.init(parameters()), batch)
    gradients = jax.grad(penalty(jnp.matmul))(parameters(), batch)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, parameters(), gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, expected)
