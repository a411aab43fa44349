"""The benchmark of hybrid parallelism: predicted and traced bytes agree, and the formula gives the paper's numbers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc
from benchmarks import hybrid
from benchmarks.hybrid import LAYOUTS, PAPER, Config, count_bytes, enlarged, formula, parameters, predicted, step_of

SMALL = 63  # the smallest image that AlexNet takes: the dense layers and the gradients are of full size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_predicted_bytes(layout):
    K, batch = 2, 8
    step, state = step_of(layout, jc.make_mesh(data=K), batch, SMALL)
    rows = {
        "image": jax.ShapeDtypeStruct((batch, SMALL, SMALL, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    traced = jc.accounting.step_report(step, state, rows, params=state.params, workers=K)
    assert traced.received == pytest.approx(predicted(layout, K, batch), rel=1e-12)


def test_size_of_alexnet():
    shapes, _ = parameters(224)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 61_100_840
    assert hybrid.widths(shapes) == (hybrid.FEATURES, 4096, 4096, 1000)


@pytest.mark.parametrize("layout", PAPER)
def test_numbers_of_the_paper(layout):
    """To their rounding: one MiB."""
    for K, mib in PAPER[layout].items():
        assert formula(layout, K, 256) == pytest.approx(mib, abs=1.0)


@pytest.mark.slow
def test_one_layout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hybrid, "LAYOUTS", ("hybrid, slices",))
    path = tmp_path / "table.json"
    count_bytes(Config(batch=4, image=SMALL, json=path), [2])
    (record,) = json.loads(path.read_text())
    assert record["all_mib"] == pytest.approx(record["predicted_mib"], rel=1e-12)
    assert record["as_paper_mib"] == pytest.approx(2 * record["all_mib"])
    assert record["worker_mib"] == record["busiest_mib"]
    assert "AlexNet, 4 rows a step" in capsys.readouterr().out


def test_enlarged_images():
    small = np.arange(8, dtype=np.float32).reshape(2, 2, 2, 1)
    large = enlarged(small, 5)
    assert large.shape == (2, 5, 5, 3)
    assert large[0, :, :, 1].tolist() == [[0, 0, 0, 1, 1]] * 3 + [[2, 2, 2, 3, 3]] * 2
    assert enlarged(np.ones((1, 4, 4, 3), np.float32), 8).shape == (1, 8, 8, 3)


def test_comparison():
    def timed(layout, devices, data, ms):
        return {"layout": layout, "devices": devices, "data": data, "ms_median": ms}

    rows = [
        timed(LAYOUTS[0], 1, "fake", 100.0),
        timed(LAYOUTS[0], 1, "real", 1.0),
        timed(LAYOUTS[0], 2, "fake", 200.0),
        timed(LAYOUTS[2], 2, "fake", 50.0),
    ]
    host, _, dense, sharded = hybrid.compare(rows)
    assert [row["speed_up"] for row in (host, dense, sharded)] == [1.0, 0.5, 2.0]
    assert [row["times_data_parallel"] for row in (host, dense, sharded)] == [1.0, 1.0, 4.0]
