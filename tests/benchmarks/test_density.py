"""The benchmark of densities: its counts are those of the real collective, and its masks are those that DGC sends."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm as jc
from benchmarks import density
from benchmarks.density import Config, accepted, cut, hop_counts, main, regions_of, shapes
from benchmarks.sparse_ring import ring_dgc, ring_sum
from jaxcomm.kernels.bits import unpack


def unpacked(words):
    return np.asarray(jax.vmap(unpack)(jnp.asarray(words)))


def counts_of_the_collective(regions, masks, seed):
    """The nonzero coordinates after every hop, for numbers that are all nonzero."""
    vectors = np.random.default_rng(seed).normal(size=(len(masks), regions.layout.n)).astype(np.float32)

    def worker(vector, mask):
        return ring_sum(regions, vector, mask, jnp.float32(0), jnp.asarray(True), "data")[1]

    return jax.jit(jax.vmap(worker, axis_name="data", out_axes=None))(vectors, masks)


@pytest.mark.slow
def test_masks_of_dgc(monkeypatch):
    K, ratio, after = 4, 0.01, []
    simulate = jc.simulate

    class Recorded:
        def __init__(self, *args):
            self.step = simulate(*args)
            self.init = self.step.init

        def __call__(self, state, batch):
            new, metrics = self.step(state, batch)
            exchange_state = new.opt_state[0]
            after.append(
                (np.array(exchange_state.memory.rows.flat), np.array(exchange_state.residual.rows))
            )  # before it is donated
            return new, metrics

    monkeypatch.setattr(jc, "simulate", Recorded)
    steps = list(density.train(Config(steps=3, samples=2), K, ratio))
    assert [index for index, _, _ in steps] == [1, 3]
    regions = regions_of(K, ratio)
    for index, largest, important in steps:
        assert np.bitwise_count(largest).sum() == np.bitwise_count(important).sum() == K * regions.layout.n_slots
        assert np.any(largest != important)
        payload = unpacked(largest)
        velocity, residual = after[index - 1]
        assert not velocity[payload].any()  # momentum factor masking
        assert np.abs(residual[payload]).max() < 0.01 * np.abs(residual).max()  # only rounding errors
        if index == 1:  # other zeros are coordinates that never had a gradient
            assert not residual[~payload & (velocity == 0)].any()
    masks = steps[-1][1]
    expected = hop_counts(accepted(regions, cut(regions, masks)))
    assert counts_of_the_collective(regions, masks, 0).tolist() == expected.tolist()
    assert np.all(np.diff(expected) > 0)


@pytest.mark.slow
def test_eight_workers():
    regions = regions_of(8, 0.002)
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 2**32, (8, 8, regions.layout.n_words), np.uint32)
    masks = np.bitwise_and.reduce(masks, axis=1)  # one in 256, in some regions more than slots
    fitting = accepted(regions, cut(regions, masks))
    assert np.bitwise_count(fitting).sum() < np.bitwise_count(masks).sum()
    assert counts_of_the_collective(regions, masks, 1).tolist() == hop_counts(fitting).tolist()


def test_counts_by_hand():
    """Three workers, three regions of a word."""
    masks = np.array([[[0b0001], [0b0011], [0]], [[0b1000], [0b0110], [1]], [[0b1001], [0], [1]]], np.uint32)
    # region 0: workers 1, 2, 0; region 1: workers 2, 0, 1; region 2: workers 0, 1, 2
    assert hop_counts(masks).tolist() == [1 + 0 + 0, 2 + 2 + 1, 2 + 3 + 1]


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    figure, path = tmp_path / "figures" / "density.png", tmp_path / "density.json"
    main(Config("2,4", "0.01", "1,2", steps=2, samples=1, figure=figure, json=path))
    assert figure.read_bytes().startswith(b"\x89PNG")
    records = json.loads(path.read_text())
    hops, sizes = records[:6], records[6:]
    assert [(row["workers"], row["hop"]) for row in hops] == [(2, 1), (2, 2), *((4, hop) for hop in (1, 2, 3, 4))]
    for rows in (hops[:2], hops[2:]):
        ring = [row["ring"] for row in rows]
        assert 0.008 < ring[0] < 0.012
        assert ring == sorted(set(ring))
        assert rows[-1]["ring"] <= rows[-1]["independent"] < 0.011 * len(rows)
        (one,), (two,) = {row["shared_1"] for row in rows}, {row["shared_2"] for row in rows}
        assert 0.009 < one < 0.011
        assert one < two < 2 * one
        assert 0 <= rows[0]["no_room"] < 0.3
    for row in sizes:
        tx = ring_dgc(0.99)
        assert row["ring_bytes"] == pytest.approx(jc.wire_report(tx, shapes(), row["workers"]).received)
        assert row["ring_bytes_at_least"] < row["ring_bytes"] < row["dense_bytes"]
        assert row["shared_1_bytes"] < row["ring_bytes"]
    output = capsys.readouterr().out
    assert "Density by hop, 4 workers, 1.00% kept by each" in output
    assert "Bytes that each worker receives in a step" in output
