import jax
import jax.numpy as jnp
import optax

from tests.forms.data import CLASSES, FEATURES, batches

EXPERTS = 4


def loss_fn(params, batch):
    gates = jax.nn.softmax(batch["x"] @ params["router"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
    hidden = jax.nn.relu(jnp.einsum("bd,edh->beh", batch["x"], params["in"]))
    logits = jnp.einsum("beh,ehc,be->bc", hidden, params["out"], chosen * gates)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    load = chosen.mean(0)
    balance = EXPERTS * (load * gates.mean(0)).sum()
    return loss + 1e-2 * balance, {"loss": loss, "load": chosen.sum(0)}


@jax.jit
def train_step(state, batch):
    params, opt_state = state
    (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), metrics


keys = jax.random.split(jax.random.key(0), 3)
params = {
    "router": jax.random.normal(keys[0], (FEATURES, EXPERTS)) / FEATURES**0.5,
    "in": jax.random.normal(keys[1], (EXPERTS, FEATURES, 32)) / FEATURES**0.5,
    "out": jax.random.normal(keys[2], (EXPERTS, 32, CLASSES)) / 32**0.5,
}
tx = optax.adam(4e-2)
state = params, tx.init(params)
losses, others = [], []
for batch in batches():
    state, metrics = train_step(state, batch)
    losses.append(float(metrics["loss"]))
    others.append([float(load) for load in metrics["load"]])
