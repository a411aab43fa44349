"""Methods whose workers train on their own parameters: Slim-DP, local SGD, Plump-DP with local steps."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from benchmarks.netlab import Lab
from tests.jaxcomm.formulas import index_words
from tests.jaxcomm.train_steps import init_state, normal
from tests.jaxcomm.train_steps import linear as loss
from tests.marks import slow_except
from tests.reference import noise
from tests.reference.local_sgd import LocalSgdReference
from tests.reference.plump_dp import PlumpDpReference
from tests.reference.slim_dp import SlimDpReference
from tests.reference.topk import TopKReference
from tests.refusals import refusals, refused

SHAPES = {"a": (7,), "b": (61,), "c": (20, 13), "s": ()}
N = 329
RATE = 0.125
ROOT = Path(__file__).parents[3]
STEPS = 14
BAD = {3: np.nan, 8: np.inf, 9: np.nan}  # on one worker; one of every three is a step with an exchange


def first_params(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return normal(SHAPES, dtype=dtype)


def batch_of(step: int, K: int, bad: float | None = None) -> dict[str, np.ndarray]:
    batch = normal(SHAPES, (step, 7), K)
    if bad is not None:
        batch["b"][K - 1, 3] = bad
    return batch


@dataclass(frozen=True)
class Case:
    """One method with one setting, and its oracle.

    Attributes:
      name: for pytest.
      make: the transformation.
      oracle: (K) -> the oracle.
      usual: (K) -> bytes a worker receives in an exchange.
      every: steps between exchanges.
    """

    name: str
    make: Callable[[], Any]
    oracle: Callable[[int], Any]
    usual: Callable[[int], float]
    every: int = 1

    def __str__(self) -> str:
        return self.name


def slim(**options: Any) -> Case:
    def oracle(K: int) -> Any:
        def uniform(t: int, k: int) -> np.ndarray:
            return noise.uniform(noise.make_key(0, t, k), reference.explorer_size * K)

        def offsets(t: int, k: int, sizes: list[int]) -> np.ndarray:
            return noise.integers(noise.make_key(0, t, k), sizes, start=reference.explorer_size * K)

        reference = SlimDpReference(first_params(), K, uniform=uniform, offsets=offsets, **options)
        return reference

    def usual(K: int) -> float:
        core = round(options["beta"] * N)
        explorer = K * min(round((options["alpha"] - options["beta"]) * N / K), (N - core) // K)
        return 2 * (K - 1) / K * 4 * (core + explorer + 1)  # one number to tell that all is finite

    name = "slim_dp-" + "-".join(str(value) for value in options.values())
    return Case(name, lambda: jc.slim_dp(**options), oracle, usual, options.get("p", 1))


def dense_bytes(K: int) -> float:
    return 2 * (K - 1) / K * 4 * N


def local(name: str, make: Callable[[], Any], H: int, usual: Callable[[int], float], **options: Any) -> Case:
    def oracle(K: int) -> Any:
        outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True, "exchange": PlumpDpReference, **options}
        return LocalSgdReference(first_params(), K, H=H, **{**outer, "exchange": outer["exchange"]()})

    return Case(name, make, oracle, usual, H)


def sparse_bytes(K: int) -> float:
    k = sum(max(1, n - n * 9 // 10) for n in (61, 260))
    words = 3 + -(-k // 2) + index_words("auto", 2048, k)  # header, values, indices of two blocks
    return (K - 1) * 4 * words + 2 * (K - 1) / K * 4 * (7 + 1)


CASES = [
    slim(alpha=0.3, beta=0.15, q=4),
    slim(alpha=0.3, beta=0.15, q=3, unsent="carry"),
    slim(alpha=0.3, beta=0.3, q=2),
    slim(alpha=0.4, beta=0.0, q=3, p=3, unsent="carry", c=1.0),
    slim(alpha=0.5, beta=0.25, q=3, p=2, server_rate=0.4),
    local("diloco", lambda: jc.local_sgd(3, exchange=jc.plump_dp()), 3, dense_bytes),
    local(
        "sparseloco",
        lambda: jc.local_sgd(
            2,
            exchange=jc.topk(0.9, dense_below=60, collective="gather"),
            outer=optax.sgd(0.5, momentum=0.9),
        ),
        2,
        sparse_bytes,
        lr=0.5,
        nesterov=False,
        exchange=lambda: TopKReference(0.9, dense_below=60, value_dtype="bfloat16"),
    ),
    local("plump_dp-p3", lambda: jc.plump_dp(p=3), 3, dense_bytes, lr=1, momentum=0, nesterov=False),
]
OTHERS = [(1, 1), (4, 3), (5, 1), (6, 3)]  # (number of a case, number of workers)
# One of each kind, as compiling is expensive.
FEW_CASES = [CASES[1], CASES[4], CASES[6]]


def on_mesh(case: Case, K: int) -> tuple[Any, Any]:
    """A fresh state and the step of a case on a mesh; compiled once for all tests."""
    return _on_mesh(case.name, K)


@functools.cache
def _on_mesh(name: str, K: int) -> tuple[Any, Any]:
    case = next(case for case in CASES if case.name == name)
    mesh = jc.make_mesh(data=K)
    tx = optax.chain(optax.sgd(RATE), case.make())
    return init_state(first_params(), tx, mesh), jc.make_train_step(loss, tx, mesh, donate=False)


@pytest.mark.parametrize(
    ("case", "K"),
    [
        pytest.param(case, K, id=f"{case}-{K}", marks=() if (case, K) == (CASES[7], 4) else pytest.mark.slow)
        for case, K in [*((case, 4) for case in CASES), *((CASES[i], K) for i, K in OTHERS)]
    ],
)
def test_oracles(case, K):
    """Every worker's parameters and the global model, in every step, to float tolerance; the core to the coordinate."""
    state, step = on_mesh(case, K)
    oracle = case.oracle(K)
    for i in range(STEPS):
        batch = batch_of(i, K, BAD.get(i))
        state, metrics = step(state, batch)
        skipped = oracle.step([{name: -np.float32(RATE) * rows[w] for name, rows in batch.items()} for w in range(K)])
        assert bool(metrics["skipped"]) == skipped, i
        model = jc.state.global_params(state)
        for name in SHAPES:
            np.testing.assert_allclose(model[name], oracle.global_model[name], rtol=2e-6, atol=2e-6, err_msg=str(i))
            for w in range(K):
                np.testing.assert_allclose(
                    np.asarray(state.params.rows[name])[w], oracle.params[w][name], rtol=2e-6, atol=2e-6
                )
        if hasattr(oracle, "core"):
            core = np.asarray(state.opt_state[1].memory.order)[: len(oracle.core)]
            np.testing.assert_array_equal(np.sort(core), oracle.core)


@pytest.mark.parametrize("case", slow_except(FEW_CASES, CASES[6]), ids=str)
def test_mesh_and_simulation(case):
    K = 4
    (state, step), tx = on_mesh(case, K), optax.chain(optax.sgd(RATE), case.make())
    twin, simulated = init_state(first_params(), tx, K), jc.simulate(loss, tx, K, donate=False)
    for i in range(6):
        state, metrics = step(state, batch_of(i, K, BAD.get(i)))
        twin, expected = simulated(twin, batch_of(i, K, BAD.get(i)))
        assert metrics["skipped"] == expected["skipped"]
        assert metrics["sent"] == expected["sent"]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), state.params, twin.params)


@pytest.mark.parametrize("case", slow_except(CASES, CASES[5], CASES[7]), ids=str)
def test_bytes(case):
    tx, K = optax.chain(optax.sgd(RATE), case.make()), 4
    for workers in (1, 2, 4, 8):
        report = jc.wire_report(tx, first_params(), workers)
        assert report.received_in_exchange == pytest.approx(case.usual(workers), rel=1e-12)
        assert report.received == pytest.approx(case.usual(workers) / case.every, rel=1e-12)
    state, step = on_mesh(case, K)
    compiled = jc.verify(step, state, batch_of(0, K), tx=tx, params=first_params(), workers=K)
    losses = 2 * (K - 1) / K * 4 if case.every == 1 else 0  # of workers that train alone, each reports its own
    assert compiled.received_in_exchange == pytest.approx(case.usual(K) + losses, rel=1e-12)
    assert compiled.received == pytest.approx(case.usual(K) / case.every + losses, rel=1e-12)


@pytest.mark.parametrize("K", [2, 8])
@pytest.mark.parametrize("alpha", slow_except([0.1, 0.9], 0.9))
def test_bytes_of_slim_dp(alpha, K):
    """2 (K-1)/K * alpha * n words, to the rounding of the explorer to whole workers."""
    n = 100_000
    tx = optax.chain(optax.sgd(0.1), jc.slim_dp(alpha, alpha / 2))
    received = jc.wire_report(tx, jax.ShapeDtypeStruct((n,), np.float32), K).received
    assert received == pytest.approx(2 * (K - 1) / K * alpha * n * 4, rel=2e-4)


@pytest.mark.parametrize("p", slow_except([1, 3], 3))
def test_slim_dp_of_everything(p):
    """With alpha = 1: equal to model averaging to the bit, and with p = 1 to averaged gradients up to rounding."""
    K = 4
    slim_state, slim_step = _start(jc.slim_dp(alpha=1.0, beta=0.5, p=p), K)
    tx = jc.plump_dp(p=p)
    chain = optax.chain(tx, optax.sgd(RATE)) if p == 1 else optax.chain(optax.sgd(RATE), tx)
    state, step = init_state(first_params(), chain, K), jc.simulate(loss, chain, K, donate=False)
    for i in range(6):
        slim_state, _ = slim_step(slim_state, batch_of(i, K))
        state, _ = step(state, batch_of(i, K))
        if p > 1:
            jax.tree.map(np.testing.assert_array_equal, slim_state.params, state.params)
        else:
            model = jc.state.global_params(slim_state)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), model, state.params)


def _start(tx: Any, K: int) -> tuple[Any, Any]:
    chain = optax.chain(optax.sgd(RATE), tx)
    return init_state(first_params(), chain, K), jc.simulate(loss, chain, K, donate=False)


@pytest.mark.slow
@pytest.mark.parametrize("unsent", ["carry", "local"])
def test_updates_between_pushes(unsent):
    """Law 1: global model + mean of delta is what plain averaging gives if delta is carried, and only then."""
    K = 4
    state, step = _start(jc.slim_dp(0.3, 0.1, q=5, unsent=unsent), K)
    expected = {name: value.astype(np.float64) for name, value in first_params().items()}
    for i in range(8):
        batch = batch_of(i, K)
        state, _ = step(state, batch)
        expected = {name: value - RATE * batch[name].mean(0) for name, value in expected.items()}
    owed = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    if unsent == "carry":
        delta = np.asarray(state.opt_state[1].memory.delta.rows).mean(0)
        ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])[:-1]
        owed = dict(zip(SHAPES, np.split(delta, ends), strict=True))
    model = jc.state.global_params(state)
    gap = max(
        np.abs(np.asarray(model[name]) + owed[name].reshape(SHAPES[name]) - expected[name]).max() for name in SHAPES
    )
    assert gap < 3e-6 if unsent == "carry" else gap > 0.01


@pytest.mark.slow
def test_explorers():
    K = 4
    state, step = _start(jc.slim_dp(0.3, 0.0, q=1000), K)
    picks = []
    for i in range(3):
        before = state.params.rows["c"]
        state, _ = step(state, batch_of(i, K))
        local_only = before - RATE * batch_of(i, K)["c"]
        variant = np.abs(np.asarray(state.params.rows["c"]) - local_only) > 1e-5
        picks += [frozenset(np.flatnonzero(rows)) for rows in variant]
    assert len(set(picks)) == len(picks)
    assert all(40 < len(explorer) < 120 for explorer in picks)  # of 260, 30% are pulled


def test_local_optimizers():
    K = 3
    tx = optax.chain(optax.adam(0.01), jc.local_sgd(4, exchange=jc.plump_dp()))
    mesh = jc.make_mesh(data=K)
    state, step = init_state(first_params(), tx, mesh), jc.make_train_step(loss, tx, mesh, donate=False)
    for i in range(3):
        state, _ = step(state, batch_of(i, K))
    moments = np.asarray(state.opt_state[0][0].mu["c"].rows)
    assert moments.shape == (K, 20, 13)
    assert not np.allclose(moments[0], moments[1])
    assert np.asarray(state.opt_state[0][0].count.rows).tolist() == [3] * K
    rows = np.asarray(state.params.rows["c"])
    assert not np.allclose(rows[0], rows[1])
    state, _ = step(state, batch_of(3, K))
    rows = np.asarray(state.params.rows["c"])
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-6)
    np.testing.assert_allclose(rows[0], jc.state.global_params(state)["c"], atol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(jc.slim_dp(0.3, 0.1, q=2, p=2), id="slim_dp", marks=pytest.mark.slow),
        pytest.param(jc.local_sgd(2, exchange=jc.plump_dp()), id="local_sgd"),
    ],
)
def test_a_bad_worker_between_exchanges(tx):
    K = 3
    chain = optax.chain(optax.sgd(RATE, momentum=0.9), tx)
    state, step = init_state(first_params(), chain, K), jc.simulate(loss, chain, K, donate=False)
    state, metrics = step(state, batch_of(0, K, np.nan))
    assert metrics["skipped"] == 0
    assert np.isnan(metrics["loss"])
    rows = state.params.rows["b"]
    np.testing.assert_array_equal(rows[K - 1], first_params()["b"])
    assert not np.allclose(rows[0], first_params()["b"])
    for i in range(1, 4):
        state, metrics = step(state, batch_of(i, K))
        assert metrics["skipped"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(CASES[1], np.float16), (CASES[4], jnp.bfloat16), (CASES[6], jnp.bfloat16)],
    ids=["carry", "server_rate", "sparseloco"],
)
def test_parameters_of_16_bits(case, dtype):
    K = 2
    tx = optax.chain(optax.sgd(RATE), case.make())
    state, step = init_state(first_params(dtype), tx, K), jc.simulate(loss, tx, K, donate=False)
    for i in range(4):
        state, metrics = step(state, {name: rows.astype(dtype) for name, rows in batch_of(i, K).items()})
        assert metrics["skipped"] == 0
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(jc.state.global_params(state))} == {np.dtype(dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_another_number_of_workers(case):
    """Of 4 workers, then 2, then 3, which take steps."""
    tx = optax.chain(optax.sgd(RATE, momentum=0.5), case.make())
    state, step = init_state(first_params(), tx, 4), jc.simulate(loss, tx, 4, donate=False)
    for i in range(5):
        state, _ = step(state, batch_of(i, 4))
    model = jc.state.global_params(state)
    for workers in (2, 3):
        state = jc.resize_workers(state, workers)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jc.state.global_params(state), model)
    step = jc.simulate(loss, tx, workers, donate=False)
    for i in range(3):
        state, metrics = step(jax.tree.map(jnp.asarray, state), batch_of(i, workers))
        assert metrics["skipped"] == 0


NAN, EMPTY, INTEGERS, COMPLEX = float("nan"), {}, {"w": np.zeros(9, np.int32)}, {"w": np.zeros(9, complex)}


def average(**options):
    return jc.plump_dp(**{"p": 2} | options)


def without_params(make):
    tx = make()
    state = tx.init(first_params())
    return jax.vmap(lambda updates: tx.update(updates, state), axis_name="data")(batch_of(0, 2))


@refusals(
    (lambda: jc.slim_dp(alpha=0), "alpha", "got 0"),
    (lambda: jc.slim_dp(alpha=1.5), "alpha", "got 1.5"),
    (lambda: jc.slim_dp(alpha=NAN), "alpha", "got nan"),
    (lambda: jc.slim_dp(0.3, 0.4), "beta", "got 0.4"),
    (lambda: jc.slim_dp(0.3, -0.1), "beta", "got -0.1"),
    (lambda: jc.slim_dp(q=0), "q must", "got 0"),
    (lambda: jc.slim_dp(p=0), "p must", "got 0"),
    (lambda: jc.slim_dp(c=0), "c must", "got 0"),
    (lambda: jc.slim_dp(server_rate=-1), "server_rate", "got -1"),
    (lambda: jc.slim_dp(unsent="drop"), "unsent", "got 'drop'"),
    (lambda: jc.slim_dp(1.0, server_rate=0.5), "server_rate", "got 0.5"),
    (lambda: jc.local_sgd(0, exchange=jc.plump_dp()), "steps", "got 0"),
    (lambda: average(p=0), "p must", "got 0"),
    (lambda: jc.local_sgd(2, exchange=optax.sgd(0.1)).init(first_params()), "exchange", "got "),
    (lambda: jc.local_sgd(2, exchange=average()).init(first_params()), "exchange", "got "),
    (lambda: without_params(jc.slim_dp), "params", "got none"),
    (lambda: without_params(average), "params", "got none"),
    *((lambda make=make: make().init(EMPTY), "", "got an empty tree") for make in (jc.slim_dp, average)),
    *((lambda make=make: make().init(INTEGERS), "'w'", "got int32") for make in (jc.slim_dp, average)),
    *((lambda make=make: make().init(COMPLEX), "'w'", "got complex") for make in (jc.slim_dp, average)),
)
def test_refusals(call, said):
    refused(call, *said)


ALONE = """
import sys, time
from pathlib import Path
from train.processes import connect, prepare_jax
prepare_jax()
processes = connect(None, None, None)
import jax, numpy as np, optax
import jaxcomm as jc
from benchmarks.netlab import Lab
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec as P
mesh, first_is_ahead = jc.make_mesh(data=2), Path(sys.argv[1])
local = jc.chain(optax.sgd(0.1), jc.local_sgd(4, exchange=jc.plump_dp()))
tx = {"local": local, "accumulated": jc.chain(jc.plump_dp(), optax.sgd(0.1), accumulate=4)}[sys.argv[2]]
step = jc.make_train_step(lambda w, rows: (w * rows).mean(), tx, mesh)
state = step.init(np.ones(1, np.float32))
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), np.full(1, 1.0 + processes.index, "f"))
if processes.index:
    while not first_is_ahead.exists():
        time.sleep(0.1)
for _ in range(3):
    state, metrics = step(state, rows)
own = float(metrics["loss"])
if processes.index == 0:
    first_is_ahead.touch()
state, metrics = step(state, rows)
print(own, *process_allgather(metrics["loss"]), *np.asarray(step.params(state)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("chain", "moves"), [("local", 0.1), ("accumulated", 0.0)])
def test_processes_wait_only_at_exchanges(tmp_path, chain, moves):
    """The second begins when the first has taken all steps before the exchange, and each reports its own loss."""
    command = [sys.executable, "-c", ALONE, str(tmp_path / "ahead"), chain]
    with Lab(2, None) as lab:
        results = lab.run(command, env={"PYTHONPATH": str(ROOT)}, timeout=100)
    assert [result.returncode for result in results] == [0, 0], results
    positions = np.asarray([result.stdout.split()[-4:] for result in results], float)
    expected = [1 - 2 * moves, 2 * (1 - 4 * moves)]  # worker k moves by 0.1 (k + 1) a step
    np.testing.assert_allclose(positions[:, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(positions[:, 1:3], [[1 - 3 * moves, 2 * (1 - 6 * moves)]] * 2, rtol=1e-6)
    assert positions[0, 3] == positions[1, 3]


def test_a_single_fragment_by_its_pattern():
    tx = jc.local_sgd(2, exchange=jc.plump_dp(), fragments=["w"])
    refused(lambda: jax.eval_shape(tx.init, {"v": jnp.zeros(3), "w": jnp.zeros(3)}), "fragments", "'v' too", "('w',)")
