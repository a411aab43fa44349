"""Dense inside a group of workers, compressed across the groups."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxcomm as jc
from benchmarks.netlab import Lab
from tests.jaxcomm.train_steps import init_state, normal
from tests.jaxcomm.train_steps import linear as loss
from tests.marks import slow_except
from tests.refusals import refused

ROOT = Path(__file__).parents[3]
SHAPES = {"a": (7,), "b": (601,), "c": (40, 60), "s": ()}
AXES = ("slice", "data")
RATE = 0.25

EXCHANGES = {
    "plump_dp": lambda: jc.plump_dp(axis_name="slice"),
    "topk": lambda: jc.topk(0.9, dense_below=32, axis_name="slice"),
    "dct_dp": lambda: jc.dct_dp(0.9, dense_below=32, drain_every=3, life_span=2, axis_name="slice"),
    "iwp": lambda: jc.iwp(0.1, density=0.1, dense_below=32, axis_name="slice"),
    "random_k": lambda: jc.random_k(0.9, dense_below=32, axis_name="slice"),
}


def first_params():
    return normal(SHAPES)


def batch_of(step, bad=None):
    batch = normal(SHAPES, (step, 3), 8)
    if bad is not None:
        batch["b"][5, 3] = bad
    return batch


def run(tx, sizes, *, on_mesh, steps=5, bad_at=2):
    """Yields (state, metrics) of every step."""
    where = jc.make_mesh(slice=sizes[0], data=sizes[1]) if on_mesh else sizes
    make = jc.make_train_step if on_mesh else jc.simulate
    state = init_state(first_params(), tx, where, axis_name=AXES)
    step = make(loss, tx, where, axis_name=AXES, donate=False)
    for i in range(steps):
        state, metrics = step(state, batch_of(i, np.nan if i == bad_at else None))
        yield state, metrics


def test_dense_is_plump_dp():
    flat = optax.chain(jc.plump_dp(), optax.sgd(RATE))
    state, step = init_state(first_params(), flat, 8), jc.simulate(loss, flat, 8, donate=False)
    tx = optax.chain(jc.hierarchical(EXCHANGES["plump_dp"]()), optax.sgd(RATE))
    for i, (grouped, metrics) in enumerate(run(tx, (4, 2), on_mesh=True)):
        state, expected = step(state, batch_of(i, np.nan if i == 2 else None))
        assert metrics["skipped"] == expected["skipped"] == (i == 2)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grouped.params, state.params)


def test_compressed_is_the_mean_of_groups():
    """With one worker per group nothing is cut into shares: it is the plain exchange of K workers."""
    tx = optax.chain(jc.hierarchical(EXCHANGES["random_k"]()), optax.sgd(RATE))
    outer = optax.chain(EXCHANGES["random_k"](), optax.sgd(RATE))
    kwargs = {"axis_name": "slice"}
    state, step = init_state(first_params(), outer, 8, **kwargs), jc.simulate(loss, outer, 8, donate=False, **kwargs)
    for i, (grouped, metrics) in enumerate(run(tx, (8, 1), on_mesh=False, bad_at=None)):
        state, expected = step(state, batch_of(i))
        assert metrics["sent"] == expected["sent"]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grouped.params, state.params)


@pytest.mark.parametrize("name", slow_except(["plump_dp", "dct_dp", "iwp"], "plump_dp"))
def test_mesh_simulation_and_bytes(name):
    sizes, tx = (2, 4), optax.chain(jc.hierarchical(EXCHANGES[name]()), optax.sgd(RATE))
    for i, ((mesh_state, metrics), (simulated, expected)) in enumerate(
        zip(run(tx, sizes, on_mesh=True), run(tx, sizes, on_mesh=False), strict=True)
    ):
        assert metrics["skipped"] == expected["skipped"] == (i == 2)
        for count in ("sent", "overflow", "drained"):
            assert metrics[count] == expected[count]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), mesh_state.params, simulated.params)
    report = jc.wire_report(tx, first_params(), sizes, axis_name=AXES)
    shares = sum(-(-int(np.prod(shape)) // 4) for shape in SHAPES.values())
    assert report.received_over("data") == 3 * 4 * shares * 2 + 2 * 3 / 4 * 20  # both ways, and five counts
    flat = jc.wire_report(
        EXCHANGES[name](), [jax.ShapeDtypeStruct((-(-int(np.prod(s)) // 4),), "float32") for s in SHAPES.values()], 2,
        axis_name="slice",
    )  # fmt: skip
    assert report.received_over("slice") == flat.received
    mesh = jc.make_mesh(slice=2, data=4)
    state = init_state(first_params(), tx, mesh, axis_name=AXES)
    step = jc.make_train_step(loss, tx, mesh, axis_name=AXES)
    jc.verify(step, state, batch_of(0), tx=tx, params=first_params(), workers=sizes, axis_name=AXES)


@pytest.mark.slow
def test_nothing_is_lost():
    """Parameters + the shares' residuals are what dense averaging gives."""
    sizes = (2, 4)
    tx = optax.chain(jc.hierarchical(jc.topk(0.9, dense_below=0, axis_name="slice")), optax.sgd(RATE))
    dense = {name: value.astype(np.float64) for name, value in first_params().items()}
    *_, (state, _) = run(tx, sizes, on_mesh=True, bad_at=1)
    for i in (0, 2, 3, 4):
        dense = {name: value - RATE * batch_of(i)[name].mean(0) for name, value in dense.items()}
    check_that_it_is_owed(state, dense, sizes)


def check_that_it_is_owed(state, dense, sizes):
    groups, inside = sizes
    rows = np.asarray(state.opt_state[0].memory.residual.rows)  # (K, n of a share), groups outermost
    owed = rows.reshape(groups, inside, -1).mean(0)  # (inside, n)
    start = 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        share = -(-size // inside)
        debt = owed[:, start : start + share].reshape(-1)[:size].reshape(shape)
        np.testing.assert_allclose(np.asarray(state.params[name]) - RATE * debt, dense[name], atol=2e-6)
        start += -(-share // 1024) * 1024


def test_groups_come_and_go():
    """4 groups of 2 workers, then 3, 8, 1 and 4: each share keeps its groups' residuals, which the last ones send."""
    tx = optax.chain(jc.hierarchical(jc.dct_dp(0.9, dense_below=0, axis_name="slice")), optax.sgd(RATE))
    step = jc.simulate(loss, tx, (4, 2), axis_name=AXES, donate=False)
    state, dense = step.init(first_params()), first_params()
    for i in range(4):
        state, metrics = step(state, batch_of(i))
        assert metrics["skipped"] == 0
        dense = {name: value - RATE * batch_of(i)[name].mean(0) for name, value in dense.items()}
        check_that_it_is_owed(state, dense, (4, 2))
        if i < 3:
            assert state.opt_state[0].memory.memory.due.rows.tolist() == [False, False]  # a row for each share
            for groups in (3, 8, 1, 4):
                state = step.resize(state, 2 * groups)
                check_that_it_is_owed(state, dense, (groups, 2))
            assert state.opt_state[0].memory.memory.due.rows.tolist() == [True, True]


def test_refusals():
    refused(lambda: jc.hierarchical(jc.plump_dp(), inside="data", across="data"), "across", "got 'data'")
    for inner in (optax.sgd(0.1), jc.slim_dp(axis_name="slice")):
        tx = jc.hierarchical(inner)
        with pytest.raises(ValueError, match="exchange of hierarchical must be an exchange of gradients; got"):
            jc.wire_report(tx, first_params(), (2, 2), axis_name=AXES)
    with pytest.raises(ValueError, match=r"must average over \('slice',\); got topk .* Pass axis_name='slice' to it"):
        jc.wire_report(jc.hierarchical(jc.topk(0.9)), first_params(), (2, 2), axis_name=AXES)
    tx = jc.hierarchical(EXCHANGES["topk"]())
    with pytest.raises(ValueError, match="one number for each axis of workers; got 4 for axis_name="):
        init_state(first_params(), tx, 4, axis_name=AXES)
    with pytest.raises(ValueError, match="got no axis 'data'"):
        tx.init(first_params())
    state = init_state(first_params(), tx, (2, 2), axis_name=AXES)
    with pytest.raises(ValueError, match="must make whole groups of 2, the number along 'data'; got 3"):
        jc.resize_workers(state, 3)


LATE = """
from train.processes import connect, prepare_jax
prepare_jax()
processes = connect(None, None, None)
import time
import jax, numpy as np, optax
import jaxcomm as jc
from jax.sharding import NamedSharding, PartitionSpec as P
mesh, axes = jc.make_mesh(slice=1, data=2), ("slice", "data")
tx = optax.chain(jc.hierarchical(jc.topk(0.9, axis_name="slice")), optax.sgd(1.0))
step = jc.make_train_step(lambda w, rows: (w * rows).mean(), tx, mesh, axis_name=axes)
state = step.init(np.zeros(1000, np.float32))
whole = np.arange(2000, dtype=np.float32).reshape(2, 1000)
own = whole[processes.index : processes.index + 1]
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P(axes)), own)
for late in (0, 40):
    if processes.index:
        time.sleep(late)
    state, metrics = step(state, rows)
    jax.block_until_ready(state)
print(int(metrics["skipped"]))
"""


@pytest.mark.slow
def test_a_late_process():
    """Gloo's reduce-scatter waits 30 s, whatever time-out is set."""
    with Lab(2, None) as lab:
        results = lab.run([sys.executable, "-c", LATE], env={"PYTHONPATH": str(ROOT)}, timeout=150)
    assert [(result.returncode, result.stdout.splitlines()[-1]) for result in results] == [(0, "0")] * 2, results
