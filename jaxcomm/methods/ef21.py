"""EF21: each worker keeps an estimate of its gradient, and sends corrections to it."""

from dataclasses import dataclass, field
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxcomm.checks import Rule
from jaxcomm.collectives import axis_size, dense_mean
from jaxcomm.exchange import Exchanged, ExchangeState, Gradient, keep_unless, transformation, zeros_unless
from jaxcomm.kernels.numerics import is_finite_narrow
from jaxcomm.layout import Layout
from jaxcomm.methods.topk import TopK
from jaxcomm.selectors import draw_start, select_topk
from jaxcomm.types import ExchangeMetrics, Params


@dataclass(frozen=True)
class Ef21(TopK):
    """Keeps an estimate of each worker's gradient, and sends its k largest corrections.

    Each step, on each worker k, in every tensor of N elements, starting from g_k = 0 and g = 0:

      1. c = the N - floor(N * sparsity) largest coordinates of (gradient - g_k), exactly
      2. round c and send it; g_k = g_k + c
      3. g = g + the mean of c over the workers, so that g is the mean of all g_k
      4. return g

    Unlike error feedback, nothing accumulates: a coordinate that is not sent keeps its old estimate until it is sent.
    The state's residual is -g_k, so that it is resized like any residual. The memory is g, (n,) float32, replicated.
    Memory: 8 bytes a parameter. `jc.chain(jc.ef21(0.99), optax.sgd(0.1))`.

    Source: Richtarik, Sokolov and Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
    Feedback", NeurIPS 2021, https://arxiv.org/abs/2106.05203, Algorithm 2.
    """

    decay: Annotated[float, Rule("1 for ef21", lambda x: x == 1, "Its residual is an estimate, and does not grow")] = (
        field(default=1.0, kw_only=True)
    )
    residual_dtype: Annotated[
        str, Rule("float32 for ef21", lambda x: x == "float32", "Its estimate must stay the mean of its rows")
    ] = field(default="float32", kw_only=True)

    @property
    def has_error_feedback(self) -> bool:
        return False

    @property
    def pack_remedy(self) -> str | None:
        return "Take topk: a mean of estimates needs every worker in every round"

    def first_memory(self, params: Params, layout: Layout) -> jax.Array:
        return jnp.zeros(layout.n, jnp.float32)

    def average_densely(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, jax.Array]:
        """Averages the gradient densely; each worker's then is the estimate to begin with."""
        layout, vector = gradient.layout, gradient.vector()
        out, _ = super().average_densely(gradient._replace(leaves=[vector, *gradient.dense]), state)
        estimate, *dense_means = out.means
        means = layout.join(layout.as_leaves(layout.unflatten(estimate)), dense_means)
        residual, estimate = keep_unless(out.ok, (-vector[None], estimate), (gradient.residual, state.memory))
        return out._replace(means=means, residual=residual), estimate

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, jax.Array]:
        layout, difference = gradient.layout, gradient.accumulated()
        dense_means, ok = dense_mean(gradient.dense, self.axis_name)
        residual, estimate = difference.residual, state.memory
        means, counts = dense_means, jnp.zeros(2, jnp.float32)
        if layout.sizes:
            selected = select_topk(difference, layout)
            reduced = self.collective_of(layout)(difference, *selected, draw_start(0, state.step))
            estimate = estimate + reduced.total(reduced.ok) / axis_size(self.axis_name)
            compressed = layout.as_leaves(layout.unflatten(estimate))
            ok = ok & reduced.ok & jnp.isfinite(estimate).all() & is_finite_narrow(compressed)
            estimate = jnp.where(ok, estimate, state.memory)
            residual, counts = reduced.kept(residual, ok), reduced.counts
            means = layout.join(compressed, dense_means)
        return Exchanged(zeros_unless(ok, means), residual, ExchangeMetrics.of(ok, *counts)), estimate


ef21 = transformation(Ef21)
