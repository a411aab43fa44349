"""What a run compiles: the train step, the evaluation, and the state that it starts with."""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from configs.experiment import Experiment
from configs.methods import Method
from models.beam_search import beam_search
from models.functional import Graph, apply, cut, merge, split
from models.late_linear import LateLinear
from models.split_linear import SplitLinear
from train.architectures import choose_cuts, make_model, with_bottlenecks
from train.data import DatasetInfo, TranslationInfo, dataset_info
from train.dense_layers import multiply_late, shards_of, with_dense
from train.embeddings import is_exchanged, lookup_traffic, lookups_of, shards_of_table, with_embeddings
from train.methods import make_chain
from train.plans import Planned, check_plan
from train.tasks import Task, make_task

OTHER_BYTES = 512  # that a step may receive in addition to its exchange: losses, metrics and counts
Model = tuple[Any, Any]  # parameters and running statistics, both by block


@dataclass(frozen=True)
class Job:
    """The compiled functions of a run; runs that differ only in their seeds share them.

    Attributes:
      info: of the dataset.
      task: loss and scores.
      mesh: of the workers, and of the stages of each.
      axis: the axis of workers, or the axes.
      by_rows: the sharding of a batch, by its rows.
      start: seed -> the fresh state, on the mesh.
      step: (state, batch) -> (state, metrics).
      inputs: the shapes of the state and of a batch, with their shardings: what the step is compiled for.
      verify: (state, batch) -> a line that gives the predicted bytes; raises if the compiled step has others.
      model: state -> the model to evaluate, replicated unless it must be sharded to fit.
      evaluate: (model, batch with a mask) -> the values of every row that scores are computed from, and the mask.
      translate: (model, source) -> the best translation of every row, (B, T - 1); None for other data.
      report: bytes of a step, losses and metrics included; for a pipeline, the average over its devices.
      dense: bytes that a device would receive in a step with uncompressed gradients and activations.
      late: which dense layers multiply late, and why; None if that was not asked for.
    """

    info: DatasetInfo
    task: Task
    mesh: Mesh
    axis: str | tuple[str, ...]
    by_rows: NamedSharding
    start: Callable[[int], jc.state.TrainState]
    step: jc.steps.TrainStep
    inputs: tuple[jc.state.TrainState, dict[str, jax.ShapeDtypeStruct]]
    verify: Callable[[jc.state.TrainState, Any], str]
    model: Callable[[jc.state.TrainState], Model]
    evaluate: Callable[[Model, Any], dict[str, jax.Array]]
    translate: Callable[[Model, Any], jax.Array] | None
    report: jc.accounting.WireReport
    dense: float
    late: jc.planner.LatePlan | None


def make_job(
    experiment: Experiment,
    method: Method,
    info: DatasetInfo | None = None,
    devices: Sequence[Any] | None = None,
    late: Collection[str] | None = None,
) -> Job:
    """Makes the model, the optimizer and the functions of a run; `experiment.seed` is used only to trace shapes.

    A benchmark may pass the `info` of a dataset that is not there, and the `devices` of the mesh, which may be mere
    descriptions. A run that goes on passes the paths of the layers that multiply `late`.
    """
    info = info or dataset_info(experiment.dataset, experiment.data_dir)
    task = make_task(info, experiment.label_smoothing)
    experiment = with_bottlenecks(experiment, info)
    model_parts = split(_abstract(experiment, info))
    check_plan(method, experiment, model_parts.params)
    axes = {"slice": experiment.slices, "data": experiment.workers // experiment.slices, "stage": experiment.stages}
    axes |= {"model": experiment.model_parallel, "fsdp": experiment.fsdp}
    axes = {name: size for name, size in axes.items() if size > 1 or name == "data"}
    mesh = jc.make_mesh(**axes) if devices is None else Mesh(np.reshape(devices, tuple(axes.values())), tuple(axes))
    axis = ("slice", "data") if experiment.slices > 1 else "data"
    has_shards = experiment.dense_layers == "split" or experiment.embeddings in ("columns", "rows")
    is_sharded = has_shards or experiment.model_parallel * experiment.fsdp > 1
    make = _pipeline if experiment.stages > 1 else _sharded if is_sharded else partial(_data_parallel, late=late)
    everywhere, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(axis))
    if experiment.fsdp > 1:
        by_rows = NamedSharding(mesh, P(tuple(name for name in ("slice", "data", "fsdp") if name in mesh.shape)))
    batch = {
        name: jax.ShapeDtypeStruct((experiment.global_batch, *shape), dtype, sharding=by_rows)
        for name, (shape, dtype) in (info.row_types() | {"seed": ((), np.dtype(np.uint32))}).items()
    }
    trained = replace(experiment, architecture=with_embeddings(experiment))
    parts = make(trained, method, info, task, mesh, axis, batch)
    step, init = parts.step, parts.init or parts.step.init
    shapes = step.shapes(*jax.eval_shape(lambda: parts.first(experiment.seed)))  # traced once for these and the arrays
    report = jc.accounting.step_report(step, shapes, batch, params=model_parts.params, workers=experiment.workers)

    def verify(state: jc.state.TrainState, batch: Any) -> str:
        step.verify(state, batch, beside=parts.beside, other_bytes=OTHER_BYTES)
        return f"{report.received:,.0f} bytes a step predicted; the compiled program sends them, and no more."

    def model(state: jc.state.TrainState) -> Model:
        return parts.whole(step.params(state)), parts.whole(step.model_state(state))

    return Job(
        info=info,
        task=task,
        mesh=mesh,
        axis=axis,
        by_rows=by_rows,
        start=lambda seed: init(*parts.first(seed)),
        step=step,
        inputs=(shapes, batch),
        verify=verify,
        # Of a local method and of a pipeline, no single device holds the whole model: it is put together on every
        # device. What must be sharded to fit stays sharded.
        model=jax.jit(model, out_shardings=parts.places or everywhere),
        evaluate=jax.jit(partial(_evaluate, task, model_parts.graph), out_shardings=everywhere),
        translate=_translator(experiment, info, model_parts.graph, everywhere),
        report=report,
        dense=report.dense if parts.dense is None else parts.dense,
        late=parts.late,
    )


class _Parts(NamedTuple):
    """What differs between meshes.

    `first` makes the parameters and running statistics of a seed, as the step's `init` takes them, and `whole` merges
    those of the stages. `dense` is None if the report has it, and `late` if no layer multiplies late. `beside` is the
    traffic of late layers and lookups, and `places` has the shardings of the model to evaluate, or is None if it is
    replicated.
    """

    step: jc.steps.TrainStep
    first: Callable[[int], tuple[Any, Any]]
    whole: Callable[[Any], Any] = lambda part: part
    init: Callable[..., jc.state.TrainState] | None = None
    dense: float | None = None
    late: jc.planner.LatePlan | None = None
    beside: Sequence[jc.accounting.Traffic] = ()
    places: Any = None


def _data_parallel(
    experiment: Experiment,
    method: Method,
    info: DatasetInfo,
    task: Task,
    mesh: Mesh,
    axis: Any,
    batch: Any,
    *,
    late: Collection[str] | None,
) -> _Parts:
    """Workers that each hold the whole model."""
    del batch
    plan, where, extra_traffic = None, None, ()
    model = _abstract(experiment, info, LateLinear if experiment.dense_layers == "late" else None)
    if experiment.dense_layers == "late":
        plan = multiply_late(model, experiment, method, late)
        where, extra_traffic = None if isinstance(method, Planned) else plan.exchanges, plan.traffic
    elif experiment.embeddings == "late":
        where, extra_traffic = is_exchanged, (lookup_traffic(model, experiment),)
    tx = make_chain(experiment, method, where)
    loss_fn = _loss_of(experiment, task, split(model).graph)
    step = jc.make_train_step(loss_fn, tx, mesh, has_state=True, axis_name=axis)
    return _Parts(step, partial(_first, experiment, info), init=jax.jit(step.init), late=plan, beside=extra_traffic)


def _sharded(
    experiment: Experiment, method: Method, info: DatasetInfo, task: Task, mesh: Mesh, axis: Any, batch: Any
) -> _Parts:
    """Workers that each hold a shard of the dense layers or of the tables, or that are several devices each."""
    del batch
    is_split = experiment.dense_layers == "split"
    tx, model = make_chain(experiment, method), _abstract(experiment, info, SplitLinear if is_split else None)
    model_parts = split(model)
    loss_fn = _loss_of(experiment, task, model_parts.graph)

    if experiment.embeddings != "exchange":
        specs = shards_of_table(model, model_parts.params, experiment.workers)
    else:
        specs = shards_of(model) if is_split else jax.tree.map(partial(_spec_of, experiment), model_parts.params)
    auto = tuple(name for name in ("fsdp", "model") if mesh.shape.get(name, 1) > 1)
    step = jc.make_train_step(
        loss_fn,
        tx,
        mesh,
        specs=specs,
        auto=auto,
        lookups=lookups_of(model, model_parts.params, experiment),
        has_state=True,
        axis_name=axis,
    )
    dense = None
    if auto:  # the bytes that a device would receive for its shards
        pairs = zip(jax.tree.leaves(model_parts.params), jax.tree.leaves(specs), strict=True)
        shard_size = sum(math.prod(NamedSharding(mesh, spec).shard_shape(leaf.shape)) for leaf, spec in pairs)
        dense = float(jc.accounting.Traffic("all_reduce", 4 * shard_size, experiment.workers).received)
    places, draw = None, partial(_first, experiment, info)
    if experiment.embeddings != "exchange" or experiment.fsdp > 1:  # one device, or one host, may be too small
        everywhere = jax.tree.map(lambda _: P(), model_parts.stats)
        places = jax.tree.map(partial(NamedSharding, mesh), (specs, everywhere), is_leaf=lambda x: isinstance(x, P))
        draw = draw_where(places, experiment, info)

    return _Parts(step, lambda seed: draw(jax.random.key(seed)), dense=dense, places=places)


def _spec_of(experiment: Experiment, leaf: Any) -> P:
    """Returns the PartitionSpec of a parameter if a worker is several devices.

    The outputs of a matrix are sharded over "model", and the largest other dimension of a parameter with at least two
    over "fsdp", where the axis divides them.
    """
    entries: list[str | None] = [None] * leaf.ndim
    if leaf.ndim == 2 and experiment.model_parallel > 1 and leaf.shape[1] % experiment.model_parallel == 0:
        entries[1] = "model"
    free = [i for i, size in enumerate(leaf.shape) if entries[i] is None and size % experiment.fsdp == 0]
    if leaf.ndim > 1 and experiment.fsdp > 1 and free:
        entries[max(free, key=lambda i: leaf.shape[i])] = "fsdp"
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def draw_where(places: Any, experiment: Experiment, info: DatasetInfo) -> Callable[[jax.Array], Model]:
    """Returns (key) -> the first parameters and running statistics; no device or host ever has a whole sharded one."""
    return jax.jit(partial(_first, experiment, info), out_shardings=places)


def _first(experiment: Experiment, info: DatasetInfo, seed: int | jax.Array) -> Model:
    model_parts = split(make_model(experiment.architecture, info, experiment.dtype, seed))
    return model_parts.params, model_parts.stats


def _loss_of(experiment: Experiment, task: Task, graph: Graph) -> Callable[..., Any]:
    """Returns (params, stats, batch) -> (loss, (scalars, new stats)) of a model that is not cut."""

    def loss_fn(params: Any, stats: Any, batch: Any) -> Any:
        output, stats = apply(graph, params, stats, batch, training=True, rows_per_group=experiment.rows_per_group)
        loss, scalars = task.loss(output, batch)
        return loss, (scalars, stats)

    return loss_fn


def _pipeline(
    experiment: Experiment, method: Method, info: DatasetInfo, task: Task, mesh: Mesh, axis: Any, batch: Any
) -> _Parts:
    """Workers whose devices each hold a stage of the model."""
    tx, fields = make_chain(experiment, method), experiment.boundary
    boundary = jc.dct_mp(fields.sparsity, value_dtype=fields.value_dtype)
    model = _abstract(experiment, info)
    cuts = choose_cuts(model, experiment.stages, experiment.cuts)
    stages = cut(model, cuts)

    def run(graph: Graph, params: Any, stats: Any, x: Any, batch: Any) -> tuple[Any, Any]:
        return apply(graph, params, stats, batch, x, training=True, rows_per_group=experiment.rows_per_group)

    pipeline = jc.Pipeline(
        stages=[partial(run, stage.graph) for stage in stages],
        loss_fn=task.loss,
        params=[stage.params for stage in stages],
        model_state=[stage.stats for stage in stages],
        boundaries=[boundary] * (len(stages) - 1),
        micro_batches=experiment.micro_batches,
        schedule=experiment.pipeline_schedule,
    )

    step = jc.make_train_step(pipeline, tx, mesh, axis_name=axis)

    def first(seed: int) -> tuple[list[Any], list[Any]]:
        stages = cut(make_model(experiment.architecture, info, experiment.dtype, seed), cuts)
        return [stage.params for stage in stages], [stage.stats for stage in stages]

    def join_stages(stages: list[Any]) -> Any:
        return {block: params for stage in stages for block, params in stage.items()}

    costs = pipeline.report(tx, batch, experiment.workers)
    crossing = sum(
        2 * boundary_cost.dense * _features(stage.params)
        for boundary_cost, stage in zip(costs.boundaries, stages[:-1], strict=True)
    )
    dense = costs.exchange.dense + crossing / len(stages)
    return _Parts(step, first, join_stages, jax.jit(step.init), dense)


def _features(params: Any) -> float:
    """Returns how many features become one number at the end of a stage: 1 without a bottleneck.

    Where several arrays cross, it is the mean over them, as if they had equally many places.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params[max(params)] if params else None)
    encoders = [x.shape for (*_, name), x in leaves if jax.tree_util.keystr((name,), simple=True) == "encoder"]
    return statistics.fmean(features / rank for features, rank in encoders) if encoders else 1.0


def _abstract(experiment: Experiment, info: DatasetInfo, dense: Callable[..., Any] | None = None) -> Any:
    """Returns the model as shapes without numbers, to compile for; with dense layers made by `dense` if given."""
    architecture = experiment.architecture if dense is None else with_dense(experiment.architecture, dense)
    return nnx.eval_shape(lambda: make_model(architecture, info, experiment.dtype, experiment.seed))


def _evaluate(task: Task, graph: Graph, model: Model, batch: Any) -> dict[str, jax.Array]:
    params, stats = model
    output, _ = apply(graph, params, stats, batch, training=False)
    return task.rows(output, batch) | {"mask": batch["mask"]}


def _translator(experiment: Experiment, info: DatasetInfo, graph: Graph, everywhere: Any) -> Any:
    if not isinstance(info, TranslationInfo):
        if experiment.beam != Experiment.beam:
            raise ValueError(
                f"--beam must go with a translation, whose BLEU it is for; got {experiment.beam} for "
                f"{experiment.dataset}. Leave it out."
            )
        return None

    def translate(model: Model, source: jax.Array) -> jax.Array:
        blocks = merge(graph, *model, training=False)
        tokens, _ = beam_search(blocks, source, max_length=info.target_length - 1, beam=experiment.beam)
        return tokens[:, 0]

    return jax.jit(translate, out_shardings=everywhere)
