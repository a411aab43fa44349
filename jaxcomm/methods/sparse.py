"""The exchanges of sparse gradients with error feedback: top-k, DCT-DP and DGC differ only in the mask.

A payload holds the coordinates of the mask. Payloads are gathered and summed on every worker (or summed by the owners
of regions), and what was not sent is the new residual.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.checks import DenseBelow, Rule, number, one_of
from jaxcomm.codecs import SlotDtype, slot_codec
from jaxcomm.collectives import axis_size, dense_mean
from jaxcomm.collectives.dense import dense_words, read_dense
from jaxcomm.collectives.reduced import SparseReduced
from jaxcomm.collectives.sparse import COLLECTIVES, Accumulated, SparseSum
from jaxcomm.exchange import Exchange, Exchanged, ExchangeState, Gradient, Packed, zeros_unless
from jaxcomm.kernels.bits import popcount, unpack
from jaxcomm.kernels.numerics import is_finite_narrow
from jaxcomm.kernels.scopes import EXCHANGE
from jaxcomm.kernels.vectors import computed_end_to_end
from jaxcomm.layout import BLOCK, Layout, plan_layout
from jaxcomm.selectors import Selected, draw_start, select_topk
from jaxcomm.types import ExchangeMetrics, PyTree


def _is_chunk(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value > 0 and value % BLOCK == 0)


@dataclass(frozen=True, kw_only=True)
class SparseExchange(Exchange):
    """One payload of coordinates per worker and step; what is not sent stays in the residual.

    With error feedback nothing is lost: mean + pmean(new residual) == pmean(gradient + residual), to float rounding.
    `decay` then multiplies the new residual.

    Received: K-1 payloads, see `jaxcomm.wire_report`. Memory: 4 bytes a parameter.

    Attributes:
      dense_below: tensors with fewer elements are sent dense, as float32.
      value_dtype: "bfloat16" (16 bits a value), "float32", or "4bit" or "2bit": a sign and a magnitude bin per value,
        and the bins' means per segment, see `jaxcomm.codecs.bins`.
      collective: "gather" (every worker receives the K-1 other payloads), "balanced" (owners of regions sum, and send
        the largest sums to all; the other coordinates stay with their senders: about 2 payloads whatever K is), or
        "auto": gather if that receives at most a quarter of the dense bytes, else whichever of the two receives fewer.
      chunk: elements of a segment, a multiple of 1024: coordinates are selected, and values binned, in each chunk of a
        tensor. None for whole tensors.
      decay: factor on the residual in each step, above 0 and at most 1. Below 1, gradients that wait are gradually
        forgotten.
    """

    dense_below: DenseBelow = 512
    value_dtype: SlotDtype = "bfloat16"
    collective: Annotated[str, one_of((*COLLECTIVES, "auto"), "Or pass 'auto'")] = "auto"
    chunk: Annotated[int | None, Rule(f"a multiple of {BLOCK}, or None", _is_chunk, "SparseLoCo has 4096")] = None
    decay: Annotated[float, number("above 0 and at most 1", lambda x: 0 < x <= 1, "1 keeps all that is not sent")] = 1.0

    always_fits: ClassVar[bool] = True  # whether `choose` never selects more of a tensor than its capacity

    @property
    def checksum_remedy(self) -> None:
        return None

    def capacity(self, n: int) -> int:
        """Returns the slots of a tensor of n elements in a payload."""
        raise NotImplementedError

    def plan(self, tree: PyTree) -> Layout:
        layout = plan_layout(tree, dense_below=self.dense_below, capacity=self.capacity, chunk=self.chunk)
        self.collective_of(layout)  # raises before any work is done
        return layout

    def collective_of(self, layout: Layout) -> SparseSum:
        """Returns the collective for a gradient's shapes."""
        values = slot_codec(self.value_dtype)
        return SparseSum(layout, values, self.collective, self.always_fits, self.axis_name, self.checksum)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        vector = gradient.accumulated()
        if not gradient.layout.sizes:
            return exchange_densely(gradient, vector, self.axis_name), state.memory
        return self.send(gradient, vector, *self.choose(gradient, vector, state.step))[0], state.memory

    def choose(self, gradient: Gradient, vector: Accumulated, step: jax.Array) -> tuple[Selected, jax.Array]:
        """Returns what to send, by default the largest, and the start offset of those that get slots if not all fit."""
        return select_topk(vector, gradient.layout), draw_start(0, step)

    @property
    def pack_remedy(self) -> str | None:
        return None if self.collective in ("auto", "gather") else "Leave collective= out: payloads are gathered"

    def pack(self, gradient: Gradient, step: jax.Array, worker: jax.Array | int) -> Packed:
        del worker
        layout, vector = gradient.layout, gradient.accumulated()
        words, ok = dense_words(gradient.dense)
        if not layout.sizes:
            return Packed(words, vector.residual, ok)
        (mask, selected_ok), start = self.choose(gradient, vector, step)
        payload, sent = self.collective_of(layout).pack(vector, mask, selected_ok, start)
        ok = ok & selected_ok & jnp.isfinite(sent.values).all()
        residual = (vector.residual + vector.gradient[None]) * np.float32(self.decay)
        return Packed(computed_end_to_end([payload, words]), sent.taken_from(residual, ok, self.decay), ok)

    def unpack(self, words: jax.Array, layout: Layout, step: jax.Array) -> list[jax.Array]:
        del step
        n = words.size - layout.n_dense
        total = jnp.zeros(layout.n, jnp.float32)
        if layout.sizes:
            position, values = self.collective_of(layout).unpack(words[:n])
            total = total.at[position].add(values, mode="promise_in_bounds")
        return layout.join(layout.as_leaves(layout.unflatten(total)), read_dense(words[n:], layout))

    def send(
        self, gradient: Gradient, vector: Accumulated, selected: Selected, start: jax.Array
    ) -> tuple[Exchanged, SparseReduced]:
        """Sends what is selected, and returns the mean of what arrived.

        Args:
          gradient: the worker's gradient; only its dense leaves are read.
          vector: gradient + residual of the compressed leaves.
          selected: the mask, and whether the vector is ok.
          start: start offset, from `draw_start`, of the coordinates that get slots if there are too many.

        Returns:
          The results of the exchange and of the collective.
        """
        layout = gradient.layout
        reduced = self.collective_of(layout)(vector, *selected, start)
        dense_means, dense_ok = dense_mean(gradient.dense, self.axis_name)
        ok = reduced.ok & dense_ok

        mean = reduced.total(ok) / axis_size(self.axis_name)
        means = layout.as_leaves(layout.unflatten(mean))
        ok, means = ok & is_finite_narrow(means), layout.join(means, dense_means)

        # One pass, then the few coordinates that were sent: the old residual's buffer is reused for the new one.
        residual = vector.residual + jnp.where(ok, vector.gradient, 0.0)[None]
        if self.decay < 1:
            residual = residual * jnp.where(ok, np.float32(self.decay), 1.0)
        residual = reduced.kept(residual, ok, self.decay)
        return Exchanged(zeros_unless(ok, means), residual, ExchangeMetrics.of(ok, *reduced.counts)), reduced


def exchange_densely(
    gradient: Gradient, vector: Accumulated, axis_name: str, mask: jax.Array | None = None, decay: float = 1.0
) -> Exchanged:
    """Sends the coordinates in the mask by one dense all-reduce of float32: 2 (K-1)/K * 4 bytes a parameter.

    For masks that are too dense to be worth coding. Nothing is rounded; coordinates outside the mask stay in the
    residual.

    Args:
      gradient: the worker's gradient; only its dense leaves are read.
      vector: gradient + residual of the compressed leaves.
      axis_name: the axis of workers.
      mask: (n/32,) uint32; None sends everything, which empties the residual and counts as drained.
      decay: of what stays in the residual.
    """
    layout, x = gradient.layout, vector.sum()
    sends = x if mask is None else jnp.where(unpack(mask), x, 0.0)
    if mask is None:
        n_sent = layout.n_elements() * axis_size(axis_name)
    else:
        with jax.named_scope(EXCHANGE):
            n_sent = lax.psum(jnp.sum(popcount(mask), dtype=jnp.float32), axis_name)
    # One more element, since the number that is not finite may be one that is not sent.
    flag = [] if mask is None else [jnp.where(vector.is_ok(), np.float32(0), np.float32(np.nan))]
    dense = gradient.dense
    means, ok = dense_mean([*layout.unflatten(sends), *dense, *flag], axis_name)
    n = len(layout.tensor_sizes)
    compressed = layout.as_leaves(means[:n])
    ok, means = ok & is_finite_narrow(compressed), layout.join(compressed, means[n : n + len(dense)])
    remainder = jnp.zeros_like(vector.residual) if mask is None else np.float32(decay) * (x - sends)[None]
    drained = mask is None and bool(layout.sizes)
    metrics = ExchangeMetrics.of(ok, n_sent, drained=drained)
    return Exchanged(zeros_unless(ok, means), jnp.where(ok, remainder, vector.residual), metrics)
