from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.forms.data import FEATURES, batches


class State(NamedTuple):
    generator: Any
    average: Any
    critic: Any
    generator_opt: optax.OptState
    critic_opt: optax.OptState


generator = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(FEATURES)])
critic = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(1)])
generator_tx = optax.adam(4e-2, b1=0.5)
critic_tx = optax.adam(4e-2, b1=0.5)


@jax.jit
def train_step(state, batch):
    def critic_loss(params):
        real, fake = (critic.apply(params, x) for x in (batch["x"], generator.apply(state.generator, batch["z"])))
        return nn.softplus(-real).mean() + nn.softplus(fake).mean()

    def generator_loss(params, critic_params):
        return nn.softplus(-critic.apply(critic_params, generator.apply(params, batch["z"]))).mean()

    loss, grads = jax.value_and_grad(critic_loss)(state.critic)
    updates, critic_opt = critic_tx.update(grads, state.critic_opt)
    critic_params = optax.apply_updates(state.critic, updates)
    grads = jax.grad(generator_loss)(state.generator, critic_params)
    updates, generator_opt = generator_tx.update(grads, state.generator_opt)
    params = optax.apply_updates(state.generator, updates)
    average = optax.incremental_update(params, state.average, step_size=0.5)
    return State(params, average, critic_params, generator_opt, critic_opt), loss


z = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
params = jax.jit(generator.init)(jax.random.key(0), z)
critic_params = jax.jit(critic.init)(jax.random.key(1), jnp.zeros((1, FEATURES)))
state = State(params, params, critic_params, generator_tx.init(params), critic_tx.init(critic_params))
losses = []
for batch in batches():
    batch = {"x": batch["x"] + 1, "z": z}
    state, loss = train_step(state, batch)
    losses.append(float(np.abs(generator.apply(state.average, z).mean(0) - 1).mean()))
