"""Models that are split: pipelines and shards train like plain workers, and their bytes are counted."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy.special import log_softmax

import jaxcomm as jc
from configs.experiment import Architecture, BoundaryFields
from configs.methods import Dgc, LocalSgd, PlumpDp
from models.functional import apply, cut
from tests.train.runs import DCT_DP, EXPERIMENT, HALF, IMAGES, METHODS, MLP, PIPELINE, metrics, run
from train.architectures import make_model
from train.data import eval_batches
from train.job import make_job

# Stacked stage parameters are as large as the larger tensor: kernels of 64 * 32 and 32 * 16, biases of 32 and 16.
SLOTS = 64 * 32 + 32 * 16 + 32 + 16
# Strong enough that adding it twice, or K times, would show.
L2 = {"steps": 6, "decay": "l2", "weight_decay": 0.1}


def make(method=DCT_DP, **changes):
    return make_job(dataclasses.replace(EXPERIMENT, **changes), method)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Six steps of two workers that each hold the whole model, and their folder."""
    out = tmp_path_factory.mktemp("dense")
    return out, run(out, PlumpDp(), architecture=MLP, workers=2, **L2)


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory):
    """The same steps with each model in two stages."""
    out = tmp_path_factory.mktemp("pipelined")
    return out, run(out, PlumpDp(), **PIPELINE, **L2)


@pytest.mark.slow
def test_a_pipeline(dense, pipelined):
    """Dropout and order depend on the rows, not on the mesh."""
    (folder, expected), (second, records) = dense, pipelined
    assert len(set(expected.losses)) == 6
    np.testing.assert_allclose(records.losses, expected.losses, rtol=1e-5)
    for name in ("accuracy", "test_loss", "test_accuracy"):
        lines = [[line[name] for line in metrics(path, PlumpDp()) if name in line] for path in (second, folder)]
        assert lines[0]
        np.testing.assert_allclose(*lines, rtol=1e-5)
    assert records.summary.scores == pytest.approx(expected.summary.scores, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dense_layers", ["late", "split"])
def test_dense_layers(dense_layers, dense, tmp_path):
    """L2, momentum and dropout included."""
    _, expected = dense
    records = run(tmp_path, PlumpDp(), architecture=MLP, workers=2, dense_layers=dense_layers, **L2)
    np.testing.assert_allclose(records.losses, expected.losses, rtol=1e-5)
    assert records.summary.scores == pytest.approx(expected.summary.scores, rel=1e-5)
    assert records.summary.bytes_per_step != expected.summary.bytes_per_step


@pytest.mark.slow
def test_model_parallel_matrices(dense, tmp_path):
    _, expected = dense
    records = run(tmp_path, PlumpDp(), architecture=MLP, workers=2, model_parallel=2, **L2)
    np.testing.assert_allclose(records.losses, expected.losses, rtol=1e-5)
    # Of 64 - 32 - 16 - 10: half of each kernel, and whole biases; 4 + 16 bytes for the loss and the counts, in a ring
    # of two; the scalars of the loss too.
    shards = (64 * 32 + 32 * 16 + 16 * 10) // 2 + 32 + 16 + 10
    assert 0 < records.summary.bytes_per_step - 4 * shards < 64
    assert records.summary.ratio_to_dense == pytest.approx(4 * shards / records.summary.bytes_per_step)


def test_fsdp(dense, tmp_path):
    """Parameters and rows sharded over two devices each: gradients exchanged, and with local steps."""
    _, expected = dense
    records = run(tmp_path / "fsdp", PlumpDp(), architecture=MLP, workers=2, fsdp=2, **L2)
    np.testing.assert_allclose(records.losses, expected.losses, rtol=1e-5)
    assert records.summary.scores == pytest.approx(expected.summary.scores, rel=1e-5)
    # Of 64 - 32 - 16 - 10: half of each kernel, and whole biases; loss, accuracy and counts.
    shards = (64 * 32 + 32 * 16 + 16 * 10) // 2 + 32 + 16 + 10
    assert 0 < records.summary.bytes_per_step - 4 * shards < 64
    assert P("fsdp") in {leaf.sharding.spec for leaf in jax.tree.leaves(records.state.params)}
    assert len(list((tmp_path / "fsdp" / "plump_dp" / "checkpoints").iterdir())) > 0
    whole = run(tmp_path / "whole", LocalSgd(steps=2), architecture=MLP, workers=2, **L2)
    local = run(tmp_path / "local", LocalSgd(steps=2), architecture=MLP, workers=2, fsdp=2, **L2)
    np.testing.assert_allclose(local.losses, whole.losses, rtol=1e-4)
    assert local.summary.scores == pytest.approx(whole.summary.scores, rel=1e-4)
    assert local.summary.ratio_to_dense > 1.8


@pytest.mark.parametrize("inside", ["fsdp", pytest.param("model_parallel", marks=pytest.mark.slow)])
def test_slices_of_several_devices(inside, dense, tmp_path):
    """Two slices of one worker, which is two devices: shards are averaged inside a slice, and exchanged across."""
    _, expected = dense
    result = run(tmp_path, PlumpDp(), architecture=MLP, workers=2, slices=2, **{inside: 2}, **L2)
    np.testing.assert_allclose(result.losses, expected.losses, rtol=1e-5)
    assert result.summary.scores == pytest.approx(expected.summary.scores, rel=1e-5)
    sparse = dataclasses.replace(DCT_DP, dense_below=0)
    job = make(sparse, architecture=MLP, workers=4, slices=2, **{inside: 2})
    assert dict(job.mesh.shape) == {"slice": 2, "data": 2, {"fsdp": "fsdp"}.get(inside, "model"): 2}
    # Of a half of the kernels, half is a worker's share; what crosses slices is a tenth of that, and not all of it.
    share = 4 * (64 * 32 + 32 * 16 + 16 * 10) / 4
    assert 0 < job.report.received_over("slice") < share / 3


def test_late_layers():
    """24 rows, two workers, layers 64 - 256 - 16 - 10: late, both receive 24 (N + M) numbers together; dense, 2 N M."""
    wide = {"architecture": Architecture("mlp", {"hidden": (256, 16)}), "workers": 2, "dense_layers": "late"}
    job = make(PlumpDp(), **wide)
    assert [(layer.path, layer.is_late) for layer in job.late.layers] == [
        ("0/layer", True),
        ("1/layer", True),
        ("2/layer", False),
    ]
    late = 4 * 12 * ((64 + 256) + (256 + 16))
    dense_bytes = 4 * (16 * 10 + 10)  # kernel and bias of the last
    scalars = 4 * 2  # loss and accuracy
    assert job.report.received == late + dense_bytes + scalars
    assert make(**wide).late.layers[0].bytes_reduce < late  # what the method sends of 10%


def test_layers_in_slices():
    """Only biases, in one dense all-reduce: 32 + 16 + 10 numbers."""
    job = make(architecture=MLP, workers=2, dense_layers="split")
    program = job.report.program
    exchanged = make(architecture=MLP, workers=2).report.program
    assert sum(traffic.op == "all_gather" for _, traffic in exchanged.operations()) == 1  # the payload
    assert job.report.received < 4 * (64 * 32 + 32 * 16 + 16 * 10)
    assert 4 * (32 + 16 + 10) in {traffic.operand_bytes for _, traffic in program.operations()}


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (PlumpDp(), {"architecture": Architecture("cnn")}, r"its dense layers, alexnet, mlp, vgg; got 'cnn'. Leave it"),
        (Dgc(sparsity=0.9), {}, r"--dense-layers must be exchange with dgc, whose momentum .*; got late"),
        (METHODS["slim_dp"], {}, r"with slim_dp, whose averaging of models .* would miss; got .*. Take another method"),
    ],
)
def test_refusals_of_dense_layers(method, changes, message):
    with pytest.raises(ValueError, match=message):
        make(method, **{"architecture": MLP, "dense_layers": "late"} | changes)


@pytest.mark.slow
def test_evaluation_of_a_pipeline(pipelined):
    _, result = pipelined
    params, stats = jax.device_get(make(PlumpDp(), **PIPELINE, **L2).model(result.state))
    assert params.keys() == {0, 1, 2}
    (batch,) = eval_batches("digits", global_batch=450)
    graph = cut(make_model(MLP, IMAGES, "float32", 0))[0].graph
    output = np.asarray(apply(graph, params, stats, batch, training=False)[0])
    assert result.summary.accuracy == np.mean(output.argmax(axis=-1) == batch["label"])
    losses = -np.take_along_axis(log_softmax(output, axis=-1), batch["label"][:, None], axis=-1)
    assert result.summary.scores["loss"] == pytest.approx(losses.mean(), rel=1e-5)


def test_bytes_of_a_pipeline():
    """By hand."""
    wide = PIPELINE | {"architecture": Architecture("mlp", {"hidden": (64, 64)}), "global_batch": 64}
    job = make(PlumpDp(), boundary=BoundaryFields(sparsity=0.75), **wide)
    # Of 64 features of a worker's 32 rows the 16 largest forward, 4 bytes each, and a bit for each of the 64; back the
    # 16 alone. One of a worker's two devices receives what goes forward, the other what comes back.
    boundaries = (32 * 16 * 4 + 32 * 64 / 8 + 32 * 16 * 4) / 2
    slots = 64 * 64 + 64 * 64 + 64 + 64
    exchange = 2 * (1 / 2) * 4 * slots
    # Loss and accuracy over the workers; over the stages whether a gradient is broken, and six metrics.
    scalars = 2 * (1 / 2) * (4 * 2) + 2 * (1 / 2) * (4 + 4 * 6)
    assert job.report.received == boundaries + exchange + scalars
    assert job.dense == 2 * (32 * 64 * 4) / 2 + exchange


def test_bytes_of_a_bottleneck():
    """Sixteen numbers of each row cross instead of 64 features, with which dense is still counted."""
    wide = PIPELINE | {"architecture": Architecture("mlp", {"hidden": (64, 64)}), "global_batch": 64}
    learned, whole = (make(PlumpDp(), boundary=BoundaryFields(rank=rank), **wide) for rank in (16, 0))
    layers = 2 * (1 / 2) * 4 * 64 * 16  # of the exchange: encoder and decoder share a slot of the stacked parameters
    assert learned.report.received == whole.report.received - 2 * (32 * (64 - 16) * 4) / 2 + layers
    assert learned.dense == whole.dense + layers


@pytest.mark.slow
def test_a_bottleneck_learns(tmp_path):
    boundary = BoundaryFields(rank=8)
    result = run(tmp_path, boundary=boundary, steps=30, optimizer="adam", learning_rate=0.03, **PIPELINE)
    assert result.losses[-1] < result.losses[0] - 0.3
    assert result.summary.method == "dct_dp-rank-8"
    assert [line["step"] for line in metrics(tmp_path, DCT_DP, boundary)][-1] == 30


@pytest.mark.slow
def test_a_pipeline_learns(tmp_path):
    result = run(tmp_path, boundary=HALF, steps=30, **PIPELINE)
    assert result.losses[-1] < result.losses[0] - 0.3
    job, lines = make(boundary=HALF, steps=30, **PIPELINE), metrics(tmp_path, DCT_DP, HALF)
    assert [line["bytes_received"] for line in lines] == [job.report.received * step for step in range(1, 31)]
    assert lines[-1]["sent"] < 2 * 2 * 0.3 * SLOTS  # of 2 workers and 2 stages
    summary = result.summary
    assert (summary.method, summary.bytes_per_step) == ("dct_dp-masked-0.5", job.report.received)
    assert summary.ratio_to_dense == pytest.approx(job.dense / job.report.received)
    assert summary.ratio_to_bfloat16 == pytest.approx(summary.ratio_to_dense / 2)
    assert summary.ratio_to_dense > 3


@pytest.mark.slow
def test_slices(tmp_path):
    changes = {"steps": 6, "architecture": MLP}
    reference, sliced = (run(tmp_path / str(n), PlumpDp(), slices=n, **changes) for n in (1, 2))
    assert len(set(reference.losses)) == 6
    np.testing.assert_allclose(sliced.losses, reference.losses, rtol=1e-5)
    assert sliced.summary.scores == pytest.approx(reference.summary.scores, rel=1e-5)
    flat = jax.tree.leaves(jax.tree.map(np.ravel, jax.device_get((reference.state.params, sliced.state.params))))
    half = len(flat) // 2
    np.testing.assert_allclose(np.concatenate(flat[half:]), np.concatenate(flat[:half]), rtol=1e-4, atol=1e-6)


def test_methods_between_slices():
    """4 workers in 2 slices: dense inside, where each holds half of every tensor; compressed between slices."""
    parameters = 64 * 32 + 32 + 32 * 16 + 16 + 160 + 10
    assert parameters == SLOTS + 160 + 10
    job = make(PlumpDp(), slices=2, architecture=MLP)
    scalars = 2 * (3 / 4) * 4 * 2
    # Reduce-scatter and all-gather of everything over 2, all-reduce of half of it over 2; five counts inside.
    assert job.report.received == 2 * (1 / 2) * 4 * parameters + 2 * (1 / 2) * 4 * parameters / 2 + scalars + 20
    assert job.dense == 2 * (3 / 4) * 4 * parameters
    sparse = make(DCT_DP, slices=2, architecture=MLP)
    assert sparse.report.received_over("slice") < job.report.received_over("slice") / 2
    assert sparse.report.received_over("data") == job.report.received_over("data")


@pytest.mark.parametrize(
    ("changes", "method", "message"),
    [
        (PIPELINE | {"stages": 4}, DCT_DP, "got --stages 4 for a model of 3 blocks"),
        (PIPELINE | {"cuts": (1, 2)}, DCT_DP, "A pipeline of 2 stages must have 1 cuts"),
        (PIPELINE | {"cuts": (3,)}, DCT_DP, r"rising indices of blocks, from 1 to 2"),
        (PIPELINE | {"boundary": BoundaryFields(1.0)}, DCT_DP, "sparsity must be .* got 1.0"),
        ({"architecture": MLP, "rows_per_group": 4}, DCT_DP, "Rows .* got 6 rows for groups of 4"),
        ({"slices": 2}, METHODS["slim_dp"], "With --slices workers must exchange gradients; got slim_dp"),
        ({"delay": 1}, PlumpDp(p=2), r"must exchange gradients; got plump_dp-p2, .*, with --delay 1. Leave --delay"),
        ({"slices": 2}, PlumpDp(p=2), "With --slices workers must exchange gradients; got plump_dp-p2"),
        ({"optimizer": "adam"}, Dgc(), "must be sgd with dgc, which has momentum inside; got adam"),
        ({"architecture": Architecture("dlrm")}, DCT_DP, "its kind of data; got 'dlrm' and 'digits'"),
        ({"workers": 8, "stages": 2}, DCT_DP, r"got 8 for \(data=8, stage=2\)"),
    ],
)
def test_settings_that_exclude(changes, method, message):
    with pytest.raises(ValueError, match=message):
        make(method, **changes)


def test_models_of_a_seed():
    job = make(**PIPELINE)
    for seed in (0, 3):
        params, _ = jax.device_get(job.model(job.start(seed)))
        expected = cut(make_model(MLP, IMAGES, "float32", seed))[0].params
        jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(expected))
    assert isinstance(job.start(0), jc.state.TrainState)
