"""Embedding tables that are not trained like the rest of a model: looked up late, or sharded over the workers."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from configs.experiment import Architecture, Experiment
from jaxcomm.accounting import Traffic
from jaxcomm.exchange import leaf_name
from jaxcomm.layers import late_lookup_traffic
from jaxcomm.steps.lookups import Lookups
from models.blocks import Model
from models.dlrm import Interaction


def with_embeddings(experiment: Experiment) -> Architecture:
    """Returns the architecture whose table is trained as `experiment.embeddings` says.

    Raises:
      ValueError: for a model without such a table.
    """
    architecture, way = experiment.architecture, experiment.embeddings
    if way == "exchange":
        return architecture
    if architecture.name != "dlrm":
        raise ValueError(
            f"--embeddings must be exchange for a model without tables of their own kind, which dlrm has; got {way} "
            f"for {architecture.name!r}. Leave it out."
        )
    filled = {"row_multiple": experiment.workers} if way == "rows" else {}
    return dataclasses.replace(architecture, options={**architecture.options, "embeddings": way, **filled})


def is_exchanged(path: str, leaf: Any) -> bool:
    """Returns whether a parameter's gradient is exchanged if tables are looked up late: an exchange's `where`."""
    del leaf
    return not path.endswith("/table")


def lookup_traffic(model: Model, experiment: Experiment) -> Traffic:
    """Returns the collective of a model whose table is looked up late."""
    interaction = _interaction(model)
    ids = experiment.global_batch // experiment.workers * len(interaction.sizes)
    return late_lookup_traffic(ids, interaction.table.shape[1], experiment.workers)


def shards_of_table(model: Model, params: Any, workers: int) -> Any:
    """Returns the PartitionSpec of every parameter: the table sharded by columns or by rows, all others replicated.

    Raises:
      ValueError: if the columns of the table are not divisible by the number of workers.
    """
    interaction = _interaction(model)
    by_columns, columns = interaction.embeddings == "columns", interaction.table.shape[1]
    if by_columns and columns % workers:
        raise ValueError(
            f"--embeddings columns must be for a number of --workers that divides the columns of a table; got "
            f"{workers} for {columns}. Take --embeddings rows or late, or another number of workers."
        )
    spec = P(None, "data") if by_columns else P("data")
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: P() if is_exchanged(leaf_name(path), leaf) else spec, params
    )


def lookups_of(model: Model, params: Any, experiment: Experiment) -> Lookups | None:
    """Returns the lookups of a sharded table if a step changes only the rows that its batch touches.

    Returns None if the table is not sharded, or if the optimizer changes all rows or has state for each: then the
    table's gradient is dense.
    """
    is_plain = experiment.optimizer == "sgd" and not experiment.momentum and not experiment.weight_decay
    if experiment.embeddings not in ("columns", "rows") or not is_plain:
        return None
    interaction, leaves = _interaction(model), jax.tree_util.tree_leaves_with_path(params)
    names = [leaf_name(path) for path, leaf in leaves if not is_exchanged(leaf_name(path), leaf)]
    return dict.fromkeys(names, lambda batch: interaction.ids(batch["categories"]))


def _interaction(model: Model) -> Interaction:
    return next(block for block in model.blocks if isinstance(block, Interaction))
