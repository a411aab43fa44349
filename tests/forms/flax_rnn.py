import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.forms.data import CLASSES, FEATURES, TIMES, sequences


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, x, lengths):
        return nn.Dense(CLASSES)(nn.RNN(nn.LSTMCell(32))(x, seq_lengths=lengths))


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["x"], batch["lengths"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        mask = jnp.arange(TIMES) < batch["lengths"][:, None]
        count = mask.sum()
        return (mask * losses).sum() / count

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


model = Tagger()
params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, TIMES, FEATURES)), jnp.array([TIMES]))
tx = optax.adam(2e-2)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
losses = []
for batch in sequences():
    state, loss = train_step(state, batch)
    losses.append(float(loss))
