import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.forms.data import CLASSES, FEATURES, batches


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(64)(x)))


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return loss, (logits.argmax(-1) == batch["y"]).mean()

    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


model = Mlp()
params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))["params"]
tx = optax.adam(1e-2)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
losses = []
for batch in batches():
    state, metrics = train_step(state, batch)
    losses.append(float(metrics["loss"]))
