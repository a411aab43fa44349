"""Importance weighted pruning: the paper's table against a second transcription, ratios, thresholds, and series."""

import math

import jax
import numpy as np
import pytest

from benchmarks.importance import EDGES, Watched, Watcher, histogram
from benchmarks.papers.iwp_figures import active
from benchmarks.papers.iwp_settings import TABLE, THRESHOLDS, TRIALS, Config, pruning, steady, tune
from benchmarks.trace import Trace
from jaxcomm.collectives.sparse import Accumulated

# Table I of Cheng and Xu as in the text, except for its sign of multiplication.
TABLE_1 = """
AlexNet	Baseline	58.17%	1x
	TernGrad	57.28%	8x
	Fix Threshold	57.98%	64 x
	Layerwise Threshold	58.19%	53x
Resnet50	Baseline	76.09%	1x
	Fix Threshold	76.26%	58.8x
	Layerwise Threshold	76.31%	47.6 x
"""


def test_the_papers_figures_are_the_papers():
    rows = [line.split("\t") for line in TABLE_1.strip("\n").splitlines()]
    typed = [(method, float(top1.rstrip("%")), float(ratio.rstrip("x "))) for _, method, top1, ratio in rows]
    assert [(row.method, row.accuracy, row.ratio) for row in TABLE] == typed
    assert [row.model for row in TABLE] == ["AlexNet"] * 4 + ["ResNet-50"] * 3
    assert THRESHOLDS == (0.005, 0.01, 0.05, 0.1)
    assert all(row.beta > 0 for row in TABLE if row.method == "Layerwise Threshold")


def test_ratios_are_those_after_the_warm_up():
    """1,000 parameters; after step 20 it sends 10 and then 30 of them, and receives 4,000 bytes in 20 steps."""
    run = {
        "parameters": 1000,
        "steps": [10, 20, 30, 40],
        "sent": [900.0, 500.0, 10.0, 30.0],
        "received": [80_000.0, 90_000.0, 91_000.0, 94_000.0],
        "dense_bytes": 6000.0,
    }
    assert steady(run, 15) == (1000 / 20, 6000 / 200)
    assert steady(run, 20) == (1000 / 20, 6000 / 200)
    assert steady(run, 21) == (1000 / 30, 6000 / 300)
    assert steady(run, 0) == (1000 / 360, 6000 / 2350)
    assert steady(run, 40) == (1000 / 30, 6000 / 300)  # the last interval is the least


def test_a_threshold_is_tuned_to_a_ratio():
    tried = []

    def ratio(alpha):
        tried.append(alpha)
        return 3 * alpha**1.7

    assert 3 * tune(ratio, 58.8, 1.0) ** 1.7 == pytest.approx(58.8, rel=0.1)
    assert len(tried) <= 4
    tried.clear()
    tune(ratio, 58.8, (58.8 / 3) ** (1 / 1.7))
    assert len(tried) == 1  # a good guess is not tried twice
    assert tune(lambda alpha: 2.0, 64, 1.0) == 1.0  # it also ends if the ratio never changes
    tried.clear()
    tune(lambda alpha: tried.append(alpha) or 2.0, 64, 1.0)
    assert len(tried) == TRIALS


def test_all_tensors_are_compressed_after_a_warm_up_of_four_epochs_of_ninety():
    experiment = Config(steps=450).twin("resnet_digits")
    method = pruning(experiment, 0.05, 0.01)
    assert (method.alpha, method.beta, method.dense_below, method.density) == (0.05, 0.01, 0, 1.0)
    assert method.warmup_steps == 20
    assert (experiment.nesterov, experiment.decay) == (False, "l2")


def test_training_is_when_the_middle_of_the_bytes_come():
    """Of 100, 4 arrive while hosts connect and compile, 92 in training, 4 at the end."""
    assert active([2.0, 0.0, 2.0, 0.0, 30.0, 0.0, 32.0, 29.0, 0.0, 5.0]) == [30.0, 0.0, 32.0, 29.0, 0.0]
    assert active([0.0, 0.0]) == [0.0]


def test_a_trace_is_a_series_of_rates():
    trace = Trace()
    trace.samples = [(0.0, 5_000), (0.5, 6_000), (1.5, 6_000), (2.0, 10_000)]
    assert trace.records() == [
        {"seconds": 0.5, "received": 1_000, "kB_per_s": 2.0},
        {"seconds": 1.5, "received": 1_000, "kB_per_s": 0.0},
        {"seconds": 2.0, "received": 5_000, "kB_per_s": 8.0},
    ]


def test_a_histogram_counts_logarithms_and_loses_none():
    counts = histogram(np.array([0.0, 1e-12, 1e-3, 1.0, 3.0, 1e9]))
    assert sum(counts) == 6
    assert counts[0] == 2
    assert counts[-1] == 1
    place = int(np.searchsorted(EDGES, 0.0, side="right")) - 1
    assert counts[place] == 1  # of 1
    assert counts[int(np.searchsorted(EDGES, math.log10(3.0))) - 1] >= 1


def test_the_importance_that_is_shown_is_that_of_worker_0():
    """With v of momentum and residual, and K = 2: |v| / 2 / (|w| + 1e-6)."""
    rng = np.random.default_rng(0)
    weights = {"a": rng.standard_normal((7, 5)).astype(np.float32), "b": rng.standard_normal(3).astype(np.float32)}
    momenta, residuals = (
        {name: rng.standard_normal((2, *array.shape)).astype(np.float32) for name, array in weights.items()}
        for _ in range(2)
    )
    watcher = Watcher(interval=1, marks=(1,))
    method = Watched(alpha=0.5, dense_below=0, random_selection=False, show=watcher.show)
    layout = method.plan(weights)

    def local_mask(momentum, residual):
        flat = [layout.flatten(list(tree.values())) for tree in (momentum, residual, weights)]
        return method.local_mask(Accumulated(flat[0], flat[1][None]), flat[2], np.int32(0), layout)

    jax.block_until_ready(jax.vmap(local_mask, axis_name="data")(momenta, residuals))
    jax.effects_barrier()
    values = [momenta[name][0] + residuals[name][0] for name in ("a", "b")]
    expected = [np.abs(v) / 2 / (np.abs(w) + 1e-6) for v, w in zip(values, weights.values(), strict=True)]
    assert watcher.moments[1] == [
        (pytest.approx(float(array.mean()), rel=1e-5), pytest.approx(float(array.var()), rel=1e-4))
        for array in expected
    ]
    assert watcher.histograms[1] == [histogram(array) for array in expected]
