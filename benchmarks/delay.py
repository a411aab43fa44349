"""Delayed steps, which exchange the gradients of the step before, against steps that exchange at once, between hosts.

    python -m benchmarks.delay --hosts 2 --rate 100mbit,1gbit

An MLP of four layers of 1024 x 1024 (4.2M parameters), SGD with momentum; `--rows` per worker set how long computing
takes. A time is that of ten steps in a row, divided by ten. "longer" is what a perfect overlap would leave: the longer
of computing alone and of the rest of a step that exchanges at once. Hosts share this machine's cores, so selecting and
coding at the same time as the gradient slow it down.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks import harness
from benchmarks.harness import Control, HostOptions, Row
from jaxcomm.planner.advice import candidates

WIDTH, LAYERS, IN_A_ROW = 1024, 4, 10
METHODS = "plump_dp plump_dp(float16) quant_dp(8) sign dct_dp(0.99) powersgd(4)"


@dataclass(frozen=True)
class Config(HostOptions):
    """Time delayed steps, and steps that exchange at once."""

    hosts: int = 2  # Hosts, of one worker each.
    rate: str = "100mbit,1gbit"  # Link rates, separated by commas, or "none" for no limit.
    methods: str = METHODS  # Methods, separated by spaces, by their names in an advice.
    rows: int = 2048  # Rows per worker.
    steps: int = 5  # How many times ten steps are timed.


def main(config: Config) -> None:
    """Runs the hosts, prints the table, and writes it where asked."""
    rates = harness.check_run(config.rate, config.steps)
    harness.choose(candidates(local=False), config.methods.split())
    rows = harness.on_hosts(config.hosts, rates[0], config)
    title = "Milliseconds of a step: computing, at once, the longer of computing and the rest, delayed"
    harness.report(config.json, (title, rows))


def run_host(config: Config, control: Control) -> Iterator[Row]:
    """Runs one host's part; yields a row for each method and rate."""
    mesh, random = jc.make_mesh(data=control.hosts), np.random.default_rng(0)

    def layer() -> dict[str, np.ndarray]:
        kernel = (random.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
        return {"kernel": kernel, "bias": np.zeros(WIDTH, np.float32)}

    params = [layer() for _ in range(LAYERS)]
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

        def several(state: Any, number: int = IN_A_ROW) -> Any:
            for _ in range(number):
                state, _ = step(state, batch)
            return state

        state = jax.block_until_ready(several(step.init(params), 3))
        predicted = step.report(state, batch).received
        times, counts, _ = control.measure(several, state, config.steps)
        return [ms / IN_A_ROW for ms in times], statistics.fmean(counts) / IN_A_ROW, predicted

    for rate in config.rate.split(","):
        control.set_rate(rate)
        for name, tx in harness.choose(candidates(local=False), config.methods.split()).items():
            computing = statistics.median(control.measure(lambda _: gradient(copied, batch), None, config.steps)[0])
            (at_once, *_), (delayed, bytes_kernel, predicted) = (
                time_steps(jc.make_train_step(loss_fn, jc.chain(tx, optax.sgd(1e-3, momentum=0.9), delay=delay), mesh))
                for delay in (0, 1)
            )
            ms_at_once = statistics.median(at_once)
            yield {
                "method": name,
                "hosts": control.hosts,
                "rate": rate,
                "rows": config.rows,
                "ms_computing": computing,
                "ms_at_once": ms_at_once,
                "at_once_min": min(at_once),
                "at_once_max": max(at_once),
                "ms_longer": max(computing, ms_at_once - computing),
                **harness.spread(delayed),
                "times_faster": ms_at_once / statistics.median(delayed),
                "bytes_kernel": bytes_kernel,
                "bytes_predicted": predicted,
            }


if __name__ == "__main__":
    harness.run(Config, __doc__, main, run_host)
