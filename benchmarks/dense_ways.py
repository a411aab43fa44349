"""Two ways to place the dense layers behind data-parallel convolutions: a plan of their splits, or one worker for all.

`benchmarks.hybrid` compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives import axis_size
from jaxcomm.collectives.axis import to_varying

Place = Literal["rows", "features"]
_PLACES: tuple[Place, Place] = ("rows", "features")


def on_one_worker(function: Callable[[Any, Any], Any], params_row: Any, inputs: Any, *, axis_name: str = "data") -> Any:
    """Computes a function of all workers' rows on worker 0 alone, while the others wait.

    Every other worker sends its rows to worker 0, in one message, and gets the errors of its rows back in the backward
    pass: worker 0 receives, and sends back, (K-1)/K of the rows. Nothing else is sent but the result. As in the hybrid
    parallelism of Yang et al. (see `jaxcomm.late_multiply`), where one device has the dense layers.

    Args:
      function: (params, inputs) -> a scalar or a tree of them, such as the mean loss of the rows given. It may not
        communicate.
      params_row: this worker's rows (1, ...) of parameters (K, ...) with spec P("data"), of which row 0 is used; see
        `rows_of_one_worker`.
      inputs: a tree of arrays (B/K, ...), each worker's own rows: features, labels.
      axis_name: the axis of workers.

    Returns:
      What `function` returns for all B rows, those of worker 0 first; the same on every worker (an all-reduce of the
      scalars; `make_train_step(specs=)` adds another for their derivatives).

    Raises:
      ValueError: at trace time, if `params_row` is not one row.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params_row):
        if leaf.ndim == 0 or leaf.shape[0] != 1:
            raise ValueError(
                f"Parameters that one worker uses must have one row inside a worker; got {leaf.shape} at "
                f"{jax.tree_util.keystr(path)!r}. Make them with rows_of_one_worker(params, K), and give them the spec "
                f"P({axis_name!r})."
            )
    worker_params = jax.tree.map(lambda row: row[0], params_row)
    everything = jax.tree.map(lambda rows: _gather_on_first(rows, axis_name), inputs)
    result = jax.eval_shape(function, worker_params, everything)

    def compute(worker_params: Any, everything: Any) -> Any:
        return to_varying(function(worker_params, everything), axis_name)

    def wait(worker_params: Any, everything: Any) -> Any:
        del worker_params, everything
        return to_varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result), axis_name)

    mine = lax.cond(lax.axis_index(axis_name) == 0, compute, wait, to_varying(worker_params, axis_name), everything)
    return jax.tree.map(lambda leaf: lax.psum(leaf, axis_name), mine)


def rows_of_one_worker(params: Any, workers: int) -> Any:
    """Makes parameters (K, ...) for `on_one_worker`: worker 0 has those given, and the others have zeros.

    All devices hold arrays of the same shape, so the others use the memory too, but neither compute with it nor send
    it. Zeros stay zeros with any optimizer whose update of a zero parameter with zero gradients is zero.
    """
    return jax.tree.map(lambda leaf: jnp.zeros((workers, *leaf.shape), leaf.dtype).at[0].set(leaf), params)


def _gather_on_first(rows: jax.Array, axis_name: str) -> jax.Array:
    """Gathers (B/K, ...) to (B, ...) on worker 0; elsewhere, the worker's own rows come first, and then zeros."""
    rows = to_varying(rows, axis_name)
    arrived = [lax.ppermute(rows, axis_name, [(worker, 0)]) for worker in range(1, axis_size(axis_name))]
    return jnp.concatenate([rows, *arrived])


@dataclass(frozen=True)
class SplitLayer:
    """How one dense layer is split.

    Attributes:
      widths: (N, M).
      by: "outputs" or "inputs", the side of the kernel that is split.
      inputs: where its inputs are, "rows" or "features".
      outputs: where its outputs are.
      received: bytes that each worker receives, forward and backward.
    """

    widths: tuple[int, int]
    by: Literal["outputs", "inputs"]
    inputs: Place
    outputs: Place
    received: Fraction

    def kernel_spec(self, axis_name: str = "data") -> P:
        """Returns the PartitionSpec of the kernel (N, M)."""
        return P(None, axis_name) if self.by == "outputs" else P(axis_name)

    def __str__(self) -> str:
        return (
            f"{self.widths[0]} x {self.widths[1]}, split by {self.by}: {self.inputs} to {self.outputs}, "
            f"{float(self.received):,.0f} bytes"
        )


@dataclass(frozen=True)
class SplitPlan:
    """How a sequence of dense layers is split.

    Attributes:
      layers: one entry per layer.
    """

    layers: tuple[SplitLayer, ...]

    @property
    def received(self) -> float:
        """Bytes that each worker receives in a step, forward and backward."""
        return float(sum(layer.received for layer in self.layers))

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} dense layers: {self.received:,.0f} bytes received per worker and step"]
        return "\n".join(lines + [f"  {layer}" for layer in self.layers])


def plan_split_dense(widths: tuple[int, ...], global_batch: int, workers: int, *, itemsize: int = 4) -> SplitPlan:
    """Chooses how to split a sequence of dense layers with the fewest bytes; rows in, rows out.

    Weighs all combinations of the table in `jaxcomm.layers.split_dense`, layer after layer.

    Args:
      widths: the features between the layers: (9216, 4096, 4096, 1000) are three layers.
      global_batch: B.
      workers: K.
      itemsize: bytes of an activation on the wire. XLA widens sums of 2 bytes to 4 on a CPU.

    Raises:
      ValueError: for fewer than two widths, a number below 1, or if no way to split divides evenly by K.
    """
    if len(widths) < 2 or min(*widths, global_batch, workers) < 1:
        raise ValueError(
            f"widths must have at least two numbers, and all numbers must be at least 1; got widths {widths}, "
            f"{global_batch} rows and {workers} workers. (9216, 4096) is one layer."
        )
    if global_batch % workers:
        raise ValueError(
            f"The rows of a batch must be a multiple of the number of workers; got {global_batch} for {workers}. Use a "
            f"batch size of {max(global_batch // workers, 1) * workers}."
        )
    ways: dict[Place, tuple[SplitLayer, ...]] = {"rows": ()}
    for n, m in pairwise(widths):
        shortest: dict[Place, tuple[SplitLayer, ...]] = {}
        for inputs, before in ways.items():
            for layer in _ways(n, m, inputs, global_batch, workers, itemsize):
                way, best = (*before, layer), shortest.get(layer.outputs)
                if best is None or sum(step.received for step in way) < sum(step.received for step in best):
                    shortest[layer.outputs] = way
        ways = shortest
    if "rows" not in ways:
        raise ValueError(
            f"A width that is split must be a multiple of the number of workers; got widths {widths} for {workers} "
            "workers. Pad them, or use another number of workers."
        )
    return SplitPlan(ways["rows"])


def _ways(n: int, m: int, inputs: Place, rows: int, workers: int, itemsize: int) -> list[SplitLayer]:
    """Returns the ways to split one layer that divide evenly."""
    ways = []
    for outputs in _PLACES:
        by_outputs = Fraction(n) + (Fraction(m, workers) if outputs == "rows" else 0)
        by_inputs = Fraction(m) + (Fraction(n, workers) if inputs == "rows" else 0)
        unit = 2 * Fraction(workers - 1, workers) * rows * itemsize
        if m % workers == 0:
            ways.append(SplitLayer((n, m), "outputs", inputs, outputs, unit * by_outputs))
        if n % workers == 0 and (m % workers == 0 or outputs == "rows"):
            ways.append(SplitLayer((n, m), "inputs", inputs, outputs, unit * by_inputs))
    return ways
