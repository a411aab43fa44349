import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.forms.data import CLASSES, FEATURES, batches


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(CLASSES)])
params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))
tx = optax.MultiSteps(optax.adam(3e-2), every_k_schedule=3)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
losses = []
for batch in batches():
    state, loss = train_step(state, batch)
    losses.append(float(loss))
assert state.opt_state.gradient_step == 10
