import optax
from flax import nnx

from tests.forms.data import CLASSES, FEATURES, batches

DROPOUT = 0.1


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)
        self.last = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss_fn(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    optimizer.update(model, grads)


model = Mlp(nnx.Rngs(0))
tx = optax.adam(1e-2)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
losses = []
for batch in batches():
    train_step(model, optimizer, metrics, batch)
    losses.append(float(metrics.compute()["loss"]))
    metrics.reset()
