"""Will it help me? Every method's step on this mesh and link, beside the dense ones, and a verdict."""

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxcomm import methods
from jaxcomm.accounting.report import WireReport, wire_report
from jaxcomm.checks import check_range
from jaxcomm.collectives.axis import AxisName, axis_names
from jaxcomm.exchange import leaf_name
from jaxcomm.parallel.step import loss_of
from jaxcomm.planner.costs import (
    Bench,
    Cost,
    gradients_of,
    known_accuracy,
    measure_coding,
    measure_copy,
    measure_step,
    modelled_coding,
    state_bytes,
)
from jaxcomm.planner.dense_layers import WAYS, LayerCost, layer_cost, layers_of, measure_layer
from jaxcomm.planner.links import Links, Wire, agreed, given_links, measure_links
from jaxcomm.traffic import Traffic

DENSE = "plump_dp(bfloat16)"  # what everything is compared with
_WORTHWHILE = 1.05  # times faster than dense: less is called as fast as dense
_TYPICAL_COPY = 1 / 10e9  # seconds a byte of a device that nobody measured


@dataclass(frozen=True)
class Prediction:
    """What one method would take on this mesh.

    Attributes:
      method: as it is called in the table: "dct_dp(0.99)".
      bytes: that each worker receives a step, on average.
      step: predicted seconds of a step: computing, coding and wire one after another.
      low: the lower end of its range.
      high: the upper end.
      wire: seconds on the wire.
      latency: the part of it that does not depend on the bytes.
      coding: seconds of selecting, coding and decoding.
      measured: whether `coding` was timed here, and not taken from the table of costs.
      every: steps from one exchange to the next, 1 but for local methods, which train in another way.
      memory: bytes that the method keeps on each worker.
      faster: times faster than dense in bfloat16.
      break_even: bits a second of the link above which dense in bfloat16 is as fast; 0 if it always is, infinite if
        never.
      accuracy: what is known of it, and from where.
    """

    method: str
    bytes: float
    step: float
    low: float
    high: float
    wire: float
    latency: float
    coding: float
    measured: bool
    every: int
    memory: int
    faster: float
    break_even: float
    accuracy: str


@dataclass(frozen=True)
class Advice:
    """Predictions, and what follows.

    Attributes:
      mode: "thorough" (measured here) or "rapid" (from shapes, a given link and a table of costs).
      workers: K.
      parameters: n.
      compute: seconds of a step without an exchange; 0 if that is not known.
      link: bits a second that a worker receives with in a dense all-reduce.
      latency: seconds of an all-reduce that moves nothing.
      seconds: that measuring took.
      predictions: of every method, the fastest first.
      layers: of the dense layers that were asked about, in each way that they can be computed in.
      best: the exchange of gradients to use; `DENSE` or "plump_dp" for "keep dense". Local methods are another
        training, which the verdict mentions where they are faster.
      verdict: why, in a sentence.
    """

    mode: str
    workers: int
    parameters: int
    compute: float
    link: float
    latency: float
    seconds: float
    predictions: list[Prediction]
    best: str
    verdict: str
    layers: list[LayerCost] = dataclasses.field(default_factory=list)

    @property
    def keeps_dense(self) -> bool:
        """Whether the advice is not to compress."""
        return self.best.startswith("plump_dp")

    def __getitem__(self, method: str) -> Prediction:
        for each in self.predictions:
            if each.method == method:
                return each
        raise KeyError(method)

    def json(self) -> str:
        """Returns everything as JSON; infinite numbers are null."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        record = dataclasses.asdict(self)
        record["predictions"] = [{key: plain(value) for key, value in row.items()} for row in record["predictions"]]
        return json.dumps({key: plain(value) for key, value in record.items()} | {"keeps_dense": self.keeps_dense})

    def __str__(self) -> str:
        dense = self["plump_dp"]
        took = f"measured here in {self.seconds:.0f} s" if self.mode == "thorough" else "not measured: a rapid estimate"
        lines = [
            f"{took}: K = {self.workers}, {self.parameters:,} parameters ({4e-6 * self.parameters:,.1f} MB of "
            f"gradient), link {_rate(self.link)} and {1e3 * self.latency:.2f} ms an all-reduce",
            f"dense in float32: {_ms(self.compute)} computing + {_ms(dense.wire + dense.coding)} exchange = "
            f"{_ms(dense.step)} ms a step; {self.compute / dense.step:.0%} of it computing",
            "",
            f"{'method':<28}{'MB/step':>9}{'wire ms':>9}{'coding ms':>11}{'step ms':>9}{'range':>16}{'faster':>8}"
            f"{'memory MB':>11}{'break-even':>12}  accuracy",
        ]
        for each in self.predictions:
            mark = "" if each.measured else "~"
            lines.append(
                f"{each.method:<28}{1e-6 * each.bytes:>9.3f}{_ms(each.wire):>9}{mark + _ms(each.coding):>11}"
                f"{_ms(each.step):>9}{_ms(each.low) + '-' + _ms(each.high):>16}{each.faster:>7.2f}x"
                f"{1e-6 * each.memory:>11.1f}{_rate(each.break_even):>12}  {each.accuracy}"
            )
        if not all(each.measured for each in self.predictions):
            lines.append("~ from the table of costs, not timed here.")
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def _rate(bits: float) -> str:
    if not math.isfinite(bits):
        return "any"
    if bits <= 0:
        return "none"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def candidates(axis_name: AxisName = "data", *, local: bool = True) -> dict[str, optax.GradientTransformation]:
    """Returns the methods that are compared if none are given, by what tables call them.

    Args:
      axis_name: the axis of workers, or the axes.
      local: with the local methods, which exchange models and not gradients.
    """

    def make(factory: Callable[..., Any], *args: Any, **options: Any) -> optax.GradientTransformation:
        return factory(*args, axis_name=axis_name, **options)

    narrow = make(methods.plump_dp, value_dtype="bfloat16")
    exchanges = {
        "plump_dp": make(methods.plump_dp),
        DENSE: narrow,
        "dct_dp(0.99)": make(methods.dct_dp, 0.99),
        "topk(0.99)": make(methods.topk, 0.99),
        "random_k(0.9)": make(methods.random_k, 0.9),
        "powersgd(4)": make(methods.powersgd, 4),
        "quant_dp(8)": make(methods.quant_dp, 8),
        "sign": make(methods.sign),
    }
    return exchanges | ({"local_sgd(10)": make(methods.local_sgd, 10, exchange=narrow)} if local else {})


def advise(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    mesh: Mesh,
    *,
    optimizer: optax.GradientTransformation | None = None,
    methods: Mapping[str, optax.GradientTransformation] | None = None,
    dense_layers: Mapping[str, int] | None = None,
    seconds: float = 60.0,
    axis_name: AxisName = "data",
) -> Advice:
    """Says whether compression will help: measures the mesh, and predicts every method's step. "Thorough".

    Measured are: the step without an exchange on each worker's rows, all workers at once; the link, by every collective
    that the methods use; and what each method computes, its wire cut, until the time is up: the rest comes from a
    table of costs, and is marked. Nothing of the parameters or the caller's state is changed.

    Every process of the mesh calls it together, with equal arguments.

    Args:
      loss_fn: (params, batch) -> the loss, or the loss and more; without collectives.
      params: the parameters: a tree of arrays.
      batch: a global batch, its rows a multiple of the workers.
      mesh: of the workers.
      optimizer: what comes after the exchange, so that its time counts.
      methods: exchanges or local methods by name; by default those of `candidates`. The dense ones are always there.
      dense_layers: of layers that could multiply late, or be sharded over the workers: their paths in the parameters
        ("fc/1"), and the rows of the global batch that reach each. They are compared as methods "late" and "split",
        all other gradients exchanged densely in bfloat16.
      seconds: after which no further method is timed.
      axis_name: the axis of workers, or the axes.

    Returns:
      The advice. `print` shows it as a table.

    Raises:
      ValueError: for a mesh without the axis of workers, a batch that does not divide, a loss that is not finite.
    """
    begin = time.perf_counter()
    chosen = _chosen(methods, axis_name)
    bench = Bench(mesh, axis_name)
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    layers = layers_of(leaves, dense_layers or {}, bench.sizes, axis_name)
    # A step averages its loss, too.
    metrics = Traffic("all_reduce", 4, math.prod(bench.sizes), axes=axis_names(axis_name))
    reports = {
        name: wire_report(tx, params, bench.sizes, beside=[metrics], axis_name=axis_name) for name, tx in chosen.items()
    }
    for way in dict.fromkeys(layer.way for layer in layers):
        same = [layer for layer in layers if layer.way == way]
        chosen[way] = _others_dense([path for layer in same for path in layer.tensors], axis_name)
        beside = [metrics, *(traffic for layer in same for traffic in layer.program.always)]
        reports[way] = wire_report(chosen[way], params, bench.sizes, beside=beside, axis_name=axis_name)
    rows, own = bench.shards(batch), bench.spread(params)
    loss = loss_of(lambda params, batch: _scalar(loss_fn(params, batch)), False, False)
    gradients = gradients_of(bench, loss, own, rows)
    optimizer = optimizer or optax.identity()
    links = measure_links(mesh, [report.program for report in reports.values()])

    # Of the dense exchange the whole step; of the others what they compute more or less than that.
    whole = measure_step(bench, loss, optax.chain(chosen["plump_dp"], optimizer), own, rows)
    coding: dict[str, Cost | None] = {}

    time_layer = functools.cache(functools.partial(measure_layer, bench))
    costs = [layer_cost(layer, links, time_layer(layer.way, layer.shape, layer.rows)) for layer in layers]

    def measure(name: str) -> None:
        tx = chosen[name]
        if name in WAYS:
            found = [time_layer(layer.way, layer.shape, layer.rows) for layer in layers if layer.way == name]
            coding[name] = functools.reduce(Cost.plus, found, measure_coding(bench, tx, gradients, own))
        elif reports[name].every == 1:
            coding[name] = measure_coding(bench, tx, gradients, own)
        else:  # between two exchanges its steps are others
            coding[name] = measure_step(bench, loss, optax.chain(optimizer, tx), own, rows).beyond(compute)

    dense = ["plump_dp", DENSE]
    coding["plump_dp"] = measure_coding(bench, chosen["plump_dp"], gradients, own)
    compute = whole.beyond(coding["plump_dp"])
    measure(DENSE)
    workers, copy = math.prod(bench.sizes), measure_copy(bench)
    modelled = {name: modelled_coding(tx, params, workers, copy) for name, tx in chosen.items()}
    # The table is of another machine: it says how the methods compare with the dense exchanges, which were timed.
    timed = [(coding[name], modelled[name]) for name in dense]
    factor = statistics.fmean(found.seconds / known.seconds if found and known else 1.0 for found, known in timed)

    def promise(name: str) -> float:
        cost = modelled[name]
        return math.inf if cost is None else cost.seconds * factor + links.wire(reports[name]).seconds

    for name in sorted((name for name in chosen if name not in dense), key=promise):  # in one order on all processes
        known = modelled[name]
        if known is None or agreed(time.perf_counter() - begin, mesh) < seconds:
            measure(name)
        else:
            coding[name] = known * factor
    advice = _advice("thorough", compute, links, chosen, reports, coding, params, bench.sizes, axis_name, begin)
    return dataclasses.replace(advice, layers=costs)


def _others_dense(reduced: list[str], axis_name: AxisName) -> optax.GradientTransformation:
    """Makes the dense exchange of all parameters but those whose gradients layers have reduced."""
    own = frozenset(reduced)
    return methods.plump_dp(value_dtype="bfloat16", where=lambda path, _: path not in own, axis_name=axis_name)


def _scalar(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def estimate(
    params: Any,
    workers: int,
    rate: float,
    *,
    latency: float = 0.0,
    compute: float = 0.0,
    copy: float = _TYPICAL_COPY,
    methods: Mapping[str, optax.GradientTransformation] | None = None,
    axis_name: AxisName = "data",
) -> Advice:
    """Says whether compression will help from shapes alone, for any number of workers. "Rapid": nothing is run.

    Args:
      params: the parameters, or their shapes.
      workers: K.
      rate: bits a second that each worker receives.
      latency: seconds from one worker to another.
      compute: seconds of a step without an exchange; with 0, exchanges alone are compared.
      copy: seconds a byte of copying in a worker's memory; by default those of 10 GB/s.
      methods: as in `advise`; each must be in the table of costs.
      axis_name: the axis of workers.

    Raises:
      ValueError: for a link or times that cannot be, and for a method whose cost nobody has measured.
    """
    begin = time.perf_counter()
    check_range("compute", compute, "seconds, 0 or more", compute >= 0 and math.isfinite(compute), "0 if not known")
    check_range("copy", copy, "seconds a byte, above 0", copy > 0 and math.isfinite(copy), "1e-10 is 10 GB/s")
    links, chosen = given_links(rate, latency), _chosen(methods, axis_name)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jax.numpy.shape(leaf), jax.numpy.result_type(leaf)), params)
    reports = {name: wire_report(tx, like, workers, axis_name=axis_name) for name, tx in chosen.items()}
    coding = {name: modelled_coding(tx, like, workers, copy) for name, tx in chosen.items()}
    unknown = [name for name, cost in coding.items() if cost is None]
    if unknown:
        raise ValueError(
            f"A rapid estimate must be of methods whose cost is in the table; got {', '.join(unknown)}. Measure them "
            "with jaxcomm.advise, or leave them out."
        )
    cost = Cost(compute, compute, compute)
    return _advice("rapid", cost, links, chosen, reports, coding, like, (workers,), axis_name, begin)


def _chosen(
    given: Mapping[str, optax.GradientTransformation] | None, axis_name: AxisName
) -> dict[str, optax.GradientTransformation]:
    usual = candidates(axis_name)
    return usual if given is None else {name: usual[name] for name in ("plump_dp", DENSE)} | dict(given)


def _advice(
    mode: str,
    compute: Cost,
    links: Links,
    chosen: Mapping[str, optax.GradientTransformation],
    reports: Mapping[str, WireReport],
    coding: Mapping[str, Any],
    params: Any,
    sizes: tuple[int, ...],
    axis_name: AxisName,
    begin: float,
) -> Advice:
    wires = {name: links.wire(report) for name, report in reports.items()}

    def fixed(name: str) -> float:
        return compute.seconds + coding[name].seconds + wires[name].latency

    dense = fixed(DENSE) + wires[DENSE].transfer
    link, rows = links.link(reports["plump_dp"].program.always[0]), []
    for name, tx in chosen.items():
        wire, cost = wires[name], coding[name]
        local = compute.plus(cost)
        step = local.seconds + wire.seconds
        rows.append(
            Prediction(
                method=name,
                bytes=reports[name].received,
                step=step,
                low=step - math.hypot(local.seconds - local.low, wire.error),
                high=step + math.hypot(local.high - local.seconds, wire.error),
                wire=wire.seconds,
                latency=wire.latency,
                coding=cost.seconds,
                measured=cost.measured,
                every=reports[name].every,
                memory=state_bytes(tx, params, sizes, axis_name),
                faster=dense / step,
                break_even=_break_even(fixed(name), wire, fixed(DENSE), wires[DENSE], link.bits_per_second),
                accuracy="as dense" if name in WAYS else known_accuracy(name),
            )
        )
    rows.sort(key=lambda row: row.step)
    best, verdict = _verdict(rows)
    report = reports["plump_dp"]
    return Advice(
        mode=mode,
        workers=report.workers,
        parameters=report.parameters,
        compute=compute.seconds,
        link=link.bits_per_second,
        latency=link.latency,
        seconds=time.perf_counter() - begin,
        predictions=rows,
        best=best,
        verdict=verdict,
    )


def _break_even(fixed: float, wire: Wire, dense_fixed: float, dense: Wire, rate: float) -> float:
    """Returns the bits a second from which dense is as fast: transfers grow by `scale` where the link is slower."""
    saved, lost = dense.transfer - wire.transfer, fixed - dense_fixed
    if saved <= 0:
        return math.inf if lost < 0 else 0.0
    return math.inf if lost <= 0 else rate * saved / lost


def _until(bits: float) -> str:
    if not math.isfinite(bits):
        return "It is on any link."
    return f"Above {_rate(bits)} a worker, dense in bfloat16 is as fast."


def _verdict(rows: list[Prediction]) -> tuple[str, str]:
    best, verdict = _verdict_of_exchanges([row for row in rows if row.every == 1])
    local = rows[0]
    if local.every > 1:
        step = next(row.step for row in rows if row.method == best)
        verdict += f" {local.method} would be {step / local.step:.2f}x faster than that, but trains in another way."
    return best, verdict


def _verdict_of_exchanges(rows: list[Prediction]) -> tuple[str, str]:
    dense = min((row for row in rows if row.method in ("plump_dp", DENSE)), key=lambda row: row.step)
    best = rows[0]
    if best.method == dense.method:
        return dense.method, f"keep dense: {dense.method}. No compressor is predicted to be faster on this link."
    if dense.step / best.step < _WORTHWHILE or best.step > dense.low:
        return dense.method, (
            f"keep dense: {dense.method}. The fastest, {best.method}, is predicted to take "
            f"{best.step / dense.step:.0%} of its step, and the range of dense reaches down to "
            f"{dense.low / dense.step:.0%}: too little to gain, or too uncertain."
        )
    return best.method, (
        f"{best.method}: {dense.step / best.step:.2f}x faster than {dense.method} (between "
        f"{dense.low / best.high:.2f}x and {dense.high / max(best.low, 1e-9):.2f}x). {_until(best.break_even)}"
    )
