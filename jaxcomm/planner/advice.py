"""Will compression help me? Predicts every method's step on this mesh and link, and the dense ones'."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxcomm import methods
from jaxcomm.accounting.report import WireReport, trained_shapes, wire_report
from jaxcomm.checks import check_range, check_transformation
from jaxcomm.collectives.axis import AxisName, axis_names, use_mesh
from jaxcomm.exchange import exchange_states, is_local, leaf_name
from jaxcomm.layout import MAX_ELEMENTS
from jaxcomm.planner.costs import (
    Bench,
    Cost,
    check_loss,
    gradients_of,
    known_accuracy,
    lower_coding,
    lower_step,
    measure_copy,
    modelled_coding,
    state_bytes,
)
from jaxcomm.planner.dense_layers import WAYS, Layer, LayerCost, layer_cost, layers_of, measure_layers, modelled_layer
from jaxcomm.planner.links import Links, agreed, given_links, measure_links
from jaxcomm.planner.prediction import (
    ALL_DENSE,
    AS_DENSE,
    CLOSE,
    DENSE,
    Advice,
    Prediction,
    break_even,
    verdict_of,
    without_latency,
)
from jaxcomm.state import trained, with_untrained
from jaxcomm.steps.batch import Batch, check_batch, check_global
from jaxcomm.steps.loss import gradients_of as gradients_fn_of
from jaxcomm.steps.loss import loss_of
from jaxcomm.traffic import Program, Traffic
from jaxcomm.types import Params, PyTree

_TYPICAL_COPY = 1 / 10e9  # seconds a byte, for a device that was not measured


def candidates(axis_name: AxisName = "data", *, local: bool = True) -> dict[str, optax.GradientTransformation]:
    """Returns the methods that are compared by default, by their names in tables.

    Args:
      axis_name: the axis of workers, or the axes.
      local: whether to include local methods, which exchange models instead of gradients.
    """

    def make(factory: Callable[..., Any], *args: Any, **options: Any) -> optax.GradientTransformation:
        return factory(*args, axis_name=axis_name, **options)

    narrow = make(methods.plump_dp, value_dtype="bfloat16")
    exchanges = {
        "plump_dp": make(methods.plump_dp),
        DENSE: narrow,
        "plump_dp(float16)": make(methods.plump_dp, value_dtype="float16"),
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
    params: Params,
    batch: PyTree,
    mesh: Mesh,
    *,
    optimizer: optax.GradientTransformation | None = None,
    methods: Mapping[str, optax.GradientTransformation] | None = None,
    dense_layers: Mapping[str, int] | None = None,
    seconds: float = 60.0,
    axis_name: AxisName = "data",
    batch_axis: PyTree = 0,
) -> Advice:
    """Predicts whether compression will help, from measurements of this mesh. The advice is "thorough".

    Three things are measured: the step without an exchange, on each worker's rows and on all workers at once; the link,
    by every collective that the methods use; and the coding of each method, without its collectives. When `seconds`
    have passed, the coding of the remaining methods is taken from a table of costs, and marked. The parameters are not
    changed.

    All processes of the mesh must call it together, with equal arguments.

    Args:
      loss_fn: (params, batch) -> the loss, or a tuple that starts with the loss; without collectives.
      params: the parameters: a tree of arrays.
      batch: a global batch as a train step takes it: its rows a multiple of the workers, and of global arrays where
        there are several processes.
      mesh: a mesh with at least two workers.
      optimizer: the transformation after the exchange, so that its time counts.
      methods: exchanges or local methods by name; by default those of `candidates`. The dense ones are always compared.
      dense_layers: the dense layers that could multiply late, or be sharded over the workers: by the layer's path in
        the parameters ("fc/1"), the rows of the global batch that reach it. They are compared as the methods "late" and
        "split", which exchange all other gradients densely in bfloat16.
      seconds: the time after which no further method is timed.
      axis_name: the axis of workers, or the axes.
      batch_axis: as in `make_train_step`.

    Returns:
      The advice. `print` shows it as a table.

    Raises:
      ValueError: for a mesh without the axis of workers or with one worker, a batch that a step would refuse, or a loss
        that fails or is not finite.
    """
    with use_mesh(mesh):
        begin = time.perf_counter()
        bench = Bench(mesh, axis_name)
        workers = math.prod(bench.sizes)
        if workers == 1:
            raise ValueError(
                f"A mesh must have a link between workers to be advised on; got one worker of {dict(mesh.shape)}. Run "
                "on two or more, or give a link to jaxcomm.planner.estimate."
            )
        # A step also averages its loss.
        metrics = Traffic("all_reduce", 4, workers, axes=axis_names(axis_name))
        whole, params = params, trained(params)  # integers are parts of the model that no step trains
        question = _make_question(methods, params, dense_layers, bench.sizes, axis_name, [metrics])

        def scalar_loss(params: Params, batch: PyTree) -> Any:
            out = loss_fn(with_untrained(params, whole), batch)
            return out[0] if isinstance(out, tuple) else out

        loss = loss_of(scalar_loss, False, False, axis_name)
        check_batch(batch, workers, batch_axis=batch_axis)
        check_global(batch, batch_axis)
        parts = Batch.of(batch, batch_axis)
        check_loss(loss, params, parts, workers)
        rows, param_rows = bench.shards(parts), bench.spread(params)
        gradients, memory = gradients_of(bench, loss, param_rows, rows)
        optimizer = optimizer or optax.identity()
        links = measure_links(mesh, [report.program for report in question.reports.values()])
        whole_step = gradients_fn_of(loss, axis_name)

        def coding_of(name: str) -> Cost:
            tx = question.chosen[name]
            trees = (question.exchanged(name, tree) for tree in (gradients, param_rows))
            of_layers = (layer_coding for layer, layer_coding in layers if layer.way == name)
            return functools.reduce(Cost.plus, of_layers, lower_coding(bench, tx, *trees).cost())

        def beyond_computing(name: str) -> Cost:
            """Times a local method's whole step, since its steps between two exchanges differ; returns what it adds."""
            chain = optax.chain(optimizer, question.chosen[name])
            return lower_step(bench, whole_step, chain, param_rows, rows).cost().beyond(compute)

        chain = None if "split" not in question.chosen else optax.chain(question.chosen["split"], optimizer)
        layer_codings = measure_layers(bench, question.layers, chain, gradients, param_rows)
        layers = list(zip(question.layers, layer_codings, strict=True))
        # The whole step is timed once, with the dense exchange. Less its coding, it is the computing of every method.
        step = lower_step(bench, whole_step, optax.chain(question.chosen["plump_dp"], optimizer), param_rows, rows)
        coding = {name: coding_of(name) for name in ALL_DENSE}
        compute, copy = step.cost().beyond(coding["plump_dp"]), measure_copy(bench)
        modelled = {
            name: None if name in WAYS else modelled_coding(tx, params, workers, copy)
            for name, tx in question.chosen.items()
        }
        # The table was measured on another machine: scale it by the dense exchanges, which were timed here.
        timed = [(coding[name], modelled[name]) for name in ALL_DENSE]
        factor = statistics.fmean(timing.seconds / model.seconds if model else 1.0 for timing, model in timed)

        def promise(name: str) -> float:
            cost = modelled[name]
            return math.inf if cost is None else cost.seconds * factor + links.wire(question.reports[name]).seconds

        # In the same order on all processes.
        names = sorted((name for name in question.chosen if name not in ALL_DENSE), key=promise)
        for name in names:
            model = modelled[name]
            if model is not None and agreed(time.perf_counter() - begin, mesh) >= seconds:
                coding[name] = model * factor
            else:
                coding[name] = coding_of(name) if question.reports[name].steps == 1 else beyond_computing(name)
        costs = [layer_cost(layer, links, computing) for layer, computing in layers]
        overlaps = mesh.devices.flat[0].platform != "cpu"  # collectives travel while such devices compute
        return _advice("thorough", question, links, compute, coding, costs, memory, begin, overlaps)


def estimate(
    params: Params,
    workers: int,
    rate: float | str | Sequence[float] | Sequence[Sequence[float]],
    *,
    latency: float | None = None,
    compute: float = 0.0,
    copy: float = _TYPICAL_COPY,
    methods: Mapping[str, optax.GradientTransformation] | None = None,
    dense_layers: Mapping[str, int] | None = None,
    axis_name: AxisName = "data",
) -> Advice:
    """Predicts from shapes alone whether compression will help, for any number of workers. The advice is "rapid".

    Nothing is run.

    Args:
      params: the parameters, or their shapes.
      workers: K.
      rate: bits a second that each worker receives, or with its unit, "100mbit"; where links differ, one rate for every
        worker, or one from every worker to every other, see `given_links`.
      latency: seconds of a message from one worker to another; over Gloo this is a round trip, since the receiver
        first says that it is ready. With None it is assumed to be 0, and the verdict says so.
      compute: seconds of a step without an exchange; with 0, exchanges alone are compared.
      copy: seconds per byte of a copy in a worker's memory; the default is 10 GB/s.
      methods: as in `advise`; each must be in the table of costs.
      dense_layers: as in `advise`. Their computing time is estimated from `compute`, see `modelled_layer`.
      axis_name: the axis of workers.

    Raises:
      ValueError: for an impossible link or time, and for a method that is not in the table of costs.
    """
    begin = time.perf_counter()
    holds = isinstance(compute, Real) and 0 <= compute < math.inf
    check_range("compute", compute, "seconds, 0 or more", holds, "0 if not known")
    holds = isinstance(copy, Real) and 0 < copy < math.inf
    check_range("copy", copy, "seconds a byte, above 0", holds, "1e-10 is 10 GB/s")
    links = given_links(rate, 0.0 if latency is None else latency)
    like = trained_shapes(params)
    question = _make_question(methods, like, dense_layers, (workers,), axis_name, [])
    coding = {name: modelled_coding(tx, like, workers, copy) for name, tx in question.chosen.items()}
    unpriced = [name for name, cost in coding.items() if cost is None]
    if unpriced:
        raise ValueError(
            f"A rapid estimate must be of methods whose cost is in the table; got {', '.join(unpriced)}. Measure them "
            "with jaxcomm.advise, or leave them out."
        )
    costs_of = {name: cost for name, cost in coding.items() if cost is not None}
    n, costs = sum(leaf.size for leaf in jax.tree.leaves(like)), list[LayerCost]()
    for layer in question.layers:
        layer_coding = modelled_layer(layer, compute, n)
        costs_of[layer.way] = costs_of[layer.way].plus(layer_coding)
        costs.append(layer_cost(layer, links, layer_coding))
    advice = _advice("rapid", question, links, Cost(compute, compute, compute), costs_of, costs, 0, begin)
    return advice if latency is not None else without_latency(advice)


@dataclass(frozen=True)
class _Question:
    """The methods to compare, and their bytes.

    Attributes:
      chosen: the transformations by method name; those of "late" and "split" exchange what their layers do not reduce.
      reports: the bytes of each method, its layers' included.
      layers: the dense layers, one for each of the `WAYS` that is possible.
      params: the parameters, or their shapes.
      sizes: the number of workers along each axis.
      axis_name: the axis of workers, or the axes.
      left_out: the candidates that take no tensor as large as these parameters have.
    """

    chosen: Mapping[str, optax.GradientTransformation]
    reports: Mapping[str, WireReport]
    layers: Sequence[Layer]
    params: Params
    sizes: tuple[int, ...]
    axis_name: AxisName
    left_out: tuple[str, ...] = ()

    def exchanged(self, name: str, tree: PyTree) -> Any:
        """Returns a tree like the parameters without the leaves whose gradients a method's layers already reduce."""
        reduced = {path for layer in self.layers if layer.way == name for path in layer.tensors}
        return jax.tree_util.tree_map_with_path(lambda path, leaf: None if leaf_name(path) in reduced else leaf, tree)


def _make_question(
    candidate_methods: Mapping[str, optax.GradientTransformation] | None,
    params: Params,
    dense_layers: Mapping[str, int] | None,
    sizes: tuple[int, ...],
    axis_name: AxisName,
    metrics: Sequence[Traffic],
) -> _Question:
    """Finds the methods to compare, and their bytes; every step sends `metrics` in addition to its exchange."""
    transformations, left_out = candidates(axis_name), ()
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    if candidate_methods is not None:
        _check_methods(candidate_methods, params)
        transformations = {name: transformations[name] for name in ALL_DENSE} | dict(candidate_methods)
    elif any(leaf.size >= MAX_ELEMENTS for leaf in leaves.values()):
        left_out = tuple(name for name, tx in transformations.items() if name not in ALL_DENSE and not is_local(tx))
        transformations = {name: tx for name, tx in transformations.items() if name not in left_out}
    layers = layers_of(leaves, dense_layers or {}, sizes, axis_name)
    extra_traffic = dict.fromkeys(transformations, metrics)
    for way in dict.fromkeys(layer.way for layer in layers):
        way_layers = [layer for layer in layers if layer.way == way]
        transformations[way] = _dense_without([path for layer in way_layers for path in layer.tensors], axis_name)
        extra_traffic[way] = [*metrics, *(traffic for layer in way_layers for traffic in layer.program.always)]
    reports = {
        name: wire_report(tx, params, sizes, beside=extra_traffic[name], axis_name=axis_name)
        for name, tx in transformations.items()
    }
    return _Question(transformations, reports, layers, params, sizes, axis_name, left_out)


def _check_methods(methods: Mapping[str, optax.GradientTransformation], params: Params) -> None:
    """Refuses methods that are no mapping, have the name of another one, or exchange no parameter."""
    remedy = 'Pass {"topk(0.9)": jaxcomm.topk(0.9)}, say'
    check_range("methods", methods, "exchanges by name", isinstance(methods, Mapping), remedy)
    for name, tx in methods.items():
        check_transformation(f"methods[{name!r}]", tx)
        paths = jax.tree_util.tree_leaves_with_path(params)
        for method in (state.method for state in exchange_states(jax.eval_shape(tx.init, params))):
            is_own = name not in WAYS and (name not in ALL_DENSE or method.name == "plump_dp")
            rule = f"exchanges with names of their own, not those of others, {', '.join((*WAYS, *ALL_DENSE))}"
            check_range("methods", f"{method.name} as {name!r}", rule, is_own, "Take another name")
            is_one = method.others is not None or any(leaf.size and method.chooses(path, leaf) for path, leaf in paths)
            remedy = "Widen its where=, which is searched for in the parameters' paths"
            check_range("methods", name, "exchanges of some of the parameters", is_one, remedy)


def _dense_without(reduced: list[str], axis_name: AxisName) -> optax.GradientTransformation:
    """Makes the dense exchange of all parameters but those in `reduced`, whose gradients layers already reduce."""
    excluded = frozenset(reduced)
    return methods.plump_dp(value_dtype="bfloat16", where=lambda path, _: path not in excluded, axis_name=axis_name)


def _advice(
    mode: str,
    question: _Question,
    links: Links,
    compute: Cost,
    coding: Mapping[str, Cost],
    layers: list[LayerCost],
    memory: int,
    begin: float,
    dense_overlaps: bool = False,
) -> Advice:
    """Makes the advice: adds up each method's times.

    If dense exchanges overlap with backpropagation, the range of their steps reaches down to the longer of computing
    and exchanging: how much of it overlaps is known once it runs, and compression must not be advised for less.
    """
    wires = {name: links.wire(report) for name, report in question.reports.items()}

    def fixed(name: str) -> float:
        return compute.seconds + coding[name].seconds + wires[name].latency

    dense = fixed(DENSE) + wires[DENSE].transfer
    report = question.reports["plump_dp"]
    link, rows = links.link(report.program.always[0]), []
    for name, tx in question.chosen.items():
        wire, cost = wires[name], coding[name]
        local = compute.beyond(cost * -1)  # at least 0: savings cannot exceed the computing
        step, can_wait = local.seconds + wire.seconds, question.reports[name].steps == 1 and name not in WAYS
        low, at_once = step - math.hypot(local.seconds - local.low, wire.error), cost.seconds + wire.seconds
        is_exact, accuracy = name == "plump_dp" or name in WAYS, known_accuracy(name)
        if dense_overlaps and name in ALL_DENSE:
            low = min(low, max(compute.low, at_once - wire.error))
        rows.append(
            Prediction(
                method=name,
                bytes=question.reports[name].received_on_average,
                step=step,
                delayed=max(compute.seconds, at_once) if can_wait else None,
                low=low,
                high=step + math.hypot(local.high - local.seconds, wire.error),
                wire=wire.seconds,
                latency=wire.latency,
                messages=given_links(1.0, 1.0).wire(question.reports[name]).latency,
                coding=cost.seconds,
                measured=cost.measured,
                every=question.reports[name].steps,
                shortest_period=_shortest_period(question.reports[name], links, cost, compute),
                memory=state_bytes(tx, question.params, question.sizes, question.axis_name),
                faster=dense / step,
                break_even=break_even(fixed(name), wire, fixed(DENSE), wires[DENSE], link.bits_per_second),
                accuracy=AS_DENSE if is_exact else "-" if accuracy is None else str(accuracy),
                loss=0.0 if is_exact else accuracy and accuracy.loss,
            )
        )
    rows.sort(key=lambda row: row.step)
    best, verdict = verdict_of(rows)
    if question.left_out:
        verdict += f" Left out: {', '.join(question.left_out)}, which take no tensor of 2^31 elements or more."
    return Advice(
        mode=mode,
        workers=report.workers,
        parameters=report.parameters,
        compute=compute.seconds,
        link=link.bits_per_second,
        latency=link.latency,
        memory=memory,
        seconds=time.perf_counter() - begin,
        predictions=rows,
        best=best,
        verdict=verdict,
        layers=layers,
    )


def _shortest_period(report: WireReport, links: Links, coding: Cost, compute: Cost) -> int | None:
    """Returns the smallest H with which a step of a local method takes at most `CLOSE` longer than its computing."""
    if report.steps == 1 or compute.seconds == 0:
        return None
    constant = links.seconds(Program(report.program.always))  # sent in every step: the mean of its loss
    exchange = report.steps * (coding.seconds + links.wire(report).seconds - constant)
    spare = CLOSE * compute.seconds - constant
    return max(1, math.ceil(exchange / spare)) if spare > 0 else None
