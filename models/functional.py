"""Models as functions of their parameters: whole, or cut into the stages of a pipeline.

A model's variables are two dictionaries with a key for every block that has any, the block's index in the model:

  params: what is trained.
  stats: running statistics of batch normalisation. They are state of the model, not parameters: no gradient reaches
    them, and the training step averages them over the workers once a step.

The statistics by which a training step normalises are those of the rows that one call of `apply` is given: of a
worker's rows, or of a micro-batch's. So they differ between meshes, unless `rows_per_group` says over how many rows
they are taken whatever the call is given.
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
      first: index of the first of them in the model.
      training: of every block in training mode.
      evaluation: of every block in evaluation mode: no dropout, and batch normalisation by running statistics.
    """

    first: int
    training: tuple[Any, ...]
    evaluation: tuple[Any, ...]


class Stage(NamedTuple):
    """Consecutive blocks of a model: a stage of a pipeline, or the whole.

    Attributes:
      graph: the blocks.
      params: their parameters, float32, by the index of the block in the model.
      stats: their running statistics, likewise.
    """

    graph: Graph
    params: Variables
    stats: Variables


def cut(model: Model, cuts: Sequence[int] = ()) -> list[Stage]:
    """Cuts a model into stages. The stages' parameters together are the model's, each in one stage.

    Args:
      model: the model, in any mode; it may be abstract (`nnx.eval_shape`), and the stages are then as well.
      cuts: indices of the blocks that begin a stage, besides the first; (2, 5) makes the stages 0-1, 2-4 and 5 to the
        end.

    Raises:
      ValueError: for cuts that are out of order or leave a stage empty.
    """
    count = len(model.blocks)
    edges = [0, *cuts, count]
    if any(edges[i] >= edges[i + 1] for i in range(len(edges) - 1)):
        raise ValueError(
            f"Cuts are rising indices of blocks, from 1 to {count - 1} in this model, so that every stage has a block; "
            f"got {tuple(cuts)}: leave out what repeats, and sort them."
        )
    return [_stage(model, first, last) for first, last in itertools.pairwise(edges)]


def split(model: Model) -> Stage:
    """Splits a model into its graph, parameters and running statistics; a model that was not cut is one stage."""
    return cut(model)[0]


def merge(graph: Graph, params: Variables, stats: Variables, *, training: bool) -> list[Any]:
    """Puts blocks together again; they share nothing with what `params` and `stats` hold.

    Raises:
      ValueError: if the variables are not those of these blocks.
    """
    graphs = graph.training if training else graph.evaluation
    indices = range(graph.first, graph.first + len(graphs))
    foreign = sorted((params.keys() | stats.keys()) - set(indices))
    if foreign:
        raise ValueError(
            f"A stage takes the variables of its own blocks, {indices.start} to {indices.stop - 1}, got some of "
            f"{', '.join(map(str, foreign))}: give the stage's params and stats."
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
    """Calls a model or a stage of one.

    Args:
      graph: the blocks.
      params: their parameters.
      stats: their running statistics.
      batch: of arrays, rows first.
      x: what the stage before returned; None for the first.
      training: whether to drop, and to normalise by the statistics of the rows.
      rows_per_group: in training, take statistics over groups of so many consecutive rows, each for itself, and average
        the groups' new running statistics. The result then depends on the groups alone, however many of them a call is
        given. None makes one group of all rows. Evaluation takes no statistics and is the same without.

    Returns:
      What the last block returns, and the running statistics after the call: in evaluation, those that came.

    Raises:
      ValueError: if the rows do not make whole groups, or the variables are not those of these blocks.
    """

    def call(batch: Batch, x: Any) -> tuple[Any, Variables]:
        blocks = merge(graph, params, stats, training=training)
        for block in blocks:
            x = block(x, batch)
        found = {graph.first + i: nnx.to_pure_dict(nnx.state(block, nnx.BatchStat)) for i, block in enumerate(blocks)}
        return x, {index: stat for index, stat in found.items() if stat}

    if rows_per_group is None or not training:
        return call(batch, x)
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows_per_group < 1 or rows % rows_per_group:
        raise ValueError(
            f"Rows make whole groups, got {rows} rows for groups of {rows_per_group}: give a number of rows per group "
            "that divides the rows of every worker's micro-batch."
        )
    groups = rows // rows_per_group
    grouped = jax.tree.map(lambda a: a.reshape(groups, rows_per_group, *a.shape[1:]), (batch, x))
    outputs, found = jax.vmap(call)(*grouped)
    return (
        jax.tree.map(lambda a: a.reshape(rows, *a.shape[2:]), outputs),
        jax.tree.map(lambda a: a.mean(axis=0), found),
    )


def _stage(model: Model, first: int, last: int) -> Stage:
    training, evaluation, params, stats = [], [], {}, {}
    for index in range(first, last):
        graph, *states = nnx.split(model.blocks[index], nnx.Param, nnx.BatchStat)
        for variables, state in zip((params, stats), states, strict=True):
            if pure := nnx.to_pure_dict(state):
                variables[index] = pure
        for mode, graphs in (("train", training), ("eval", evaluation)):
            block = nnx.merge(graph, *states)  # another module, so that the model's own mode stays as it is
            getattr(block, mode)()
            graphs.append(nnx.graphdef(block))
    return Stage(Graph(first, tuple(training), tuple(evaluation)), params, stats)
