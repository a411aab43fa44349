import equinox as eqx
import jax
import optax

from tests.forms.data import CLASSES, FEATURES, batches


class Mlp(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(FEATURES, 64, key=first), eqx.nn.Linear(64, CLASSES, key=last)
        self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


@eqx.filter_value_and_grad(has_aux=True)
def loss_fn(model, state, batch):
    forward = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = forward(batch["x"], state)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), state


@eqx.filter_jit
def train_step(model, state, opt_state, batch):
    (loss, state), grads = loss_fn(model, state, batch)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, opt_state, loss


model, state = eqx.nn.make_with_state(Mlp)(jax.random.key(0))
tx = optax.adam(1e-2)
opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
losses = []
for batch in batches():
    model, state, opt_state, loss = train_step(model, state, opt_state, batch)
    losses.append(float(loss))
