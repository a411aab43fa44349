"""The cost of a dense layer that multiplies late or is sharded over the workers, so that no gradient is exchanged."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxcomm.accounting.jaxpr import traced_program
from jaxcomm.collectives.axis import AxisName, abstract_mesh, axis_names
from jaxcomm.exchange import leaf_name
from jaxcomm.layers.late_multiply import late_multiply
from jaxcomm.layers.split_dense import narrowing_spec, split_dense
from jaxcomm.planner.alone import without_wire
from jaxcomm.planner.costs import Bench, Cost, given_gradients, lower_step, time_program
from jaxcomm.planner.links import Links
from jaxcomm.traffic import Program
from jaxcomm.types import Params, PyTree

WAYS = ("late", "split")


@dataclass(frozen=True)
class LayerCost:
    """The cost of a dense layer in one of the `WAYS`, forward and backward.

    Attributes:
      path: the layer's path in the parameters, parts joined by "/".
      way: "late" or "split".
      tensors: the paths of the parameters whose gradients are then not exchanged.
      bytes: bytes that each worker receives a step.
      wire: seconds on the wire.
      computing: seconds more than if its gradient were exchanged; below 0 for a split layer if updating only a shard
        saves more time than the layer costs.
      memory: bytes saved on each worker, for the parameters and for every copy of them: a shard is 1/K of a kernel.
    """

    path: str
    way: str
    tensors: tuple[str, ...]
    bytes: float
    wire: float
    computing: float
    memory: int


@dataclass(frozen=True)
class Layer:
    """A dense layer in one of the `WAYS`, before anything is measured.

    Attributes:
      path: the layer's path in the parameters.
      way: "late" or "split".
      tensors: the paths of the parameters whose gradients are then not exchanged.
      shape: the shape of the kernel, (N, M).
      rows: the rows of the global batch that reach it.
      program: its collectives, forward and backward.
    """

    path: str
    way: str
    tensors: tuple[str, ...]
    shape: tuple[int, int]
    rows: int
    program: Program

    @property
    def shard(self) -> tuple[int, int]:
        """The shape of a worker's shard of the kernel; the whole kernel for "late"."""
        return _shard(self.way, self.shape, self.program.always[0].workers)


def layers_of(
    params: Mapping[str, Any], rows: Mapping[str, int], sizes: tuple[int, ...], axis_name: AxisName
) -> list[Layer]:
    """Returns some dense layers, each in every one of the `WAYS` that is possible.

    A layer can be "split" if the workers are along one axis, and N and M are multiples of K.

    Args:
      params: the parameters, or their shapes, by path.
      rows: the rows of the global batch that reach each layer, by the layer's path.
      sizes: the number of workers along each axis.
      axis_name: the axis of workers, or the axes.

    Raises:
      ValueError: for a layer without a kernel (N, M), and for rows that are not a multiple of K.
    """
    workers, layers = math.prod(sizes), []
    for path, count in rows.items():
        kernel, bias = f"{path}/kernel", f"{path}/bias"
        shape = tuple(jnp.shape(params[kernel])) if kernel in params else ()
        if len(shape) != 2:
            raise ValueError(
                f"A dense layer must have a kernel (N, M); got {shape or 'none'} at {kernel!r}. Give the paths of the "
                "layers as in the parameters, parts joined by '/'."
            )
        if count < 1 or count % workers:
            raise ValueError(
                f"The rows of {path!r} must be a multiple of the {workers} workers; got {count}. Give those of the "
                "global batch."
            )
        for way in WAYS:
            if way == "split" and (len(sizes) > 1 or shape[0] % workers or shape[1] % workers):
                continue
            # The bias of a split layer is replicated, and its gradient exchanged.
            tensors = (kernel, bias) if way == "late" and bias in params else (kernel,)
            program = _trace(way, shape, count, sizes, axis_name)
            layers.append(Layer(path, way, tensors, shape, count, program))
    return layers


def layer_cost(layer: Layer, links: Links, computing: Cost) -> LayerCost:
    """Returns the cost of a layer on these links."""
    return LayerCost(
        path=layer.path,
        way=layer.way,
        tensors=layer.tensors,
        bytes=float(layer.program.received),
        wire=links.seconds(layer.program),
        computing=computing.seconds,
        memory=4 * (math.prod(layer.shape) - math.prod(layer.shard)),
    )


def modelled_layer(layer: Layer, compute: float, parameters: int) -> Cost:
    """Estimates how much longer a layer computes than if its gradient were exchanged, from a step's computing.

    A forward and backward pass computes three products: the output, and the gradients of input and kernel. "late", each
    worker computes the last one for all workers' rows, which adds (K-1)/3 of the layer's time. "split" adds nothing.
    The layer's time is taken as its kernel's share of all parameters, times `compute`. That is too much in a model with
    convolutions, which use each parameter more often.

    Args:
      layer: a layer of `layers_of`.
      compute: seconds of a step without an exchange.
      parameters: n, of the whole model.

    Returns:
      The cost; its range is from nothing to all of it.
    """
    workers = layer.program.always[0].workers
    seconds = compute * (workers - 1) / 3 * math.prod(layer.shape) / parameters if layer.way == "late" else 0.0
    return Cost(seconds, 0.0, seconds, measured=False)


def measure_layers(
    bench: Bench, layers: Sequence[Layer], split: optax.GradientTransformation | None, gradients: PyTree, params: Params
) -> list[Cost]:
    """Measures how much longer each layer computes in its way than if its gradient were exchanged.

    A worker updates only its shard of a split layer. The time that this saves for all split layers together is divided
    among them by the elements of their kernels.

    Args:
      bench: the devices, and K.
      layers: the layers, from `layers_of`.
      split: the chain of exchange and optimizer in a model with split layers; None if there are none.
      gradients: the gradients, one row per device.
      params: the parameters, one row per device.
    """
    time_layer = functools.cache(functools.partial(_measure_layer, bench))
    costs = [time_layer(layer.way, layer.shape, layer.rows) for layer in layers]
    kernels = {layer.tensors[0]: layer for layer in layers if layer.way == "split"}
    if split is None or not kernels:
        return costs
    shards = {path: bench.spread(np.zeros(layer.shard, np.float32)) for path, layer in kernels.items()}

    def cut(tree: PyTree) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, leaf: shards.get(leaf_name(path), leaf), tree)

    full_cost = lower_step(bench, given_gradients, split, params, gradients).cost()
    shard_cost = lower_step(bench, given_gradients, split, cut(params), cut(gradients)).cost()
    spared = full_cost.beyond(shard_cost) * (1 / sum(math.prod(layer.shape) for layer in kernels.values()))
    return [
        cost.plus(spared * -math.prod(layer.shape)) if layer.way == "split" else cost
        for layer, cost in zip(layers, costs, strict=True)
    ]


def _measure_layer(bench: Bench, way: str, shape: tuple[int, int], rows: int) -> Cost:
    """Times a layer forward and backward, without collectives; returns the time beyond a layer that is exchanged."""
    workers = math.prod(bench.sizes)
    random = np.random.default_rng(0)
    x, errors = (random.standard_normal((rows // workers, width), np.float32) for width in shape)

    def cost(way: str) -> Cost:
        kernel = random.standard_normal(_shard(way, shape, workers), np.float32)
        function = without_wire(_step(way, bench.axis_name), bench.sizes, bench.axis_name)
        return time_program(bench, function, bench.spread((x, kernel, errors)))

    return cost(way).beyond(cost("exchange"))


def _step(way: str, axis_name: AxisName) -> Callable[..., Any]:
    """Returns the forward and backward pass of a layer: (x, kernel, errors) -> the output, and both gradients."""

    def multiply(x: Any, kernel: Any) -> Any:
        if way == "split":
            return split_dense(x, kernel, axis_name=axis_names(axis_name)[0])
        return late_multiply(x, kernel, axis_name=axis_name, mode="late" if way == "late" else "reduce")

    def step(x: Any, kernel: Any, errors: Any) -> Any:
        y, backward = jax.vjp(multiply, x, kernel)
        return y, backward(errors)

    return step


def _shard(way: str, shape: tuple[int, int], workers: int) -> tuple[int, int]:
    n, m = shape
    if way != "split":
        return shape
    return (n // workers, m) if narrowing_spec(shape)[0] else (n, m // workers)


def _trace(way: str, shape: tuple[int, int], rows: int, sizes: tuple[int, ...], axis_name: AxisName) -> Program:
    mesh = abstract_mesh(dict(zip(axis_names(axis_name), sizes, strict=True)))
    kernel = P() if way == "late" else narrowing_spec(shape, axis_name)
    step = jax.shard_map(
        _step(way, axis_name),
        mesh=mesh,
        in_specs=(P(axis_name), kernel, P(axis_name)),
        out_specs=(P(axis_name), (P(axis_name), kernel)),
    )
    x, errors = (jax.ShapeDtypeStruct((rows, width), jnp.float32) for width in shape)
    return traced_program(step, x, jax.ShapeDtypeStruct(shape, jnp.float32), errors)
