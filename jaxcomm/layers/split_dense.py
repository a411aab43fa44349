"""Dense layers over the devices of data-parallel convolutions: each holds a shard of the features, or one holds all."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName, axis_size, to_varying
from jaxcomm.collectives.messages import all_gather_rows, all_to_all, sum_scatter

Place = Literal["rows", "features"]
_PLACES: tuple[Place, Place] = ("rows", "features")


def split_dense(
    x: jax.Array,
    kernel_shard: jax.Array,
    bias_shard: jax.Array | None = None,
    *,
    axis_name: str = "data",
    inputs: Place = "rows",
    outputs: Place = "rows",
) -> jax.Array:
    """Multiplies the rows of all workers by a kernel of which each worker holds a shard.

    Between layers an array is either in rows, (B/K, N): each worker has all features of its own rows, as
    convolutions leave them; or in features, (B, N/K): each worker has some features of all rows. A kernel (N, M) is
    split by its outputs, (N, M/K), or by its inputs, (N/K, M), as the shape of the shard tells. Each worker receives
    (K-1)/K of these elements, and as many again in the backward pass, which sends errors the other way:

    | kernel     | inputs   | outputs  | moves                                             | elements    |
    | ---------- | -------- | -------- | ------------------------------------------------- | ----------- |
    | by outputs | either   | features | all-gather of x                                   | B N         |
    | by outputs | either   | rows     | the same, then all-to-all of y                    | B (N + M/K) |
    | by inputs  | features | either   | reduce-scatter of partial sums of y               | B M         |
    | by inputs  | rows     | either   | all-to-all of x, then the same                    | B (M + N/K) |

    So a layer that narrows is split by its inputs, and one that widens by its outputs; `plan_split_dense` chooses for a
    sequence of layers. An all-reduce of the kernel's gradient would be 2 N M elements, whatever B is.

    The gradient of a shard is already reduced: it sums over the rows of all workers. Under `jax.grad` of each worker's
    own mean loss it is K times the gradient of the mean over all workers; `make_train_step(specs=)` divides by K.

    Args:
      x: (B/K, ..., N), each worker's own rows; or (B, ..., N/K), each worker's own features.
      kernel_shard: (N, M/K) or (N/K, M), each worker's own: from a kernel (N, M) with spec P(None, "data") or
        P("data").
      bias_shard: (M/K,), each worker's own; or, for outputs in rows, (M,), replicated.
      axis_name: the axis of workers.
      inputs: whether x is in "rows" or in "features".
      outputs: whether y is to be in "rows" or in "features".

    Returns:
      (B/K, ..., M), this worker's own rows; or (B, ..., M/K), this worker's own features, of all rows.

    Raises:
      ValueError: at trace time, if the shards do not fit x, or a dimension that is cut is not a multiple of K.

    References:
      Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
      https://arxiv.org/abs/1404.5997.
    """
    workers = axis_size(axis_name)
    m, by_outputs = _widths(x, kernel_shard, workers, inputs, outputs)
    is_whole_bias = _check_bias(bias_shard, m, workers, outputs)
    if by_outputs:
        axis = 0 if inputs == "rows" else x.ndim - 1
        y = all_gather_rows(x, axis_name, axis) @ kernel_shard  # (B, ..., M/K)
        if bias_shard is not None and not is_whole_bias:
            y = y + bias_shard
        y = features_to_rows(y, axis_name=axis_name) if outputs == "rows" else y
    else:
        x = rows_to_features(x, axis_name=axis_name) if inputs == "rows" else x  # (B, ..., N/K)
        y = x @ kernel_shard  # (B, ..., M), to be summed over the workers
        if bias_shard is not None and not is_whole_bias and outputs == "rows":  # each bias shard is in one worker's sum
            own = lax.dynamic_update_slice(
                to_varying(jnp.zeros(m, bias_shard.dtype), axis_name),
                bias_shard,
                (lax.axis_index(axis_name) * bias_shard.size,),
            )
            y = y + own
        y = sum_scatter(_cut(y, 0 if outputs == "rows" else y.ndim - 1, workers), axis_name)
        if bias_shard is not None and outputs == "features":
            y = y + bias_shard
    return y + bias_shard if bias_shard is not None and is_whole_bias else y


def narrowing_spec(shape: tuple[int, int], axis_name: AxisName = "data") -> P:
    """Returns the spec of a kernel (N, M), from rows to rows: split by inputs if it narrows, else by outputs.

    This moves fewer bytes, see `split_dense`.
    """
    return P(axis_name) if shape[0] > shape[1] else P(None, axis_name)


def rows_to_features(x: jax.Array, *, axis_name: str = "data") -> jax.Array:
    """Turns each worker's own rows (B/K, ..., N) into its own features of all rows (B, ..., N/K).

    An all-to-all: each worker receives (K-1)/K of what it holds.

    Raises:
      ValueError: at trace time, if N is not a multiple of K.
    """
    _check_multiple("features", x.shape[-1], axis_size(axis_name))
    arrived = all_to_all(_cut(x, x.ndim - 1, axis_size(axis_name)), axis_name)  # (K, B/K, ..., N/K)
    return arrived.reshape(-1, *arrived.shape[2:])


def features_to_rows(x: jax.Array, *, axis_name: str = "data") -> jax.Array:
    """Turns each worker's own features of all rows (B, ..., N/K) into its own rows (B/K, ..., N).

    An all-to-all: each worker receives (K-1)/K of what it holds.

    Raises:
      ValueError: at trace time, if B is not a multiple of K.
    """
    _check_multiple("rows", x.shape[0], axis_size(axis_name))
    arrived = jnp.moveaxis(all_to_all(_cut(x, 0, axis_size(axis_name)), axis_name), 0, -2)  # (B/K, ..., K, N/K)
    return arrived.reshape(*arrived.shape[:-2], -1)


def _cut(x: jax.Array, axis: int, workers: int) -> jax.Array:
    """Cuts a dimension into K parts: (K, ...)."""
    return jnp.stack(jnp.split(x, workers, axis))


def on_one_worker(function: Callable[[Any, Any], Any], params_row: Any, inputs: Any, *, axis_name: str = "data") -> Any:
    """Computes a function of all workers' rows on worker 0 alone, while the others wait.

    Every other worker sends its rows to worker 0, in one message, and gets the errors of its rows back in the backward
    pass: worker 0 receives, and sends back, (K-1)/K of the rows. Nothing else is sent but the result. As in the hybrid
    parallelism of Yang et al. (see `late_multiply`), where one device has the dense layers.

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
    own = jax.tree.map(lambda row: row[0], params_row)
    everything = jax.tree.map(lambda rows: _gather_on_first(rows, axis_name), inputs)
    result = jax.eval_shape(function, own, everything)

    def compute(own: Any, everything: Any) -> Any:
        return to_varying(function(own, everything), axis_name)

    def wait(own: Any, everything: Any) -> Any:
        del own, everything
        return to_varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result), axis_name)

    mine = lax.cond(lax.axis_index(axis_name) == 0, compute, wait, to_varying(own, axis_name), everything)
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
    others = [lax.ppermute(rows, axis_name, [(worker, 0)]) for worker in range(1, axis_size(axis_name))]
    return jnp.concatenate([rows, *others])


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

    Weighs all combinations of the table in `split_dense`, layer after layer.

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
        found: dict[Place, tuple[SplitLayer, ...]] = {}
        for inputs, before in ways.items():
            for layer in _ways(n, m, inputs, global_batch, workers, itemsize):
                way, best = (*before, layer), found.get(layer.outputs)
                if best is None or sum(step.received for step in way) < sum(step.received for step in best):
                    found[layer.outputs] = way
        ways = found
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


def _widths(x: jax.Array, kernel: jax.Array, workers: int, inputs: Place, outputs: Place) -> tuple[int, bool]:
    """Returns M, and whether the kernel is split by its outputs."""
    if inputs not in _PLACES or outputs not in _PLACES:
        raise ValueError(
            f"Activations must be in 'rows' or in 'features'; got inputs={inputs!r} and outputs={outputs!r}. Pass one."
        )
    if x.ndim < 2 or kernel.ndim != 2:
        raise ValueError(
            f"A dense layer must have rows of features and a matrix; got {x.shape} and a kernel {kernel.shape}. "
            "Flatten what comes from convolutions to (rows, features)."
        )
    n = x.shape[-1] * (workers if inputs == "features" else 1)
    by_outputs = kernel.shape[0] == n
    if not by_outputs and kernel.shape[0] * workers != n:
        raise ValueError(
            f"A shard of a kernel must have all {n} inputs or 1/{workers} of them; got {kernel.shape} for inputs "
            f"{x.shape} in {inputs}. Give the kernel the spec P(None, axis) or P(axis), and say where x is (inputs=)."
        )
    m = kernel.shape[1] * (workers if by_outputs else 1)
    if outputs == "rows":
        _check_multiple("rows", x.shape[0] * (workers if inputs == "rows" else 1), workers)
    else:
        _check_multiple("outputs", m, workers)
    return m, by_outputs


def _check_bias(bias: jax.Array | None, m: int, workers: int, outputs: Place) -> bool:
    """Returns whether a bias is replicated, (M,), rather than a shard."""
    if bias is None or (bias.shape == (m // workers,) and m % workers == 0):
        return False
    if bias.shape == (m,) and outputs == "rows":
        return True
    raise ValueError(
        f"A bias must be a shard ({m}/{workers},), or, for outputs in rows, may be whole, ({m},); got {bias.shape} for "
        f"outputs in {outputs}. Give it the spec P(axis), or P() for outputs in rows."
    )


def _check_multiple(what: str, number: int, workers: int) -> None:
    if number % workers:
        raise ValueError(
            f"What is split over {workers} workers must be a multiple of their number; got {number} {what}. Pad them, "
            "or use another number of workers."
        )
