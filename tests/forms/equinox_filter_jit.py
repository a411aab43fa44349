import equinox as eqx
import jax
import optax

from tests.forms.data import CLASSES, FEATURES, batches


class Mlp(eqx.Module):
    layers: list
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.layers = [eqx.nn.Linear(FEATURES, 64, key=first), jax.nn.relu, eqx.nn.Linear(64, CLASSES, key=last)]
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        first, activation, last = self.layers
        return last(self.dropout(activation(first(x)), key=key))


@eqx.filter_value_and_grad
def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["x"], jax.random.split(key, len(batch["x"])))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@eqx.filter_jit
def train_step(model, opt_state, batch, key):
    loss, grads = loss_fn(model, batch, key)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


key, model_key = jax.random.split(jax.random.key(0))
model = Mlp(model_key)
tx = optax.adam(1e-2)
opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
losses = []
for batch in batches():
    key, step_key = jax.random.split(key)
    model, opt_state, loss = train_step(model, opt_state, batch, step_key)
    losses.append(float(loss))
