"""Which method would be fastest on these machines: `python -m train NAME --advise`."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from configs.experiment import Experiment, shown
from jaxcomm.placement import Plan, make_plan
from jaxcomm.planner import Advice, advise, candidates
from models.functional import apply, split
from train.architectures import make_model
from train.data import dataset_info, train_batches
from train.dense_layers import layer_rows
from train.methods import make_exchange, make_optimizer, run_name
from train.tasks import make_task


def advise_experiment(experiment: Experiment) -> tuple[Advice, Plan | None]:
    """Measures an experiment's model, batch, optimizer and mesh, and compares methods, including its own.

    All processes of the mesh must call it together.

    Returns:
      The advice, and a plan if `experiment.plan` names a file for it. An `experiment.error_budget` applies to the
      gradient of the first batch.

    Raises:
      ValueError: if workers do not hold the whole model, or do not exchange all of its gradients in their own step.
    """
    if layout := experiment.layout:
        raise ValueError(
            "--advise must be of workers that hold the whole model and exchange all of its gradients at once; got "
            f"{shown(layout)}. Leave these options out."
        )
    info = dataset_info(experiment.dataset, experiment.data_dir)
    task = make_task(info, experiment.label_smoothing)
    model = split(make_model(experiment.architecture, info, experiment.dtype, experiment.seed))
    batches = train_batches(
        experiment.dataset,
        seed=experiment.seed,
        augment=experiment.augment,
        global_batch=experiment.global_batch,
        process_index=0,
        process_count=1,  # every process has the whole batch, and takes its workers' rows
        data_dir=experiment.data_dir,
        mean=experiment.mean,
    )
    batch = {name: np.asarray(rows) for name, rows in next(batches).items()}
    batches.close()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        output, _ = apply(
            model.graph, params, model.stats, batch, training=True, rows_per_group=experiment.rows_per_group
        )
        return task.loss(output, batch)[0]

    mesh = jc.make_mesh(data=experiment.workers)
    by_rows = NamedSharding(mesh, P("data"))
    rows = {name: jax.make_array_from_callback(x.shape, by_rows, x.__getitem__) for name, x in batch.items()}
    named = {f"--method {run_name(experiment.method)}": make_exchange(experiment.method, momentum=experiment.momentum)}
    advice = advise(
        loss_fn,
        model.params,
        rows,
        mesh,
        optimizer=make_optimizer(experiment),
        methods=candidates() | named,
        dense_layers=layer_rows(experiment, info),
    )
    if experiment.plan is None:
        return advice, None
    gradient = None if experiment.error_budget is None else jax.grad(loss_fn)(model.params, batch)
    methods = {name: _plain(method) for name, method in named.items()}
    return advice, make_plan(
        advice, model.params, methods=methods, error_budget=experiment.error_budget, gradient=gradient
    )


def _plain(exchange: Any) -> optax.GradientTransformation:
    """Returns the exchange as jaxcomm makes it, which a plan's file can hold, in place of the trainer's subclass."""
    base: Any = next(kind for kind in type(exchange.method).__mro__ if kind.__module__.startswith("jaxcomm."))
    values = {field.name: getattr(exchange.method, field.name) for field in dataclasses.fields(base)}
    return base(**values).transform()
