import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm as jc
from tests.forms.data import CLASSES, FEATURES, batches


def loss_fn(params, batch):
    logits = jax.nn.relu(batch["x"] @ params["first"]) @ params["last"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return (batch["weights"][batch["y"]] * losses).mean()


random = np.random.default_rng(0)
params = {
    "first": jnp.asarray(0.3 * random.normal(size=(FEATURES, 64)), jnp.float32),
    "last": jnp.asarray(0.2 * random.normal(size=(64, CLASSES)), jnp.float32),
}
tx = jc.chain(jc.topk(0.9), optax.adam(1e-2))
axes = {"x": 0, "y": 0, "weights": None}
step = jc.make_train_step(loss_fn, tx, jc.make_mesh(data=jax.device_count()), batch_axis=axes)
state = step.init(params)
losses = []
for batch in batches():
    counts = np.bincount(batch["y"], minlength=CLASSES)
    batch["weights"] = (counts.sum() / (CLASSES * np.maximum(counts, 1))).astype(np.float32)
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
