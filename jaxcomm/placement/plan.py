"""A plan: the exchange of every tensor and the stage of every block; its file, and its transformation."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm import methods
from jaxcomm.collectives.axis import AxisName
from jaxcomm.exchange import leaf_name
from jaxcomm.planner.dense_layers import WAYS
from jaxcomm.types import Params

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """The exchange of every tensor, and the cuts between stages.

    Attributes:
      workers: K.
      cuts: the index of the first block of every stage but the first; empty for one stage.
      tensors: by path, the shape of every parameter and the name of its exchange. The name is "late" or "split" for a
        parameter of a dense layer that multiplies late or is sharded over the workers: its gradient is not exchanged.
      exchanges: by name, the method and its options.
      micro_batches: M, of a pipeline.
      compute: predicted seconds of computing in a step, the pipeline's fill included.
      boundaries: predicted seconds of the traffic between stages.
      exchange_seconds: predicted seconds of the exchange, coding and wire.
      rank: r, the numbers of a token or sample between stages; None if boundaries do not learn.
      optimal: whether the search proved that no assignment is faster, by the model of costs; see `Assignment`.
    """

    workers: int
    cuts: tuple[int, ...]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    exchanges: Mapping[str, Mapping[str, Any]]
    micro_batches: int
    compute: float
    boundaries: float
    exchange_seconds: float
    rank: int | None = None
    optimal: bool = True

    @property
    def step(self) -> float:
        """Predicted seconds of a step."""
        return self.compute + self.boundaries + self.exchange_seconds

    @property
    def used(self) -> dict[str, list[str]]:
        """The paths of the tensors of every exchange that is used; the exchange with the most parameters is last."""
        groups: dict[str, list[str]] = {}
        for path, (_, name) in self.tensors.items():
            groups.setdefault(name, []).append(path)

        def size(name: str) -> int:
            return sum(math.prod(self.tensors[path][0]) for path in groups[name])

        return {name: groups[name] for name in sorted(groups, key=size)}

    def computed(self, way: str) -> set[str]:
        """Returns the paths of the dense layers that multiply "late", or are "split" over the workers."""
        return {path.rpartition("/")[0] for path, (_, name) in self.tensors.items() if name == way}

    @property
    def dense_layers(self) -> str:
        """How dense layers are computed: "late" or "split" (the layers of `computed`), else "exchange"."""
        return next((way for way in WAYS if self.computed(way)), "exchange")

    def transformation(self, axis_name: AxisName = "data") -> optax.GradientTransformation:
        """Makes the exchange of the plan: one transformation, which exchanges all tensors in a step, or none.

        The gradients of layers that multiply late bypass it. Those of split layers do if `make_train_step` gets the
        layers' `specs=`.
        """
        late, tx = self.dense_layers == "late", None
        exchanged = {name: paths for name, paths in self.used.items() if name not in WAYS}
        for name, paths in reversed(exchanged.items()):
            spec = self.exchanges[name]
            arguments: dict[str, Any] = {}
            if tx is not None or late:
                arguments["where"] = f"^(?:{'|'.join(re.escape(path) for path in paths)})$"
            if tx is not None:
                arguments["others"] = tx
            tx = getattr(methods, spec["method"])(**spec["options"], **arguments, axis_name=axis_name)
        if tx is None:
            tx = methods.plump_dp(where=(lambda *_: False) if late else None, axis_name=axis_name)
        return tx

    def check(self, params: Params, workers: int) -> None:
        """Refuses parameters that the plan was not made for.

        Raises:
          ValueError: for other paths, shapes or workers; it names the first difference.
        """
        remedy = "Make a plan for this model."
        if workers != self.workers:
            raise ValueError(f"A plan must be for {self.workers} workers; got {workers}. Make a plan for those.")
        model_shapes = {leaf_name(path): jnp.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        for path in model_shapes.keys() ^ self.tensors.keys():
            preposition = "without" if path in self.tensors else "with"
            raise ValueError(
                f"A plan must be for the parameters that are trained; got a model {preposition} {path!r}. {remedy}"
            )
        for path, shape in model_shapes.items():
            if shape != self.tensors[path][0]:
                raise ValueError(
                    f"A plan must be for the shapes that are trained; got {shape} at {path!r}, planned as "
                    f"{self.tensors[path][0]}. {remedy}"
                )

    def write(self, path: Path) -> None:
        """Writes the plan as JSON."""
        path.write_text(json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=2) + "\n")

    def __str__(self) -> str:
        cuts = f", {len(self.cuts) + 1} stages cut before the blocks {list(self.cuts)}" if self.cuts else ""
        cuts += "" if self.rank is None else f" with {self.rank} numbers between them"
        lines = [
            f"plan for {self.workers} workers{cuts}: {1e3 * self.step:,.1f} ms a step ({1e3 * self.compute:,.1f} "
            f"computing, {1e3 * self.boundaries:,.1f} boundaries, {1e3 * self.exchange_seconds:,.1f} exchange)"
        ]
        for name, paths in self.used.items():
            count = sum(math.prod(self.tensors[path][0]) for path in paths)
            lines.append(f"  {name}: {len(paths)} tensors, {count:,} parameters")
        return "\n".join(lines)


def read_plan(path: Path) -> Plan:
    """Reads a plan from a file.

    Raises:
      ValueError: for a file that is missing, is not a plan, or has another format; it names the file.
    """
    try:
        record = json.loads(path.read_text())
        if record.pop("format") != FORMAT:
            raise KeyError("format")
        record["tensors"] = {name: (tuple(shape), way) for name, (shape, way) in record["tensors"].items()}
        record["cuts"] = tuple(record["cuts"])
        plan = Plan(**record)
        lengths = (n for shape, _ in plan.tensors.values() for n in shape)
        sizes = [plan.workers, plan.micro_batches, *plan.cuts, *lengths]
        if not all(type(n) is int and n >= 0 for n in sizes) or not math.isfinite(plan.step):
            raise ValueError("a number that is none, or negative")
        plan.transformation()
        return plan
    except Exception as error:  # a damaged file may raise any
        raise ValueError(
            f"A plan must be a file that `Plan.write` made, of format {FORMAT}; got {path}: {error!r}. Make it again."
        ) from None
