import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.forms.data import CLASSES, FEATURES, batches

DROPOUT = 0.1


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(DROPOUT, deterministic=False)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(CLASSES)(x)


def loss_fn(params, apply_fn, batch, key):
    logits = apply_fn(params, batch["x"], rngs={"dropout": key})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), {"right": (logits.argmax(-1) == batch["y"]).sum(), "worst": losses.max()}


@jax.jit
def train_step(state, batch, key):
    def add(grads, part):
        (loss, metrics), new = jax.value_and_grad(loss_fn, has_aux=True)(state.params, state.apply_fn, *part)
        return jax.tree.map(lambda total, x: total + x / 4, grads, new), metrics | {"loss": loss}

    parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    grads, metrics = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state.params), (parts, jax.random.split(key, 4)))
    metrics = {"loss": metrics["loss"].mean(), "right": metrics["right"].sum(), "worst": metrics["worst"].max()}
    return state.apply_gradients(grads=grads), metrics


model = Mlp()
key = jax.random.key(0)
params = jax.jit(model.init)({"params": key, "dropout": key}, jnp.zeros((1, FEATURES)))
tx = optax.adam(1e-2)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
losses, others = [], []
for number, batch in enumerate(batches()):
    state, metrics = train_step(state, batch, jax.random.fold_in(key, number))
    losses.append(float(metrics["loss"]))
    others.append([int(metrics["right"]), float(metrics["worst"])])
