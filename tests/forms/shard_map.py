from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from tests.forms.data import CLASSES, FEATURES, batches

mesh = jax.make_mesh((jax.device_count(),), ("data",))
tx = optax.adam(1e-2)


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P())
def init(key):
    first, last = jax.random.split(key)
    params = {
        "first": 0.3 * jax.random.normal(first, (FEATURES, 64)),
        "last": 0.2 * jax.random.normal(last, (64, CLASSES)),
    }
    return params, tx.init(params)


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
def train_step(state, batch):
    params, opt_state = state

    def loss_fn(params):
        logits = jnp.maximum(batch["x"] @ params["first"], 0) @ params["last"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return jax.lax.pmean(loss, "data")

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


state = init(jax.random.key(0))
losses = []
for batch in batches():
    batch = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
    state, loss = train_step(state, batch)
    losses.append(float(loss))
