"""Random-k with shared seeds and error feedback."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.checks import Seed, Sparsity
from jaxcomm.codecs import value_codec
from jaxcomm.collectives.dense import dense_words, read_dense
from jaxcomm.exchange import Exchanged, ExchangeState, Gradient, Packed, transformation
from jaxcomm.kernels import noise
from jaxcomm.kernels.vectors import computed_end_to_end
from jaxcomm.layout import Layout
from jaxcomm.methods.shared import SharedExchange
from jaxcomm.methods.sparse import exchange_densely
from jaxcomm.selectors.strata import select_strata
from jaxcomm.selectors.topk import n_kept


@dataclass(frozen=True)
class RandomK(SharedExchange):
    """Sends k random coordinates of every tensor, the same on all workers, and keeps the rest (error feedback).

    The seed is shared, so no index travels, and what a worker receives does not grow with K. Each step, on each worker,
    in every tensor of N elements:

      1. x = gradient + residual
      2. draw k = N - floor(N * sparsity) coordinates, from (seed, step): one in each of k strata of N // k or
         N // k + 1 coordinates, rotated by a random offset, so that every coordinate is drawn equally often
      3. sum x over the workers there; the residual is the rounding error there, and x elsewhere
      4. return the sum / K

    Every coordinate waits for 1 / (1 - sparsity) steps on average, and then arrives with all that has accumulated: use
    a learning rate that tolerates such bursts, and less sparsity than with top-k.

    Source: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.

    Attributes:
      sparsity: the fraction of coordinates that is not sent, 0 <= sparsity < 1.
      seed: seed of the coordinates, the same on all workers.
    """

    sparsity: Sparsity = 0.99
    _: KW_ONLY
    seed: Seed = 0

    def capacity(self, n: int) -> int:
        return n_kept(n, self.sparsity)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        vector = gradient.accumulated()
        if not gradient.layout.sizes:
            return exchange_densely(gradient, vector, self.axis_name), state.memory
        slots = select_strata(noise.make_key(self.seed, state.step), gradient.layout)
        return self.send(gradient, vector, slots), state.memory

    @property
    def pack_remedy(self) -> str | None:
        return None if self.collective == "auto" else "Leave collective= out: values are gathered"

    def pack(self, gradient: Gradient, step: jax.Array, worker: jax.Array | int) -> Packed:
        del worker
        vector, codec, layout = gradient.accumulated(), value_codec(self.value_dtype), gradient.layout
        words, ok = dense_words(gradient.dense)
        if not layout.sizes:
            return Packed(words, vector.residual, ok)
        slots = select_strata(noise.make_key(self.seed, step), layout)
        values = codec.rounded(jnp.where(slots.filled, vector.at(slots.position), 0.0))  # (C,)
        ok = ok & vector.is_ok()
        sent = jnp.where(ok, values, 0.0)
        residual = vector.sum()[None].at[0, slots.position].add(-sent, mode="promise_in_bounds")
        return Packed(computed_end_to_end([codec.encode(values), words]), residual, ok)

    def unpack(self, words: jax.Array, layout: Layout, step: jax.Array) -> list[jax.Array]:
        n, total = words.size - layout.n_dense, jnp.zeros(layout.n, jnp.float32)
        if layout.sizes:
            slots = select_strata(noise.make_key(self.seed, step), layout)
            values = value_codec(self.value_dtype).decode(words[:n], slots.position.size)
            values = jnp.where(slots.filled, values, 0.0)
            total = total.at[slots.position].add(values, mode="promise_in_bounds")
        return layout.join(layout.as_leaves(layout.unflatten(total)), read_dense(words[n:], layout))


random_k = transformation(RandomK)
