import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks.naive import naive_topk
from tests.jaxcomm.train_steps import init_state
from tests.reference.topk import TopKReference


@pytest.mark.parametrize(("sparsity", "shapes"), [(0.9, [(1000,)]), (0.75, [(10, 20), (7,), (3, 3, 5)])])
def test_naive_topk(sparsity, shapes):
    K, sizes = 3, [int(np.prod(shape)) for shape in shapes]
    tx = naive_topk(sparsity)
    mesh = jc.make_mesh(data=K)
    state = init_state([jnp.zeros(shape) for shape in shapes], tx, mesh).opt_state
    specs = jc.state_specs(state)

    def update(gradients, state):
        return tx.update([gradient[0] for gradient in gradients], state)

    exchange = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)))
    starts = np.arange(len(sizes)) * 1024  # of the tensors, a block each
    reference = TopKReference(sparsity, dense_below=0, value_dtype="float32")
    rng = np.random.default_rng(0)
    for _ in range(4):
        flat = rng.standard_normal((K, sum(sizes)), np.float32)
        parts = np.split(flat, np.cumsum(sizes)[:-1], axis=1)
        gradients = [part.reshape(K, *shape) for part, shape in zip(parts, shapes, strict=True)]
        means, state = exchange(gradients, state)
        expected = reference.step([{"flat": row} for row in flat])
        mean = np.concatenate([np.ravel(mean) for mean in means])
        np.testing.assert_allclose(mean, expected.mean["flat"], rtol=1e-6, atol=1e-7)
        assert [mean.shape for mean in means] == shapes
        residuals = [residual["flat"] for residual in reference.residuals]
        mean = np.concatenate(
            [np.asarray(state.residual.rows)[:, at : at + n] for at, n in zip(starts, sizes, strict=True)], axis=1
        )
        np.testing.assert_allclose(mean, residuals, rtol=1e-6, atol=1e-7)
        assert np.count_nonzero(expected.mean["flat"]) > 0
