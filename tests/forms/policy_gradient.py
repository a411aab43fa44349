from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.forms.data import ROWS, STEPS, TIMES


class Environments(NamedTuple):
    position: jax.Array  # (environments,)
    key: jax.Array  # (environments,)


def policy(params, position):
    hidden = jnp.tanh(position[..., None] * params["first"] + params["bias"])
    hidden = jnp.tanh(hidden @ params["middle"])
    return hidden @ params["last"]


def act(params, environments, _):
    keys = jax.vmap(jax.random.split, out_axes=1)(environments.key)
    action = jax.vmap(jax.random.categorical)(keys[0], policy(params, environments.position))
    position = jnp.clip(environments.position + action - 1, -5, 5)
    return Environments(position, keys[1]), (environments.position, action, -jnp.abs(position))


@jax.jit
def train_step(params, opt_state, environments):
    environments, (position, action, reward) = jax.lax.scan(partial(act, params), environments, length=TIMES)
    returns = jnp.cumsum(reward[::-1], axis=0)[::-1]
    baseline = returns.mean(axis=1, keepdims=True)

    def loss_fn(params):
        losses = optax.softmax_cross_entropy_with_integer_labels(policy(params, position), action)
        return (losses * (returns - baseline)).mean()

    updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, environments, -reward.mean()


first, middle, last, starts, keys = jax.random.split(jax.random.key(0), 5)
params = {
    "first": jax.random.normal(first, (32,)),
    "bias": jnp.zeros(32),
    "middle": 0.2 * jax.random.normal(middle, (32, 32)),
    "last": 0.1 * jax.random.normal(last, (32, 3)),
}
tx = optax.adam(2e-2)
opt_state = tx.init(params)
environments = Environments(jax.random.uniform(starts, (ROWS,), minval=-5, maxval=5), jax.random.split(keys, ROWS))
losses = []
for _ in range(STEPS):
    params, opt_state, environments, distance = train_step(params, opt_state, environments)
    losses.append(float(distance))
