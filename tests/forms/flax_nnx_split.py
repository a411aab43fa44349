import jax
import optax
from flax import nnx

from tests.forms.data import CLASSES, FEATURES, batches


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@jax.jit
def train_step(graphdef, state, batch):
    model, optimizer = nnx.merge(graphdef, state)
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


rngs = nnx.Rngs(0)
model = nnx.Sequential(nnx.Linear(FEATURES, 64, rngs=rngs), nnx.relu, nnx.Linear(64, CLASSES, rngs=rngs))
tx = optax.adam(1e-2)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
graphdef, state = nnx.split((model, optimizer))
losses = []
for batch in batches():
    state, loss = train_step(graphdef, state, batch)
    losses.append(float(loss))
nnx.update((model, optimizer), state)
