import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.forms.data import CLASSES, FEATURES, batches


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, name="pretrained")(x)
        x = nn.relu(nn.Dense(64, name="body")(x))
        return nn.Dense(CLASSES, name="head")(x)


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


model = Mlp()
params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, FEATURES)))["params"]
parts = {"frozen": optax.set_to_zero(), "slow": optax.adamw(3e-3), "fast": optax.adam(1e-2)}
labels = {"pretrained": "frozen", "body": "slow", "head": "fast"}
tx = optax.multi_transform(parts, labels)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
losses = []
for batch in batches():
    state, loss = train_step(state, batch)
    losses.append(float(loss))
assert (state.params["pretrained"]["kernel"] == params["pretrained"]["kernel"]).all()
