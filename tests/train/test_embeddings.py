"""Tables of a DLRM that are not exchanged: they train like exchanged ones, their bytes are counted, and runs go on."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

import jaxcomm as jc
import train.job
from configs.experiment import Architecture
from configs.methods import Dgc, PlumpDp
from tests.train.runs import DCT_DP, EXPERIMENT, LOGGED, METHODS, Told, assert_same_bits, metrics, run
from train.embeddings import with_embeddings
from train.job import draw_where, make_job

DENSE = PlumpDp()
WAYS = ("late", "columns", "rows")
ROWS, DIM, FEATURES = 26 * 20, 4, 26  # of the table, its columns, and ids of a row of the batch
LAYERS = 13 * 8 + 8 + 8 * 4 + 4 + (4 + 27 * 26 // 2) * 8 + 8 + 8 + 1  # parameters of the dense layers


def make(logged, method=DENSE, **changes):
    return make_job(dataclasses.replace(EXPERIMENT, data_dir=logged, **LOGGED | changes), method)


@pytest.fixture(scope="module")
def exchanged(logged, tmp_path_factory):
    """Eight steps of two workers that exchange the table's gradient, with L2 decay."""
    return run(tmp_path_factory.mktemp("exchanged"), DENSE, data_dir=logged, decay="l2", **LOGGED)


@pytest.fixture(scope="module")
def undecayed(logged, tmp_path_factory):
    """The same without decay, so that only rows that a batch touches change."""
    return run(tmp_path_factory.mktemp("undecayed"), DENSE, data_dir=logged, weight_decay=0.0, **LOGGED)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "rate"), [*((way, 1e-3) for way in WAYS), ("columns", 0.0), ("rows", 0.0)])
def test_tables_train_alike(way, rate, exchanged, undecayed, logged, tmp_path):
    """For three workers, rows are padded from 520 to 522; columns have two workers, since three do not divide four.

    With decay, the gradient of a sharded table is dense; without it, only touched rows are changed.
    """
    exchanged = exchanged if rate else undecayed
    changes = LOGGED | {"embeddings": way, "workers": 2 if way == "columns" else 3, "decay": "l2", "weight_decay": rate}
    progress = Told()
    result = run(tmp_path, DENSE, progress, data_dir=logged, **changes)
    assert len(progress.proved) == 1
    np.testing.assert_allclose(result.losses, exchanged.losses, rtol=1e-5)
    assert result.summary.scores == pytest.approx(exchanged.summary.scores, rel=1e-5)
    params, expected = (jax.device_get(run.state.params) for run in (result, exchanged))
    (index,) = [index for index, block in params.items() if "table" in block]
    assert not np.any(params[index]["table"][ROWS:])
    params[index]["table"] = params[index]["table"][:ROWS]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), params, expected)


def table_bytes(way, K):
    """The formulas of the docstring of `models.dlrm`."""
    ids, ring = EXPERIMENT.global_batch * FEATURES, (K - 1) / K
    return {
        "exchange": 2 * ring * 4 * ROWS * DIM,
        "late": ring * 4 * ids * (1 + DIM),
        "columns": ring * 4 * ids * (1 + 2 * DIM / K),
        "rows": ring * 4 * ids * (1 + 2 * DIM),
    }[way]


def scalar_bytes(way, K):
    """Loss and accuracy, and with shards the counts of the exchange."""
    return 2 * (K - 1) / K * 4 * (2 + (4 if way in ("columns", "rows") else 0))


@pytest.mark.parametrize(("way", "K"), [("exchange", 2), ("late", 2), ("columns", 2), ("rows", 4)])
def test_bytes(way, K, logged):
    job, layers = make(logged, embeddings=way, workers=K), 2 * (K - 1) / K * 4 * LAYERS
    assert job.report.received == pytest.approx(table_bytes(way, K) + layers + scalar_bytes(way, K), rel=1e-12)
    assert "the compiled program sends them, and no more" in job.verify(*job.inputs)
    assert job.dense == layers + table_bytes("exchange", K)
    info = dataclasses.replace(job.info, table_sizes=(2000,) * 26)
    large = make_job(dataclasses.replace(EXPERIMENT, **LOGGED | {"embeddings": way, "workers": K}), DENSE, info=info)
    grown = large.report.received - job.report.received
    assert grown == pytest.approx(99 * table_bytes(way, K) if way == "exchange" else 0)


@pytest.mark.parametrize("way", ["columns", "rows"])
def test_only_touched_rows_change(way, logged):
    """Tables of 20,000 rows: temporaries stay below a quarter of a shard, as a batch touches only 624 rows."""
    info = dataclasses.replace(make(logged).info, table_sizes=(20_000,) * 26)
    arrays = {}
    for rate in (1e-3, 0.0):
        changes = LOGGED | {"embeddings": way, "weight_decay": rate}
        job = make_job(dataclasses.replace(EXPERIMENT, **changes), DENSE, info=info)
        arrays[rate] = job.report.received
        temporary = job.step.compile(*job.inputs).memory_analysis().temp_size_in_bytes
        shard = 26 * 20_000 * DIM // 2 * 4
        assert temporary > shard if rate else temporary < shard / 4
    assert arrays[0.0] == arrays[1e-3]


@pytest.mark.parametrize(("way", "K"), [("columns", 4), ("rows", 3)])
def test_draws_of_shards(way, K, logged, monkeypatch):
    drawn_in, first = [], train.job._first

    def traced(experiment, info, key):
        drawn_in.append(isinstance(key, jax.core.Tracer))
        return first(experiment, info, key)

    monkeypatch.setattr(train.job, "_first", traced)
    job = make(logged, embeddings=way, workers=K)
    job.start(1)
    assert drawn_in == [True]  # inside the program that is looked at below
    shards, whole = (
        next(block["table"] for block in one_job.start(1).params.values() if "table" in block)
        for one_job in (job, make(logged, workers=1))
    )
    np.testing.assert_array_equal(shards[:ROWS], whole)
    assert not np.any(shards[ROWS:])
    experiment = dataclasses.replace(EXPERIMENT, **LOGGED | {"embeddings": way, "workers": K})
    experiment = dataclasses.replace(experiment, architecture=with_embeddings(experiment))
    places = jax.tree.map(lambda leaf: leaf.sharding, (job.inputs[0].params, job.inputs[0].model_state))
    program = draw_where(places, experiment, job.info).lower(jax.random.key(1)).compile().as_text()
    rows = -(-ROWS // K) * K if way == "rows" else ROWS
    assert f"[{rows},{DIM}]" not in program
    assert f"[{rows // K},{DIM}]" in program or f"[{rows},{DIM // K}]" in program


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_dense_layers_are_compressed(way, logged):
    method = dataclasses.replace(DCT_DP, dense_below=0)
    job = make(logged, method, embeddings=way)
    layers = {index: block for index, block in job.inputs[0].params.items() if "table" not in block}
    payload = jc.wire_report(method.transform(), layers, 2)
    assert 0 < payload.received < payload.dense / 2
    assert job.report.received == pytest.approx(
        payload.received + table_bytes(way, 2) + scalar_bytes(way, 2), rel=1e-12
    )
    assert "the compiled program sends them, and no more" in job.verify(*job.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_shards_of_workers(way, logged):
    """In training and where the model is evaluated."""
    job = make(logged, embeddings=way)
    state = job.start(0)
    for params in (state.params, job.model(state)[0]):
        table = next(block["table"] for block in params.values() if "table" in block)
        assert {shard.data.shape for shard in table.addressable_shards} == {
            {"late": (ROWS, DIM), "columns": (ROWS, DIM // 2), "rows": (ROWS // 2, DIM)}[way]
        }


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run(way, logged, tmp_path):
    """With another number of workers, it goes on from the same numbers, wherever the table is."""
    changes, names = {"data_dir": logged, **LOGGED, "embeddings": way}, (None, "exchange", way)
    whole = run(tmp_path / "whole", **changes)
    partial = run(tmp_path / "stopped", **changes, stop_after=5)
    shutil.copytree(tmp_path / "stopped", tmp_path / "other")
    resumed = run(tmp_path / "stopped", **changes)
    assert_same_bits(resumed.state, whole.state)
    assert resumed.losses == whole.losses[5:]
    assert metrics(tmp_path / "stopped", DCT_DP, *names) == metrics(tmp_path / "whole", DCT_DP, *names)
    progress = Told()
    as_read = run(tmp_path / "other", DCT_DP, progress, **changes | {"workers": 4}, stop_after=5)
    assert "The checkpoint has 2 workers and the run 4" in progress.messages[0]
    assert as_read.losses == []
    assert_same_bits(as_read.state.params, partial.state.params)
    assert run(tmp_path / "other", **changes | {"workers": 4}).finished


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            DENSE,
            {"architecture": Architecture("mlp"), "dataset": "digits"},
            "which dlrm has; got columns for 'mlp'",
        ),
        (
            DENSE,
            {"workers": 3},
            "a number of --workers that divides the columns of a table; got 3 for 4. Take --emb",
        ),
        (Dgc(sparsity=0.9), {}, r"--embeddings must be exchange with dgc, whose momentum .*; got columns"),
        (
            METHODS["slim_dp"],
            {"embeddings": "late"},
            r"--embeddings must be exchange with slim_dp, whose averaging of models .*; got late",
        ),
    ],
)
def test_refusals(method, changes, message, logged):
    with pytest.raises(ValueError, match=message):
        make(logged, method, **{"embeddings": "columns"} | changes)
