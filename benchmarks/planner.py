"""The planner against the lab: predicted and measured steps, and the table of costs behind rapid estimates.

    python -m benchmarks.planner --hosts 2,4,8 --rate 100mbit,1gbit   # predicted and measured, cell by cell
    python -m benchmarks.planner --calibrate                          # measures jaxcomm/planner/costs.json
    python -m benchmarks.planner --accuracies                         # writes its accuracies from docs/data

A cell is a method, a number of hosts and a rate; "100mbit/1gbit" is a slow link for host 0. For each number of hosts
and rate, `jaxcomm.advise` first measures and predicts on the hosts; then every method's whole train step is
timed in the same processes. The MLP has three layers of 1024 x 1024 and a head, 3.2M parameters, and 64 rows per
worker. For other shapes, the gradient is each worker's own noise, and costs nothing to compute. But the dense layers of
alexnet and vgg16 are computed, for 64 rows per worker, and may multiply late or be split.
"""

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks import harness
from benchmarks.conditions import headed
from benchmarks.harness import Control, HostOptions, Row
from benchmarks.ladder import Config as LadderConfig
from benchmarks.ladder import Ladder
from benchmarks.shapes import shapes_of
from configs import CONFIGS
from configs.methods import DctDp, LocalSgd, Method, PlumpDp, PowerSgd, QuantDp, RandomK, Sign, TopK
from jaxcomm.planner.advice import DENSE, candidates
from jaxcomm.planner.costs import Accuracy, Bench, cost_key, lower_coding, measure_copy, method_of, size_of
from jaxcomm.planner.prediction import ALL_DENSE
from train.compare import interval, summarise
from train.loop import describe
from train.processes import prepare_jax
from train.records import Records
from train.tables import print_table, write_records

COSTS = Path(__file__).parents[1] / "jaxcomm" / "planner" / "costs.json"
DATA = Path(__file__).parents[1] / "docs" / "data"
ACCURACY, LADDER = DATA / "compare_fashion.json", DATA / "ladder.json"
ON_LADDER = {"powersgd(4)": "powersgd", "topk(0.99)": "topk", "dct_dp(0.99)": "dct_dp", "quant_dp(8)": "quant_dp"}
# The candidates whose accuracy on images is known, as the trainer's methods, with the defaults of the library.
MEASURED: dict[str, Method] = {
    "dct_dp(0.99)": DctDp(sparsity=0.99, life_span=1000),
    "topk(0.99)": TopK(sparsity=0.99),
    "random_k(0.9)": RandomK(sparsity=0.9),
    "powersgd(4)": PowerSgd(rank=4),
    "quant_dp(8)": QuantDp(bits=8),
    "sign": Sign(),
    "local_sgd(10)": LocalSgd(steps=10, outer_momentum=0.9),
}
# The same with other sizes: what coding grows by, see `jaxcomm.planner.costs.size_of`.
LARGER = {
    "dct_dp(0.99)": jc.dct_dp(0.9),
    "topk(0.99)": jc.topk(0.9),
    "random_k(0.9)": jc.random_k(0.5),
    "powersgd(4)": jc.powersgd(64),
}
REGIONS = Path(__file__).parents[1] / "docs" / "figures" / "regions.png"
WIDTH, LAYERS, CLASSES, ROWS = 1024, 3, 10, 64  # of the MLP
COMPUTED = {"alexnet": 3, "vgg16": 3}  # the number of dense layers, which end the model
GAIN = 1.05  # times faster than dense from which a method is worthwhile
WARM_UP = 10  # steps that are not timed
REFRESHES = 40  # the same with dct_dp: a usual step is predicted, and it refreshes in the steps 1, 2, 4, ..., 32
# Steps at least that are timed at once, one after another as in training: after a single step from a barrier, other
# workers still compute when this one is done.
IN_A_ROW = 5
CLOSE, WRONG = 0.10, 0.05  # the targets: how close a step is predicted, and by how much "faster" may be wrong


@dataclass(frozen=True)
class Config(HostOptions):
    """Compare predicted with measured steps, or measure the table of costs."""

    shapes: str = "mlp"  # What is trained: "mlp", or shapes as for benchmarks.exchange ("resnet50", "1e6").
    hosts: str = "2,4"  # Numbers of hosts, separated by commas; one worker each.
    rate: str = "100mbit,1gbit"  # Link rates, separated by commas, or "none" for no limit.
    methods: str = "all"
    """Methods, separated by spaces, by their names in the advice ("dct_dp(0.99)"); dense, late and split always run."""
    steps: int = 25  # Timed steps of each cell, five at a time; for a local method, whole periods.
    seconds: float = 60.0  # Seconds after which the advice times no further method.
    plan: bool = False  # Also make a plan from each advice, and train with it.
    regions: bool = False
    """Draw which method a rapid estimate finds fastest, by link speed and computing time; no lab is needed."""
    calibrate: bool = False  # Measure the table of costs on this machine instead.
    accuracies: bool = False  # Read the accuracies of that table from the records instead, and keep its costs.


def main(config: Config) -> None:
    """Runs the hosts, prints the table, and writes it where asked."""
    if config.calibrate:
        calibrate(config)
        return
    if config.accuracies:
        write_table(json.loads(COSTS.read_text()))
        return
    if config.regions:
        draw_regions(config)
        return
    if config.shapes != "mlp":
        shapes_of(config.shapes)
    _methods(config)
    rates = harness.check_run(config.rate, config.steps)
    rows = [row for K in harness.numbers("--hosts", config.hosts) for row in harness.on_hosts(K, rates[0], config)]
    rows = [row | _errors(row, rows) for row in rows]
    print_table(*headed(f"Steps of {config.shapes}, predicted and measured", rows))
    print(summary(rows))
    write_records(config.json, [{"shapes": config.shapes} | row for row in rows])


def _errors(row: Row, rows: Sequence[Row]) -> Row:
    dense = harness.find(rows, hosts=row["hosts"], rate=row["rate"], method=DENSE)
    assert dense is not None
    return {
        "error": row["ms_predicted"] / row["ms_median"] - 1,
        "faster_predicted": dense["ms_predicted"] / row["ms_predicted"],
        "faster_measured": dense["ms_median"] / row["ms_median"],
    }


def summary(rows: Sequence[Row]) -> str:
    """Returns a text on how many cells meet the targets."""
    close = sum(abs(row["error"]) <= CLOSE for row in rows)
    inside = sum(row["ms_low"] <= row["ms_median"] <= row["ms_high"] for row in rows)
    rivals = [row for row in rows if row["method"] != DENSE]
    wrong = [row for row in rivals if (row["faster_predicted"] - 1) * (row["faster_measured"] - 1) < 0]
    far = [f"{r['method']} K={r['hosts']} {r['rate']}" for r in wrong if abs(r["faster_measured"] - 1) > WRONG]
    return (
        f"{close} of {len(rows)} cells are predicted within {CLOSE:.0%}, {inside} lie in their range. Faster or "
        f"slower than dense in bfloat16 is told wrongly in {len(wrong)} of {len(rivals)} cells"
        + (f", by more than {WRONG:.0%} in: {', '.join(far)}." if far else f", in none by more than {WRONG:.0%}.")
    )


def _methods(config: Config) -> dict[str, optax.GradientTransformation]:
    methods = candidates()
    return harness.choose(
        methods, list(methods) if config.methods == "all" else ["plump_dp", DENSE, *config.methods.split()]
    )


def run_host(config: Config, control: Control) -> Iterator[Row]:
    """Runs one host's part: advice and measurement at every rate; yields a row for each cell."""
    mesh = jc.make_mesh(data=control.hosts)
    loss_fn, params, batch = problem(config.shapes, control.hosts)
    mine = NamedSharding(mesh, P("data"))
    rows = jax.tree.map(lambda leaf: jax.make_array_from_callback(leaf.shape, mine, lambda i: leaf[i]), batch)
    optimizer = optax.sgd(1e-3, momentum=0.9)
    methods = _methods(config)
    layers = [name for name in params if name.startswith("fc")] if isinstance(params, dict) else []

    def step_of(tx: Any, ways: dict[str, str]) -> Any:
        """Makes a train step whose dense layers are computed in the given ways, by name."""
        is_local = jc.state.communication_period(jax.eval_shape(tx.init, params)) is not None
        chain = jc.chain(optimizer, tx) if is_local else jc.chain(tx, optimizer)
        specs = None
        if "split" in ways.values():
            specs = jax.tree.map(lambda _: P(), params)
            for name in ways:
                specs[name]["kernel"] = jc.layers.narrowing_spec(params[name]["kernel"].shape)
        return jc.make_train_step(partial(loss_fn, ways=ways), chain, mesh, **({"specs": specs} if specs else {}))

    def time_steps(step: Any, rate: str, warm_up: int) -> tuple[list[float], list[float], float]:
        """Returns the milliseconds and bytes of steps after the warm-up, and the predicted bytes."""
        control.set_rate("none")
        state = jax.jit(step.init)(params)
        for _ in range(warm_up):
            state, _ = step(state, rows)
        predicted, period = step.report(state, rows).received, jc.state.communication_period(state) or 1
        control.set_rate(rate)
        in_a_row = period * math.ceil(IN_A_ROW / period)

        def steps(state: Any) -> Any:
            for _ in range(in_a_row):
                state, _ = step(state, rows)
            return state

        times, counts, _ = control.measure(steps, state, math.ceil(config.steps / IN_A_ROW))
        return [ms / in_a_row for ms in times], [count / in_a_row for count in counts], predicted

    runs = {name: step_of(tx, {}) for name, tx in methods.items()}
    if layers:
        late = jc.plump_dp(value_dtype="bfloat16", where="^rest")
        runs["late"] = step_of(late, dict.fromkeys(layers, "late"))
        runs["split"] = step_of(methods[DENSE], dict.fromkeys(layers, "split"))
    for rate in config.rate.split(","):
        control.set_rate(rate)
        exchanges = {name: tx for name, tx in methods.items() if not name.startswith("plump_dp")}
        advice = jc.planner.advise(
            partial(loss_fn, ways={}),
            params,
            rows,
            mesh,
            optimizer=optimizer,
            methods=exchanges,
            dense_layers=dict.fromkeys(layers, ROWS * control.hosts),
            seconds=config.seconds,
        )
        if control.host == 0:
            print(f"# {rate}\n{advice}", flush=True)
        timed: dict[str, Any] = dict.fromkeys(runs)
        if config.plan:
            timed["plan"] = _shared_plan(control, advice, params, methods)
        for name, plan in timed.items():
            step = runs[name] if plan is None else step_of(plan.transformation(), _ways(plan))
            uses = [name] if plan is None else list(plan.used)
            warm_up = REFRESHES if any(used.startswith("dct_dp") for used in uses) else WARM_UP
            times, counts, predicted = time_steps(step, rate, warm_up)
            cell = advice[name] if plan is None else None
            ends = [cell.step, cell.low, cell.high] if cell else [plan.step] * 3
            yield {
                "method": name,
                "hosts": control.hosts,
                "rate": rate,
                **{f"ms_{end}": 1e3 * seconds for end, seconds in zip(("predicted", "low", "high"), ends, strict=True)},
                **harness.spread(times),
                "bytes_kernel": statistics.fmean(counts),
                "bytes_predicted": predicted,
                "coding_measured": cell is None or cell.measured,
                "advice_seconds": advice.seconds,
                "uses": "" if plan is None else ", ".join(f"{key} {len(paths)}" for key, paths in plan.used.items()),
            }


def _ways(plan: jc.placement.Plan) -> dict[str, str]:
    return {layer: way for way in ("late", "split") for layer in plan.computed(way)}


def _shared_plan(control: Control, advice: Any, params: Any, methods: dict[str, optax.GradientTransformation]) -> Any:
    """Makes a plan on host 0; the other hosts read its file."""
    control.requests += 1
    file = control.folder / f"{control.requests}.plan"
    if control.host == 0:
        plan = jc.placement.make_plan(advice, params, methods=methods)
        print(plan, flush=True)
        plan.write(file.with_suffix(".draft"))
        file.with_suffix(".draft").rename(file)
    control.barrier()
    return jc.placement.read_plan(file)


def draw_regions(config: Config) -> None:
    """Draws the fastest exchange by link speed and computing time, for the given shapes and numbers of hosts.

    If no exchange is at least 5% faster than dense, dense is drawn. Local methods are left out.
    """
    shapes = "resnet50" if config.shapes == "mlp" else config.shapes
    sizes = shapes_of(shapes)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes]
    rates, computes = np.logspace(7, 11, 25), np.logspace(-2, 1, 25)
    hosts, names = harness.numbers("--hosts", config.hosts), list(candidates(local=False))
    with harness.figure(REGIONS, 1, len(hosts), (4 * len(hosts), 4.8), dpi=110) as (drawing, panels):
        for axis, count in zip(panels[0], hosts, strict=True):
            advice = jc.planner.estimate(params, count, 1e9, latency=1e-4)
            rows = [advice[name] for name in names]
            fixed = np.array([row.coding + row.latency for row in rows])[:, None, None] + computes[None, :, None]
            steps = fixed + np.array([row.wire - row.latency for row in rows])[:, None, None] * 1e9 / rates
            best = steps.argmin(0)  # (computing times, rates)
            dense = [names.index(name) for name in ALL_DENSE]
            gains = steps[dense].min(0) / steps.min(0)
            best = np.where(gains < GAIN, np.array(dense)[steps[dense].argmin(0)], best)
            for index in np.unique(best):
                rows, columns = np.nonzero(best == index)
                axis.scatter(rates[columns], computes[rows], color=f"C{index}", marker="s", s=26, label=names[index])
            axis.set(xscale="log", yscale="log", xlabel="link, bits a second", title=f"K = {count}")
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=8, ncols=2)
            axis.sharey(panels[0][0])
        panels[0][0].set_ylabel("computing, seconds a step")
        drawing.suptitle(f"The fastest exchange by a rapid estimate: {shapes}, memory copied at 10 GB/s")


def problem(shapes: str, workers: int) -> tuple[Any, Any, Any]:
    """Returns (loss, parameters, global batch) of the MLP, or of shapes whose gradient is the batch.

    The loss also takes `ways`: "late" or "split" by the names of dense layers.
    """
    random = np.random.default_rng(0)
    if shapes != "mlp":
        sizes = shapes_of(shapes)
        dense = len(sizes) - 2 * COMPUTED.get(shapes, 0)  # where the dense layers begin; each is a kernel and a bias
        params: dict[str, Any] = {"rest": [random.standard_normal(shape, np.float32) for shape in sizes[:dense]]}
        batch: dict[str, Any] = {
            "rest": [random.standard_normal((workers, *shape), np.float32) for shape in sizes[:dense]]
        }
        for index, kernel in enumerate(sizes[dense::2]):
            scale = np.float32(math.sqrt(2 / kernel[0]))
            weights = scale * random.standard_normal(kernel, np.float32)
            params[f"fc{index}"] = {"kernel": weights, "bias": np.zeros(kernel[1], np.float32)}
        if dense < len(sizes):
            batch["x"] = random.standard_normal((workers, ROWS, sizes[dense][0]), np.float32)

        def inner(params: Any, batch: Any, ways: dict[str, str]) -> jax.Array:
            parts = [jnp.vdot(p, rows[0]) for p, rows in zip(params["rest"], batch["rest"], strict=True)]
            total = jnp.stack(parts).sum() / len(parts)
            x = batch["x"][0] if "x" in batch else None
            for index in range(len(params) - 1):
                layer, way = params[f"fc{index}"], ways.get(f"fc{index}", "reduce")
                if way == "split":
                    x = jc.layers.split_dense(x, layer["kernel"], layer["bias"])
                else:
                    x = jc.late_multiply(x, layer["kernel"], layer["bias"], mode=way)
                x = jax.nn.relu(x)
            return total if x is None else total + x.mean()

        return inner, params, batch
    widths = [WIDTH] * (LAYERS + 1) + [CLASSES]
    params = [
        {
            "kernel": random.standard_normal(pair).astype(np.float32) / math.sqrt(pair[0]),
            "bias": np.zeros(pair[1], np.float32),
        }
        for pair in itertools.pairwise(widths)
    ]
    batch = {
        "x": random.standard_normal((workers * ROWS, WIDTH)).astype(np.float32),
        "y": random.integers(0, CLASSES, workers * ROWS),
    }

    def loss(params: Any, batch: Any, ways: dict[str, str]) -> jax.Array:
        del ways
        x = batch["x"]
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        logits = x @ params[-1]["kernel"] + params[-1]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss, params, batch


def calibrate(config: Config) -> None:
    """Measures every candidate's computing on one device for K = 2, 8 and 32; the unit is a copy of the gradient."""
    prepare_jax()
    mesh = jc.make_mesh(data=1)
    shapes = [(1024, 1024)] * 4 if config.shapes == "mlp" else shapes_of(config.shapes)
    random = np.random.default_rng(0)
    gradients = [random.standard_normal(shape, np.float32) for shape in shapes]
    params = [random.standard_normal(shape, np.float32) for shape in shapes]
    n = sum(leaf.size for leaf in params)

    def copies(tx: optax.GradientTransformation, workers: int) -> float:
        bench = Bench(mesh, "data", workers)
        coding, ratios = lower_coding(bench, tx, bench.spread(gradients), bench.spread(params)), []
        for _ in range(7):  # the speed of this machine's cores varies: both sides of a ratio are of one moment
            copy = measure_copy(bench, n)
            ratios.append(coding.cost().seconds / (jc.planner.COPY_BYTES * n * copy))
        return statistics.median(ratios)

    def line(by_workers: Mapping[int, float]) -> dict[str, float]:
        """Returns the straight line through the fewest and the most workers, which begins at 0 or above."""
        fewest, most_workers = min(by_workers), max(by_workers)
        slope = max(0.0, (by_workers[most_workers] - by_workers[fewest]) / max(1, most_workers - fewest))
        return {"fixed": max(0.0, by_workers[fewest] - fewest * slope), "a_worker": slope}

    table_of_costs: dict[str, dict[str, float]] = {}
    for name, tx in candidates(local=False).items():  # a local method costs its exchange, once per period
        method, by_key = method_of(tx, params), dict[str, dict[int, float]]()
        for workers in (2, 8, 32):
            by_key.setdefault(cost_key(method, workers), {})[workers] = copies(tx, workers)
        for key, by_workers in by_key.items():
            costs = line(by_workers)
            if name in LARGER:
                at, size = (size_of(method_of(one, params)) or 0.0 for one in (tx, LARGER[name]))
                larger = line({workers: copies(LARGER[name], workers) for workers in (2, 8)})
                growth = {f"{field}_a_unit": max(0.0, (larger[field] - costs[field]) / (size - at)) for field in larger}
                costs |= {"at": at, **growth}
            table_of_costs[key] = {field: round(value, 4) for field, value in costs.items()}
            print(f"{name}: {key} {table_of_costs[key]}", flush=True)
    table = {
        "source": "python -m benchmarks.planner --calibrate",
        "device": jax.devices()[0].device_kind,
        "copies": table_of_costs,
    }
    write_table(table)


def write_table(table: Mapping[str, Any]) -> None:
    """Writes a table of costs, with what the records have about accuracy."""
    COSTS.write_text(json.dumps({**table, "accuracy": accuracy()}, indent=2) + "\n")
    print(f"written to {COSTS}")


def accuracy() -> dict[str, dict[str, Any]]:
    """Returns the fields of an `Accuracy` for the candidates: of the ladder's GPT, otherwise of Fashion-MNIST."""
    records = json.loads(ACCURACY.read_text())
    dense = [100 * run["scores"]["accuracy"] for run in _runs_of(records, PlumpDp())]
    known = dict[str, dict[str, Any]]()
    for name, method in MEASURED.items():
        runs = _runs_of(records, method)
        row = summarise(runs, dense=dense, margin=0.0)
        points = (-row[column] for column in ("points_below_dense", "below_high", "below_low"))
        on = f"Fashion-MNIST, {runs[0]['about']['steps']:,} steps, {row['seeds']} seeds"
        known[name] = Accuracy(*(round(number, 2) for number in points), "points", on)._asdict()
    return known | ladder_accuracy()


def ladder_accuracy() -> dict[str, dict[str, Any]]:
    """Returns what docs/data/ladder.json has about the candidates: on one rung, the largest that has most of them."""
    ladder = Ladder(LadderConfig(), Records(LADDER), json.loads(LADDER.read_text())[0]["about"])
    dense = {rung: losses for rung in ladder.rungs if (losses := ladder.final(rung, "dense"))}
    found = {
        rung: {name: losses for name, entry in ON_LADDER.items() if (losses := ladder.final(rung, entry))}
        for rung in dense
    }
    known = dict[str, dict[str, Any]]()
    if not found:
        return known
    rung = max(found, key=lambda rung: (len(found[rung]), rung.size))
    size = rung.steps * ladder.about["batch"] * ladder.about["length"]
    for name, losses in found[rung].items():
        gaps = [own - other for own, other in zip(losses, dense[rung], strict=True)]
        numbers = (round(number, 3) + 0.0 for number in (statistics.fmean(gaps), *interval(gaps)))  # no -0.0
        on = f"a GPT of {rung.size:,} parameters on {1e-6 * size:.1f} MB of text, {len(gaps)} seeds"
        own = ladder.entries[ON_LADDER[name]].method
        on += f", life_span of {own.life_span}" if isinstance(own, DctDp) else ""
        known[name] = Accuracy(*numbers, "nats", on)._asdict()
    return known


def _runs_of(records: list[dict[str, Any]], method: Method) -> list[dict[str, Any]]:
    options = _options(describe(CONFIGS["fashion"], method))
    return sorted((r for r in records if _options(r["about"]) == options), key=lambda r: r["about"]["seed"])


def _options(about: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if name.startswith("method")}


if __name__ == "__main__":
    harness.run(Config, __doc__, main, run_host)
