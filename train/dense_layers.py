"""Dense layers that are not trained like the rest of a model: multiplied late, or sharded over the workers."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from configs.experiment import Architecture, Experiment
from configs.methods import Method
from models.blocks import Model
from models.functional import split
from models.late_linear import LateLinear
from models.split_linear import SplitLinear
from train.architectures import MODELS, make_model
from train.data import DatasetInfo
from train.methods import make_exchange
from train.plans import Planned


def takes_dense(model: Callable[..., Model]) -> bool:
    """Returns whether a model (its class) takes the kind of its dense layers as an argument."""
    return "dense" in inspect.signature(model.__init__).parameters  # nnx hides the signature of the class itself


def with_dense(architecture: Architecture, dense: Callable[..., Any]) -> Architecture:
    """Returns an architecture whose dense layers are made by `dense`.

    Raises:
      ValueError: for a model that does not take the kind of its dense layers.
    """
    names = [name for name, model in MODELS.items() if takes_dense(model)]
    if architecture.name not in names:
        raise ValueError(
            f"--dense-layers must go with a model that takes the kind of its dense layers, {', '.join(names)}; got "
            f"{architecture.name!r}. Leave it out."
        )
    return dataclasses.replace(architecture, options={**architecture.options, "dense": dense})


def multiply_late(
    model: Model, experiment: Experiment, method: Method, late: Collection[str] | None = None
) -> jc.planner.LatePlan:
    """Sets dense layers to multiply late where that moves fewer bytes than the method, or where a plan says so.

    Args:
      model: with `LateLinear` for its dense layers; it may be abstract.
      experiment: the fields.
      method: how the other gradients are exchanged.
      late: the paths of the layers that multiply late, if already decided.
    """
    planned = method.contents if isinstance(method, Planned) else None
    plan = jc.planner.plan_late_multiply(
        split(model).params,
        experiment.global_batch,
        experiment.workers,
        None if planned else make_exchange(method, momentum=experiment.momentum),
        jnp.dtype(experiment.dtype).itemsize,
        late=planned.computed("late") if planned else late,
    )
    for path, layer in _layers(model, LateLinear):
        layer.mode = plan.mode(path)
    return plan


def shards_of(model: Model) -> Any:
    """Returns the PartitionSpec of every parameter: kernels of `SplitLinear` sharded, all others replicated."""
    split_layers = {path for path, _ in _layers(model, SplitLinear)}

    def spec(path: Any, leaf: Any) -> P:
        layer, _, name = jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")
        return jc.layers.narrowing_spec(leaf.shape) if name == "kernel" and layer in split_layers else P()

    return jax.tree_util.tree_map_with_path(spec, split(model).params)


def layer_rows(experiment: Experiment, info: DatasetInfo) -> dict[str, int]:
    """Returns, by path, the rows of a global batch that reach each dense layer that could be computed another way."""
    if not takes_dense(MODELS[experiment.architecture.name]):
        return {}
    architecture = with_dense(experiment.architecture, LateLinear)
    model = nnx.eval_shape(lambda: make_model(architecture, info, experiment.dtype, experiment.seed))
    return {path: experiment.global_batch for path, _ in _layers(model, LateLinear)}


def _layers(model: Model, kind: type) -> Iterator[tuple[str, Any]]:
    """Yields the layers of a kind, by their path in the parameters."""
    for index, block in enumerate(model.blocks):
        for path, node in nnx.iter_graph(block):
            if isinstance(node, kind):
                yield "/".join(map(str, (index, *path))), node
