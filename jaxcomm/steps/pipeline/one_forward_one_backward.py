"""A pipeline whose backward passes start as early as possible.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019 (1F1B), but with the
gradients summed over the micro-batches of a step.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.collectives.boundary import Encoded, send_backward, send_forward
from jaxcomm.steps.pipeline.pipeline import STAGE_AXIS, Schedule, at, run_ticks
from jaxcomm.types import Params, PyTree


class OneForwardOneBackward(Schedule):
    """In every tick a stage runs forward on one micro-batch and backward on another.

    Of S stages, stage s runs micro-batch m forward in tick m + s and backward in tick m + 2 (S - 1) - s, where it
    recomputes its activations. The last stage does both in the same tick. The first S - 1 ticks have no backward pass
    and the last S - 1 no forward pass, so M micro-batches take the time of M + S - 1 passes each way, as with GPipe.

    Between the two passes stage s keeps its inputs, for 2 (S - s) - 1 micro-batches instead of M. All devices run one
    program, so each has room for the inputs of every stage: (S - 1)^2 micro-batches instead of M (S - 1).
    """

    def gradients(self, params: list[jax.Array], model_state: list[jax.Array]) -> PyTree:
        """Returns the totals, and the gradients of this stage's stacked parameters."""
        size, count = self.pipeline.size, self.pipeline.micro_batches
        nothing, totals = self._nothing(model_state)
        waiting = [
            jax.tree.map(lambda x, n=2 * (size - stage) - 3: jnp.zeros((n, *x.shape), x.dtype), boxes)
            for stage, boxes in enumerate(nothing)
        ]
        carry = self._vary((waiting, _values(nothing), jax.tree.map(jnp.zeros_like, params), totals))

        def inboxes(stage: int, micro_batch: PyTree, waiting: list[Any]) -> list[Any]:
            """Returns a micro-batch's inputs of this stage, and zeros for the other stages."""
            boxes = list(nothing)
            if stage:
                saved = waiting[stage - 1]
                boxes[stage - 1] = jax.tree.map(lambda x: at(x, micro_batch % len(x)), saved)
            return self._vary(boxes)

        def ahead(stage: int, micro_batch: PyTree, params: Params, waiting: PyTree) -> Any:
            return self._branch(stage, model_state, micro_batch)(params, inboxes(stage, micro_batch, waiting))[0]

        def backward_stage(stage: int, micro_batch: PyTree, params: Params, waiting: PyTree, arrived: Any) -> Any:
            """Returns the gradients of the stage's inputs, those of the parameters, and the totals."""
            boxes = inboxes(stage, micro_batch, waiting)

            def run(values: list[list[jax.Array]], params: list[jax.Array]) -> Any:
                inputs = [
                    [box._replace(values=box_values) for box, box_values in zip(*pair, strict=True)]
                    for pair in zip(boxes, values, strict=True)
                ]
                outboxes, totals = self._branch(stage, model_state, micro_batch)(params, inputs)
                return self._vary((_values(outboxes), totals.loss)), totals

            _, pull, totals = jax.vjp(run, _values(boxes), params, has_aux=True)
            return *pull(self._vary((arrived, jnp.float32(1 / count)))), totals

        def tick(carry: PyTree, time: Any, active: tuple[list[int], list[int]], in_loop: bool) -> PyTree:
            del in_loop
            waiting, arrived, sums, totals = carry
            forward = {stage: time - stage for stage in active[0]}  # their micro-batches
            backward = {stage: time - 2 * (size - 1) + stage for stage in active[1]}
            outboxes, input_gradients = nothing, arrived
            if forward:
                branches = {stage: partial(ahead, stage, micro) for stage, micro in forward.items()}
                outboxes = self._switch(branches, params, waiting)
            if backward:
                branches = {stage: partial(backward_stage, stage, micro) for stage, micro in backward.items()}
                input_gradients, *increments = self._switch(branches, params, waiting, arrived)
                sums, totals = jax.tree.map(jnp.add, (sums, totals), tuple(increments))
            waiting, arrived = list(waiting), list(arrived)
            if forward:
                boxes = send_forward(self._routes(forward), [outboxes[stage] for stage in forward], STAGE_AXIS)
                for (stage, micro), new in zip(forward.items(), boxes, strict=True):
                    waiting[stage] = jax.tree.map(partial(_put, micro), waiting[stage], new)
            if receivers := {stage - 1: micro for stage, micro in backward.items() if stage}:
                keys = [self._key(stage, micro) for stage, micro in receivers.items()]
                gradients = [input_gradients[stage] for stage in receivers]
                gradients = send_backward(self._routes(receivers), gradients, STAGE_AXIS, keys)
                for stage, new in zip(receivers, gradients, strict=True):
                    arrived[stage] = new
            return waiting, arrived, sums, totals

        def active_at(time: int) -> tuple[list[int], list[int]]:
            """Returns the stages that run forward, without the last, and those that run backward."""
            return (
                [stage for stage in range(size - 1) if 0 <= time - stage < count],
                [stage for stage in range(size) if 0 <= time - 2 * (size - 1) + stage < count],
            )

        *_, sums, totals = run_ticks(tick, carry, active_at, count + 2 * (size - 1))
        return jax.tree.map(lambda total: total / count, totals), sums


def _values(boxes: list[list[Encoded]]) -> list[list[jax.Array]]:
    return [[box.values for box in stage_boxes] for stage_boxes in boxes]


def _put(micro_batch: PyTree, saved: jax.Array, new: jax.Array) -> jax.Array:
    """Overwrites the oldest micro-batch that is kept."""
    return lax.dynamic_update_index_in_dim(saved, new, micro_batch % len(saved), 0)
