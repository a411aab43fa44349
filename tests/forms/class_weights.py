import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.forms.data import CLASSES, FEATURES, batches


def loss_fn(params, batch):
    logits = jax.nn.relu(batch["x"] @ params["first"]) @ params["last"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return (batch["weights"][batch["y"]] * losses).mean()


@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


random = np.random.default_rng(0)
params = {
    "first": jnp.asarray(0.3 * random.normal(size=(FEATURES, 64)), jnp.float32),
    "last": jnp.asarray(0.2 * random.normal(size=(64, CLASSES)), jnp.float32),
}
tx = optax.adam(1e-2)
opt_state = tx.init(params)
losses = []
for batch in batches():
    counts = np.bincount(batch["y"], minlength=CLASSES)
    batch["weights"] = (counts.sum() / (CLASSES * np.maximum(counts, 1))).astype(np.float32)
    params, opt_state, loss = train_step(params, opt_state, batch)
    losses.append(float(loss))
