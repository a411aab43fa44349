"""The benchmark of DLRM's tables: predicted bytes are the compiled ones, at Criteo's size, and parts match formulas."""

import json

import pytest

from benchmarks.embeddings import WAYS, Config, compare, measure, tables_received
from configs.dlrm_criteo import TABLE_SIZES

SMALL = (3,) * 26


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_criteos_size(way):
    """Apart from the tables: the payload of the dense layers and some scalars, equally many bytes for every way."""
    record = measure(way, 4, 128, TABLE_SIZES)
    assert record["received_compiled"] == record["received_predicted"]
    surplus = record["received_compiled"] - record["tables_formula"]
    assert 99_000 < surplus < 99_400
    table = 4 * 16 * 33_762_577 / 1e6
    if way in ("columns", "rows"):  # whose gradient is not made
        assert record["temporaries_mb"] < 20
    assert record["arguments_mb"] == pytest.approx(table / (4 if way in ("columns", "rows") else 1), rel=0.01)


def test_the_papers_batch():
    """By hand: with 4 workers, three quarters of 128 * 26 ids with 16 numbers each of 4 bytes."""
    assert tables_received("late", 4, 128, TABLE_SIZES) == 0.75 * 128 * 26 * 17 * 4
    assert tables_received("columns", 4, 128, TABLE_SIZES) == 0.75 * 128 * 26 * (1 + 8) * 4
    assert tables_received("rows", 4, 128, TABLE_SIZES) == 0.75 * 128 * 26 * 33 * 4
    assert tables_received("exchange", 4, 128, TABLE_SIZES) == 1.5 * 4 * 16 * 33_762_577


@pytest.mark.slow
def test_the_table(tmp_path, capsys):
    path = tmp_path / "table.json"
    compare(Config(batch=6, json=path), [3], SMALL)
    records = json.loads(path.read_text())
    assert [record["embeddings"] for record in records] == ["exchange", "late", "rows"]  # 3 do not divide 16 columns
    assert all(record["received_compiled"] == record["received_predicted"] for record in records)
    assert "DLRM of 78 rows, 6 rows a step" in capsys.readouterr().out
