"""Milliseconds, bytes and compile time of one exchange between real processes on rate-limited links.

    python -m benchmarks.exchange --shapes resnet50 --hosts 4 --rate 100mbit,1gbit --method plump_dp,topk,dct_dp,naive

Every host of a network lab is a process. All methods run in the same processes, one after another, and each at all
rates. A step turns one gradient per worker (normal noise) into the workers' mean; the residual is reset between timed
steps, so that every step selects from the same distribution. The thresholds of dct_dp are those of an earlier step, as
in a usual step; ms_refresh is the time of a step that refreshes them, or selects a core (slim_dp).
sizes_moved is what a usual step of the compiled program reads from memory and writes to it (see
`benchmarks.memory_traffic`), and sizes_held the most that it holds: gradient, state, result and temporaries. Both are
in sizes of the gradient (4 bytes a parameter).

    python -m benchmarks.exchange --device gpu --json exchange.json

times them on this machine's GPUs instead, in one process, one worker each, over the links that they have; times,
bytes_compiled and memory are as above. On several machines, start it on each with JAXCOMM_COORDINATOR (HOST:PORT of the
first), JAXCOMM_PROCESS_ID and JAXCOMM_NUM_PROCESSES set, or under Slurm.

With --rounds, the hosts are started anew that many times. A row then has the median of the rounds' medians, the least
and the most of all steps, and the median, least and most of times_faster, which compares with the dense exchange of the
same round. A file that is given as --days keeps the rounds of every day, and the table is of all of them. With --delay,
every message between hosts takes longer; with --slow, the last host computes slower.
"""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks import harness
from benchmarks.conditions import LINKS, check_control, machine
from benchmarks.harness import Control, HostOptions, Row
from benchmarks.memory_traffic import read_memory_traffic
from benchmarks.naive import naive_topk
from benchmarks.netlab import Lab
from benchmarks.shapes import count, shapes_of
from jaxcomm.accounting.hlo import read_program
from train.tables import check_file, write_records

# (sparsity) -> the method; those without a sparsity ignore it.
METHODS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "plump_dp": lambda _: jc.plump_dp(),
    "plump_dp_bfloat16": lambda _: jc.plump_dp(value_dtype="bfloat16"),
    "plump_dp_float16": lambda _: jc.plump_dp(value_dtype="float16"),
    "quant_dp": lambda _: jc.quant_dp(),
    "quant_dp_16": lambda _: jc.quant_dp(16),
    "quant_dp_gather": lambda _: jc.quant_dp(collective="gather"),
    "quant_dp_two_shot": lambda _: jc.quant_dp(collective="two_shot"),
    "quant_dp_4": lambda _: jc.quant_dp(4),
    "quant_dp_2": lambda _: jc.quant_dp(2),
    "terngrad": lambda _: jc.terngrad(),
    "sign": lambda _: jc.sign(),
    "powersgd": lambda _: jc.powersgd(),
    "slim_dp": lambda _: jc.slim_dp(0.2, 0.1),
    "slim_dp_30_0": lambda _: jc.slim_dp(0.3, 0.0),
    "slim_dp_30_15": lambda _: jc.slim_dp(0.3, 0.15),
    "slim_dp_30_30": lambda _: jc.slim_dp(0.3, 0.3),
    "slim_dp_50_25": lambda _: jc.slim_dp(0.5, 0.25),
    "random_k": jc.random_k,
    "random_k_float32": lambda sparsity: jc.random_k(sparsity, value_dtype="float32"),
    "random_k_ring": lambda sparsity: jc.random_k(sparsity, collective="ring"),
    # Weights and gradients are both normal noise: the fraction 1 - sparsity of their quotients is above this threshold.
    "iwp": lambda sparsity: jc.iwp(
        1 / math.tan((1 - sparsity) * math.pi / 2), density=1 - sparsity, random_selection=False
    ),
    "dgc": jc.dgc,
    "demo": lambda sparsity: jc.demo(max(1, round(4096 * (1 - sparsity)))),
    "topk": jc.topk,
    "topk_2bit": lambda sparsity: jc.topk(sparsity, value_dtype="2bit"),
    "sparse_loco": lambda _: jc.sparse_loco(1),
    "dct_dp": jc.dct_dp,
    "dct_dp_balanced": lambda sparsity: jc.dct_dp(sparsity, collective="balanced"),
    "naive": naive_topk,
}

USUAL_STEP = 65  # neither a power of two nor a multiple of a period: dct_dp refreshes in the steps 0, 1, 2, 4, 8, ...


@dataclass(frozen=True)
class Config(HostOptions):
    """Time one exchange of gradients between real processes on rate-limited links."""

    shapes: str = "resnet50"
    """Shapes of the gradient: "resnet50" (161 tensors, 25.6M parameters), "alexnet", "vgg16", "googlenet", "dlrm",
    "transformer", or a number for one vector."""
    hosts: int = 4  # Hosts, one worker each.
    device: str = ""
    """Kind of this machine's devices (gpu, tpu, cpu) to run on, in place of a lab's hosts: one worker each; no rate."""
    rate: str = "100mbit,1gbit"  # Link rates, separated by commas: "100mbit", "1gbit", or "none" for no limit.
    method: str = "plump_dp,topk,dct_dp,naive"
    """Methods, separated by commas, or "all": a transformation's name, or one followed by a setting (quant_dp_4: 4
    bits; random_k_ring: summed on a ring), or naive (lax.top_k with int32 indices)."""
    sparsity: float = 0.99  # Fraction of coordinates that the sparse methods do not send.
    steps: int = 5  # Timed steps of each method and rate.
    rounds: int = 1  # Runs of all hosts.
    days: Path | None = None  # File with the rounds of other days, of the same command; these are added to it.
    huge_pages: bool = False  # Let glibc back large arrays with huge pages (GLIBC_TUNABLES), for all methods.


def main(config: Config) -> None:
    """Runs the hosts, prints the table, and writes it where asked."""
    selected_methods(config.method, config.sparsity)
    size, rates = count(shapes_of(config.shapes)), harness.check_run(config.rate, config.steps)
    harness.check_least(config, 1, "rounds")
    if config.device:
        if config.link("") != "":
            raise ValueError(
                f"--delay, --jitter and --slow must be left out with --device, whose links are what they are; got "
                f"{config.link('')[2:]}. Leave out --device."
            )
        return _on_devices(config)
    rounds = earlier_rounds(config)
    env = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if config.huge_pages else {}
    for _ in range(config.rounds):
        rounds.append(harness.on_hosts(config.hosts, rates[0], config, env=env))
        write_records(config.days, [row | {"round": number} for number, rows in enumerate(rounds) for row in rows])
    title = f"Exchange of {size:,} parameters, sparsity {config.sparsity}, {config.hosts} hosts"
    harness.report(config.json, (title, summary(rounds)))


def earlier_rounds(config: Config) -> list[list[Row]]:
    """Returns the rounds that the file of other days has.

    Raises:
      ValueError: for rounds of other methods, bytes, rates, hosts or links, or under another congestion control.
    """
    check_file("--days", config.days)
    if config.days is None or not config.days.exists():
        return []
    rows: list[Row] = json.loads(config.days.read_text())
    rates, methods = config.rate.split(","), selected_methods(config.method, config.sparsity)
    with Lab(config.hosts, rates[0], **config.lab(config.hosts)) as lab:
        conditions = lab.conditions()
    check_control([*rows, conditions])
    links = {"hosts": config.hosts, **{name: conditions[name] for name in LINKS}}
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes_of(config.shapes)]
    exchanges = {method: METHODS[method](config.sparsity) for method in methods}
    sent = {method: jc.wire_report(tx, like, config.hosts).received for method, tx in exchanges.items()}
    asked = [
        {"method": method, "rate": rate, "bytes_predicted": sent[method], **links}
        for method in methods
        for rate in rates
    ]
    rounds = [list(group) for _, group in itertools.groupby(rows, lambda row: row["round"])]
    for round_rows in rounds:
        had = [{name: row[name] for name in asked[0]} for row in round_rows]
        for row, key in itertools.zip_longest(had, asked):
            if row != key:
                raise ValueError(
                    "--days must be a file of rounds of the same methods, bytes, rates, hosts and links; got one with "
                    f"{row} in the place of {key}. Name another file."
                )
    return rounds


def _on_devices(config: Config) -> None:
    """Runs all methods on the devices of this process, and of others that it joins."""
    settings: Any = jax.config  # its attributes have no types
    platforms = settings.jax_platforms
    jax.config.update("jax_platforms", config.device)
    control = Control()
    try:
        devices = jax.devices(config.device)
        device, workers = devices[0].device_kind, len(devices)
    except RuntimeError as error:
        jax.config.update("jax_platforms", platforms)
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device must be a kind that JAX finds here; got {config.device!r}: {reason}") from error
    config = dataclasses.replace(config, hosts=workers, rate="none")
    rounds = [list(run_host(config, control)) for _ in range(config.rounds)]
    if control.host == 0:
        about = {"device": device, "processes": control.hosts, "jax": jax.__version__, **machine()}
        rows = [row | about for row in summary(rounds)]
        title = f"Exchange of {count(shapes_of(config.shapes)):,} parameters, {workers} x {device}"
        harness.report(config.json, (title, rows))


def summary(rounds: list[list[Row]]) -> list[Row]:
    """Returns a row for each of a round's: the median of times, bytes and ratios, and their least and most."""
    rounds = [harness.compare(rows, ["rate"], method="plump_dp") for rows in rounds]
    rows = harness.over_rounds(rounds, "bytes_kernel", "compile_s", "ms_refresh", "times_faster")
    for row, repeats in zip(rows, zip(*rounds, strict=True), strict=True):
        ratios = [repeat["times_faster"] for repeat in repeats]
        is_known = None not in ratios
        row |= {
            f"times_faster_{name}": pick(ratios) if is_known else None for name, pick in (("min", min), ("max", max))
        }
    return rows


def run_host(config: Config, control: Control) -> Iterator[Row]:
    """Runs one process's part: every method at every rate; yields a row for each."""
    mesh, shapes, workers = jc.make_mesh(data=config.hosts), shapes_of(config.shapes), jax.local_device_count()

    def normal(seed: Any, *shape: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(shape, np.float32)

    gradients = harness.place(
        mesh, [normal((control.host, index), workers, *shape) for index, shape in enumerate(shapes)]
    )
    weights = harness.place(mesh, [normal(index, *shape) for index, shape in enumerate(shapes)], P())
    for method in selected_methods(config.method, config.sparsity):
        yield from _time_method(method, config, mesh, gradients, weights, control)


def selected_methods(
    names: str, sparsity: float, known: Mapping[str, Callable[[float], optax.GradientTransformation]] = METHODS
) -> list[str]:
    """Returns the names of known methods, separated by commas in `names`, or all of them.

    Raises:
      ValueError: for an unknown method, or one that does not take the sparsity.
    """
    methods = list(known) if names == "all" else names.split(",")
    for make in harness.choose(known, methods, "--method").values():
        make(sparsity)
    return methods


def _time_method(
    method: str, config: Config, mesh: Any, gradients: list[Any], weights: list[Any], control: Control
) -> Iterator[Row]:
    tx = METHODS[method](config.sparsity)
    like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in weights]
    state_like = jax.eval_shape(tx.init, like)
    specs = jc.state_specs(state_like)
    is_local = jc.state.communication_period(state_like) is not None
    updated = P("data") if is_local else P()

    def exchange(gradients: Any, state: Any, params: Any) -> Any:
        local_params = [param[0] for param in params] if is_local else params
        updates, state = tx.update([gradient[0] for gradient in gradients], state, local_params)
        return [update[None] for update in updates] if is_local else updates, state

    def start(weights: list[jax.Array]) -> tuple[Any, Any]:
        return tx.init(weights), [leaf[None] for leaf in weights] if is_local else weights

    sharded = jax.shard_map(exchange, mesh=mesh, in_specs=(P("data"), specs, updated), out_specs=(updated, specs))
    state, params = jax.jit(jax.shard_map(start, mesh=mesh, in_specs=P(), out_specs=(specs, updated)))(weights)
    reset = jax.jit(
        lambda state: jax.tree.map(make_usual, state, is_leaf=_has_residual),
        donate_argnums=0,
        # As the compiled step wants them: JAX places arrays without elements as it likes.
        out_shardings=jax.tree.map(lambda array: array.sharding, state),
    )

    control.set_rate("none")
    compiled, text, compile_s = harness.timed_compile(jax.jit(sharded, donate_argnums=1), gradients, state, params)
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    size = 4 * count([leaf.shape for leaf in weights])

    def step(state: Any) -> Any:
        return compiled(gradients, state, params)[1]

    def refreshing(state: Any) -> Any:
        state = reset(state)
        due = jax.jit(lambda: jnp.asarray(True), out_shardings=state.memory.due.sharding)()
        return state.replace(memory=state.memory._replace(due=due))

    state = jax.block_until_ready(step(state))  # the first refresh, and Gloo's connections
    for rate in config.rate.split(","):
        control.set_rate(rate)
        times, counts, state = control.measure(step, state, config.steps, reset)
        refresh = None
        if method == "dct_dp" or method.startswith("slim_dp"):
            refresh, _, state = control.measure(step, state, min(3, config.steps), refreshing)
        yield {
            "method": method,
            "hosts": config.hosts,
            "rate": rate,
            **harness.spread(times),
            "bytes_kernel": None if None in counts else statistics.fmean(counts),
            "bytes_predicted": jc.wire_report(tx, like, config.hosts).received,
            "bytes_compiled": float(read_program(text).received),
            "compile_s": compile_s,
            "sizes_moved": read_memory_traffic(text) / size,
            "sizes_held": (held - memory.alias_size_in_bytes) / size,
            "ms_refresh": refresh and statistics.median(refresh),
        }


def _has_residual(node: Any) -> bool:
    return getattr(node, "residual", None) is not None


def make_usual(node: Any) -> Any:
    """Makes a state that has a residual that of a usual step: of zeros, and in another than the first steps."""
    if not _has_residual(node):
        return node
    residual = jax.tree.map(jnp.zeros_like, node.residual)
    return node.replace(residual=residual, step=jnp.full_like(node.step, USUAL_STEP))


if __name__ == "__main__":
    harness.run(Config, __doc__, main, run_host)
