"""Steps of several frameworks that were written for one device, on a mesh; and what such a step must not do."""

import functools
import sys
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks.netlab import Lab
from jaxcomm.exchange import get_exchange
from jaxcomm.state import check_rows
from tests.jaxcomm.cases import CASES

ROOT = Path(__file__).parents[3]
K, ROWS, FEATURES, CLASSES = 4, 24, 12, 5
DENSE, SPARSE = jc.plump_dp(), jc.dct_dp(0.5, life_span=4, dense_below=0)


def mesh():
    return jc.make_mesh(data=K)


def batches(count=6):
    random = np.random.default_rng(0)
    x = random.normal(size=(count, ROWS, FEATURES)).astype(np.float32)
    return [{"x": jnp.asarray(x[i]), "y": jnp.asarray(random.integers(0, CLASSES, ROWS))} for i in range(count)]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def assert_close(one, two, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), one, two)


def plain(tx):
    """A pair (parameters, optimizer's state), and a function of it."""
    params = {"w": jnp.linspace(-0.3, 0.3, FEATURES * CLASSES).reshape(FEATURES, CLASSES), "b": jnp.zeros(CLASSES)}

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(batch["x"] @ p["w"] + p["b"], batch["y"]))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step, (params, tx.init(params)), lambda state: state[0]


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(16)(x)))


def flax_linen(tx):
    """Flax's own TrainState, whose step counter begins as a Python number."""
    model = Perceptron()
    params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))

    @jax.jit
    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn(params, batch["x"])
            return cross_entropy(logits, batch["y"]), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = (logits.argmax(-1) == batch["y"]).mean()
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    return step, TrainState.create(apply_fn=model.apply, params=params, tx=tx), lambda state: state.params


def flax_nnx(tx):
    """A module that is merged in the step."""
    model = nnx.Sequential(
        nnx.Linear(FEATURES, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, CLASSES, rngs=nnx.Rngs(1))
    )
    graph, params = nnx.split(model)

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(nnx.merge(graph, p)(batch["x"]), batch["y"]))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step, (params, tx.init(params)), lambda state: state[0]


def equinox(tx):
    """A model with functions among its leaves, in an argument of its own."""
    model = eqx.nn.MLP(FEATURES, CLASSES, 16, 1, key=jax.random.key(0))

    def step(state, batch):
        model, opt_state = state
        loss, grads = eqx.filter_value_and_grad(lambda m: cross_entropy(jax.vmap(m)(batch["x"]), batch["y"]))(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, updates), opt_state), {"loss": loss}

    return step, (model, tx.init(eqx.filter(model, eqx.is_array))), lambda state: eqx.filter(state[0], eqx.is_array)


def haiku(tx):
    """A NamedTuple with a moving average of the parameters."""
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, CLASSES])(x)))
    params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))

    def step(state, batch):
        params, average, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(model.apply(p, batch["x"]), batch["y"]))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, optax.incremental_update(params, average, 0.1), opt_state), {"loss": loss}

    return step, (params, params, tx.init(params)), lambda state: state[:2]


def chain(exchange):
    return jc.chain(exchange, optax.adam(1e-2))


def run(step, state, data=None):
    for batch in data or batches():
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.parametrize("script", [plain, flax_linen, flax_nnx, equinox, haiku])
def test_dense_is_one_device(script):
    step, state, params_of = script(optax.adam(1e-2))
    single, loss = run(eqx.filter_jit(step), state)
    step, state, _ = script(chain(DENSE))
    parallel, metrics = run(jc.data_parallel(step, mesh(), check_every=2), state)
    assert_close(params_of(single), params_of(parallel), rtol=2e-4, atol=2e-5)
    assert metrics.keys() == loss.keys()
    for name in loss:
        np.testing.assert_allclose(metrics[name], loss[name], rtol=1e-4)


def test_compressed_is_make_train_step():
    tx = chain(SPARSE)
    step, state, _ = plain(tx)
    parallel = jc.data_parallel(step, mesh())
    model = jc.make_train_step(lambda p, b: cross_entropy(b["x"] @ p["w"] + p["b"], b["y"]), tx, mesh())
    params, reference = state[0], model.init(state[0])
    for batch in batches():
        state, metrics = parallel(state, batch)
        reference, expected = model(reference, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    assert_close(state[0], reference.params, rtol=1e-4, atol=1e-6)
    residual = get_exchange(state[1]).residual.rows
    assert residual.sharding.is_equivalent_to(NamedSharding(mesh(), P("data")), 2)
    np.testing.assert_allclose(residual, get_exchange(reference.opt_state).residual.rows, rtol=1e-4, atol=1e-6)
    report = jc.verify(parallel, state, batch, tx=tx, params=params, workers=K, other_bytes=8)
    assert report.received == model.report(reference, batch).received


def test_under_jit_and_scan():
    step, state, _ = plain(chain(SPARSE))
    parallel = jc.data_parallel(step, mesh())
    expected, _ = run(parallel, state)
    under_jit, _ = run(jax.jit(parallel), state)
    first, _ = parallel(state, batches()[0])  # a loop's state has its rows from the start
    tail = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches()[1:])
    scanned, losses = jax.jit(lambda state: lax.scan(parallel, state, tail))(first)
    assert losses["loss"].shape == (5,)
    for variant in (under_jit, scanned):
        assert_close(expected, variant, rtol=1e-5, atol=1e-6)


def test_batches_by_position_and_name():
    step, state, _ = plain(chain(DENSE))

    def by_name(images, *, state, labels, scale):
        state, metrics = step(state, {"x": images * labels["scale"] * scale, "y": labels["y"]})
        return metrics, state

    parallel = jc.data_parallel(by_name, mesh(), batch=(np.int64(0), "labels"))
    for batch in batches():
        labels = {"y": batch["y"], "scale": 1.0}
        metrics, new_state = parallel(batch["x"], state=state, labels=labels, scale=1.0)
        expected, expected_state = jc.data_parallel(step, mesh())(state, batch)
        jax.tree.map(np.testing.assert_array_equal, (new_state, metrics), (expected, expected_state))
        state = new_state


@pytest.mark.slow
def test_explicit_axes_and_numpy():
    step, state, _ = plain(chain(SPARSE))
    explicit = jax.make_mesh((K,), ("data",), axis_types=(AxisType.Explicit,))
    arrays = [jax.tree.map(np.asarray, batch) for batch in batches()]
    state, metrics = run(jc.data_parallel(step, explicit), state, arrays)
    expected, expected_metrics = run(jc.data_parallel(step, mesh()), plain(chain(SPARSE))[1])
    assert_close((state, metrics), (expected, expected_metrics), rtol=1e-6)


def normalized(tx):
    """A model with running statistics in the state."""
    state = (*plain(tx)[1], {"batch_stats": {"mean": jnp.zeros(FEATURES)}})

    def step(state, batch):
        params, opt_state, stats = state
        mean = batch["x"].mean(0)  # of the rows that are there
        new = {"batch_stats": {"mean": 0.9 * stats["batch_stats"]["mean"] + 0.1 * mean}}
        grads = jax.grad(lambda p: cross_entropy((batch["x"] - mean) @ p["w"] + p["b"], batch["y"]))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, new), {}

    return step, state


def test_running_statistics():
    step, state = normalized(chain(DENSE))
    (_, _, stats), _ = run(jc.data_parallel(step, mesh(), mean="batch_stats", check_every=1), state, batches(1))
    np.testing.assert_allclose(stats["batch_stats"]["mean"], 0.1 * batches(1)[0]["x"].mean(0), rtol=1e-5, atol=1e-7)


def with_tail(tail):
    """The plain step with a `tail`, which does something with a worker's own gradients, batch and state."""

    def script(tx):
        _, state, _ = plain(tx)

        def step(state, batch):
            params, opt_state = state
            grads = jax.grad(lambda p: cross_entropy(batch["x"] @ p["w"] + p["b"], batch["y"]))(params)
            updates, new = tx.update(grads, opt_state, params)
            return tail(grads, batch, state, (optax.apply_updates(params, updates), new))

        return step, state

    return script


def keeps_finite(grads, batch, old, new):
    ok = jnp.isfinite(optax.tree.norm(grads))
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old), {}


LOCAL = {
    "finite by the local gradients": (
        keeps_finite,
        r"must be the same on all workers.*'0/0/b' float32\[5\] \(state\).*Put an exchange into the chain",
    ),
    "a count": (lambda g, b, old, new: (new, {"right": (b["y"] == 0).sum()}), r"got '1/right' int32\[\], computed"),
    "logits": (lambda g, b, old, new: (new, {"rows": b["x"][:, 0]}), r"'1/rows' float32\[6\]"),
}


@pytest.mark.parametrize("case", LOCAL)
def test_worker_local_state_is_refused(case):
    tail, message = LOCAL[case]
    step, state = with_tail(tail)(chain(SPARSE))
    with pytest.raises(ValueError, match=message):
        jc.data_parallel(step, mesh())(state, batches(1)[0])


REDUCED = {
    "a pmean of gradients": (lambda g: lax.pmean(g, "data"), lambda u: u),
    "a pmean, and a clip": (
        lambda g: jax.tree.map(lambda x: x / optax.tree.norm(lax.pmean(g, "data")), lax.pmean(g, "data")),
        lambda u: u,
    ),
    "a psum in a loop": (lambda g: lax.scan(lambda c, _: (lax.psum(c, "data"), None), g, length=2)[0], lambda u: u),
    "the largest tensor alone": (lambda g: g | {"w": lax.pmean(g["w"], "data")}, lambda u: u),
    "a pmean of updates": (lambda g: g, lambda u: lax.pmean(u, "data")),
}


@pytest.mark.parametrize("case", REDUCED)
def test_reductions_of_the_step_are_refused(case):
    before, after = REDUCED[case]
    tx = chain(SPARSE)
    _, state, _ = plain(tx)

    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: cross_entropy(batch["x"] @ p["w"] + p["b"], batch["y"]))(params)
        updates, opt_state = tx.update(before(grads), opt_state, params)
        return (optax.apply_updates(params, after(updates)), opt_state), {}

    with pytest.raises(
        ValueError, match=r"must leave the mean.*collectives of its own.*first a psum of.*Delete lax\.p"
    ):
        jc.data_parallel(step, mesh())(state, batches(1)[0])


def test_equal_gradients_are_refused():
    """A step that draws its examples, and has no batch."""
    tx = chain(DENSE)
    _, state, _ = plain(tx)

    def step(state, key):
        params, opt_state = state
        x = jax.random.normal(key, (24, 12))
        grads = jax.grad(lambda p: jnp.square(x @ p["w"] + p["b"] - lax.pmean(x.mean(), "data")).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state)

    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"the same on all 4 workers\. Name by batch= .* by rng= keys of which"):
        jc.data_parallel(step, mesh(), batch=())(state, key)
    jc.data_parallel(step, mesh(), batch=(), rng="key")(state, key)
    jc.data_parallel(step, jc.make_mesh(data=1), batch=())(state, key)


def test_shape_errors_name_the_rows():
    tx = chain(DENSE)
    _, state, _ = plain(tx)

    def step(state, memory, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.square(batch["x"] @ p["w"] + p["b"] - memory).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), memory

    args = state, jnp.zeros((24, 5)), batches(1)[0]
    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        jc.data_parallel(step, mesh(), batch=2)(*args)
    (note,) = [note for note in caught.value.__notes__ if "data_parallel" in note]
    assert "rows of ['batch'] (batch=); whole are, with as many rows, 'memory' (24, 5)" in note
    assert "rows= state" in note
    jc.data_parallel(step, mesh(), batch=2, rows="memory")(*args)


def test_values_after_the_exchange_are_allowed():
    def by_the_exchange(grads, batch, old, new):
        ok = jc.exchange_metrics(new[1]).skipped == 0
        norm = optax.tree.norm(jax.tree.map(jnp.subtract, new[0], old[0]))
        return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old), {"norm": norm, "steps": new[1][0].step}

    step, state = with_tail(by_the_exchange)(chain(SPARSE))
    _, metrics = run(jc.data_parallel(step, mesh(), check_every=1), state)
    assert metrics["steps"] == 6


def test_collectives_replace_queues_and_minima():
    def script(tx, all_rows, mean):
        _, state, _ = plain(tx)

        def step(state, memory, batch):
            params, opt_state = state
            loss, grads = jax.value_and_grad(lambda p: cross_entropy(batch["x"] @ p["w"] + p["b"], batch["y"]))(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            queue = jnp.concatenate([all_rows(batch["x"]), memory["queue"]])[:36]
            memory = {"queue": queue, "least": jnp.minimum(memory["least"], mean(loss))}
            return (optax.apply_updates(params, updates), opt_state), memory

        return step, state

    def train(step, state):
        memory = {"queue": jnp.zeros((36, 12)), "least": jnp.inf}
        for batch in batches(3):
            state, memory = step(state, memory, batch)
        return memory

    step, state = script(chain(DENSE), lambda x: x, lambda x: x)
    with pytest.raises(ValueError, match=r"pmean\(loss, 'data'\), jax\.lax\.all_gather\(rows, 'data', tiled=True\)"):
        train(jc.data_parallel(step, mesh(), batch=2), state)
    expected = train(*script(optax.adam(1e-2), lambda x: x, lambda x: x))
    step, state = script(chain(DENSE), lambda x: lax.all_gather(x, "data", tiled=True), lambda x: lax.pmean(x, "data"))
    result = train(jc.data_parallel(step, mesh(), batch=2), state)
    assert_close(result, expected, rtol=1e-5)


def test_statistics_without_a_mean_are_refused():
    step, state = normalized(chain(DENSE))
    with pytest.raises(ValueError, match=r"'0/2/batch_stats/mean' float32\[12\] \(state\).*Pass mean='batch_stats'"):
        jc.data_parallel(step, mesh())(state, batches(1)[0])


@pytest.mark.parametrize(
    ("exchange", "arguments", "message"),
    [
        (SPARSE, {"batch": 2}, r"batch must name arguments of the call; got \['args\[2\]'\]"),
        (SPARSE, {"batch": "rows"}, r"got \['rows'\] for \['batch', 'state'\]"),
        (SPARSE, {"check_every": 0}, "check_every"),
        (jc.dct_dp(0.5, where="w"), {}, "must average all gradients; got dct_dp, that gradients bypass"),
        (jc.dct_dp(0.5, axis_name="workers"), {}, "got 'workers' and a mesh with"),
    ],
)
def test_bad_arguments(exchange, arguments, message):
    step, state, _ = plain(chain(exchange))
    with pytest.raises(ValueError, match=message):
        jc.data_parallel(step, mesh(), **arguments)(state, batches(1)[0])


def test_other_states_and_batches():
    parallel = jc.data_parallel(plain(chain(SPARSE))[0], mesh())
    _, state, _ = plain(chain(SPARSE))
    with pytest.raises(ValueError, match=r"got 22 rows at \"\['batch'\]\['x'\]\" for 4 workers"):
        parallel(state, jax.tree.map(lambda x: x[:22], batches(1)[0]))
    with pytest.raises(ValueError, match="must get the state of an exchange"):
        parallel(plain(optax.adam(1e-2))[1], batches(1)[0])
    with pytest.raises(ValueError, match=r"got local_sgd, whose workers train on their own"):
        parallel((state[0], jc.local_sgd(2, exchange=DENSE).init(state[0])), batches(1)[0])
    with pytest.raises(ValueError, match=r"check_every must be None inside jax\.jit"):
        jax.jit(jc.data_parallel(plain(chain(SPARSE))[0], mesh(), check_every=1))(state, batches(1)[0])
    steps = optax.MultiSteps(chain(SPARSE), 2)
    with pytest.raises(ValueError, match=r"not be inside optax\.MultiSteps.*dct_dp there\. Write jaxcomm\.chain\("):
        parallel((state[0], steps.init(state[0])), batches(1)[0])
    three = jax.tree.map(lambda n: n, jc.resize_workers(run(parallel, state)[0], 3))
    with pytest.raises(ValueError, match="got 3 rows for 4 workers"):
        parallel(three, batches(1)[0])


def test_split_nnx_optimizer():
    model = nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, chain(SPARSE), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        grads = nnx.grad(lambda m: cross_entropy(m(batch["x"]), batch["y"]))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {}

    with pytest.raises(ValueError, match=r"must get the state of an exchange.*nnx\.split"):
        jc.data_parallel(step, mesh())(state, batches(1)[0])


@pytest.mark.parametrize("place", ["params", "momentum"])
def test_replicas_that_parted(place):
    step, state, _ = plain(jc.chain(SPARSE, optax.sgd(0.1, momentum=0.9)))
    parallel = jc.data_parallel(step, mesh(), check_every=2)
    state, _ = parallel(state, batches(1)[0])

    def part(leaf):
        """Worker 2 has a different number in the middle."""
        copies = [np.array(leaf) for _ in range(K)]
        copies[2].reshape(-1)[leaf.size // 2] += 1e-3
        devices = mesh().devices.flat
        arrays = [jax.device_put(copy, device) for copy, device in zip(copies, devices, strict=True)]
        return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh(), P()), arrays)

    params, opt_state = state
    if place == "params":
        params = params | {"w": part(params["w"])}
    else:
        trace = opt_state[1][0].trace
        opt_state = (opt_state[0], (optax.TraceState(trace | {"b": part(trace["b"])}), opt_state[1][1]))
    name = {"params": "0/0/w", "momentum": "0/1/1/0/trace/b"}[place]
    with pytest.raises(ValueError, match=rf"got other numbers at .*{name}.* after 2 steps"):
        parallel((params, opt_state), batches(1)[0])


def one_row(state):
    """As in a checkpoint of a state that was mistaken for replicated: only worker 0's rows."""
    return jax.tree.map(
        lambda node: jax.tree.map(lambda rows: np.asarray(rows)[:1], node) if isinstance(node, jc.PerWorker) else node,
        state,
        is_leaf=lambda node: isinstance(node, jc.PerWorker),
    )


def test_rows_of_another_worker():
    tx = chain(SPARSE)
    step, state, _ = plain(tx)
    state, _ = run(jc.data_parallel(step, mesh()), state)
    one_state = one_row(state)
    with pytest.raises(ValueError, match=r"The rows of dct_dp must be those of their 4 workers; got .*\[0\]"):
        jc.data_parallel(step, mesh())(one_state, batches(1)[0])
    spread = jax.tree.map(
        lambda node: jax.tree.map(lambda rows: np.repeat(rows, K, 0), node) if isinstance(node, jc.PerWorker) else node,
        one_state,
        is_leaf=lambda node: isinstance(node, jc.PerWorker),
    )
    with pytest.raises(ValueError, match=r"got those of workers \[0, 0, 0, 0\]"):
        check_rows(spread, K)
    reference = jc.make_train_step(lambda p, b: cross_entropy(b["x"] @ p["w"] + p["b"], b["y"]), tx, mesh())
    train_state = jc.state.TrainState(spread[0], spread[1], jnp.zeros((), jnp.int32))
    with pytest.raises(ValueError, match="The rows of dct_dp"):
        reference(train_state, batches(1)[0])

    # A script's own pmap-like region, in which nothing is tracked and no host checks the numbers.
    blind = jax.shard_map(
        step, mesh=mesh(), in_specs=(jc.state_specs(spread), P("data")), out_specs=P(), check_vma=False
    )
    (_, opt_state), _ = jax.jit(blind)(spread, batches(1)[0])
    assert jc.exchange_metrics(opt_state).skipped == 1
    jax.tree.map(np.testing.assert_array_equal, get_exchange(opt_state).worker.rows[0, 0], 4 << 16)


def test_rows_are_numbered_at_first():
    step, state, _ = plain(chain(SPARSE))
    assert np.asarray(get_exchange(state[1]).worker.rows).tolist() == [[-1]]
    state, _ = run(jc.data_parallel(step, mesh()), state, batches(1))
    assert np.asarray(get_exchange(state[1]).worker.rows).tolist() == [[i + (4 << 16)] for i in range(4)]
    resized = jc.resize_workers(state, 2)
    assert np.asarray(get_exchange(resized[1]).worker.rows).tolist() == [[-1], [-1]]
    state, _ = run(jc.data_parallel(step, jc.make_mesh(data=2)), resized, batches(1))
    assert np.asarray(get_exchange(state[1]).worker.rows).tolist() == [[2 << 16], [1 + (2 << 16)]]


EXCHANGES = {
    **{str(case): case.make() for case in CASES if not case.is_variant},
    "powersgd": jc.powersgd(2),
    "ef21": jc.ef21(0.9),
    "two parts": jc.dct_dp(0.9, where="w", others=jc.powersgd(1)),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_are_replicated(name):
    """JAX proves this where it tracks variation; where it does not, the walk over the program finds the same."""
    params = {"w": jnp.zeros((64, 40)), "b": jnp.zeros(7)}
    tx = EXCHANGES[name]

    def step(state, batch):
        grads = jax.grad(lambda p: ((batch @ p["w"]).sum(-1) * p["b"].sum()).mean())(state[0])
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), {}

    jc.data_parallel(step, mesh()).trace((params, tx.init(params)), jnp.ones((8, 64)))


PROCESSES = """
import sys
from train.processes import connect, prepare_jax
prepare_jax()
processes = connect(None, None, None)
import jax, numpy as np
import jaxcomm as jc
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.jaxcomm.foreign.test_data_parallel import SPARSE, batches, chain, plain
mesh = jc.make_mesh(data=2)
step, state, _ = plain(chain(SPARSE))
own = jc.data_parallel(step, mesh, check_every=2)
whole = [jax.tree.map(np.asarray, batch) for batch in batches()]
try:
    own(state, whole[0])
except ValueError as error:
    assert "must be of global arrays" in str(error), error
else:
    raise AssertionError("a batch of one process was taken")
others = jax.tree.map(lambda x: x + processes.index, state)
for place in (own.place, jc.make_train_step(lambda params, batch: 0.0, chain(SPARSE), mesh).init):
    try:
        place(others if place == own.place else others[0])
    except ValueError as error:
        assert "must be equal in every process; got other numbers in process" in str(error), error
    else:
        raise AssertionError("other parameters in each process were taken")
for batch in whole:
    half = jax.tree.map(lambda rows: rows[12 * processes.index : 12 * (processes.index + 1)], batch)
    rows = jax.tree.map(lambda rows: jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows), half)
    state, metrics = own(state, rows)
print(*[repr(float(x)) for x in (metrics["loss"], np.abs(state[0]["w"]).sum())])
"""


@pytest.mark.slow
def test_two_processes_are_two_workers():
    with Lab(2, None) as lab:
        results = lab.run([sys.executable, "-c", PROCESSES], env={"PYTHONPATH": str(ROOT)}, timeout=120)
    assert [result.returncode for result in results] == [0, 0], results
    step, state, _ = plain(chain(SPARSE))
    (params, _), metrics = run(jc.data_parallel(step, jc.make_mesh(data=2)), state)
    expected = [float(metrics["loss"]), float(np.abs(params["w"]).sum())]
    for result in results:
        np.testing.assert_allclose(
            [float(text) for text in result.stdout.splitlines()[-1].split()], expected, rtol=1e-5
        )


def test_the_name_of_the_step():
    step, _, _ = plain(chain(DENSE))
    assert jc.data_parallel(step, mesh()).__name__ == "step"
    assert functools.partial(jc.data_parallel, mesh=mesh())(step).__name__ == "step"


def drawing(tx):
    """A step that draws for its rows, with a key from the state or from an argument."""

    def step(state, batch, key=None):
        params, opt_state, worker_key = state
        worker_key, key = jax.random.split(worker_key) if key is None else (worker_key, key)
        grads = jax.grad(lambda p: cross_entropy(batch["x"] @ p["w"] + p["b"], batch["y"]))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        draw = jax.random.uniform(key)
        return (optax.apply_updates(params, updates), opt_state, worker_key), {"draw": draw, "square": draw**2}

    _, (params, opt_state), _ = plain(tx)
    return step, (params, opt_state, jax.random.key(5))


def test_a_key_for_each_worker():
    step, state = drawing(chain(DENSE))
    key = jax.random.key(9)
    _, metrics = jc.data_parallel(step, mesh())(state, batches(1)[0], key)
    assert metrics["square"] == pytest.approx(float(metrics["draw"]) ** 2)  # the same draw on all
    _, metrics = jc.data_parallel(step, mesh(), rng="^key$")(state, batches(1)[0], key)
    keys = [jax.random.fold_in(jax.random.fold_in(key, 1), worker) for worker in range(K)]
    draws = np.array([jax.random.uniform(key) for key in keys])
    assert len(set(draws.tolist())) == K
    assert metrics["draw"] == pytest.approx(draws.mean(), rel=1e-5)
    assert metrics["square"] == pytest.approx((draws**2).mean(), rel=1e-5)
    with pytest.raises(
        ValueError, match=r"finds a random key among the arguments; got 'dropout' for keys at \['key', 'state/2'\]"
    ):
        jc.data_parallel(step, mesh(), rng="dropout")(state, batches(1)[0], key)


def test_a_key_in_the_state():
    step, state = drawing(chain(DENSE))
    parallel = jc.data_parallel(step, mesh(), rng="state/2", check_every=1)
    keys, draws = [state[2]], []
    for batch in batches(3):
        state, metrics = parallel(state, batch)
        keys.append(state[2])
        draws.append(float(metrics["draw"]))
        assert abs(metrics["square"] - metrics["draw"] ** 2) > 1e-4
    assert len({jax.random.key_data(key).tobytes() for key in keys}) == 4
    assert len(set(draws)) == 3


class Tied(nnx.Module):
    """Two names for one variable, and a module that is in two places."""

    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.second = self.first
        self.last = nnx.Linear(FEATURES, CLASSES, rngs=rngs)
        self.bias = self.last.bias

    def __call__(self, x):
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x))))) + self.bias


def nnx_script(tx, transform=lambda step: step):
    model = Tied(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @transform
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch["x"]), batch["y"]))(model)
        optimizer.update(model, grads)
        return loss

    return step, model, optimizer


@pytest.mark.parametrize(
    "transform",
    [pytest.param(lambda step: step, id="plain", marks=pytest.mark.slow), pytest.param(nnx.jit, id="nnx.jit")],
)
def test_nnx_objects_change_in_place(transform):
    step, model, optimizer = nnx_script(optax.adam(1e-2), nnx.jit)
    script, copy, copy_optimizer = nnx_script(chain(DENSE), transform)
    script = jc.data_parallel(script, mesh(), batch="batch", check_every=1)
    for batch in batches(3):
        np.testing.assert_allclose(script(copy, copy_optimizer, batch), step(model, optimizer, batch), rtol=1e-4)
    assert copy.first is copy.second
    assert copy.bias is copy.last.bias
    assert copy_optimizer.step == 3
    assert_close(nnx.to_pure_dict(nnx.state(copy)), nnx.to_pure_dict(nnx.state(model)), rtol=1e-3, atol=1e-5)


def test_a_state_is_placed_in_rows():
    step, state, _ = plain(chain(SPARSE))
    parallel = jc.data_parallel(step, mesh())
    placement = parallel.place(state)
    assert get_exchange(placement[1]).residual.rows.shape[0] == K
    assert get_exchange(placement[1]).residual.rows.sharding.spec == P("data")
    jax.tree.map(np.testing.assert_array_equal, run(parallel, placement), run(parallel, state))


def tailed(tail, **options):
    """A step (params, opt_state, batch, state) whose tail makes new state and metrics of the batch, and its outputs."""
    tx = chain(DENSE)
    params, opt_state = plain(tx)[1]

    def step(params, opt_state, batch, state):
        grads = jax.grad(lambda p: cross_entropy(batch["x"] @ p["w"] + p["b"], batch["y"]))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, *tail(state, batch)

    parallel = jc.data_parallel(step, mesh(), batch=2, **options)

    def outputs(state, steps=3):
        pair = params, opt_state
        for batch in batches(steps):
            *pair, state, metrics = parallel(*pair, batch, state)
        return state, metrics

    def expected(state, steps=3):
        for batch in batches(steps):
            state, metrics = tail(state, batch)
        return state, metrics

    return outputs, expected


def decayed(state, batch):
    """Sums as of a codebook: decayed, then corrected for their start; a counter; a bias."""
    counts = jnp.zeros(CLASSES).at[batch["y"]].add(1.0)
    hidden = 0.9 * state["hidden"] + 0.1 * counts
    count = state["count"] + 1
    average = hidden / (1 - 0.9**count)
    return {"hidden": hidden, "average": average, "count": count}, {"total": (batch["y"] == 1).sum()}


def counted(state, batch):
    return state.at[batch["y"]].add(1), {"total": state.sum() + batch["y"].sum(), "last": batch["x"].sum(0)}


def furthest(state, batch):
    state = jnp.maximum(state, batch["x"].max(0))
    return state, {"large": (batch["x"] > 2.2).any(), "most": batch["y"].max()}


def replaced(state, batch):
    return batch["x"].sum(0), {"rows": jnp.float32(1) * (batch["y"] >= 0).sum()}


COMBINED = {
    "sums that decay": (
        decayed,
        {"hidden": jnp.ones(CLASSES), "average": jnp.zeros(CLASSES), "count": jnp.zeros(())},
        {"sum": "state|total"},
    ),
    "integers that count": (counted, jnp.arange(CLASSES), {"sum": "state|total|last"}),
    "maxima": (furthest, jnp.zeros(FEATURES), {"max": "^state$|large|most"}),
    "a sum of this step alone": (replaced, jnp.ones(FEATURES), {"sum": "^state$|rows"}),
}


@pytest.mark.parametrize("case", COMBINED)
def test_sums_and_maxima(case):
    tail, state, options = COMBINED[case]
    outputs, expected = tailed(tail, **options, check_every=1)
    assert_close(outputs(state), jax.device_get(expected(state)), rtol=1e-5, atol=1e-5)
    assert jax.tree.map(jnp.result_type, outputs(state)) == jax.tree.map(jnp.result_type, expected(state))


def running(state, batch, axis=None):
    """A mean over all rows so far, and their number."""
    rows = len(batch["x"]) * (1 if axis is None else jax.lax.axis_size(axis))
    seen = state["seen"] + rows
    return {"seen": seen, "mean": state["mean"] + (batch["x"].mean(0) - state["mean"]) * rows / seen}, {}


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_gradient_for_what_rows_have_of_their_own(is_divided):
    """Of a mean over a worker's rows it is K times that of a mean over all."""
    tx = chain(DENSE)
    params, opt_state = plain(tx)[1]

    def step(params, opt_state, batch, codes, axis=None):
        def loss(params, codes):
            return cross_entropy((batch["x"] + codes) @ params["w"] + params["b"], batch["y"])

        gradients, own = jax.grad(loss, (0, 1))(params, codes)
        if axis is None:
            return params, opt_state, codes - 0.5 * own
        updates, opt_state = tx.update(gradients, opt_state, params)
        own = own / jax.lax.axis_size(axis) if is_divided else own
        return optax.apply_updates(params, updates), opt_state, codes - 0.5 * own

    (batch,) = batches(1)
    codes = np.zeros(batch["x"].shape, np.float32)
    parallel = jc.data_parallel(functools.partial(step, axis="data"), mesh(), batch=2, rows="codes|^2$")
    if not is_divided:
        with pytest.warns(UserWarning, match="2: divided by the number of a worker's own rows"):
            parallel(params, opt_state, batch, codes)
        return
    np.testing.assert_allclose(
        parallel(params, opt_state, batch, codes)[2], step(params, opt_state, batch, codes)[2], rtol=1e-5, atol=1e-7
    )


def test_bad_sums():
    with pytest.raises(ValueError, match=r"sum= must name sums over rows; got '2'.*jax\.lax\.psum"):
        tailed(lambda s, b: (jnp.sqrt(s + b["x"].sum(0) ** 2), {}), sum="state")[0](jnp.ones(FEATURES))
    with pytest.raises(ValueError, match=r"got mean and sum for '2', which continues 'state'.*Narrow the patterns"):
        tailed(lambda s, b: (s + b["x"].sum(0), {}), sum="state", mean="^2$")[0](jnp.ones(FEATURES))
    seen = {"seen": jnp.ones(()), "mean": jnp.zeros(FEATURES)}
    step, expected = tailed(running, mean="state")
    with pytest.raises(
        ValueError, match=r"mean= must name means over rows; got '2/seen'.* pass sum='.*seen'.*axis_size"
    ):
        step(seen)
    step, _ = tailed(functools.partial(running, axis="data"), mean="state")
    assert_close(step(seen)[0], expected(seen)[0], rtol=1e-5)
    counts = tailed(counted, mean="state|last|total")[0]
    with pytest.raises(
        ValueError, match=r"'2' int32\[5\] \(state\), '3/total' int32\[\], c.*Pass sum='state\|total' for s"
    ):
        counts(jnp.arange(CLASSES))


@pytest.mark.parametrize("how", ["mean", "sum", "max", "rows"])
def test_a_pattern_without_a_match(how):
    step, state, _ = plain(chain(DENSE))
    with pytest.raises(ValueError, match=rf"{how}= must be .* finds an output; got 'typo' for \['1/loss', 'state/0/b'"):
        jc.data_parallel(step, mesh(), **{how: "typo"})(state, batches(1)[0])


def test_the_pattern_offered_works():
    tail, state, _ = COMBINED["sums that decay"]
    with pytest.raises(
        ValueError, match=r"Pass mean='average\\|hidden\\|total' for means.*sum='average\\|hidden\\|total'"
    ):
        tailed(tail)[0](state)
    outputs, expected = tailed(tail, sum="average|hidden|total")
    assert_close(outputs(state), jax.device_get(expected(state)), rtol=1e-5)


def test_a_dict_of_losses():
    def losses(state, batch):
        return state, {"a": (batch["x"] ** 2).mean(), "b": batch["x"].mean()}

    outputs, expected = tailed(losses)
    weights = {"a": jnp.float32(0.5), "b": jnp.float32(2)}
    np.testing.assert_allclose(outputs(weights)[1]["a"], expected(weights)[1]["a"], rtol=1e-5)
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    np.testing.assert_allclose(outputs(params)[1]["b"], expected(params)[1]["b"], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"'2/a' float32\[\] \(state\)"):  # it goes on from step to step
        tailed(lambda s, b: (s | {"a": s["a"] + b["x"].sum()}, {}))[0](weights)


def test_rows_of_workers_go_through():
    """Recurrent state (rows, 2), losses of rows, and logits; the batch that is returned."""

    def recurrent(state, batch):
        hidden = 0.5 * state["h"] + batch["x"][:, :2]
        return {"h": hidden, "n": state["n"] + 1}, {
            "each": hidden.sum(1),
            "batch": jax.tree.map(lambda x: x + 1, batch),
        }

    outputs, expected = tailed(recurrent, rows="state/h|each", check_every=2)
    state = {"h": jnp.arange(2.0 * ROWS).reshape(ROWS, 2), "n": jnp.zeros(())}
    result = outputs(state)
    assert_close(result, jax.device_get(expected(state)), rtol=1e-6)
    assert result[0]["h"].sharding.spec == P("data")
    with pytest.raises(ValueError, match=r"multiple of the number of workers; got 22 rows at 'state/h' for 4 workers"):
        outputs(state | {"h": state["h"][:22]})
    with pytest.raises(ValueError, match=r"'3/each' float32\[6\].*rows='each' for what each row has"):
        tailed(recurrent, rows="state/h")[0](state)


@pytest.mark.parametrize(
    ("output", "axes"),
    [
        (lambda x: x.T, r"\[1\]"),
        (lambda x: x @ x.T, r"\[0, 1\]"),
        (lambda x: x.mean(0), "none"),
    ],
    ids=["second", "pairs", "mean"],
)
def test_rows_that_are_none(output, axes):
    with pytest.raises(ValueError, match=rf"rows= must name .* along axis 0; got '3/each', whose axes.* are {axes}"):
        tailed(lambda state, batch: (state, {"each": output(batch["x"])}), rows="each")[0](jnp.zeros(()))


def test_a_scalar_beside_rows():
    """The pattern finds both."""
    step, expected = tailed(
        lambda state, batch: (state, {"each": batch["x"].sum(1), "each_mean": batch["x"].mean()}), rows="each"
    )
    assert_close(step(jnp.zeros(())), jax.device_get(expected(jnp.zeros(()))), rtol=1e-5)


def test_items_of_workers_go_through():
    def own(state, batch):
        return jc.PerWorker(state.rows + batch["y"].sum(), state.axes), {}

    state = tailed(own)[0](jc.PerWorker(jnp.zeros(K, jnp.int32), ("data",)), steps=1)[0]
    np.testing.assert_array_equal(state.rows, batches(1)[0]["y"].reshape(K, -1).sum(1))


def test_an_optimizer_in_the_batch():
    step, state, _ = plain(chain(SPARSE))
    with pytest.raises(
        ValueError, match=r"got argument 0, 'state', which holds an exchange's state. Pass batch=.*batch'"
    ):
        jc.data_parallel(step, mesh(), batch=0)(state, batches(1)[0])


@pytest.mark.parametrize("static", ["flag", 2, ("flag", "layers")])
def test_static_arguments(static):
    step, state, _ = plain(chain(DENSE))
    names = ("flag", "layers") if isinstance(static, tuple) else ("flag",)

    @functools.partial(jax.jit, static_argnames=names)
    def flagged(state, batch, flag=False, layers=1):
        state, metrics = step(state, batch)
        return state, metrics | {"layers": jnp.float32(layers)} if flag else metrics

    parallel = jc.data_parallel(flagged, mesh(), static=static)
    assert parallel(state, batches(1)[0], True, layers=2)[1].keys() == {"loss", "layers"}
    assert parallel(state, batches(1)[0], False, layers=2)[1].keys() == {"loss"}
    assert parallel(state, batches(1)[0])[1].keys() == {"loss"}
    with pytest.raises(
        ValueError, match=r"Pass static= with their names or positions, or bind them by functools\.partial"
    ):
        jc.data_parallel(flagged, mesh())(state, batches(1)[0], True)
    with pytest.raises(ValueError, match=r"static must name arguments that can be hashed; got 'flag', a list. Make it"):
        parallel(state, batches(1)[0], [])


@pytest.mark.parametrize("where", ["fresh", "placed", "returned", "shared with the batch"])
def test_an_array_twice_is_donated_once(where):
    step, (params, opt_state), _ = plain(chain(DENSE))

    def averaged(state, batch):
        (params, opt_state), metrics = step((state["params"], state["opt_state"]), batch)
        return {
            "params": params,
            "opt_state": opt_state,
            "ema": optax.incremental_update(params, state["ema"], 0.1),
        }, metrics

    parallel, plain_step = jc.data_parallel(averaged, mesh(), donate=True), jc.data_parallel(averaged, mesh())
    batch, state = batches(1)[0], {"params": params, "opt_state": opt_state, "ema": params}
    expected = plain_step(plain_step(state, batch)[0], batch)[0]
    if where == "shared with the batch":
        state, batch = state | {"ema": {"w": batch["x"], "b": params["b"]}}, batch
        averaged_x = jc.data_parallel(lambda s, b: averaged(s | {"ema": s["params"]}, b), mesh(), donate=True)
        averaged_x(state, batch)
        assert np.isfinite(np.asarray(batch["x"])).all()
        return
    state = parallel.place(state) if where == "placed" else state
    state, _ = parallel(state, batch)
    if where == "returned":
        state, expected = state | {"ema": state["params"]}, plain_step(state | {"ema": state["params"]}, batch)[0]
        state = jax.tree.map(lambda x: x, state)
    state, _ = parallel(state, batch)
    assert_close(state["ema"], expected["ema"], rtol=1e-6)


def synchronized(params, batch, axis):
    """Batch normalisation over the rows of all workers."""
    x = batch["x"] @ params["w"]
    mean, square = x.mean(0), (x**2).mean(0)
    if axis is not None:
        mean, square = lax.pmean((mean, square), axis)
    return cross_entropy(2 * (x - mean) / jnp.sqrt(square - mean**2 + 1e-3) + params["b"], batch["y"])


def contrastive(params, batch, axis):
    """Each row against the rows of all workers, at a temperature."""
    x = batch["x"] @ params["w"]
    rows = x if axis is None else lax.all_gather(x, axis, tiled=True)
    labels = jnp.arange(len(x)) + (0 if axis is None else lax.axis_index(axis) * len(x))
    return cross_entropy(jnp.exp(params["b"][0]) * jnp.sin(x) @ rows.T, labels)


def gathered_whole(params, batch, axis):
    """The whole loss on every worker: the temperature's gradient is replicated."""
    x = batch["x"] @ params["w"]
    rows = x if axis is None else lax.all_gather(x, axis, tiled=True)
    return cross_entropy(jnp.exp(params["b"][0]) * jnp.sin(rows) @ rows.T, jnp.arange(len(rows)))


def by_tokens(params, batch, axis):
    """A mean over the rows of some classes, of which the workers have different numbers."""
    logits, valid = batch["x"] @ params["w"] + params["b"], batch["y"] < 2
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    total = valid.sum() if axis is None else lax.psum(valid.sum(), axis) / K
    return (losses * valid).sum() / total


def decorrelated(params, batch, axis):
    """A loss of a covariance over all rows, which is replicated."""
    x = batch["x"] @ params["w"] + params["b"]
    moments = x.T @ x / len(x)
    moments = moments if axis is None else lax.pmean(moments, axis)
    return (moments**2).mean()


@pytest.mark.parametrize("loss", [synchronized, contrastive, gathered_whole, by_tokens, decorrelated])
def test_collectives_inside_a_loss(loss):
    def script(tx, axis):
        params, opt_state = plain(tx)[1]

        def step(state, batch):
            params, opt_state = state
            value, grads = jax.value_and_grad(loss)(params, batch, axis)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        return step, (params, opt_state)

    batch, sgd = batches(1)[0], optax.sgd(0.1)
    step, state = script(sgd, None)
    expected, value = step(state, batch)
    tx = jc.chain(DENSE, sgd)
    step, state = script(tx, "data")
    parallel = jc.data_parallel(step, mesh(), check_every=1)
    result, mean = parallel(state, batch)
    assert_close(result[0], jax.device_get(expected[0]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mean, value, rtol=1e-5)
    jc.verify(parallel, result, batch, tx=tx, params=state[0], workers=K)
    reference = jc.make_train_step(lambda params, batch: loss(params, batch, "data"), tx, mesh())
    reference.verify(reference.init(state[0]), batch)


def written(index, value):
    """A tail that writes to a reference, in a loop and a jit, and returns what it has then."""

    def tail(state, batch):
        reference = jax.new_ref(jnp.zeros(3))
        read_before = jax.new_ref(state)

        def turn(carry, x):
            carry = carry + read_before[0]
            jax.jit(lambda r: r.__setitem__(index, value(batch) * x))(reference)
            read_before[...] = state + reference[0]
            return carry, None

        carry, _ = lax.scan(turn, 0.0, jnp.ones(2))
        return carry + reference[...], {}

    return tail


def test_writes_to_references():
    for index in (0, 1):
        with pytest.raises(ValueError, match=r"got '2' float32\[3\] \(state\).*sum='state'"):
            tailed(written(index, lambda batch: batch["x"].sum()))[0](jnp.zeros(3))
    outputs, expected = tailed(written(0, lambda batch: 2.0))
    np.testing.assert_array_equal(outputs(jnp.ones(3))[0], expected(jnp.ones(3))[0])
