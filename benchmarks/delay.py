"""Delayed steps, which exchange the gradients of the step before, against steps that exchange at once, between hosts.

    python -m benchmarks.delay --hosts 2 --rate 100mbit,1gbit

An MLP of four layers of 1024 x 1024 (4.2M parameters), SGD with momentum; `--rows` per worker set how long computing
takes. A time is that of ten steps in a row, divided by ten. "longer" is what a perfect overlap would leave: the longer
of computing alone and of the rest of a step that exchanges at once. Hosts share this machine's cores, so selecting and
coding at the same time as the gradient slow it down.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optax

import jaxcomm as jc
from benchmarks.control import (
    Control,
    check_run,
    choose,
    merge_records,
    print_record,
    read_records,
    run,
    run_hosts,
    spread,
)
from benchmarks.netlab import Lab
from jaxcomm.planner.advice import candidates
from train.tables import print_table, write_records

WIDTH, LAYERS, IN_A_ROW = 1024, 4, 10
METHODS = "plump_dp plump_dp(float16) quant_dp(8) sign dct_dp(0.99) powersgd(4)"


@dataclass(frozen=True)
class Config:
    """Time delayed steps, and steps that exchange at once."""

    hosts: int = 2
    """Hosts, of one worker each."""
    rate: str = "100mbit,1gbit"
    """Link rates, separated by commas, or "none" for no limit."""
    methods: str = METHODS
    """Methods, separated by spaces, by their names in an advice."""
    rows: int = 2048
    """Rows per worker."""
    steps: int = 5
    """How many times ten steps are timed."""
    json: Path | None = None
    """File for the table, as a list of records."""


@dataclass
class Record:
    """One method at one rate, milliseconds a step."""

    method: str
    hosts: int
    rate: str
    rows: int
    ms_computing: float
    ms_at_once: float
    at_once_min: float
    at_once_max: float
    ms_longer: float
    ms_median: float
    ms_min: float
    ms_max: float
    times_faster: float
    bytes_kernel: float | None
    bytes_predicted: float


def main(config: Config) -> None:
    """Runs the hosts, prints the table, and writes it where asked."""
    rates = check_run(config.rate, config.steps)
    choose(candidates(local=False), config.methods.split())
    with Lab(config.hosts, rates[0]) as lab:
        outputs = run_hosts(lab, "benchmarks.delay")
        records = merge_records([read_records(Record, text) for text in outputs], lab.isolated)
    rows = [dataclasses.asdict(record) for record in records]
    print_table("Milliseconds of a step: computing, at once, the longer of computing and the rest, delayed", rows)
    write_records(config.json, rows)


def run_host(config: Config) -> None:
    """Runs one host's part; prints a JSON record for each method and rate."""
    control = Control()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh, random = jc.make_mesh(data=control.hosts), np.random.default_rng(0)
    params = [
        {
            "kernel": (random.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32),
            "bias": np.zeros(WIDTH, np.float32),
        }
        for _ in range(LAYERS)
    ]
    x = random.standard_normal((config.rows * control.hosts, WIDTH)).astype(np.float32)
    batch = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("data")), lambda index: x[index])

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return (x**2).mean()

    def own_gradient(params: Any, x: jax.Array) -> Any:
        varying = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)
        return jax.tree.map(lambda leaf: leaf[None], jax.grad(loss_fn)(varying, x))

    gradient = jax.jit(jax.shard_map(own_gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")))
    copied = jax.device_put(params, NamedSharding(mesh, P()))
    jax.block_until_ready(gradient(copied, batch))

    def time_steps(step: Any) -> tuple[list[float], float, float]:
        """Returns milliseconds per step, and a step's bytes: received, as counted by the kernel, and predicted."""
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        predicted, times, counts = step.report(state, batch).received, [], []

        def several(state: Any) -> Any:
            for _ in range(IN_A_ROW):
                state, _ = step(state, batch)
            return state

        for _ in range(config.steps):
            ms, count, state = control.timed(partial(several, state))
            times.append(ms / IN_A_ROW)
            counts.append(count / IN_A_ROW)
        return times, statistics.fmean(counts), predicted

    for rate in config.rate.split(","):
        control.set_rate(rate)
        for name, tx in choose(candidates(local=False), config.methods.split()).items():
            computing = statistics.median(
                control.timed(lambda: gradient(copied, batch))[0] for _ in range(config.steps)
            )
            results = []
            for delay in (0, 1):
                chain = jc.chain(tx, optax.sgd(1e-3, momentum=0.9), delay=delay)
                results.append(time_steps(jc.make_train_step(loss_fn, chain, mesh)))
            (at_once, _, _), (delayed, bytes_kernel, predicted) = results
            ms_at_once = statistics.median(at_once)
            print_record(
                Record(
                    method=name,
                    hosts=control.hosts,
                    rate=rate,
                    rows=config.rows,
                    ms_computing=computing,
                    ms_at_once=ms_at_once,
                    at_once_min=min(at_once),
                    at_once_max=max(at_once),
                    ms_longer=max(computing, ms_at_once - computing),
                    **spread(delayed),
                    times_faster=ms_at_once / statistics.median(delayed),
                    bytes_kernel=bytes_kernel,
                    bytes_predicted=predicted,
                )
            )


if __name__ == "__main__":
    run(Config, __doc__, main, run_host)
