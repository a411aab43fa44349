"""Bytes of records follow today's report; what was measured, and records of other kinds, stay."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import density
from benchmarks.wire_bytes import Config, current, rewrite


def test_dense_bytes_by_hand_and_measurements_stay(tmp_path, capsys):
    """2 (K-1)/K * 4 bytes a number, for K = 4."""
    row = {"method": "plump_dp", "hosts": 4, "rate": "1gbit", "ms_median": 3.5, "bytes_kernel": 9.0}
    records = [
        {**row, "parameters": 8192, "density": 0.1, "bytes_predicted": 1.0},
        {**row, "shapes": "4096", "bytes_predicted": 2.0},
        {"workers": 4, "accuracies": [98.0], "bytes_per_step": 7.0},
    ]
    path = tmp_path / "records.json"
    path.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n")
    rewrite(Config((path,)))
    sizes = [2 * 3 / 4 * 4 * 8192, 2 * 3 / 4 * 4 * 4096]
    expected = [record | {"bytes_predicted": size} for record, size in zip(records[:2], sizes, strict=True)]
    assert [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:-1]] == [*expected, records[2]]
    assert capsys.readouterr().out.count("bytes_predicted") == 2


def test_a_row_of_dct_is_that_of_its_setting(monkeypatch):
    jobs = []

    def make_job(experiment, method):
        jobs.append((experiment.name, experiment.stages, experiment.boundary.sparsity, method.name))
        return SimpleNamespace(report=SimpleNamespace(received=100.0), dense=400.0)

    monkeypatch.setattr("train.job.make_job", make_job)
    row = {"system": "DCT-MP", "stages": 4, "sparsity": 0.9, "steps": 10, "life_span": 10, "losses": [0.5]}
    row |= {"experiment": "dlrm_clicks", "bytes_per_step": 110.0, "ratio_to_dense": 4.0}
    assert current(row, [row]) == {"bytes_per_step": 100.0}  # the ratio is the same
    assert jobs == [("dlrm_clicks", 4, 0.9, "plump_dp")]
    dense = row | {"system": "dense", "sparsity": 0.0, "bytes_per_step": 0.0, "ratio_to_dense": None}
    assert current(dense, [dense]) == {}


def test_bytes_on_a_ring(monkeypatch):
    monkeypatch.setattr(density, "bytes_of", lambda *given: {"given": given})
    hops = [{"workers": K, "kept": 0.01, "hop": hop, "ring": 0.01 * hop} for K in (4, 16) for hop in (1, 2)]
    sizes = {"workers": 16, "kept": 0.01, "ring_bytes": 5.0, "shared_1_bytes": 2.0, "shared_4_bytes": 3.0}
    assert current(sizes, [*hops, sizes]) == {"given": (16, 0.01, [1, 4], hops[2:])}


@pytest.mark.parametrize("record", [{"ms_median": 1.0}, {"method": "topk", "bytes_per_step": 3.0}])
def test_other_records_stay(record):
    assert current(record, [record]) == {}
