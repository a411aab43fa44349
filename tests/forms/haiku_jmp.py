from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import optax

from tests.forms.data import CLASSES, FEATURES, batches


class State(NamedTuple):
    params: hk.Params
    average: hk.Params
    opt_state: optax.OptState
    loss_scale: jmp.LossScale


network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, CLASSES])(x)))
tx = optax.adam(1e-2)


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = network.apply(params, batch["x"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return state.loss_scale.scale(loss), loss

    grads, loss = jax.grad(loss_fn, has_aux=True)(state.params)
    grads = state.loss_scale.unscale(grads)
    updates, opt_state = tx.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    average = optax.incremental_update(params, state.average, step_size=0.1)
    grads_finite = jmp.all_finite(grads)
    loss_scale = state.loss_scale.adjust(grads_finite)
    params, opt_state = jmp.select_tree(grads_finite, (params, opt_state), (state.params, state.opt_state))
    return State(params, average, opt_state, loss_scale), loss


params = network.init(jax.random.key(0), jnp.zeros((1, FEATURES)))
state = State(params, params, tx.init(params), jmp.DynamicLossScale(jnp.float32(2**15), period=10))
losses = []
for batch in batches():
    state, loss = train_step(state, batch)
    losses.append(float(loss))
