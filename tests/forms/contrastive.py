import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.forms.data import FEATURES, batches


class Towers(nnx.Module):
    def __init__(self, rngs):
        self.images = nnx.Linear(FEATURES, 32, rngs=rngs)
        self.texts = nnx.Linear(FEATURES, 32, rngs=rngs)
        self.scale = nnx.Param(jnp.array(1.0))

    def __call__(self, batch):
        images, texts = self.images(batch["x"]), self.texts(batch["text"])
        return tuple(x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (images, texts))


@nnx.jit
def train_step(model, optimizer, batch):
    def loss_fn(model):
        images, texts = model(batch)
        logits = jnp.exp(model.scale[...]) * images @ texts.T
        both = [-jnp.diagonal(jax.nn.log_softmax(each)) for each in (logits, logits.T)]
        return jnp.mean(jnp.stack(both))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


model = Towers(nnx.Rngs(0))
tx = optax.adam(1e-2)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
turn = np.linalg.qr(np.random.default_rng(0).normal(size=(FEATURES, FEATURES)))[0].astype(np.float32)
losses = []
for batch in batches():
    batch = {"x": batch["x"], "text": batch["x"] @ turn}
    losses.append(float(train_step(model, optimizer, batch)))
