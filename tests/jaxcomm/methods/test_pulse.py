"""PULSELoCo: local steps, and an exchange of the changes that bfloat16 shows; the residual keeps the rest."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.methods.pulse import select_visible
from tests.jaxcomm.train_steps import linear as loss
from tests.jaxcomm.train_steps import normal
from tests.reference import noise
from tests.reference.local_sgd import LocalSgdReference
from tests.reference.pulse import PulseReference
from tests.refusals import refused

K, SHAPES = 2, {"w": (50, 60), "v": (2049,), "b": (3,)}


class OnAnchor(PulseReference):
    """The exchange of `LocalSgdReference`, with its anchor as the weights."""

    of: LocalSgdReference

    def step(self, gradients):
        return super().step(gradients, self.of.global_model)


@pytest.mark.parametrize("sparsity", [0.5, 0.95])
def test_local_steps(sparsity):
    params = normal(SHAPES)
    exchange = jc.pulse(sparsity, value_dtype="float32")
    tx = jc.chain(optax.sgd(2.0**-11), jc.local_sgd(2, exchange=exchange, outer=optax.sgd(1.0)))
    step = jc.simulate(loss, tx, K, donate=False)
    state = step.init(params)
    inner = OnAnchor(sparsity, lambda k: noise.turn(0, k))
    reference = LocalSgdReference(params, K, H=2, lr=1.0, momentum=0.0, nesterov=False, exchange=inner)
    inner.of = reference
    for i in range(8):
        batch = normal(SHAPES, 1 + i, K)
        state, metrics = step(state, batch)
        reference.step([{name: -np.float32(2.0**-11) * rows[k] for name, rows in batch.items()} for k in range(K)])
        for name in SHAPES:
            np.testing.assert_allclose(step.params(state)[name], reference.global_model[name], rtol=1e-5, atol=1e-9)
        if i % 2:
            total = K * (50 * 60 + 2049)
            assert 0.02 * total < sum(reference.result.sent) < 0.4 * total  # some, and not all, are visible
            assert metrics["sent"] == sum(reference.result.sent)
            assert (metrics["overflow"] > 0) == (sparsity == 0.95)


def test_invisible_changes_add_up():
    """Each of 40 numbers by itself."""
    tx = optax.chain(jc.pulse(0.0, value_dtype="float32", dense_below=0), optax.sgd(1.0))
    step = jc.simulate(lambda params, rows: jnp.sum(params * rows.mean(0)), tx, 1)
    state, updates = step.init(jnp.ones(40)), []
    for _ in range(3):
        state, metrics = step(state, jnp.full((1, 40), 2.0**-10))
        updates.append((int(metrics["sent"]), float(state.params[7])))
    # Below 1, numbers are 2^-8 apart: 2^-10 is a quarter of that, two make a tie, which rounds to 1, three are visible.
    assert updates == [(0, 1.0), (0, 1.0), (40, 1 - 3 * 2.0**-10)]


def test_masks_of_casts():
    rng = np.random.default_rng(0)
    w = rng.normal(size=4096).astype(np.float32)
    w[:64] = 0
    change = (rng.normal(size=4096) * 2.0 ** rng.integers(-20, 2, 4096)).astype(np.float32)
    change[32:96] = 0
    w[90:100] = np.nan
    expected = ((w + change).astype(ml_dtypes.bfloat16) != w.astype(ml_dtypes.bfloat16)) & (change != 0)
    words = np.asarray(jax.jit(select_visible)(change, w))
    np.testing.assert_array_equal(np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool), expected)
    assert 0.1 < expected.mean() < 0.9


def test_missing_parameters():
    tx = jc.pulse()
    state = tx.init(jnp.ones(1000))
    refused(
        lambda: jax.vmap(lambda g: tx.update(g, state), axis_name="data")(jnp.ones((2, 1000))), "params", "got none"
    )
