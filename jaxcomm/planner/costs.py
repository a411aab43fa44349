"""What computing costs: the user's own step without an exchange, and each method's selecting and coding."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.exchange import Exchange, ExchangeState, exchange_states, is_exchange_state
from jaxcomm.planner.alone import alone
from jaxcomm.planner.links import agreed, time_calls
from jaxcomm.states import communication_period

_REPEATS = 5
_DEVICES = "devices"  # the axis of all devices, beside one another
COPY_BYTES = 8  # that a copy of a float32 moves in memory


@dataclass(frozen=True)
class Cost:
    """Seconds of computing in a step.

    Attributes:
      seconds: the median.
      low: the lower quartile.
      high: the upper quartile.
      measured: whether it was timed here; else it comes from the table of costs.
    """

    seconds: float
    low: float
    high: float
    measured: bool = True

    def __mul__(self, factor: float) -> "Cost":
        return Cost(self.seconds * factor, self.low * factor, self.high * factor, self.measured)


def cost_of(seconds: Sequence[float], mesh: Mesh) -> Cost:
    """Makes a cost of repeated timings, the slowest process counting."""
    low, _, high = statistics.quantiles(seconds, n=4)
    median = statistics.median(seconds)
    return Cost(agreed(median, mesh), agreed(low, mesh), agreed(high, mesh))


class Bench:
    """Runs programs on all devices of a mesh at once, none of which communicates.

    So workers that share cores or memory slow one another down as they do in training.
    """

    def __init__(self, mesh: Mesh, axis_name: AxisName, workers: int | None = None):
        """Takes the workers of a mesh, or another number of them for what methods compute."""
        self.mesh, self.axis_name = mesh, axis_name
        missing = set(axis_names(axis_name)) - set(mesh.axis_names)
        if missing:
            raise ValueError(
                f"A mesh must have the axes of the workers; got {dict(mesh.shape)} for axis_name={axis_name!r}. Make "
                "it with jaxcomm.make_mesh(data=K), or pass axis_name=."
            )
        self.sizes = tuple(mesh.shape[name] for name in axis_names(axis_name)) if workers is None else (workers,)
        self.devices = Mesh(mesh.devices.reshape(-1), (_DEVICES,))
        self.by_device = NamedSharding(self.devices, P(_DEVICES))

    def compile(self, function: Callable[..., Any], *args: Any, donate: int | None = None) -> Any:
        """Compiles a function of one device's arguments for all of them; arguments and results have a row a device."""

        def on_rows(*rows: Any) -> Any:
            out = function(*jax.tree.map(lambda row: row[0], rows))
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], out)

        spread = jax.shard_map(on_rows, mesh=self.devices, in_specs=P(_DEVICES), out_specs=P(_DEVICES), check_vma=False)
        jitted = jax.jit(spread, donate_argnums=() if donate is None else donate)
        return jitted.lower(*args).compile()

    def spread(self, tree: Any) -> Any:
        """Gives every device a copy, as a row."""

        def rows(leaf: Any) -> jax.Array:
            array = np.asarray(leaf)
            shape = (self.devices.size, *array.shape)
            return jax.make_array_from_callback(shape, self.by_device, lambda _: array[None])

        return jax.tree.map(rows, tree)

    def shards(self, batch: Any) -> Any:
        """Gives every device the rows of its worker, of a global batch that this process has whole."""
        workers = int(np.prod(self.sizes))
        axes = axis_names(self.axis_name)
        places = dict(zip(self.mesh.axis_names, np.indices(self.mesh.devices.shape), strict=True))
        numbers = np.zeros(self.mesh.devices.shape, np.int64)  # of each device's worker
        for name, size in zip(axes, self.sizes, strict=True):
            numbers = numbers * size + places[name]
        numbers = numbers.reshape(-1)

        def rows(leaf: Any) -> jax.Array:
            array = np.asarray(leaf)
            if array.ndim == 0 or array.shape[0] % workers:
                raise ValueError(
                    f"A batch must have rows for every worker; got an array of shape {array.shape} for {workers} "
                    "workers. Pass the global batch, its rows a multiple of the workers."
                )
            parts = array.reshape(workers, -1, *array.shape[1:])[numbers]
            return jax.make_array_from_callback(parts.shape, self.by_device, lambda index: parts[index])

        return jax.tree.map(rows, batch)


def measure_step(
    bench: Bench, loss_fn: Callable[..., Any], params: Any, batch: Any, optimizer: optax.GradientTransformation | None
) -> tuple[Cost, Any]:
    """Times a step without an exchange: loss, gradient and optimizer, on each worker's rows.

    Args:
      bench: the devices.
      loss_fn: (params, batch) -> the loss, or the loss and more.
      params: the parameters.
      batch: the global batch.
      optimizer: what comes after the exchange; None for none.

    Returns:
      The cost, and the gradients, a row a device.

    Raises:
      ValueError: if the loss is no finite number.
    """
    optimizer = optimizer or optax.identity()

    def loss_of(params: Any, batch: Any) -> jax.Array:
        out = loss_fn(params, batch)
        return out[0] if isinstance(out, tuple) else out

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, _ = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, grads), loss

    rows = bench.shards(batch)
    state = bench.spread((params, optimizer.init(params), jax.tree.map(jnp.zeros_like, params)))
    compiled = bench.compile(step, state, rows, donate=0)
    state, loss = compiled(state, rows)
    losses = np.concatenate([np.asarray(shard.data) for shard in loss.addressable_shards])
    if not np.isfinite(losses).all():
        raise ValueError(
            f"The loss must be a finite number for every worker; got {losses.tolist()}. Look at it with these "
            "parameters and this batch first."
        )
    gradients = state[2]
    gradients = jax.tree.map(jnp.copy, gradients)
    compiled(state, rows)
    state = bench.spread((params, optimizer.init(params), jax.tree.map(jnp.zeros_like, params)))
    seconds = []
    for _ in range(2 + _REPEATS):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, rows))
        seconds.append(time.perf_counter() - begin)
    return cost_of(seconds[2:], bench.mesh), gradients


def measure_coding(bench: Bench, tx: optax.GradientTransformation, gradients: Any, params: Any) -> Cost:
    """Times what a method computes in a step: selecting, coding and decoding, without the wire.

    Args:
      bench: the devices; K is that of its mesh.
      tx: the exchange, or a local method.
      gradients: a row a device.
      params: the parameters, a row a device.
    """
    init = bench.compile(alone(tx.init, bench.sizes, bench.axis_name), params)
    state = init(params)
    period = communication_period(state) or 1
    update = bench.compile(alone(tx.update, bench.sizes, bench.axis_name), gradients, state, params, donate=1)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    restart = jax.jit(partial(_restarted, period=period), donate_argnums=0, out_shardings=places)
    seconds = []
    for _ in range(2 + _REPEATS):
        state = jax.block_until_ready(restart(state))
        begin = time.perf_counter()
        out, state = jax.block_until_ready(update(gradients, state, params))
        seconds.append(time.perf_counter() - begin)
        del out
    return cost_of(seconds[2:], bench.mesh) * (1 / period)


def _restarted(state: Any, period: int) -> Any:
    """Returns a state whose next step selects from a fresh residual, and exchanges."""

    def restarted(node: Any) -> Any:
        if not isinstance(node, ExchangeState):
            return node
        # An array that is added to is not a constant, which would be written in place of what is read.
        residual = jax.tree.map(jnp.zeros_like, node.residual)
        step = node.step if period == 1 else jnp.full_like(node.step, period - 1)
        memory = jax.tree.map(restarted, node.memory, is_leaf=is_exchange_state)
        return node.replace(residual=residual, step=step, memory=memory)

    return jax.tree.map(restarted, state, is_leaf=is_exchange_state)


def state_bytes(tx: optax.GradientTransformation, params: Any, sizes: tuple[int, ...], axis_name: AxisName) -> int:
    """Returns the bytes that a method keeps on each worker."""
    state = jax.eval_shape(alone(tx.init, sizes, axis_name), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def measure_copy(bench: Bench, numbers: int = 1 << 24) -> float:
    """Returns the seconds a byte of copying an array of float32 in memory, on all devices at once."""
    rows = bench.spread(np.zeros(numbers, np.float32))
    copy = bench.compile(lambda x: x + 1, rows)
    jax.block_until_ready(copy(rows))
    seconds = statistics.median(time_calls(lambda: copy(rows), _REPEATS))
    return agreed(seconds, bench.mesh) / (COPY_BYTES * numbers)


@cache
def known_costs() -> dict[str, Any]:
    """Returns the table of costs: of a method the copies of the gradient that its coding takes, `fixed + a_worker * K`.

    `python -m benchmarks.planner --calibrate` measured them.
    """
    return json.loads(resources.files("jaxcomm.planner").joinpath("costs.json").read_text())


def known_accuracy(method: str) -> str:
    """Returns what is known of a method's accuracy, and from which table; a dash if nothing is."""
    return known_costs()["accuracy"].get(method, "-")


def cost_key(method: Exchange) -> str:
    """Returns what the table of costs calls a method: its name, and the type of its values if it has one."""
    value_dtype = getattr(method, "value_dtype", None)
    return method.name if value_dtype is None else f"{method.name}/{value_dtype}"


def modelled_coding(tx: optax.GradientTransformation, params: Any, workers: int, copy: float) -> Cost | None:
    """Reckons what a method computes in a step from the table of costs.

    Args:
      tx: the exchange, or a local method.
      params: the parameters, or their shapes.
      workers: K.
      copy: seconds a byte of copying in memory.

    Returns:
      The cost, half and twice of it as its range; None for a method that the table does not have.
    """
    state = jax.eval_shape(alone(tx.init, workers), params)
    (method,) = [found.method for found in exchange_states(state)]
    inner = getattr(method, "exchange", None)
    if method.period is not None and inner is not None:
        cost = modelled_coding(inner, params, workers, copy)
        return None if cost is None else cost * (1 / method.period)
    found = known_costs()["copies"].get(cost_key(method))
    if found is None or method.where is not None:
        return None
    n = sum(leaf.size for leaf in jax.tree.leaves(params))
    seconds = (found["fixed"] + found["a_worker"] * workers) * n * COPY_BYTES * copy
    return Cost(seconds, seconds / 2, 2 * seconds, measured=False)
