from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from tests.forms.data import CLASSES, FEATURES, ROWS, sequences


class State(NamedTuple):
    params: hk.Params
    opt_state: optax.OptState
    memory: jax.Array


def forward(x, memory):
    features, memory = hk.dynamic_unroll(hk.GRU(32), x, memory)
    return hk.Linear(CLASSES)(features), memory


network = hk.without_apply_rng(hk.transform(forward))
tx = optax.adam(2e-2)


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits, memory = network.apply(params, batch["x"], state.memory)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), memory

    (loss, memory), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    updates, opt_state = tx.update(grads, state.opt_state)
    return State(optax.apply_updates(state.params, updates), opt_state, memory), loss


memory = jnp.zeros((ROWS, 32))
params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, ROWS, FEATURES)), memory)
state = State(params, tx.init(params), memory)
losses = []
for batch in sequences():
    batch = {"x": batch["x"].swapaxes(0, 1), "y": batch["y"].swapaxes(0, 1)}  # time first
    state, loss = train_step(state, batch)
    losses.append(float(loss))
