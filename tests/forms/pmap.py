import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import jax_utils
from flax.training.common_utils import shard
from flax.training.train_state import TrainState

from tests.forms.data import CLASSES, FEATURES, batches


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, axis_name="batch")


model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(CLASSES)])
params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))
tx = optax.adam(1e-2)
state = jax_utils.replicate(TrainState.create(apply_fn=model.apply, params=params, tx=tx))
train_step = jax.pmap(train_step, axis_name="batch")
losses = []
for batch in batches():
    batch = shard(batch)
    state, loss = train_step(state, batch)
    losses.append(float(loss[0]))
