"""Two ways to cut a model that lose accuracy according to the paper of DCT-MP; to show that they do.

One device plays both stages: a scheme is a function between them, and what would cross is computed. `benchmarks.dct`
trains them.

Source: Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data Parallelism", KDD
2021, appendix A, "Schemes That Do Not Work".
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxcomm as jc
from configs.experiment import BoundaryFields, Experiment
from configs.methods import Method
from jaxcomm.kernels.noise import make_key
from jaxcomm.selectors.topk import n_kept, select_rows
from jaxcomm.steps.engine import worker_step
from jaxcomm.traffic import Program, Traffic
from models.functional import apply, cut
from train.architectures import choose_cuts, make_model
from train.data import dataset_info
from train.job import Job, make_job
from train.methods import make_chain
from train.tasks import Task

# (activations (B, ...), residual like them, sparsity, key () uint32) -> what the second stage works with. The gradient
# with respect to the residual is the new residual.
Scheme = Callable[[jax.Array, jax.Array, float, jax.Array], jax.Array]


def sketch(x: jax.Array, residual: jax.Array, sparsity: float, key: jax.Array) -> jax.Array:
    """Returns x S S^T, which is x on average: of every sample a random projection to k = (1 - sparsity) d numbers.

    The entries of S (d, k) are normal with variance 1/k. The gradient goes back as if nothing had been lost.
    """
    d = math.prod(x.shape[1:])
    k = n_kept(d, sparsity)

    @jax.custom_vjp
    def cross(x: jax.Array, residual: jax.Array) -> jax.Array:
        del residual
        if k == d:
            return x
        projection = jax.random.normal(jax.random.key(key), (d, k), jnp.float32) / math.sqrt(k)
        return (x.reshape(-1, d) @ projection @ projection.T).reshape(x.shape)

    cross.defvjp(lambda x, residual: (cross(x, residual), residual), lambda residual, gradient: (gradient, residual))
    return cross(x, residual)


def topk_gradient(x: jax.Array, residual: jax.Array, sparsity: float, key: jax.Array) -> jax.Array:
    """Returns x; the k largest of every sample's gradient + residual go back, and the others are the new residual."""
    del key

    @jax.custom_vjp
    def cross(x: jax.Array, residual: jax.Array) -> jax.Array:
        del residual
        return x

    def back(residual: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = (gradient + residual).reshape(len(gradient), -1)
        mask = select_rows(jnp.abs(total), n_kept(total.shape[1], sparsity))
        sent, waiting = jnp.where(mask, total, 0), jnp.where(mask, 0, total)
        return sent.reshape(gradient.shape), waiting.reshape(gradient.shape)

    cross.defvjp(lambda x, residual: (x, residual), back)
    return cross(x, residual)


def bytes_each_way(scheme: Scheme, links: dict[tuple[int, int], int], whole: int) -> dict[tuple[int, int], int]:
    """Returns the bytes that would cross from stage to stage.

    Args:
      scheme: what is between the stages.
      links: the same of DCT-MP with the same k: values and positions go forward, values come back.
      whole: the bytes of all activations.
    """
    if scheme is sketch:
        return {(0, 1): links[1, 0], (1, 0): whole}
    return {(0, 1): whole, (1, 0): links[0, 1]}


class TwoStages:
    """The train step of one worker whose model is cut in two, with a scheme in between."""

    resize = staticmethod(jc.resize_workers)

    def __init__(self, experiment: Experiment, method: Method, scheme: Scheme, task: Task):
        """Cuts the model of an experiment with two stages and one micro-batch."""
        info = dataset_info(experiment.dataset, experiment.data_dir)
        model = nnx.eval_shape(lambda: make_model(experiment.architecture, info, experiment.dtype, experiment.seed))
        stages = cut(model, choose_cuts(model, 2, experiment.cuts))
        self._graphs, self._blocks = [stage.graph for stage in stages], [list(stage.params) for stage in stages]
        self._task, self._scheme, self._sparsity = task, scheme, experiment.boundary.sparsity
        self._run_stage = partial(apply, training=True, rows_per_group=experiment.rows_per_group)
        self._tx = make_chain(experiment, method)
        self._jitted = jax.jit(self._step)

    def __call__(self, state: jc.state.TrainState, batch: Any) -> tuple[jc.state.TrainState, dict[str, jax.Array]]:
        """Takes a step: (state, metrics)."""
        return self._jitted(state, batch)

    def crossing(self, params: Any, stats: Any, batch: Any) -> tuple[Any, Any]:
        """Runs the first stage: (the activations that cross, its new running statistics)."""
        first, own = self._graphs[0], self._blocks[0]
        of_stage = {block: params[block] for block in own}
        return self._run_stage(first, of_stage, {block: stats[block] for block in own if block in stats}, batch)

    def _loss(self, params: Any, residual: Any, stats: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        x, first = self.crossing(params, stats, batch)
        x = jax.tree.map(lambda leaf, waiting: self._scheme(leaf, waiting, self._sparsity, key), x, residual)
        of_stage = {block: params[block] for block in self._blocks[1]}
        later = {block: stats[block] for block in self._blocks[1] if block in stats}
        output, second = self._run_stage(self._graphs[1], of_stage, later, batch, x)
        loss, scalars = self._task.loss(output, batch)
        return loss, (scalars, first | second)

    def _step(self, state: jc.state.TrainState, batch: Any) -> tuple[jc.state.TrainState, dict[str, jax.Array]]:
        key = make_key(state.step, 0, 0)

        def gradients(params: Any, model_state: Any, batch: Any) -> Any:
            run = jax.value_and_grad(self._loss, (0, 1), has_aux=True)
            (loss, (scalars, stats)), (found, residual) = run(
                params, model_state["residual"], model_state["stats"], batch, key
            )
            return (loss, (scalars, {"stats": stats, "residual": residual})), found

        step = partial(worker_step, gradients, self._tx, "data")
        alone = jax.vmap(step, in_axes=None, axis_name="data", axis_size=1)
        state, (scalars, exchanged) = jax.tree.map(lambda leaf: leaf[0], alone(state, batch))
        return state, scalars | exchanged


def make_ablation(experiment: Experiment, method: Method, scheme: Scheme) -> Job:
    """Makes the functions of a run of two stages, as `train.job.make_job` does for DCT-MP of the same sparsity."""
    staged = make_job(experiment, method)
    job = make_job(dataclasses.replace(experiment, stages=1, boundary=BoundaryFields()), method)
    step, (shapes, batch) = TwoStages(experiment, method, scheme, job.task), job.inputs
    x, _ = jax.eval_shape(step.crossing, shapes.params, shapes.model_state, batch)
    whole = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(x))
    links = bytes_each_way(scheme, staged.report.program.links(), whole)
    program = Program([_of_link(traffic, links) for traffic in staged.report.program.always])

    def start(seed: int) -> jc.state.TrainState:
        state = job.start(seed)
        residual = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x)
        return state._replace(model_state={"stats": state.model_state, "residual": residual})

    def model(state: jc.state.TrainState) -> tuple[Any, Any]:
        return state.params, state.model_state["stats"]

    def verify(state: jc.state.TrainState, batch: Any) -> str:
        del state, batch
        return f"{links[0, 1]:,} bytes would go forward and {links[1, 0]:,} back; one device plays both stages."

    report = dataclasses.replace(staged.report, program=program)
    made = {"report": report, "dense": staged.dense, "step": step, "start": start, "model": model, "verify": verify}
    return dataclasses.replace(job, **made)


def _of_link(traffic: Traffic, links: dict[tuple[int, int], int]) -> Traffic:
    """Returns a permutation of a step with other bytes, and any other collective as it is."""
    if traffic.pairs is None:
        return traffic
    return dataclasses.replace(traffic, operand_bytes=links[traffic.pairs[0]])
