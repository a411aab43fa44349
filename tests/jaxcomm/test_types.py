import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm as jc


def test_rows_are_a_node():
    node = jc.PerWorker({"a": jnp.ones(2), "b": jnp.zeros(3)})
    doubled = jax.tree.map(lambda x: 2 * x, node)
    assert isinstance(doubled, jc.PerWorker)
    np.testing.assert_array_equal(doubled.rows["a"], 2)
    assert len(jax.tree.leaves(node)) == 2


def test_metrics_start_at_zero():
    metrics = jc.types.ExchangeMetrics.zeros()
    assert not any(int(count) for count in metrics)
    assert len({count.unsafe_buffer_pointer() for count in metrics}) == len(metrics)
    assert [count.dtype for count in metrics] == [jnp.float32, jnp.float32, jnp.int32, jnp.int32]


def test_public_names():
    for name in jc.__all__:
        assert hasattr(jc, name)
    assert len(set(jc.__all__)) == len(jc.__all__) <= 32
