import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from tests.forms.data import CLASSES, FEATURES, batches


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def train_epoch(state, epoch):
    return jax.lax.scan(train_step, state, epoch)


model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(CLASSES)])
params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))
tx = optax.adam(1e-2)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
epoch = jax.tree.map(lambda *rows: np.stack(rows), *batches())
state, losses = train_epoch(state, epoch)
