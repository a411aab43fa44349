"""What a pipeline's step sends: predicted, and verified on the compiled step, so that tampering is found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.steps.pipeline.verify import verify_pipeline
from tests.jaxcomm.steps.pipeline.stages import CUTS, batches, loss_fn, make_pipeline, means_of, params_of, stages_of

K, D, ROWS = 2, 32, 16
SGD = optax.sgd(0.1)
TOPK = optax.chain(jc.topk(0.9, dense_below=0), SGD)
BATCH = batches(1)[0]


def test_numbers():
    """Two workers with 16 rows of 32 features in two micro-batches: 4 samples; half, an eighth, or all is sent."""
    stages = [lambda params, x, batch: params * (batch["x"] if x is None else x)] * 4
    boundaries = [jc.dct_mp(0.5), jc.dct_mp(0.875, value_dtype="bfloat16"), jc.dct_mp(0.0)]
    pipeline = jc.Pipeline(stages, loss_fn, [np.ones(D) for _ in range(4)], boundaries=boundaries, micro_batches=2)
    batch = {"x": jax.ShapeDtypeStruct((ROWS, D), np.float32), "y": jax.ShapeDtypeStruct((ROWS, 3), np.float32)}
    report = pipeline.report(TOPK, batch, K)
    whole = 2 * 4 * 32 * 4
    # Positions of 64 of 1024 as upper parts of 6 bits and 4 planes; those of 16 as upper parts of 5 bits and 5 planes.
    half, few = 4 * (64 + (63 + 64) // 32 + 1 + 4 * 2), 4 * (8 + (31 + 16) // 32 + 1 + 5)
    rows = [(boundary.forward, boundary.backward, boundary.dense) for boundary in report.boundaries]
    assert rows == [
        (2 * half, 2 * 4 * 64, whole),
        (2 * few, 2 * 4 * 8, whole),
        (whole, whole, whole),
    ]
    assert report.exchange == jc.wire_report(TOPK, [np.ones(D, np.float32)], K)


def test_words_about_a_costly_boundary():
    pipeline = make_pipeline(3, boundaries=[jc.dct_mp(0.1), jc.dct_mp(0.0)])
    first, second, tail = str(pipeline.report(TOPK, BATCH, K)).split("\n", 2)
    # 8 samples of 7 and 6 features: of the 7, all are sent, as floor(0.7) = 0 are dropped.
    assert first == "stage 0 to 1: 224 bytes forward, 224 back (1.0x fewer than whole activations)"
    assert second == "stage 1 to 2: 192 bytes forward, 192 back (1.0x fewer than whole activations)"
    assert tail.startswith("each stage's gradients: ")
    stages = [lambda params, x, batch: batch["x"], lambda params, x, batch: x]
    pipeline = jc.Pipeline(stages, simple_loss, [np.ones(1), np.ones(1)], boundaries=[jc.dct_mp(0.1)])
    first, _ = str(pipeline.report(TOPK, {"x": np.ones((K, 10), np.float32)}, K)).split("\n", 1)
    # 9 of 10: values, and positions among 1024 as upper parts of 4 bits and 6 planes.
    assert first.startswith("stage 0 to 1: 64 bytes forward, 36 back (0.8x fewer than whole activations): MORE than w")
    assert first.endswith("so few values are sent at once; use sparsity 0 here")


def test_numbers_of_4_bits():
    """Two workers with 8 rows of 32 features: 4 tiles of 9 words and 6 of pivots; back, 8 buckets of 7 words."""
    report = prove(boundary=jc.dct_mp(0.0, value_dtype="int4"))
    assert [(boundary.forward, boundary.backward, boundary.dense) for boundary in report.boundaries] == [
        (4 * 42, 4 * 56, 8 * 32 * 4)
    ]


def test_a_batch_that_does_not_divide():
    batch = {name: rows[:15] for name, rows in BATCH.items()}
    with pytest.raises(ValueError, match=r"rows of a batch must be a multiple of .*; got 15 rows at .* for 2 workers"):
        make_pipeline(2).report(TOPK, batch, K)


PARAMS = [np.eye(D, dtype=np.float32) for _ in range(2)]
X = {"x": np.ones((ROWS, D), np.float32)}


def simple_loss(x, batch):
    return jnp.mean(x**2), {}


def nothing_more(x):
    return x


HALF = jc.dct_mp(0.5)


def prove(first=nothing_more, second=nothing_more, outside=None, axes=None, tx=None, boundary=HALF, **options):
    """Verifies two stages that may do more than they should with their activations, (8, 32) per worker."""

    def pipeline_of(first, second):
        stages = [
            lambda params, x, batch: first(batch["x"] @ params),
            lambda params, x, batch: second(x @ params),
        ]
        return jc.Pipeline(stages, simple_loss, PARAMS, boundaries=[boundary])

    mesh = jc.make_mesh(**(axes or {"data": K, "stage": 2}))
    tx = tx or optax.chain(jc.plump_dp(), SGD)
    pipeline = pipeline_of(nothing_more, nothing_more)
    step = inner = jc.make_train_step(pipeline_of(first, second), tx, mesh)
    if outside is not None:
        collective = jax.shard_map(outside, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        step = jax.jit(lambda state, batch: (inner(state, batch), collective(batch["x"])))
    state = jax.eval_shape(lambda: jc.make_train_step(pipeline, tx, mesh).init(PARAMS))
    return verify_pipeline(step, state, X, pipeline=pipeline, tx=tx, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("axes", "tx"),
    [
        ({"data": K, "stage": 2}, TOPK),
        pytest.param(
            {"stage": 2, "data": K}, optax.chain(SGD, jc.local_sgd(3, exchange=jc.topk(0.5))), marks=pytest.mark.slow
        ),
        pytest.param(
            {"data": 1, "stage": 2},
            optax.chain(jc.dct_dp(0.9, drain_every=5, dense_below=0), SGD),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["topk", "local", "alone"],
)
def test_a_pipeline_is_proved(axes, tx):
    report = prove(axes=axes, tx=tx)
    (boundary,) = report.boundaries
    rows = ROWS // axes["data"]
    assert (boundary.backward, boundary.dense) == (rows * 16 * 4, rows * 32 * 4)
    assert report.exchange == jc.wire_report(tx, [PARAMS[0]], axes["data"])


def summed(axis):
    """Something that a careless stage could do: 512 bytes or more that are not claimed."""
    return lambda x: x + lax.pmean(x, axis).mean() * 0.1


def rarely(function):
    return lambda x: lax.cond(x.sum() > 1e9, lambda: function(x), lambda: x)


def permuted(axis, pairs):
    return lambda x: x + lax.ppermute(x, axis, pairs)


OTHERS = r"boundaries, its exchange and at most 256 bytes more; got .* more in the {} step. Raise other_bytes="


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("tampering", "message"),
    [
        SLOW({"first": summed("data")}, OTHERS.format("usual")),
        ({"second": summed("data")}, OTHERS.format("usual")),
        SLOW({"second": rarely(summed("data"))}, OTHERS.format("most expensive")),
        SLOW({"outside": summed("stage")}, OTHERS.format("usual")),
        SLOW({"first": permuted("data", [(0, 1)])}, OTHERS.format("usual")),
        SLOW(
            {"outside": permuted("stage", [(0, 1)])},
            r"must send what it claims; got 3,232 bytes forward over 2 workers between the stages \(0, 1\), where 592",
        ),
        SLOW(
            {"first": lambda x: lax.pmean(x.astype(jnp.bfloat16), "data").astype(x.dtype), "other_bytes": 10**6},
            r"no more bytes than were traced; got .* on average .*XLA has changed the collectives",
        ),
    ],
    ids=["first", "last", "rarely", "stages", "permute", "boundary", "widened"],
)
def test_tampering_is_caught(tampering, message, monkeypatch):
    """In stages, too: a collective only in their gradients is not seen when stages are traced."""
    monkeypatch.setattr("jaxcomm.steps.pipeline.pipeline.jaxpr_communicates", lambda traced: False)
    with pytest.raises(ValueError, match=message):
        prove(**tampering)


def test_a_stage_that_is_skipped_is_caught():
    """From the first stage to the last of three."""
    pipeline, tx, mesh = make_pipeline(3), optax.chain(jc.plump_dp(), SGD), jc.make_mesh(data=1, stage=3)
    inner = jc.make_train_step(pipeline, tx, mesh)
    detour = jax.shard_map(
        lambda x: lax.ppermute(x, "stage", [(0, 2)]), mesh=mesh, in_specs=P(), out_specs=P("stage"), check_vma=False
    )
    step = jax.jit(lambda state, batch: (inner(state, batch), detour(batch["y"])))
    params = stages_of(params_of(), CUTS[3])
    state = jax.eval_shape(lambda: jc.make_train_step(pipeline, tx, mesh).init(params))
    message = (
        r"must send to their neighbours alone; got bytes from stage to stage of \{\(0, 2\): 192\}. Look for another"
    )
    with pytest.raises(ValueError, match=message):
        verify_pipeline(step, state, BATCH, pipeline=pipeline, tx=tx, mesh=mesh)


def test_bytes_of_a_model_state():
    """Its mean over the workers takes at most 8 bytes per number."""
    pipeline, tx = make_pipeline(2, has_state=True), optax.chain(jc.plump_dp(), SGD)
    params, means = stages_of(params_of(), CUTS[2]), stages_of(means_of(), CUTS[2])
    mesh = jc.make_mesh(data=K, stage=2)
    step = jc.make_train_step(pipeline, tx, mesh)
    state = jax.eval_shape(lambda: jc.make_train_step(pipeline, tx, mesh).init(params, model_state=means))
    arguments = {"pipeline": pipeline, "tx": tx, "mesh": mesh}
    with pytest.raises(ValueError, match=r"at most 0 bytes more; got 92 more in the usual step"):
        verify_pipeline(step, state, BATCH, other_bytes=0, **arguments)
    verify_pipeline(step, state, BATCH, other_bytes=92, **arguments)
