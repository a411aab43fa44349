"""The train step for every kind of parallelism, and its simulation."""

from typing import Any, Unpack

import jax
import optax
from jax.sharding import Mesh

from jaxcomm.checks import check_range
from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.exchange import axis_name_of
from jaxcomm.steps.engine import WorkerUpdate
from jaxcomm.steps.gradients import ByCompiler, ByWorkers
from jaxcomm.steps.lookups import Lookups
from jaxcomm.steps.loss import LossFn, gradients_of, in_turns
from jaxcomm.steps.overlap import HostOverlap
from jaxcomm.steps.pipeline.pipeline import Pipeline
from jaxcomm.steps.pipeline.step import pipeline_step
from jaxcomm.steps.settings import StepOptions, StepSettings
from jaxcomm.steps.sharded import Sharded, ShardedUpdate
from jaxcomm.steps.step import TrainStep
from jaxcomm.steps.workers import Replicated, Simulated
from jaxcomm.types import PyTree


def make_train_step(
    loss_fn: LossFn | Pipeline,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    specs: PyTree = None,
    auto: tuple[str, ...] = (),
    lookups: Lookups | None = None,
    has_aux: bool = False,
    has_state: bool = False,
    sum: str | None = None,
    max: str | None = None,
    accumulate: int = 1,
    batch_axis: PyTree = 0,
    rng: jax.Array | None = None,
    axis_name: AxisName | None = None,
    donate: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> TrainStep:
    """Makes a train step whose gradients are exchanged by `tx`.

    Every worker differentiates the loss of its own rows of the batch with respect to its own copy of the parameters (no
    reduction is inserted), `tx` exchanges the gradients and makes the update, and all workers apply it. If the exchange
    was skipped (a gradient is not finite on some worker), parameters and optimizer state stay as they were, except the
    exchange's own counts.

    Integers, booleans and keys among the parameters have no gradients, and stay as they are. A chain that takes more
    than gradients gets the mean loss as `value`; see `chain` for line searches.

    With a local method (`slim_dp`, `local_sgd`, `plump_dp(p=...)`) every worker has its own parameters and optimizer
    state. A worker whose gradient is not finite, or has a number of 2^90 or more, leaves both as they were.
    `step.params(state)` is the model. With `specs`, the local optimizer sees its worker's whole tensors, and the
    exchange sees shards.

    A model with running statistics (batch normalisation) keeps them in `state.model_state`. In every step, also with
    local methods, each worker computes new statistics from its own rows, and all continue from their mean. They stay as
    they were if the step is skipped; with a local method, a worker whose gradient is not finite contributes its old
    ones.

    **Sharded parameters.** With `specs`, a parameter's PartitionSpec says how its gradient is treated:

    - P(): data-parallel. Each worker's own gradient, exchanged by `tx` over `axis_name`.
    - with `axis_name` in it, P(None, "data"): model-parallel over the workers themselves, as `split_dense` takes it.
      The gradient is already reduced, to that of the mean over all rows. It bypasses the exchange, and goes through the
      rest of the chain.
    - with other axes, P(None, "model"): model-parallel over other devices. Each worker's gradient, exchanged shard by
      shard over `axis_name` alone.

    The exchange, and what comes before it in the chain, work on shards: thresholds, ranks and capacities belong to a
    device's shard of a tensor. What comes after it sees whole arrays, as under plain `jax.jit`: a global norm is over
    all parameters. So, with `plump_dp`, a step equals that of one device with all rows, momentum and weight decay
    included, to float rounding. `tx` is one exchange, or a `jaxcomm.chain`.

    The loss runs in a region that is manual over all mesh axes except those in `auto`: it gets a worker's own rows and
    a device's own shards, and its code does all communication between the devices. Along an axis in `auto`, it gets
    whole tensors, is written as for one device, and XLA partitions it; gradients are not gathered. On a mesh whose axes
    are all of type Explicit, the loss gets all rows and whole tensors, whose types carry their sharding; there, JAX
    refuses convolutions, and a bias that is added without a reshard. The guide has an example for each ("When the model
    is split"). Nothing is left for the user to scale.

    **Tables of which a batch touches few rows.** The gradient of a sharded table is a dense array of the shard's size,
    and so is its update. With `lookups`, the step itself looks up rows of tables with spec P("data") (rows) or P(None,
    "data") (columns): in place of the table, the loss gets the vectors (B/K, ..., D) of its ids. The optimizer's update
    of each vector is added to its row, on the worker that holds it; no other row is read or written. That equals the
    dense update for an optimizer whose update of a row is a sum over its gradients: SGD with any learning rate, without
    momentum and decay. Others are refused.

    **Stages.** With a `Pipeline` in place of the loss, each device of the mesh holds the parameters and the optimizer
    state of one stage. In one compiled program, the micro-batches go forward and backward through the stages; then the
    workers of each stage exchange that stage's gradients. `tx` sees stacked stage parameters, see `StackedParams`. What
    a method counts by tensor is counted from the stage's own tensor; ranks and layer-wise norms are per stacked tensor,
    and a norm over all parameters is per stage. If a gradient is not finite in any stage of any worker, all skip.

    Args:
      loss_fn: (params, batch) -> the mean loss of the rows given, a scalar; or (loss, dict of scalars) with `has_aux`;
        or (params, model_state, batch) -> (loss, (dict of scalars, new model_state)) with `has_state`. Or a `Pipeline`.
      tx: a chain with one exchange of this library in it.
      mesh: a mesh with the axis of workers.
      specs: the PartitionSpec or NamedSharding of every parameter, in a tree like theirs or a prefix of it. None if
        every worker holds the whole model. On a mesh with other axes, None is for parameters that are already sharded
        over these axes, and a loss that is written for one device: parameters keep the sharding of those that `init` or
        `shapes` gets first, and the other axes are left to XLA.
      auto: axes that are left to XLA, with `specs`.
      lookups: by path ("embeddings/table"), (batch) -> ids int32, for tables whose rows the step looks up.
      has_aux: whether `loss_fn` also returns a dict of scalars of each worker's own rows; floats are averaged over the
        workers, unless `sum` or `max` name them.
      has_state: whether `loss_fn` takes and returns `state.model_state` (which `init` is given). It then also returns a
        dict of scalars, which may be empty, whatever `has_aux` says. The new state has the structure, shapes and types
        of the old.
      sum: a regular expression of the names of scalars that are sums over rows (right answers, counts): the metric is
        the sum over all workers and micro-batches, as float32. If it finds "loss", the loss is a sum over rows, and so
        is its gradient.
      max: the same for maxima; each is an all-reduce. Not with a `Pipeline`.
      accumulate: micro-batches that a worker takes one after another, with one exchange of their mean gradient, and
        memory for the activations of one. Each starts with the model state left by the previous one.
      batch_axis: the axis of a batch's arrays that has the rows; or a tree of axes, a prefix of the batch, with None
        for what is replicated: {"tokens": 1, "label": 0, "class_weights": None}.
      rng: a random key, folded with the step, the micro-batch and the worker, for a `loss_fn` that takes a key after
        the batch. On a mesh of Explicit axes, where a loss has all rows, not with the worker.
      axis_name: the axis of workers, or the axes, outermost first; None for that of the exchange in `tx` if it is known
        (for a `jaxcomm.chain` or an exchange alone), else "data".
      donate: reuse the state's buffers for the new state. The old state cannot be read afterwards.
      compiler_options: XLA's options by name, as in `jax.jit`, for every compilation of the step, to run or to verify
        it. XLA refuses names that it does not know.

    Returns:
      A `TrainStep`: state = step.init(params); state, metrics = step(state, batch). All arrays of the batch have the
      same number of rows along `batch_axis`, a multiple of K (times the micro-batches); scalars in it, such as a key of
      `jax.random.key`, are replicated. With several processes they are global arrays. Metrics, replicated: loss, the
      scalars of `loss_fn`, and those of the exchange (see `ExchangeMetrics`). On the wire: what `tx` costs, and one
      all-reduce of 4 bytes per scalar and per number of the model state; with `specs` also what the loss moves, and an
      all-reduce of 16 bytes; with stages also the boundaries, and two all-reduces over the stages, of 4 bytes and of 4
      bytes per metric.

      With a local method, or a `chain` with accumulate=, a step that does not exchange sends nothing between workers.
      The loss and the scalars are then those of this process's workers (of all processes by
      `jax.experimental.multihost_utils.process_allgather`). With a local method `step.model_state(state)` is the mean
      over the workers; with accumulate= a model's state is averaged in every step.

    Raises:
      ValueError: if the mesh lacks an axis, or has others over which no parameter is sharded; for specs that do not fit
        the parameters or the mesh; for lookups of anything but a sharded table, or with an optimizer whose updates of a
        row do not add up; for a process's own arrays in a batch, where there are several processes; at trace time, if
        the batch does not divide, or its arrays have different numbers of rows; for a loss or a scalar that is a sum
        over rows, or an extreme of them, and is not named so (for a quotient of sums over a worker's rows it warns);
        for a model state that `loss_fn` does not take, returns in another shape, or that is not of floats; for a loss
        that differs along other axes; and if the loss uses a parameter whose gradient bypasses the exchange other than
        by `late_multiply` or `layers.late_lookup`.
    """
    settings = StepSettings(
        axis_name=axis_name_of(tx) if axis_name is None else axis_name,
        has_aux=has_aux,
        has_state=has_state,
        sum=sum,
        max=max,
        accumulate=accumulate,
        batch_axis=batch_axis,
        rng=rng,
        donate=donate,
        compiler_options=compiler_options,
    )
    if isinstance(loss_fn, Pipeline):
        if specs is not None or auto or lookups or has_aux or has_state or accumulate != 1 or rng is not None:
            raise ValueError(
                "specs, auto, lookups, has_aux, has_state, accumulate and rng must not be given with a Pipeline, which "
                "has its own; got some of them. Pass micro_batches= and the rest to the Pipeline."
            )
        rule = "None with a Pipeline, which adds up its micro-batches"
        check_range("max", max, rule, max is None, "Return a mean, or a sum for sum=")
        rule = "0 with a Pipeline, whose micro-batches are rows of every array"
        remedy = "Put the rows first, and repeat for every row what has none"
        check_range("batch_axis", batch_axis, rule, batch_axis == 0, remedy)
        return pipeline_step(loss_fn, tx, mesh, settings)
    if lookups and specs is None:
        raise ValueError("lookups must go with specs=, which say how the tables are sharded; got no specs=. Give both.")
    if auto and specs is None:
        raise ValueError(f"auto must go with specs=, which say how parameters are sharded along it; got auto={auto}.")
    workers = axis_names(settings.axis_name)
    extra_axes = tuple(name for name, size in mesh.shape.items() if name not in workers and size > 1)
    if specs is None and not (extra_axes and set(workers) <= mesh.shape.keys()):
        return _replicated_step(loss_fn, Replicated(tx, mesh, settings.axis_name), settings)
    auto = extra_axes if specs is None else tuple(auto)
    return _sharded_step(loss_fn, Sharded(tx, mesh, specs, auto, settings.axis_name, lookups), settings)


def simulate(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    workers: int | tuple[int, ...],
    *,
    axis_name: AxisName | None = None,
    **options: Unpack[StepOptions],
) -> TrainStep:
    """Makes the step of `make_train_step` for K workers that share one device, under `jax.vmap`.

    The same arguments, results and errors; nothing crosses a wire.

    Args:
      loss_fn: as in `make_train_step`.
      tx: as in `make_train_step`.
      workers: K, any number (96, say), or one number per axis. Memory grows with K; the decoded mean is held once.
      axis_name: as in `make_train_step`.
      **options: has_aux, has_state, sum, max, accumulate, batch_axis, rng and donate, as in `make_train_step`.
    """
    axis_name = axis_name_of(tx) if axis_name is None else axis_name
    return _replicated_step(loss_fn, Simulated(tx, workers, axis_name), StepSettings(axis_name=axis_name, **options))


def _replicated_step(loss_fn: LossFn, placement: Replicated | Simulated, settings: StepSettings) -> TrainStep:
    """Every worker has the whole model, and takes its whole step."""
    loss, mesh = settings.loss(loss_fn), placement.mesh
    gradients_fn = in_turns(gradients_of(loss, settings.axis_name), settings.kinds, settings.axis_name)
    overlap = None if mesh is None else HostOverlap(gradients_fn, placement.tx, mesh, settings)
    return TrainStep(placement, WorkerUpdate(placement, gradients_fn, loss, settings.kinds, overlap), settings)


def _sharded_step(loss_fn: LossFn, placement: Sharded, settings: StepSettings) -> TrainStep:
    """Every worker has shards of the model on its devices, or shares them with the others."""
    count, rule = settings.accumulate, "1 on a mesh of Explicit axes, where a loss gets all rows"
    remedy = "Make the mesh with jaxcomm.make_mesh, or jax.make_mesh(..., axis_types=(AxisType.Auto, ...))"
    check_range("accumulate", count, rule, count <= 1 or not placement.is_explicit, remedy)
    rule = "1 with lookups, which take the rows of a whole batch"
    check_range("accumulate", count, rule, count <= 1 or not placement.lookups, "Leave one of them out")
    loss = settings.loss(loss_fn, tuple(placement.lookups))
    if placement.is_explicit:
        gradients = ByCompiler(loss, placement.mesh)
    else:
        gradients = ByWorkers(loss, settings.kinds, placement.manual)
    return TrainStep(placement, ShardedUpdate(placement, gradients, settings), settings)
