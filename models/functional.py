"""Models as functions of their parameters: whole, or cut into the stages of a pipeline.

A model's variables are two dictionaries. Their keys are the indices of the blocks that have such variables:

  params: the trained parameters.
  stats: running statistics of batch normalisation. They are state of the model, not parameters: no gradient reaches
    them, and the train step averages them over the workers once a step.

In training, batch normalisation uses the statistics of the rows of one call of `apply`: a worker's rows, or a
micro-batch's. So the result depends on the mesh, unless `rows_per_group` fixes the number of rows.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import nnx

from models.blocks import Batch, Model

Variables = dict[int, Any]


@dataclass(frozen=True)
class Graph:
    """Consecutive blocks of a model without their variables.

    Attributes:
      first: the index of the first block in the model.
      training: the graph of every block in training mode.
      evaluation: the graph of every block in evaluation mode: no dropout, and batch normalisation by running
        statistics.
    """

    first: int
    training: tuple[Any, ...]
    evaluation: tuple[Any, ...]


class Stage(NamedTuple):
    """Consecutive blocks of a model: a stage of a pipeline, or the whole model.

    Attributes:
      graph: the blocks.
      params: their parameters, float32, by the index of the block in the model.
      stats: their running statistics, by the same index.
    """

    graph: Graph
    params: Variables
    stats: Variables


def cut(model: Model | Stage, cuts: Sequence[int] = ()) -> list[Stage]:
    """Cuts a model into stages. Every parameter of the model is in exactly one stage.

    Args:
      model: the whole model, in any mode, or split already; if it is abstract (`nnx.eval_shape`), so are the stages.
      cuts: the index of the first block of every stage but the first; (2, 5) makes the stages 0-1, 2-4 and 5 to the
        end.

    Raises:
      ValueError: for cuts that are out of order or leave a stage empty.
    """
    whole = model if isinstance(model, Stage) else split(model)
    count = len(whole.graph.training)
    edges = [0, *cuts, count]
    if any(edges[i] >= edges[i + 1] for i in range(len(edges) - 1)):
        raise ValueError(
            f"cuts must be rising indices of blocks, from 1 to {count - 1} in this model, so that every stage has a "
            f"block; got {tuple(cuts)}. Leave out what repeats, and sort them."
        )
    return [_part(whole, first, last) for first, last in itertools.pairwise(edges)]


def split(model: Model) -> Stage:
    """Splits a whole model into its graph, parameters and running statistics, as one stage."""
    training, evaluation, params, stats = [], [], {}, {}
    for index, block in enumerate(model.blocks):
        graph, *states = nnx.split(block, nnx.Param, nnx.BatchStat)
        for variables, state in zip((params, stats), states, strict=True):
            if pure := nnx.to_pure_dict(state):
                variables[index] = pure
        for mode, graphs in (("train", training), ("eval", evaluation)):
            copy = nnx.merge(graph, *states)  # a new module, so that the model's own mode does not change
            getattr(copy, mode)()
            graphs.append(nnx.graphdef(copy))
    return Stage(Graph(0, tuple(training), tuple(evaluation)), params, stats)


def merge(graph: Graph, params: Variables, stats: Variables, *, training: bool) -> list[Any]:
    """Merges blocks with their variables, which are copied from `params` and `stats`.

    Raises:
      ValueError: if the variables are not those of these blocks.
    """
    graphs = graph.training if training else graph.evaluation
    indices = range(graph.first, graph.first + len(graphs))
    foreign = sorted((params.keys() | stats.keys()) - set(indices))
    if foreign:
        raise ValueError(
            f"A stage must get the variables of its own blocks, {indices.start} to {indices.stop - 1}; got some of "
            f"{', '.join(map(str, foreign))}. Give the stage's params and stats."
        )
    return [
        nnx.merge(block, params.get(index, {}), stats.get(index, {}), copy=True)
        for index, block in zip(indices, graphs, strict=True)
    ]


def apply(
    graph: Graph,
    params: Variables,
    stats: Variables,
    batch: Batch,
    x: Any = None,
    *,
    training: bool,
    rows_per_group: int | None = None,
) -> tuple[Any, Variables]:
    """Calls a model, or a stage of a model.

    Args:
      graph: the blocks.
      params: their parameters.
      stats: their running statistics.
      batch: a dictionary of arrays, rows first.
      x: the output of the stage before; None for the first.
      training: whether to apply dropout, and to normalise by the statistics of the rows.
      rows_per_group: in training, compute statistics separately over groups of so many consecutive rows, and average
        the groups' new running statistics. The result then does not depend on how rows are divided into calls. None
        makes one group of all rows. Ignored in evaluation.

    Returns:
      The output of the last block, and the running statistics after the call; in evaluation they are unchanged.

    Raises:
      ValueError: if the rows do not make whole groups, or the variables are not those of these blocks.
    """

    def call(batch: Batch, x: Any) -> tuple[Any, Variables]:
        blocks = merge(graph, params, stats, training=training)
        for block in blocks:
            x = block(x, batch)
        batch_stats = {
            graph.first + i: nnx.to_pure_dict(nnx.state(block, nnx.BatchStat)) for i, block in enumerate(blocks)
        }
        return x, {index: stat for index, stat in batch_stats.items() if stat}

    if rows_per_group is None or not training:
        return call(batch, x)
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows_per_group < 1 or rows % rows_per_group:
        raise ValueError(
            f"Rows must make whole groups; got {rows} rows for groups of {rows_per_group}. Give a number of rows per "
            "group that divides the rows of every worker's micro-batch."
        )
    groups = rows // rows_per_group
    grouped = jax.tree.map(lambda a: a.reshape(groups, rows_per_group, *a.shape[1:]), (batch, x))
    outputs, batch_stats = jax.vmap(call)(*grouped)
    return (
        jax.tree.map(lambda a: a.reshape(rows, *a.shape[2:]), outputs),
        jax.tree.map(lambda a: a.mean(axis=0), batch_stats),
    )


def _part(whole: Stage, first: int, last: int) -> Stage:
    graph = Graph(first, whole.graph.training[first:last], whole.graph.evaluation[first:last])
    params, stats = ({i: own[i] for i in range(first, last) if i in own} for own in (whole.params, whole.stats))
    return Stage(graph, params, stats)
