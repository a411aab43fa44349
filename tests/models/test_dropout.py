import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from models.dropout import Dropout

X = jnp.ones((8, 5, 40))
BATCH = {"seed": jnp.arange(8, dtype=jnp.uint32) * 1000}


def test_fractions_and_scale():
    for rate in (0.3, 0.7):
        y = np.asarray(Dropout(rate, 0)(X, BATCH))
        # 1600 draws: three standard deviations of the fraction are 0.035.
        assert abs(np.mean(y == 0) - rate) < 0.035
        np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)
        per_place = (y.reshape(8, -1) == 0).sum(axis=0)
        assert per_place.min() < 8 * rate < per_place.max()  # rows differ


def test_masks():
    layer = Dropout(0.5, 3)
    y = layer(X, BATCH)
    order = jnp.asarray([5, 2, 2])
    np.testing.assert_array_equal(layer(X[order], {"seed": BATCH["seed"][order]}), y[order])
    mesh = jc.make_mesh(data=4)
    specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
    spread = jax.jit(jax.shard_map(lambda x, batch: layer(x, batch), mesh=mesh, **specs))
    np.testing.assert_array_equal(spread(X, BATCH), y)
    for variant in (Dropout(0.5, 4)(X, BATCH), layer(X, {"seed": BATCH["seed"] + 1})):
        # Independent masks agree on half of the elements, give or take 1.3%.
        assert abs(np.mean(np.asarray(variant) == np.asarray(y)) - 0.5) < 0.04


def test_evaluation():
    layer = Dropout(0.5, 0)
    layer.eval()
    np.testing.assert_array_equal(layer(X, {}), X)
    layer.train()
    assert not np.array_equal(layer(X, BATCH), X)
    np.testing.assert_array_equal(Dropout(0.0, 0)(X, {}), X)


def test_refusals():
    for rate in (1.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="rate must be at least 0 and below 1"):
            Dropout(rate, 0)
    with pytest.raises(
        ValueError, match=r"seed for dropout.*got a batch of image, label. Add batch\['seed'\].*evaluation mode"
    ):
        Dropout(0.5, 0)(X, {"label": X, "image": X})
    with pytest.raises(ValueError, match=r"a number for every row; got shape \(7,\) for 8 rows"):
        Dropout(0.5, 0)(X, {"seed": BATCH["seed"][1:]})
