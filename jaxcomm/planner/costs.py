"""The costs of computing: the user's step without an exchange, and each method's selecting and coding."""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.exchange import Exchange, ExchangeState, exchange_states, is_exchange_state
from jaxcomm.methods.powersgd import PowerSgd
from jaxcomm.methods.quant_dp import QuantDp
from jaxcomm.planner.alone import without_wire
from jaxcomm.planner.links import REPEATS, agreed, all_agreed, check_axes, time_calls
from jaxcomm.state import TrainState, communication_period, exchange_turns, make_local
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.engine import worker_step
from jaxcomm.steps.loss import GradientsFn, LossFn
from jaxcomm.types import Params, PyTree

_SHORT = 1.0  # seconds for which more than REPEATS repetitions are timed, up to _MOST
_MOST = 25
_LATE = 1_000_001  # a step so late in a run that nothing is warmed up, refreshed or drained any more
_DEVICES = "devices"  # the one axis of all devices
COPY_BYTES = 8  # bytes that a copy of one float32 moves in memory


@dataclass(frozen=True)
class Cost:
    """Seconds of computing in a step; below 0 for a saving.

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

    def beyond(self, baseline: "Cost") -> "Cost":
        """Returns by how much this cost exceeds another, at least 0."""
        excess = self.plus(baseline * -1)
        return Cost(max(0.0, excess.seconds), max(0.0, excess.low), max(0.0, excess.high), excess.measured)

    def plus(self, addend: "Cost") -> "Cost":
        """Returns the sum; the ranges add up as independent errors."""
        seconds = self.seconds + addend.seconds
        low = seconds - math.hypot(self.seconds - self.low, addend.seconds - addend.low)
        high = seconds + math.hypot(self.high - self.seconds, addend.high - addend.seconds)
        return Cost(seconds, low, high, self.measured and addend.measured)

    def __mul__(self, factor: float) -> "Cost":
        low, high = sorted((self.low * factor, self.high * factor))
        return Cost(self.seconds * factor, low, high, self.measured)


def cost_of(seconds: Sequence[float], mesh: Mesh, is_whole: bool = False) -> Cost:
    """Makes a cost from repeated timings.

    Args:
      seconds: the timings of this process; all processes must have equally many.
      mesh: the devices.
      is_whole: whether a whole step was timed. Then the slowest process of each repetition counts, since all wait for
        it. For a part of a step, the process with the slowest quartiles counts: a step waits once, not once per part.
    """
    if is_whole:
        low, median, high = statistics.quantiles(all_agreed(seconds, mesh), n=4)
    else:
        low, median, high = all_agreed(statistics.quantiles(seconds, n=4), mesh)
    return Cost(median, low, high)


class Bench:
    """Runs programs without communication on all devices of a mesh at once.

    So workers that share cores or memory slow one another down, as in training.
    """

    def __init__(self, mesh: Mesh, axis_name: AxisName, workers: int | None = None):
        """Takes K from the mesh, or as `workers`, to time a method's coding for another K."""
        self.mesh, self.axis_name = mesh, axis_name
        check_axes(mesh, axis_name)
        self.sizes = tuple(mesh.shape[name] for name in axis_names(axis_name)) if workers is None else (workers,)
        self.devices = Mesh(mesh.devices.reshape(-1), (_DEVICES,))
        self.by_device = NamedSharding(self.devices, P(_DEVICES))

    def lower(self, function: Callable[..., Any], *args: Any, donate: int | None = None) -> Any:
        """Lowers a function of one device for all devices; arguments and results have one row per device."""

        def on_rows(*rows: Any) -> Any:
            out = function(*jax.tree.map(lambda row: row[0], rows))
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], out)

        spread = jax.shard_map(on_rows, mesh=self.devices, in_specs=P(_DEVICES), out_specs=P(_DEVICES), check_vma=False)
        # Explicit, since XLA replicates empty arrays, such as the residual when all tensors are sent dense.
        out = self.by_device
        return jax.jit(spread, out_shardings=out, donate_argnums=() if donate is None else donate).lower(*args)

    def spread(self, tree: PyTree) -> PyTree:
        """Gives every device a copy, as its row."""

        def rows(leaf: PyTree) -> jax.Array:
            array = np.asarray(leaf)
            shape = (self.devices.size, *array.shape)
            return jax.make_array_from_callback(shape, self.by_device, lambda _: array[None])

        return jax.tree.map(rows, tree)

    def shards(self, batch: Batch) -> Batch:
        """Gives every device its worker's rows of a global batch, and what is replicated.

        Call `check_loss` first.
        """
        by_worker = NamedSharding(self.mesh, P(self.axis_name))
        place_of = {device.id: place for place, device in enumerate(self.devices.devices.flat)}

        def rows(leaf: PyTree) -> jax.Array:
            shards = jax.device_put(leaf, by_worker).addressable_shards
            parts = [shard.data[None] for shard in sorted(shards, key=lambda shard: place_of[shard.device.id])]
            shape = (len(place_of), *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self.by_device, parts)

        def copies(leaf: PyTree) -> jax.Array:
            return jax.device_put(jnp.broadcast_to(leaf, (len(place_of), *jnp.shape(leaf))), self.by_device)

        return replace(batch, rows=list(map(rows, batch.rows)), replicated=list(map(copies, batch.replicated)))


def check_loss(loss_fn: LossFn, params: Params, batch: Batch, workers: int) -> None:
    """Refuses, from shapes alone, a loss that fails on one worker's rows.

    Args:
      loss_fn: a loss from `loss_of`.
      params: the parameters.
      batch: a global batch, which divides by K.
      workers: K.

    Raises:
      ValueError: with the error of the loss.
    """

    def rows(leaf: PyTree) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((leaf.shape[0] // workers, *leaf.shape[1:]), leaf.dtype)

    like = replace(batch, rows=list(map(rows, map(jax.typeof, batch.rows))))
    try:
        jax.eval_shape(jax.value_and_grad(loss_fn, has_aux=True), params, (), like)
    except Exception as error:
        raise ValueError(
            "The loss must have a gradient on one worker's rows, outside of any axis; got "
            f"{type(error).__name__}: {error}. Call jax.grad(loss_fn)(params, batch) with these first."
        ) from error


def gradients_of(bench: Bench, loss_fn: LossFn, params: Params, rows: PyTree) -> tuple[Any, int]:
    """Returns each worker's gradients, one row per device, and the bytes of memory to compute them.

    The bytes are those of the compiled program's arguments (parameters and rows of the batch) and temporaries, without
    the gradients; 0 if XLA does not report them.

    Args:
      bench: the devices.
      loss_fn: a loss from `loss_of`.
      params: the parameters, one row per device.
      rows: the workers' rows, from `bench.shards`.

    Raises:
      ValueError: if the loss is not finite.
    """
    gradient = bench.lower(
        lambda params, batch: jax.value_and_grad(loss_fn, has_aux=True)(params, (), batch), params, rows
    ).compile()
    (loss, _), gradients = gradient(params, rows)
    losses = np.concatenate([np.asarray(shard.data) for shard in loss.addressable_shards])
    if not np.isfinite(losses).all():
        raise ValueError(
            f"The loss must be a finite number for every worker; got {losses.tolist()}. Look at it with these "
            "parameters and this batch first."
        )
    memory = gradient.memory_analysis()
    return gradients, 0 if memory is None else memory.argument_size_in_bytes + memory.temp_size_in_bytes


class Timing:
    """Times a usual step on every device: lowers it at once, compiles and runs it on demand."""

    def __init__(
        self,
        bench: Bench,
        start: Callable[..., Any],
        step: Callable[..., Any],
        params: Params,
        args: tuple[Any, ...],
        is_whole: bool,
    ):
        """Lowers three programs: one makes a state, one takes a step, one sets the state's step number.

        Args:
          bench: the devices, and K.
          start: params -> the first state of a worker.
          step: (state, *args) -> the new state.
          params: the parameters, one row per device.
          args: further arguments of the step, one row per device.
          is_whole: whether it is a whole step, see `cost_of`.
        """
        self._bench, self._params, self._args, self._is_whole = bench, params, args, is_whole
        initial = bench.lower(without_wire(start, bench.sizes, bench.axis_name), params)
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=bench.by_device), initial.out_info
        )
        stepped = bench.lower(without_wire(step, bench.sizes, bench.axis_name), state, *args, donate=0)
        restarted = bench.lower(_restarted, state, bench.spread(np.int32(0)), donate=0)
        self._lowered = (initial, stepped, restarted)

    @cached_property
    def _programs(self) -> list[Any]:
        return [lowered.compile() for lowered in self._lowered]

    def cost(self) -> Cost:
        """Times a usual step; for a local method, the average over its periods. The first call compiles."""
        start, step, restart = self._programs
        state = start(self._params)

        def time_steps(state: PyTree, number: int) -> tuple[Any, Cost]:
            seconds, start_time = [], time.perf_counter()
            for count in range(2 + _MOST):
                at = self._bench.spread(np.int32(count if count < 2 else number))
                state = jax.block_until_ready(restart(state, at))
                # Also a barrier: workers that share cores compute at the same time in training.
                elapsed = agreed(time.perf_counter() - start_time, self._bench.mesh)
                if count >= 2 + REPEATS and elapsed > _SHORT:
                    break
                begin = time.perf_counter()
                state = jax.block_until_ready(step(state, *self._args))
                seconds.append(time.perf_counter() - begin)
            return state, cost_of(seconds[2:], self._bench.mesh, self._is_whole)

        period, turns = communication_period(state) or 1, exchange_turns(state)
        late = _LATE // (period * turns) * period * turns
        state, total = time_steps(state, late + period - 1)
        for turn in range(2, turns + 1):
            state, exchange = time_steps(state, late + turn * period - 1)
            total = total.plus(exchange)
        if period > 1:
            _, quiet = time_steps(state, late)
            total = total.plus(quiet * ((period - 1) * turns))
        return total * (1 / (period * turns))


def lower_step(
    bench: Bench, gradients_fn: GradientsFn, tx: optax.GradientTransformation, params: Params, rows: PyTree
) -> Timing:
    """Prepares to time a whole train step without collectives: loss, gradient, exchange, optimizer, check for a skip.

    Args:
      bench: the devices, and K.
      gradients_fn: the gradients function of `worker_step`; `given_gradients` for a step without loss and gradient.
      tx: the whole chain.
      params: the parameters, one row per device.
      rows: the workers' rows, from `bench.shards`.
    """

    def start(params: Params) -> TrainState:
        return make_local(TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), ()), bench.axis_name)

    def step(state: TrainState, batch: PyTree) -> TrainState:
        return worker_step(gradients_fn, tx, bench.axis_name, state, batch)[0]

    return Timing(bench, start, step, params, (rows,), is_whole=True)


def given_gradients(params: Params, model_state: PyTree, batch: PyTree) -> Any:
    """Returns the batch as the gradient, in the form that `worker_step` takes."""
    del params
    return (jnp.zeros(()), ({}, model_state)), batch


def lower_coding(bench: Bench, tx: optax.GradientTransformation, gradients: PyTree, params: Params) -> Timing:
    """Prepares to time an exchange without its collectives: selecting, coding and decoding.

    Args:
      bench: the devices, and K.
      tx: the exchange.
      gradients: the gradients, one row per device.
      params: the parameters, one row per device.
    """

    def step(state: PyTree, gradients: PyTree, params: Params) -> Any:
        means, state = tx.update(gradients, state[1], params)
        return means, state

    return Timing(bench, lambda params: (params, tx.init(params)), step, params, (gradients, params), is_whole=False)


def _restarted(state: PyTree, step: jax.Array) -> Any:
    """Returns a state with the residual zero and another step number."""

    def restarted(node: PyTree) -> Any:
        if not isinstance(node, ExchangeState):
            return node
        residual = jax.tree.map(jnp.zeros_like, node.residual)
        memory, others = jax.tree.map(restarted, (node.memory, node.others), is_leaf=is_exchange_state)
        return node.replace(residual=residual, step=jnp.full_like(node.step, step), memory=memory, others=others)

    return jax.tree.map(restarted, state, is_leaf=is_exchange_state)


def state_bytes(tx: optax.GradientTransformation, params: Params, sizes: tuple[int, ...], axis_name: AxisName) -> int:
    """Returns the bytes that a method keeps on each worker."""
    state = jax.eval_shape(without_wire(tx.init, sizes, axis_name), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def time_program(bench: Bench, function: Callable[..., Any], rows: PyTree) -> Cost:
    """Times a function without state on all devices at once; `rows` are its arguments, one row per device."""
    compiled = bench.lower(function, *rows).compile()
    jax.block_until_ready(compiled(*rows))
    return cost_of(time_calls(lambda: compiled(*rows), bench.mesh), bench.mesh)


def measure_copy(bench: Bench, numbers: int = 1 << 24) -> float:
    """Measures the seconds per byte of a copy of a float32 array in memory, on all devices at once."""
    rows = bench.spread(np.zeros(numbers, np.float32))
    return time_program(bench, lambda x: x + 1, (rows,)).seconds / (COPY_BYTES * numbers)


@cache
def known_costs() -> dict[str, Any]:
    """Returns the table of costs: a method's coding time, in copies of the gradient, is `fixed + a_worker * K`.

    Where a method has a size (`size_of`), that is of the size `at`. Of a larger one, `fixed` and `a_worker` are more by
    `fixed_a_unit` and `a_worker_a_unit` for each unit above.

    `python -m benchmarks.planner --calibrate` measured it.
    """
    return json.loads(resources.files("jaxcomm.planner").joinpath("costs.json").read_text())


class Accuracy(NamedTuple):
    """What was measured of a method's accuracy, against dense in the same number of steps.

    Attributes:
      change: points of accuracy above dense, or nats of loss above dense.
      low, high: the ends of its 95% interval.
      unit: "points" or "nats".
      on: the model and the data.
    """

    change: float
    low: float
    high: float
    unit: str
    on: str

    def __str__(self) -> str:
        return f"{self.change:+.2f} {self.unit} (95%: {self.low:+.2f} to {self.high:+.2f}), {self.on}"

    @property
    def loss(self) -> float | None:
        """The nats that it loses at least, 0 if it cannot be told from dense; None if points were measured."""
        return max(0.0, self.low) if self.unit == "nats" else None


def known_accuracy(method: str) -> Accuracy | None:
    """Returns what the table has about a method's accuracy."""
    known = known_costs()["accuracy"].get(method)
    return known and Accuracy(**known)


def cost_key(method: Exchange, workers: int) -> str:
    """Returns a method's key in the table of costs: its name and, if it has variants, how its values travel.

    A variant is the type of the values or, for a method that chooses its collective by K, the collective.
    """
    way = method.way(workers) if isinstance(method, QuantDp) else getattr(method, "value_dtype", None)
    return method.name if way is None else f"{method.name}/{way}"


def size_of(method: Exchange) -> float | None:
    """Returns what coding grows by: the rank, or the percentage of coordinates that is sent; None without either."""
    if isinstance(method, PowerSgd):
        return method.rank
    sparsity = getattr(method, "sparsity", None)
    return None if sparsity is None else 100 * (1 - float(sparsity))


def method_of(tx: optax.GradientTransformation, params: Params) -> Exchange:
    """Returns the method of an exchange of gradients, or of a local exchange.

    Args:
      tx: a transformation with exactly one exchange.
      params: the parameters, or their shapes.
    """
    (method,) = [exchange.method for exchange in exchange_states(jax.eval_shape(tx.init, params))]
    return method


def modelled_coding(tx: optax.GradientTransformation, params: Params, workers: int, copy: float) -> Cost | None:
    """Estimates the coding time of a method in a step from the table of costs.

    Args:
      tx: the exchange, or a local method.
      params: the parameters, or their shapes.
      workers: K.
      copy: seconds per byte of a copy in memory.

    Returns:
      The cost, with a range from half of it to twice; None for a method that is not in the table, or has `others=`.
    """
    method = method_of(tx, params)
    inner = getattr(method, "exchange", None)
    if method.period is not None and inner is not None:
        cost = modelled_coding(inner, params, workers, copy)
        return None if cost is None else cost * (1 / (method.period * method.turns))
    coefficients = known_costs()["copies"].get(cost_key(method, workers))
    if coefficients is None or method.others is not None:
        return None
    leaves = jax.tree_util.tree_leaves_with_path(params)
    n = sum(leaf.size for path, leaf in leaves if method.chooses(path, leaf))
    units = (size_of(method) or 0.0) - coefficients["at"] if "at" in coefficients else 0.0
    fixed, a_worker = (
        max(0.0, coefficients[name] + coefficients.get(f"{name}_a_unit", 0.0) * units) for name in ("fixed", "a_worker")
    )
    seconds = (fixed + a_worker * workers) * n * COPY_BYTES * copy
    return Cost(seconds, seconds / 2, 2 * seconds, measured=False)
