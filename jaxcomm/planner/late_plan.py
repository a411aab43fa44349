"""The choice of the dense layers that multiply late, from shapes, before anything runs."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm.accounting.report import wire_report
from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.exchange import leaf_name
from jaxcomm.layers.late_multiply import late_traffic, reduce_traffic
from jaxcomm.traffic import Traffic
from jaxcomm.types import PyTree


@dataclass(frozen=True)
class LateLayer:
    """The cost of late-multiply for one layer, and of the exchange of its kernel.

    Attributes:
      path: the layer's path in the parameters, parts joined by "/".
      shape: the shape of the kernel, (N, M).
      late: the gathers of late-multiply.
      is_late: whether it multiplies late.
      bytes_late: bytes that each worker receives with late-multiply.
      bytes_reduce: bytes that each worker receives when the exchange gets the kernel's gradient.
      crossover: the global batch, in rows, at which both cost the same; infinite for one worker.
    """

    path: str
    shape: tuple[int, int]
    late: tuple[Traffic, Traffic]
    is_late: bool
    bytes_late: float
    bytes_reduce: float
    crossover: float

    def __str__(self) -> str:
        n, m = self.shape
        sign = "<" if self.bytes_late < self.bytes_reduce else ">" if self.bytes_late > self.bytes_reduce else "="
        return (
            f"{self.path} ({n:,} x {m:,}): {'late' if self.is_late else 'reduce'}, late {self.bytes_late:,.0f} bytes "
            f"{sign} reduce {self.bytes_reduce:,.0f}; equal at a batch of {self.crossover:,.0f} rows"
        )


@dataclass(frozen=True)
class LatePlan:
    """The layers that multiply late, and the reasons.

    Attributes:
      global_batch: rows of all workers together.
      workers: K.
      layers: all layers that the plan was made for.
    """

    global_batch: int
    workers: int
    layers: tuple[LateLayer, ...]

    def mode(self, path: str) -> str:
        """Returns the mode to pass to a layer: "late" or "reduce".

        Raises:
          ValueError: if the plan has no such layer.
        """
        for layer in self.layers:
            if layer.path == path:
                return "late" if layer.is_late else "reduce"
        paths = ", ".join(layer.path for layer in self.layers)
        raise ValueError(f"path must be that of a layer of this plan; got {path!r}. The plan has {paths}.")

    def exchanges(self, path: str, leaf: PyTree) -> bool:
        """Returns whether a parameter's gradient is exchanged: False for kernel and bias of a layer that is late.

        For an exchange's `where=`: `jaxcomm.dct_dp(0.99, where=plan.exchanges)`.
        """
        del leaf
        layer, _, name = path.rpartition("/")
        return name not in ("kernel", "bias") or not any(
            planned.is_late and planned.path == layer for planned in self.layers
        )

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives of the layers that multiply late, for `beside=` of `wire_report` and `verify`."""
        return tuple(traffic for layer in self.layers if layer.is_late for traffic in layer.late)

    @property
    def received(self) -> float:
        """Bytes that each worker receives a step for all of these layers."""
        return sum(layer.bytes_late if layer.is_late else layer.bytes_reduce for layer in self.layers)

    def __str__(self) -> str:
        late = sum(layer.is_late for layer in self.layers)
        reduced = sum(layer.bytes_reduce for layer in self.layers)
        head = (
            f"{late} of {len(self.layers)} dense layers multiply late, batch {self.global_batch:,}, {self.workers} "
            f"workers: {self.received:,.0f} bytes received per worker and step, {reduced:,.0f} without"
        )
        return "\n".join([head, *(f"  {layer}" for layer in self.layers)])


def plan_late_multiply(
    kernels: Mapping[str, Any],
    global_batch: int,
    workers: int | tuple[int, ...],
    exchange: optax.GradientTransformation | None = None,
    activation_bytes: int = 4,
    *,
    late: Collection[str] | None = None,
    axis_name: AxisName = "data",
) -> LatePlan:
    """Decides which dense layers multiply late: those for which this moves fewer bytes than the exchange.

    With late-multiply each worker receives the other workers' rows of inputs and errors, B (K-1)/K * (N + M) *
    `activation_bytes`; with a dense exchange, 2 (K-1)/K * 4 N M bytes. So with float32 a layer multiplies late if B < 2
    N M / (N + M). A layer with mode="auto" decides in the same way, always against a dense exchange.

    Args:
      kernels: {path: (N, M)}, with a layer's path in the parameters, parts joined by "/"; or parameters (or their
        shapes), in which every matrix named "kernel" is taken as that of a layer that may multiply late.
      global_batch: B, rows of all workers together that reach the layers (examples times positions).
      workers: K, or the number along each axis.
      exchange: the exchange of the other gradients; None for a dense exchange. A layer is compared with the bytes that
        it would receive for the kernel alone.
      activation_bytes: bytes per element of the inputs and errors: 4, or 2 for bfloat16 and float16.
      late: the paths of the layers that multiply late, if already decided; None to decide here.
      axis_name: the axis of workers that `exchange` was made for, or the axes.

    Returns:
      The plan; `print` it to see each layer's choice and the reason.

    Raises:
      ValueError: if there is no kernel, one is not a matrix, the batch is not a multiple of K, `activation_bytes` is
        not 2 or 4, or `late` has a path of no layer.
    """
    count = math.prod(workers) if isinstance(workers, tuple) else workers
    if count < 1 or global_batch < 1 or global_batch % count:
        raise ValueError(
            f"global_batch must be a positive multiple of the number of workers; got {global_batch} rows for {workers} "
            "workers. Count the rows of all workers together."
        )
    if activation_bytes not in (2, 4):
        raise ValueError(f"activation_bytes must be 2 or 4; got {activation_bytes}. Pass 4 for float32.")
    shapes = _kernels(kernels)
    if not shapes:
        raise ValueError(f"A plan must have at least one kernel; got none in {list(kernels)}. Pass {{path: (N, M)}}.")
    if late is not None and set(late) - set(shapes):
        raise ValueError(
            f"late must be paths of layers; got {sorted(set(late) - set(shapes))}, where the layers are "
            f"{', '.join(shapes)}. Look at the names."
        )
    layers = []
    for path, (n, m) in shapes.items():
        gathers = late_traffic(global_batch, (n, m), count, activation_bytes, axis_names(axis_name))
        late_bytes = float(sum(traffic.received for traffic in gathers))
        if exchange is None:
            reduced = float(reduce_traffic((n, m), count).received)
        else:
            like = {"kernel": jax.ShapeDtypeStruct((n, m), jnp.float32)}
            reduced = wire_report(exchange, like, workers, axis_name=axis_name).received
        a_row = (count - 1) / count * (n + m) * activation_bytes
        layers.append(
            LateLayer(
                path=path,
                shape=(n, m),
                late=gathers,
                is_late=late_bytes < reduced if late is None else path in late,
                bytes_late=late_bytes,
                bytes_reduce=reduced,
                crossover=reduced / a_row if a_row else math.inf,
            )
        )
    return LatePlan(global_batch, count, tuple(layers))


def _kernels(kernels: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the shapes (N, M) of layers by path, from either form."""

    def is_shape(node: PyTree) -> bool:
        return isinstance(node, tuple) and all(isinstance(size, Integral) for size in node)

    shapes = {}
    for path, node in jax.tree_util.tree_leaves_with_path(kernels, is_leaf=is_shape):
        name_path, shape = leaf_name(path), tuple(node) if is_shape(node) else tuple(jnp.shape(node))
        layer, _, name = name_path.rpartition("/")
        if is_shape(node):
            layer = layer if name == "kernel" else name_path
            if len(shape) != 2 or min(shape) < 1:
                raise ValueError(
                    f"A kernel must be a matrix (N, M); got {shape} at {name_path!r}. Leave it out of the plan."
                )
        elif name != "kernel" or len(shape) != 2:
            continue
        shapes[layer] = shape
    return shapes
