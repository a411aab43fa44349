"""Predicted, compiled and verified bytes. That the first two agree for every method is tested with the laws."""

import re
from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.accounting.jaxpr import jaxpr_program, traced_program
from jaxcomm.accounting.report import BoundaryBytes, PipelineReport, check_bytes, exchange_report
from jaxcomm.traffic import Program, Traffic
from tests.jaxcomm.train_steps import init_state
from tests.refusals import refused

K = 4
PARAMS = {"b": jnp.zeros(3), "w": jnp.zeros((1000, 3))}
BATCH = np.ones((8, 1000), np.float32)
TX = optax.chain(jc.dct_dp(0.99), optax.sgd(0.1))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def report():
    return jc.wire_report(TX, PARAMS, K)


def test_report_numbers():
    result = report()
    # Header, 33 values of 16 bits, 33 indices (5% more than a refresh selects) in 4 words of upper parts and 5 planes.
    words = 3 + 17 + 4 + 5 * 2
    assert (result.workers, result.parameters) == (4, 3003)
    assert result.received == result.received_at_most == 3 * 4 * words + 1.5 * 4 * 3
    assert result.dense == 1.5 * 4 * 3003
    assert result.ratio_to_dense == result.dense / result.received
    assert result.ratio_to_dense_bfloat16 == result.ratio_to_dense / 2


def test_report_words():
    text = str(report())
    assert "3,003 parameters, 4 workers: 426 bytes received per worker and step, 42.3x fewer than dense float32" in text
    assert "all_gather of 136 bytes over 4 workers: 408 bytes received" in text
    assert "all_reduce of 12 bytes over 4 workers: 18 bytes received" in text
    assert "at most" not in text
    text = str(jc.wire_report(jc.dct_dp(0.99, drain_every=100), PARAMS, K))
    assert "at most 18,018 bytes in a rare step, one of 100: 602 on average" in text
    assert "all_reduce of 12,012 bytes over 4 workers (in one branch)" in text


def test_reports_of_shapes():
    shapes = jax.eval_shape(lambda: PARAMS)
    assert jc.wire_report(TX, shapes, K) == report()
    single = jc.wire_report(TX, PARAMS, 1)
    assert single.received == single.dense == 0
    assert single.ratio_to_dense == float("inf")
    workers_report = jc.wire_report(jc.dct_dp(0.99, axis_name="workers"), PARAMS, K, axis_name="workers")
    assert workers_report.received == report().received


@pytest.mark.parametrize(
    "report",
    [
        lambda params: jc.wire_report(jc.chain(jc.topk(0.9), optax.adam(1e-2)), params, workers=8),
        lambda params: jc.planner.estimate(params, workers=8, rate=1e9, compute=0.1),
    ],
    ids=["wire_report", "estimate"],
)
@pytest.mark.parametrize(
    ("params", "got"),
    [
        ({"w": jnp.ones(3), "activation": jnp.tanh}, r"\['activation'\]"),
        ({"params": {"w": jnp.ones(3)}, "batch_stats": {"mean": jnp.ones(3)}}, r"\['batch_stats'\]\['mean'\]"),
        (nnx.eval_shape(lambda: nnx.BatchNorm(3, rngs=nnx.Rngs(0))), "got a BatchStat at"),
    ],
    ids=["a function", "variables of Linen", "a module of NNX"],
)
def test_what_is_not_trained(report, params, got):
    with pytest.raises(ValueError, match=rf"all trained; .*{got}.* variables\['params'\]"):
        report(params)


def test_a_step_may_train_what_is_called_statistics():
    """Of a step's own parameters all are trained, whatever their name; a function is not."""
    tx, params = jc.chain(jc.plump_dp(), optax.sgd(0.1)), {"batch_stats": {"mean": jnp.ones(3)}}
    assert exchange_report(tx, params, 4, (), None).received == 2 * 4 * 3 * 3 / 4
    with pytest.raises(ValueError, match=r"all trained; got a .* at \"\['activation'\]\""):
        exchange_report(tx, params | {"activation": jnp.tanh}, 4, (), None)


@pytest.mark.parametrize("factory", [jc.topk, jc.dct_dp])
def test_large_models_take_no_memory(factory):
    """ResNet-50 on 96 workers."""
    shapes = {"w": jax.ShapeDtypeStruct((25_600_000,), np.float32)}
    result = jc.wire_report(factory(0.99, collective="gather"), shapes, 96)
    slots = {jc.topk: 256_000, jc.dct_dp: 268_800}[factory]
    assert 95 * slots * (16 + 8.1) / 8 < result.received < 95 * slots * (16 + 8.9) / 8


SIZES = {"w": jax.ShapeDtypeStruct((32_000,), np.float32)}


@pytest.mark.parametrize(
    ("tx", "usual", "full", "share"),
    [
        (jc.dct_dp(0.99, drain_every=2), jc.dct_dp(0.99), jc.plump_dp(), 1 / 2),
        (jc.dct_dp(0.99, drain_every=1), jc.plump_dp(), jc.plump_dp(), 1),
        (jc.slim_dp(q=4), None, jc.slim_dp(q=1), 1 / 4),
        (jc.local_sgd(5, exchange=jc.dct_dp(0.99, drain_every=4)), jc.dct_dp(0.99), jc.plump_dp(), 1 / 4),
        (jc.iwp(0.1, life_span=5), None, jc.iwp(0.1), 1 / 5),
    ],
    ids=["dct_dp", "always", "slim_dp", "local_sgd", "iwp"],
)
def test_full_steps_count_on_average(tx, usual, full, share):
    """Half of the steps are not rare: what is claimed for a run is the mean."""
    result, most = jc.wire_report(tx, SIZES, K), jc.wire_report(full, SIZES, K).received
    least = result.received_in_exchange if usual is None else jc.wire_report(usual, SIZES, K).received
    assert result.received_on_average == pytest.approx((least + share * (most - least)) / result.every)
    assert (f"one of {round(result.every / share)}: " in str(result)) == (0 < share < 1)


def test_a_large_drain():
    shapes = {"w": jax.ShapeDtypeStruct((25_600_000,), np.float32)}
    report = jc.wire_report(jc.dct_dp(0.99, drain_every=1000), shapes, 96)
    assert report.dense == report.received_at_most == float(Fraction(2 * 95, 96) * 4 * 25_600_000)


@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(TX, id="dct_dp", marks=pytest.mark.slow),
        pytest.param(optax.chain(jc.plump_dp(), optax.adam(0.1)), id="plump"),
        pytest.param(jc.chain(jc.topk(0.9), optax.sgd(0.1)), id="topk", marks=pytest.mark.slow),
    ],
)
def test_a_train_step(tx):
    mesh = jc.make_mesh(data=K)
    step = jc.make_train_step(loss_fn, tx, mesh)
    proof = jc.verify(step, init_state(PARAMS, tx, mesh), BATCH, tx=tx, params=PARAMS, workers=K)
    loss = Traffic("all_reduce", 4, K).received
    assert proof.program.received == jc.wire_report(tx, PARAMS, K).program.received + loss
    assert (proof.workers, proof.parameters) == (K, 3003)


def test_report_of_a_whole_step():
    mesh = jc.make_mesh(data=K)
    step, state = jc.make_train_step(loss_fn, TX, mesh), init_state(PARAMS, TX, mesh)
    result = jc.accounting.step_report(step, state, BATCH, params=PARAMS, workers=K)
    assert result.received == report().received + 6
    assert (result.workers, result.parameters) == (K, 3003)


def step_with(extra, tx=TX):
    """A step that does more with the gradients than exchange them."""
    mesh = jc.make_mesh(data=K)
    state = init_state(PARAMS, tx, mesh)
    specs = jc.state_specs(state.opt_state)

    def worker(params, opt_state, batch):
        grads = jax.grad(loss_fn)(lax.pcast(params, "data", to="varying"), batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, extra(grads)

    mapped = jax.shard_map(worker, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P()))
    return jax.jit(mapped), (state.params, state.opt_state, BATCH)


@pytest.mark.parametrize(
    ("tx", "params"),
    [
        (jc.quant_dp(8), {"unread": jnp.zeros(27), "w": jnp.ones((1000, 3))}),
        (jc.quant_dp(8, start=2), {"unread": jnp.zeros(27), "w": jnp.ones((1000, 3))}),
        (
            jc.terngrad(collective="gather"),
            {"unread": jnp.zeros(27), "unread too": jnp.zeros(5), "w": jnp.ones((1000, 3))},
        ),
    ],
)
def test_parameters_that_no_loss_reads(tx, params):
    """Their gradients are zeros, which XLA knows. It sends them as predicted, rather than nothing."""
    mesh = jc.make_mesh(data=K)
    step = jc.make_train_step(
        lambda params, batch: jnp.mean((batch @ params["w"]) ** 2), jc.chain(tx, optax.sgd(0.1)), mesh
    )
    report = step.verify(step.init(params), BATCH)
    assert report.received >= jc.wire_report(tx, params, K).received


def test_an_extra_all_reduce():
    """Such as of a gradient norm for the log."""
    step, args = step_with(lambda grads: optax.tree.norm(lax.pmean(grads["w"], "data")))
    message = (
        r"must send its exchange and at most 256 bytes more; got 18,426 where the exchange is 426: a dense all-reduce"
    )
    with pytest.raises(ValueError, match=message) as error:
        jc.verify(step, *args, tx=TX, params=PARAMS, workers=K)
    assert "params = jax.lax.pcast(params, 'data', to='varying') before jax.grad" in str(error.value)
    assert "all_reduce" in str(error.value)
    assert jc.verify(step, *args, tx=TX, params=PARAMS, workers=K, other_bytes=18_000).received == 18_426


def test_the_trap():
    """With pmean, and back to varying: the compressor cannot see it, but the bytes show it."""
    mesh = jc.make_mesh(data=K)
    state = init_state(PARAMS, TX, mesh)
    specs = jc.state_specs(state.opt_state)

    def worker(params, opt_state, batch):
        grads = lax.pcast(jax.grad(loss_fn)(params, batch), "data", to="varying")
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))
    with pytest.raises(ValueError, match="a dense all-reduce is left in the usual step"):
        jc.verify(step, state.params, state.opt_state, BATCH, tx=TX, params=PARAMS, workers=K)


def test_an_all_reduce_in_a_branch():
    """In a step whose exchange never drains."""

    def now_and_then(grads):
        rare = lax.psum(grads["b"][0], "data") > 1e9
        return lax.cond(rare, lambda: optax.tree.norm(lax.pmean(grads["w"], "data")), lambda: lax.pmean(0.0, "data"))

    step, args = step_with(now_and_then)
    with pytest.raises(ValueError, match="dense all-reduce"):
        jc.verify(step, *args, tx=TX, params=PARAMS, workers=K)


def test_a_type_that_xla_widens():
    """A sum of bfloat16 is sent as float32 on a CPU."""
    step, args = step_with(lambda grads: lax.psum(grads["w"].astype(jnp.bfloat16), "data"))
    with pytest.raises(
        ValueError, match=r"no more bytes than were traced; got 18,426 \(.*\) for 9,426 \(.*\). XLA has changed"
    ):
        jc.verify(step, *args, tx=TX, params=PARAMS, workers=K, other_bytes=10**6)


class Once:
    """A step that is traced and compiled only once, however often that is asked."""

    def __init__(self, step, args):
        self.traced, self.text = step.trace(*args), step.lower(*args).compile().as_text()

    def trace(self, *args):
        return self.traced

    def lower(self, *args):
        return self

    def compile(self):
        return self

    def as_text(self):
        return self.text


DRAINS = jc.dct_dp(0.99, drain_every=100)


@pytest.fixture(scope="module")
def step_that_drains():
    step, args = step_with(lambda grads: jnp.zeros(()), DRAINS)
    return Once(step, args), args


def changed(program, change):
    """A program with every collective changed."""
    branches = [[changed(branch, change) for branch in branches_of] for branches_of in program.conditionals]
    return Program([change(traffic) for traffic in program.always], branches)


def without_branch(program, unread):
    branches = [
        [Program() if i == unread else b for i, b in enumerate(branches_of)] for branches_of in program.conditionals
    ]
    return Program(program.always, branches)


@pytest.mark.parametrize(
    ("reader", "when"),
    [
        pytest.param(
            lambda program: changed(program, lambda t: replace(t, operand_bytes=t.operand_bytes // 2)),
            "usual",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda program: changed(program, lambda t: replace(t, workers=K - 1)), "usual", marks=pytest.mark.slow
        ),
        (lambda program: Program(), "usual"),
        (lambda program: Program(program.always), "usual"),
        (lambda program: without_branch(program, 0), "usual"),
        (lambda program: without_branch(program, 1), "most expensive"),
    ],
    ids=["half", "groups", "nothing", "no conditional", "no usual branch", "no rare branch"],
)
def test_readers_that_count_too_little(step_that_drains, reader, when, monkeypatch):
    step, args = step_that_drains
    jc.verify(step, *args, tx=DRAINS, params=PARAMS, workers=K)
    monkeypatch.setattr("jaxcomm.accounting.report.read_program", lambda text, mesh=None: reader(read_program(text)))
    message = (
        rf"A step must send its whole exchange; got .* in the {when} step. Pass the tx= and the params= .*read_program"
    )
    with pytest.raises(ValueError, match=message):
        jc.verify(step, *args, tx=DRAINS, params=PARAMS, workers=K)


@pytest.mark.parametrize(("name", "value"), [("_itemsize", lambda dtype: 2), ("_BRANCHES", re.compile("no (branch)"))])
def test_faults_of_the_reader(step_that_drains, name, value, monkeypatch):
    """Types at half their size, and conditionals whose branches are not found."""
    step, args = step_that_drains
    monkeypatch.setattr(f"jaxcomm.accounting.text.{name}", value)
    with pytest.raises(ValueError, match="A step must send its whole exchange; got"):
        jc.verify(step, *args, tx=DRAINS, params=PARAMS, workers=K)


def test_another_exchange(step_that_drains):
    """The step's own exchange sends fewer bytes."""
    step, args = step_that_drains
    with pytest.raises(
        ValueError, match=r"A step must send its whole exchange; got .* where the exchange is 18,018, in the"
    ):
        jc.verify(step, *args, tx=jc.plump_dp(), params=PARAMS, workers=K)


def program_of(function, *args, shape=(K,), axes=("data",)):
    """(traced, compiled) of a function on a mesh."""
    mesh = jc.make_mesh(**dict(zip(axes, shape, strict=True)))
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    traced = mapped.trace(*args)
    return jaxpr_program(traced.jaxpr), read_program(traced.lower().compile().as_text())


X = np.ones((K * 8, 8), np.float32)  # 256 bytes a worker


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: lax.psum(x, "data"), Traffic("all_reduce", 256, K)),
        (lambda x: lax.pmax(x, "data"), Traffic("all_reduce", 256, K)),
        (lambda x: lax.pmean(x[0], "data") + x, Traffic("all_reduce", 32, K)),
        (lambda x: lax.all_gather(x, "data").sum(0), Traffic("all_gather", 256, K)),
        (lambda x: lax.psum_scatter(x, "data", tiled=True) + x[:2], Traffic("reduce_scatter", 256, K)),
        (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), Traffic("all_to_all", 256, K)),
        (lambda x: lax.ppermute(x, "data", [(i, (i + 1) % K) for i in range(K)]), Traffic("permute", 256, K)),
        (lambda x: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]), Traffic("all_reduce", 256, 2)),
        (  # of the rows, then of the workers, as batch normalisation of Equinox
            lambda x: jax.vmap(lambda row: row - lax.pmean(row, ("rows", "data")), axis_name="rows")(x),
            Traffic("all_reduce", 32, K),
        ),
        (lambda x: jax.jit(lambda y: lax.psum(y, "data"))(x), Traffic("all_reduce", 256, K)),
        (lambda x: jax.checkpoint(lambda y: lax.psum(jnp.sin(y), "data"))(x), Traffic("all_reduce", 256, K)),
        (
            lambda x: lax.scan(lambda c, _: (lax.psum(c, "data"), None), x, length=5)[0],
            Traffic("all_reduce", 256, K, times=5),
        ),
    ],
)
def test_collectives_agree(function, expected):
    traced, compiled = program_of(function, X)
    assert traced.always == [expected]
    assert traced.received == compiled.received == expected.received


def test_two_axes():
    def both(x):
        return lax.psum(x, ("data", "model")) + lax.psum(2 * x, "model")

    traced, compiled = program_of(both, X, shape=(4, 2), axes=("data", "model"))
    assert traced.received == compiled.received == Traffic("all_reduce", 256, 8).received + 256


def test_a_loop_of_unknown_length():
    def loop(x):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: lax.psum(c, "data"), x)

    mesh = jc.make_mesh(data=K)
    mapped = jax.shard_map(loop, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    refused(lambda: traced_program(mapped, X), "loop with collectives", "got a while loop")


def test_a_ragged_collective():
    def ragged(x):
        sizes = jnp.ones(K, jnp.int32)
        return lax.ragged_all_to_all(x, x, sizes, sizes, sizes, sizes, axis_name="data")

    mesh = jc.make_mesh(data=K)
    mapped = jax.shard_map(ragged, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    with pytest.raises(
        ValueError, match=r"one of .*all_gather.* for its bytes to be predicted; got 'ragged_all_to_all'"
    ):
        traced_program(mapped, X)


def compiled_for_tpus(instruction):
    return (
        "HloModule jit_step, is_scheduled=true, num_partitions=4\n\n"
        f"ENTRY %main.1 (p: f32[1024]) -> f32[4096] {{\n  %p = f32[1024]{{0}} parameter(0)\n  ROOT {instruction}, "
        "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true\n}\n"
    )


@pytest.mark.parametrize(
    ("instruction", "is_refused"),
    [
        ("%a = f32[4096]{0:T(1024)} all-gather(%p)", False),
        ("%a = f32[4096]{0} all-gather(%p)", True),  # not of TPUs: the same padding is a fault
        ("%a = f32[4096]{0:T(1024)} all-reduce(%p)", True),  # XLA's program for a gather of 1,000 words
    ],
)
def test_tiles_of_tpus(instruction, is_refused):
    """A gather of 4,000 bytes must be a tile of 4,096, and not an all-reduce of zeros."""
    traced = jc.accounting.WireReport(4, 1000, Program([Traffic("all_gather", 4000, 4)]))
    text = compiled_for_tpus(instruction)
    if is_refused:
        with pytest.raises(ValueError, match="no more bytes than were traced"):
            check_bytes(text, traced, traced.program, 0, "data")
    else:
        assert check_bytes(text, traced, traced.program, 0, "data").received == 3 * 4096


@pytest.mark.parametrize(("layout", "activations"), [("{0:T(1024)}", 1.0), ("{0:T(1024)}", 0.9), ("{0}", 1.0)])
def test_tpus_multiply_in_16_bits(layout, activations):
    """And nothing else; on other devices numbers keep their width."""
    traced = jc.accounting.WireReport(4, 1000, Program([Traffic("all_gather", 8192, 4)]))
    text = compiled_for_tpus(f"%a = f32[4096]{layout} all-gather(%p)")  # half of the 24,576 bytes received
    options = {"activations": activations * 3 * 8192}
    if layout == "{0:T(1024)}" and activations == 1:
        assert check_bytes(text, traced, traced.program, 0, "data", **options).received == 3 * 4096
    else:
        refused(lambda: check_bytes(text, traced, traced.program, 0, "data", **options), "A step", "got 12,288 bytes")


@pytest.mark.parametrize(
    ("tiles", "padding", "workers"),
    [(61, 64, 4), (1000, 1008, 4), (3000, 3024, 4), (6240, 6272, 4), (12001, 12096, 4), (61, 62, 8), (12001, 12040, 8)],
)
def test_padding_of_a_reduce_scatter(tiles, padding, workers):
    """Padded and shifted as XLA compiled it for two slices of a v5e:2x2, and for a v6e:2x4. Not an all-reduce."""
    part, shift = 4096 * workers, (workers - 1) * (padding - tiles)
    pairs = tuple((worker, worker + 1) for worker in range(workers - 1))
    compiled = Program([Traffic("reduce_scatter", padding * part, workers)])
    compiled.always.append(Traffic("permute", 4096 * shift, workers, pairs=pairs))
    most = Traffic("reduce_scatter", tiles * part, workers).in_tiles(True).received
    assert compiled.received <= most < Traffic("all_reduce", tiles * part, workers).received


@pytest.mark.parametrize(
    ("operand", "across", "most"),
    [(4, False, 4096), (4, True, 6 * 4096), (32 * 4096, True, 32 * 4096), (32 * 4096 + 1, True, 36 * 4096)],
)
def test_padding_of_an_all_reduce(operand, across, most):
    """With four workers; between slices a tile for each. Small all-reduces may be summed twice."""
    assert Traffic("all_reduce", operand, 4).in_tiles(across).operand_bytes == most


def test_seconds_of_boundaries():
    """By hand, of 4 micro-batches, a byte a ms, and 0.1 s for each round trip. With cuts that differ, the stage in the
    middle has two messages there and two back; with equal ones, one each, in 6 ticks for three cuts."""
    cuts = [BoundaryBytes(4000, 1000, 9000), BoundaryBytes(2000, 2000, 9000)]
    report = PipelineReport(cuts, jc.wire_report(TX, PARAMS, 1), 4)
    assert report.boundary_seconds(8e3) == pytest.approx(9)
    assert report.boundary_seconds(8e3, 0.05) == pytest.approx(9 + 4 * 2 * 2 * 0.1)
    assert PipelineReport(cuts[:1], report.exchange, 4).boundary_seconds(8e3, 0.05) == pytest.approx(5 + 4 * 2 * 0.1)
    assert PipelineReport(cuts[:1] * 3, report.exchange, 4).boundary_seconds(8e3, 0.05) == pytest.approx(
        1.5 * 5 + 6 * 2 * 0.1
    )
    assert PipelineReport([], report.exchange, 4).boundary_seconds(8e3, 0.05) == 0
    refused(lambda: report.boundary_seconds("1gbit"), "rate must be bits a second, above 0; got '1gbit'")
    refused(lambda: report.boundary_seconds(-1e9), "rate must be bits a second, above 0; got -1")
    refused(lambda: report.boundary_seconds(1e9, -0.1), "latency must be seconds, 0 or more; got -0.1")


@pytest.mark.parametrize("tx", [jc.dct_dp(0.9, drain_every=1), jc.slim_dp(q=1)], ids=["dct_dp", "slim_dp"])
def test_an_exchange_that_is_always_dense(tx):
    """It claims what every exchange costs, not what one would cost that never happens."""
    report = jc.wire_report(tx, {"w": jax.ShapeDtypeStruct((1000, 100), np.float32)}, 4)
    assert report.received >= report.dense
    assert report.received_at_most == report.received
