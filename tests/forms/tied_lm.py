import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from tests.forms.data import STEPS, texts

VOCABULARY = 24


class Lm(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, 32)
        x = embed(tokens)
        x += nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x += nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["tokens"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, {"loss": loss, "rate": state.opt_state[-1].hyperparams["learning_rate"]}


model = Lm()
params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), int))
adamw = optax.inject_hyperparams(optax.adamw)(optax.warmup_cosine_decay_schedule(0.0, 2e-2, 5, STEPS))
tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
losses = []
for batch in texts(VOCABULARY):
    state, metrics = train_step(state, batch)
    losses.append(float(metrics["loss"]))
