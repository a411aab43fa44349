"""Proof of the bytes that a pipeline's compiled step sends."""

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import optax
from jax.sharding import Mesh

from jaxcomm.accounting.hlo import read_program
from jaxcomm.accounting.jaxpr import jaxpr_program
from jaxcomm.accounting.report import PipelineReport, as_compiled, exchange_report, kind_of_device
from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.steps.pipeline.pipeline import STAGE_AXIS, Pipeline
from jaxcomm.types import PyTree


def verify_pipeline(
    step: Any,
    state: PyTree,
    batch: PyTree,
    *,
    pipeline: Pipeline,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    other_bytes: int = 256,
    axis_name: AxisName = "data",
    text: str | None = None,
) -> PipelineReport:
    """Proves from the compiled text of a pipeline's step that it sends what `Pipeline.report` claims; returns that.

    The step is a function under `jax.jit` that holds the whole step, `text` its compiled text, if it is at hand. State
    and batch may be shapes. A device may receive `other_bytes` in addition to boundaries and exchange: losses, metrics,
    model state.

    Raises:
      ValueError: if a boundary's bytes differ from the claim, if stages that are not neighbours communicate, if XLA
        sends more than was traced, or if a step sends more than boundaries, exchange and `other_bytes`, or less than
        boundaries and exchange.
    """
    sizes = tuple(mesh.shape[name] for name in axis_names(axis_name))
    workers = math.prod(sizes)
    claimed = pipeline.report(tx, batch, workers, axis_name=axis_name)
    traced = jaxpr_program(step.trace(state, batch).jaxpr)
    program: Any = step.lower(state, batch).compile().as_text() if text is None else text
    compiled, turns = read_program(program), claimed.exchange.turns
    with pipeline.exchanging():
        shapes = pipeline.exchanged_shapes()
        exchange = exchange_report(tx, shapes, sizes, (), axis_name, kind_of_device(state)).program
    steps = [[counted.in_turn(turn, turns) for counted in (compiled, traced, exchange)] for turn in range(turns)]
    padding = Fraction(0)
    for wire, expected, _ in steps:
        bound = as_compiled(expected, program)
        padding = max(padding, bound.received_at_most - expected.received_at_most)
        if wire.received > bound.received or wire.received_at_most > bound.received_at_most:
            raise ValueError(
                f"A compiled step must send no more bytes than were traced; got {float(wire.received):,.0f} on average "
                f"(at most {float(wire.received_at_most):,.0f}) for {float(expected.received):,.0f} (at most "
                f"{float(expected.received_at_most):,.0f}). XLA has changed the collectives."
            )
    links = _stage_links(compiled.links(), mesh)
    for stage, boundary in enumerate(claimed.boundaries):
        there, back = (stage, stage + 1), (stage + 1, stage)
        for way, pair, claim in (("forward", there, boundary.forward), ("backward", back, boundary.backward)):
            if (wire := links.pop(pair, 0)) != claim * workers:
                raise ValueError(
                    f"A boundary must send what it claims; got {wire:,} bytes {way} over {workers} workers between the "
                    f"stages {pair}, where {claim:,} a worker are claimed."
                )
    links = {pair: wire for pair, wire in links.items() if pair[0] != pair[1]}  # the rest is between workers
    if links:
        raise ValueError(
            f"Stages must send to their neighbours alone; got bytes from stage to stage of {links}. Look for another "
            "permutation in the stages."
        )
    sent = sum(boundary.forward + boundary.backward for boundary in claimed.boundaries)
    boundaries = Fraction(workers * sent, mesh.size)
    usual = [("usual", wire.received, claim.received) for wire, _, claim in steps]
    most = [("most expensive", wire.received_at_most, claim.received_at_most) for wire, _, claim in steps]
    for kind, wire, claim in usual + most:
        if wire > boundaries + claim + other_bytes + padding:
            raise ValueError(
                f"A step must send its boundaries, its exchange and at most {other_bytes} bytes more; got "
                f"{float(wire - boundaries - claim):,.0f} more in the {kind} step. Raise other_bytes= by 8 bytes for "
                "each number of the model state, or look for another collective in the stages."
            )
        if wire < boundaries + claim:
            raise ValueError(
                f"A step must send its boundaries and its whole exchange; got {float(boundaries + claim - wire):,.0f} "
                f"bytes less in the {kind} step. Pass the pipeline= and the tx= of this step. If they are, "
                "read_program has a fault: it missed bytes of the compiled text."
            )
    return claimed


def _stage_links(links: dict[tuple[int, int], int], mesh: Mesh) -> dict[tuple[int, int], int]:
    """Sums the bytes between devices, given by their positions in the mesh, to bytes between stages."""
    place = mesh.axis_names.index(STAGE_AXIS)
    inner = math.prod(mesh.shape[name] for name in mesh.axis_names[place + 1 :])
    stages: Counter[tuple[int, int]] = Counter()
    for pair, count in links.items():
        source, target = (device // inner % mesh.shape[STAGE_AXIS] for device in pair)
        stages[source, target] += count
    return stages
