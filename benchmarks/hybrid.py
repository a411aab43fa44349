"""Bytes of a training step of AlexNet: data-parallel, and hybrid, with the dense layers sharded or on one device.

    python -m benchmarks.hybrid
    python -m benchmarks.hybrid --run --rate 1gbit --batch 64     # times steps instead, on 1, 2, 4 and 8 hosts

compiles the whole step (loss, gradients, SGD with momentum and weight decay) for AlexNet in full size (61.1M
parameters, images of 224 x 224) on simulated devices, without running it, and reads the collectives of the compiled
text. Dropout is left out: its masks are made where they are used.

Bytes are received bytes: per worker on average, of the busiest worker, and of all together. The table's paper_mib is
from Yang et al., "Practical Lessons of Distributed Deep Learning", Table 2, which does not say how it counts. The
following count gives its numbers (formula_mib), over all workers. Each worker pushes its gradients to a server and
pulls the parameters from it; in the hybrid layout, only those of the convolutions. There, the features of all rows also
go to the one device that has the dense layers, and their errors go back. The count is for 256 rows (those of the
paper's other table) and the AlexNet of 2012, with two towers (60,965,224 parameters, 2,334,080 of them in
convolutions), and includes what a worker would send to itself. So as_paper_mib is the compiled count with that added:
K/(K-1) times as much, since a ring, an all-to-all and rows sent to one worker all leave a K-th where it is.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from benchmarks import harness
from benchmarks.dense_ways import on_one_worker, plan_split_dense
from benchmarks.harness import Control, HostOptions, Row
from jaxcomm.accounting.hlo import read_program
from jaxcomm.layers import split_dense
from models.alexnet import AlexNet
from models.functional import apply, cut
from train.data import train_batches
from train.processes import prepare_jax

MIB = 2**20
LAYOUTS = ("data-parallel", "hybrid, slices", "hybrid, one device")
PAPER = {
    "data-parallel": {2: 930, 4: 1861, 8: 3722},
    "hybrid, one device": {2: 54, 4: 89, 8: 161},
}
TWO_TOWERS = {"convolutions": 2_334_080, "dense": 58_631_144}
FEATURES = 9216
CUT = 5  # the first dense block of models.alexnet


@dataclass(frozen=True)
class Config(HostOptions):
    """Count the bytes of data-parallel and hybrid training steps of AlexNet in compiled programs."""

    devices: str = "2,4,8"  # Numbers of devices, separated by commas.
    batch: int = 256  # Rows per step, over all devices.
    image: int = 224  # Height and width of the images.
    run: bool = False
    """Instead of counting, time steps on as many hosts of `benchmarks.netlab` as --devices, and on one."""
    rate: str = "10gbit"  # With --run, speed of the hosts' links: "1gbit", or "none" for no limit.
    steps: int = 3  # With --run, timed steps of each layout.
    hidden: int = 4096  # With --run, width of the dense layers.
    dataset: str = "digits"  # With --run, the dataset of the real images; they are enlarged to --image.
    data_dir: Path | None = None  # Folder of prepared datasets.


def main(config: Config) -> None:
    """Times steps with --run; otherwise compiles all layouts; prints the table, and writes it where asked."""
    workers = _checked(config)
    if config.run:
        time_layouts(config, [1, *workers])
    else:
        prepare_jax(simulated_devices=max(workers))
        count_bytes(config, workers)


def count_bytes(config: Config, workers: Sequence[int]) -> None:
    """Compiles all layouts, once the devices are there, prints the table, and writes it where asked."""
    rows = []
    for layout, K in itertools.product(LAYOUTS, workers):
        rows.append(measure(layout, K, config.batch, config.image))
        print(f"{layout}, {K} devices: compiled in {rows[-1]['compile_s']:.0f} s", flush=True)
    title = f"AlexNet, {config.batch} rows a step, images of {config.image} x {config.image}"
    harness.report(config.json, (title, rows))


def _checked(config: Config) -> list[int]:
    workers = harness.numbers("--devices", config.devices)
    if min(workers) < 2 or any(config.batch % K for K in workers) or config.batch < 1:
        raise ValueError(
            f"--devices must be at least 2 and divide --batch evenly; got {config.devices} and {config.batch}. One "
            "device sends nothing."
        )
    if config.image < 63:
        raise ValueError(f"--image must be at least 63, or AlexNet's poolings leave nothing; got {config.image}.")
    harness.check_run(config.rate, config.steps, one=True)
    return workers


def measure(layout: str, K: int, batch: int, image: int) -> Row:
    """Compiles one step and counts."""
    mesh = jc.make_mesh(data=K)
    rows = {
        "image": jax.ShapeDtypeStruct((batch, image, image, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    step, state = step_of(layout, mesh, batch, image)
    _, text, seconds = harness.timed_compile(step, state, rows)
    program = read_program(text)
    permuted = float(sum(traffic.received for _, traffic in program.operations() if traffic.op == "permute"))
    arriving = [0] * K  # by permutations
    for (_, target), count in program.links().items():
        arriving[target] += count
    worker_bytes = float(program.received)
    return {
        "layout": layout,
        "devices": K,
        "batch": batch,
        "worker_mib": worker_bytes / MIB,
        "busiest_mib": (worker_bytes - permuted + max(arriving)) / MIB,
        "all_mib": K * worker_bytes / MIB,
        "predicted_mib": K * predicted(layout, K, batch) / MIB,
        "as_paper_mib": K * worker_bytes * K / (K - 1) / MIB,
        "formula_mib": formula(layout, K, batch),
        "paper_mib": PAPER.get(layout, {}).get(K),
        "compile_s": seconds,
    }


def parameters(image: int, hidden: int = 4096) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Returns the shapes of AlexNet's parameters, by block, and (params, images) -> (B, 9216) features."""
    model = nnx.eval_shape(lambda: AlexNet((image, image, 3), 1000, hidden=(hidden, hidden), rngs=nnx.Rngs(0)))
    bottom, top = cut(model, (CUT,))

    def features(params: Any, images: Any) -> Any:
        params_of_stage = {index: params[index] for index in bottom.params}
        x, _ = apply(bottom.graph, params_of_stage, bottom.stats, {"image": images}, training=False)
        return x.reshape(x.shape[0], -1)  # (B, 9216)

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), {**bottom.params, **top.params})
    return shapes, features


def step_of(layout: str, mesh: Any, batch: int, image: int, hidden: int = 4096) -> tuple[Any, Any]:
    """Returns a step that is not compiled yet, and the shapes of its state."""
    K = mesh.size
    shapes, features = parameters(image, hidden)
    dense = sorted(shapes)[CUT:]
    specs: dict[int, Any] = dict.fromkeys(shapes, P())

    def cross_entropy(logits: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def dense_loss(params: Any, x: Any, labels: Any) -> Any:
        for index in dense:
            x = x @ params[index]["layer"]["kernel"] + params[index]["layer"]["bias"]
            x = jax.nn.relu(x) if index != dense[-1] else x
        return cross_entropy(x, labels)

    def data_parallel(params: Any, batch: Any) -> Any:
        return dense_loss(params, features(params, batch["image"]), batch["label"])

    def one_device(params: Any, batch: Any) -> Any:
        inputs = {"x": features(params, batch["image"]), "label": batch["label"]}
        dense_params = {index: params[index] for index in dense}
        return on_one_worker(
            lambda dense_params, inputs: dense_loss(dense_params, inputs["x"], inputs["label"]), dense_params, inputs
        )

    plan = plan_split_dense(widths(shapes), batch, K)

    def slices(params: Any, batch: Any) -> Any:
        x = features(params, batch["image"])
        for index, layer in zip(dense, plan.layers, strict=True):
            weights = params[index]["layer"]
            x = split_dense(x, weights["kernel"], weights["bias"], inputs=layer.inputs, outputs=layer.outputs)
            x = jax.nn.relu(x) if index != dense[-1] else x
        return cross_entropy(x, batch["label"])

    if layout == "hybrid, slices":
        for index, layer in zip(dense, plan.layers, strict=True):
            specs[index] = {"layer": {"kernel": layer.kernel_spec(), "bias": P("data")}}
    elif layout == "hybrid, one device":
        for index in dense:
            specs[index] = P("data")
            shapes[index] = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((K, *leaf.shape), leaf.dtype), shapes[index])
    loss = {"data-parallel": data_parallel, "hybrid, slices": slices, "hybrid, one device": one_device}[layout]
    tx = jc.chain(jc.plump_dp(), optax.add_decayed_weights(5e-4), optax.sgd(0.01, momentum=0.9))
    step = jc.make_train_step(loss, tx, mesh, specs=specs)
    return step, step.shapes(shapes)


def widths(shapes: Any) -> tuple[int, ...]:
    """Returns the numbers of features before, between and after the dense layers."""
    kernels = [shapes[index]["layer"]["kernel"].shape for index in sorted(shapes)[CUT:]]
    return (*(n for n, _ in kernels), kernels[-1][1])


def predicted(layout: str, K: int, batch: int) -> float:
    """Returns the bytes that each worker receives on average, from shapes alone."""
    shapes, _ = parameters(224)
    exchanged = sorted(shapes) if layout == "data-parallel" else sorted(shapes)[:CUT]
    leaves = jax.tree.leaves({index: shapes[index] for index in exchanged})
    n = sum(math.prod(leaf.shape) for leaf in leaves)
    ring = 2 * (K - 1) / K
    scalars = ring * (4 + 16)  # the loss; the counts of the exchange
    if layout == "hybrid, slices":
        return ring * 4 * n + scalars + plan_split_dense(widths(shapes), batch, K).received
    if layout == "hybrid, one device":  # features and labels to worker 0, errors back; the loss and its derivative
        feature_bytes = (K - 1) / K * batch * (2 * 4 * widths(shapes)[0] + 4)
        return ring * 4 * n + scalars + ring * 8 + feature_bytes / K
    return ring * 4 * n + scalars


def formula(layout: str, K: int, batch: int) -> float | None:
    """Returns the count, in MiB, that gives the paper's numbers; None for a layout that it does not have."""
    convolutions, dense = TWO_TOWERS["convolutions"], TWO_TOWERS["dense"]
    if layout == "data-parallel":
        return 2 * K * 4 * (convolutions + dense) / MIB
    if layout == "hybrid, one device":
        return (2 * K * 4 * convolutions + 2 * 4 * batch * FEATURES) / MIB
    return None


def time_layouts(config: Config, workers: Sequence[int]) -> None:
    """Runs the hosts, as many as `workers` says, one after another; prints the table, and writes it where asked."""
    rows: list[Row] = []
    for K in workers:
        rows += harness.on_hosts(K, config.rate, config)
        print(f"{K} hosts: timed", flush=True)
    title = f"AlexNet, {config.batch} rows a step, {config.rate}, medians of {config.steps}"
    harness.report(config.json, (title, compare(rows)))


def compare(rows: Sequence[Row]) -> list[Row]:
    """Adds how many times faster a step is than on one host, and than data-parallel on as many."""
    times = {(row["layout"], row["devices"], row["data"]): row["ms_median"] for row in rows}
    return [
        row
        | {
            "speed_up": times["data-parallel", 1, row["data"]] / row["ms_median"],
            "times_data_parallel": times["data-parallel", row["devices"], row["data"]] / row["ms_median"],
        }
        for row in rows
    ]


def run_host(config: Config, control: Control) -> Iterator[Row]:
    """Runs one host's part of --run: every layout, or only the data-parallel one if it is alone.

    Every host is a process with its rows of the batch. Hosts share the cores of this machine, so computing takes as
    long whatever their number: compare layouts at one number of hosts. Fake data is one batch that is already placed;
    real data is read, enlarged and placed in every step.
    """
    for layout in LAYOUTS if control.hosts > 1 else LAYOUTS[:1]:
        yield from _time(layout, config, control)


def _time(layout: str, config: Config, control: Control) -> Iterator[Row]:
    K, n_rows = control.hosts, config.batch // control.hosts
    mesh = jc.make_mesh(data=K)
    step, shapes = step_of(layout, mesh, config.batch, config.image, config.hidden)

    def start() -> Any:
        """Returns a state with small random parameters; no host ever has a whole sharded one."""
        key = jax.random.key(0)
        params = jax.tree.map(lambda leaf: 0.01 * jax.random.normal(key, leaf.shape, leaf.dtype), shapes.params)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return zeros._replace(params=params)

    control.set_rate("none")
    state = jax.jit(start, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()
    images, rng = _images(config, control.host, K), np.random.default_rng(control.host)
    pixels = rng.standard_normal((n_rows, config.image, config.image, 3), np.float32)
    fake = harness.place(mesh, {"image": pixels, "label": rng.integers(0, 1000, n_rows).astype(np.int32)})
    compiled, text, compile_s = harness.timed_compile(step, state, fake)
    state, _ = jax.block_until_ready(compiled(state, fake))  # Gloo's connections
    control.set_rate(config.rate)
    sources: dict[str, Callable[[], Any]] = {"fake": lambda: fake, "real": lambda: harness.place(mesh, next(images))}
    for data, source in sources.items():
        source()  # opening the dataset is not timed

        def run_step(state: Any, source: Callable[[], Any] = source) -> Any:
            return compiled(state, source())[0]

        times, counts, state = control.measure(run_step, state, config.steps)
        yield {
            "layout": layout,
            "devices": K,
            "data": data,
            "batch": config.batch,
            "image": config.image,
            "rate": config.rate,
            **harness.spread(times),
            "bytes_kernel": statistics.median(counts),
            "bytes_compiled": float(read_program(text).received),
            "compile_s": compile_s,
        }


def _images(config: Config, host: int, hosts: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields a host's rows of the batches of the dataset."""
    where = {"process_index": host, "process_count": hosts, "data_dir": config.data_dir}
    for batch in train_batches(config.dataset, global_batch=config.batch, seed=0, **where):
        yield {"image": enlarged(batch["image"], config.image), "label": batch["label"].astype(np.int32)}


def enlarged(images: np.ndarray, size: int) -> np.ndarray:
    """Enlarges images (B, h, w, 1 or 3) to (B, size, size, 3), by the nearest pixel."""
    _, height, width, channels = images.shape
    rows, columns = (np.arange(size) * side // size for side in (height, width))
    return np.repeat(images[:, rows][:, :, columns], 3 // channels, axis=3)


if __name__ == "__main__":
    harness.run(Config, __doc__, main, run_host)
