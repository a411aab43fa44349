import jax
import jax.numpy as jnp
import optax

from tests.forms.data import CLASSES, FEATURES, batches

MEMBERS = 3


def init(key):
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (FEATURES, 64)) / FEATURES**0.5,
        "out": jax.random.normal(second, (64, CLASSES)) / 8,
    }


def loss_fn(params, batch):
    logits = jax.nn.relu(batch["x"] @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@jax.jit
def train_step(state, batch):
    params, opt_state = state["params"], state["opt_state"]
    loss, grads = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(0, None))(params, batch)
    updates, opt_state = jax.vmap(tx.update)(grads, opt_state, params)
    seen = state["seen"] + batch["x"].shape[0]
    return {"params": optax.apply_updates(params, updates), "opt_state": opt_state, "seen": seen}, loss.mean()


params = jax.vmap(init)(jax.random.split(jax.random.key(0), MEMBERS))
tx = optax.adam(1e-2)
state = {"params": params, "opt_state": jax.vmap(tx.init)(params), "seen": jnp.zeros((), jnp.int32)}
losses = []
for batch in batches():
    state, loss = train_step(state, batch)
    losses.append(float(loss))
others = [int(state["seen"])]
