"""`benchmarks.hybrid --run`: milliseconds of a training step of AlexNet on hosts, by layout.

Every host of `benchmarks.netlab` is a process with its rows of the batch. Hosts share the cores of this machine, so
their computation takes equally long whatever their number: compare layouts at the same number of hosts. Fake data is
one batch that is already placed; real data is read, enlarged and placed in every step.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.control import Control, check_run, merge_records, print_record, read_records, run_hosts, spread
from benchmarks.netlab import Lab
from train.tables import print_table, write_records

if TYPE_CHECKING:
    from benchmarks.hybrid import Config


@dataclass
class Record:
    """One row of the table; bytes are those that a host receives in a step, on average over the hosts."""

    layout: str
    devices: int
    data: str
    batch: int
    image: int
    rate: str
    ms_median: float
    ms_min: float
    ms_max: float
    bytes_kernel: float | None
    bytes_compiled: float
    compile_s: float
    speed_up: float | None = None
    times_data_parallel: float | None = None


def time_layouts(config: "Config", workers: Sequence[int]) -> None:
    """Runs the hosts, prints the table, and writes it where asked.

    Args:
      config: of `benchmarks.hybrid`.
      workers: numbers of hosts; the first is 1.

    Raises:
      ValueError: for a rate that no link has.
      SystemExit: if a host fails.
    """
    records: list[Record] = []
    if len(check_run(config.rate, config.steps)) > 1:
        raise ValueError(f"--rate must be one rate; got {config.rate}. Run this once for each.")
    for K in workers:
        with Lab(K, config.rate) as lab:
            hosts = [read_records(Record, text) for text in run_hosts(lab, "benchmarks.hybrid")]
        records += merge_records(hosts, lab.isolated)
        print(f"{K} hosts: timed", flush=True)
    compare(records)
    rows = [dataclasses.asdict(record) for record in records]
    print_table(f"AlexNet, {config.batch} rows a step, {config.rate}, medians of {config.steps}", rows)
    write_records(config.json, rows)


def compare(records: Sequence[Record]) -> None:
    """Fills in how many times faster a step is than on one host, and than data-parallel on as many."""
    times = {(r.layout, r.devices, r.data): r.ms_median for r in records}
    for record in records:
        record.speed_up = times["data-parallel", 1, record.data] / record.ms_median
        record.times_data_parallel = times["data-parallel", record.devices, record.data] / record.ms_median


def run_host(config: "Config") -> None:
    """Runs one host's part: every layout, or only the data-parallel one if it is alone; prints JSON records."""
    control = Control()
    from benchmarks.hybrid import LAYOUTS

    for layout in LAYOUTS if control.hosts > 1 else LAYOUTS[:1]:
        for record in _time(layout, config, control):
            print_record(record)


def _time(layout: str, config: "Config", control: Control) -> list[Record]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxcomm as jc
    from benchmarks.hybrid import step_of
    from jaxcomm.accounting.hlo import read_program

    K, rows = control.hosts, config.batch // control.hosts
    mesh = jc.make_mesh(data=K)
    by_rows = NamedSharding(mesh, P("data"))
    step, shapes = step_of(layout, mesh, config.batch, config.image, config.hidden)

    def start() -> Any:
        """Returns a state with small random parameters; no host ever has a whole sharded one."""
        key = jax.random.key(0)
        params = jax.tree.map(lambda leaf: 0.01 * jax.random.normal(key, leaf.shape, leaf.dtype), shapes.params)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return zeros._replace(params=params)

    def place(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {name: jax.make_array_from_process_local_data(by_rows, column) for name, column in batch.items()}

    control.set_rate("none")
    state = jax.jit(start, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()
    images = _images(config, control.host, K)
    rng = np.random.default_rng(control.host)
    fake = place(
        {
            "image": rng.standard_normal((rows, config.image, config.image, 3), np.float32),
            "label": rng.integers(0, 1000, rows).astype(np.int32),
        }
    )
    begin = time.perf_counter()
    compiled = step.lower(state, fake).compile()
    compile_s = time.perf_counter() - begin
    state, _ = jax.block_until_ready(compiled(state, fake))  # Gloo's connections
    control.set_rate(config.rate)
    sources: dict[str, Callable[[], Any]] = {"fake": lambda: fake, "real": lambda: place(next(images))}
    records = []
    for data, source in sources.items():
        times, counts = [], []
        source()  # opening the dataset is not timed
        for _ in range(config.steps):
            ms, count, (state, _) = control.timed(lambda state=state, source=source: compiled(state, source()))
            times.append(ms)
            counts.append(count)
        records.append(
            Record(
                layout=layout,
                devices=K,
                data=data,
                batch=config.batch,
                image=config.image,
                rate=config.rate,
                **spread(times),
                bytes_kernel=statistics.median(counts),
                bytes_compiled=float(read_program(compiled.as_text()).received),
                compile_s=compile_s,
            )
        )
    return records


def _images(config: "Config", host: int, hosts: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields a host's rows of the batches of the dataset."""
    from train.data import train_batches

    where = {"process_index": host, "process_count": hosts, "data_dir": config.data_dir}
    for batch in train_batches(config.dataset, global_batch=config.batch, seed=0, **where):
        yield {"image": enlarged(batch["image"], config.image), "label": batch["label"].astype(np.int32)}


def enlarged(images: np.ndarray, size: int) -> np.ndarray:
    """Enlarges images (B, h, w, 1 or 3) to (B, size, size, 3), by the nearest pixel."""
    _, height, width, channels = images.shape
    rows, columns = (np.arange(size) * side // size for side in (height, width))
    return np.repeat(images[:, rows][:, :, columns], 3 // channels, axis=3)
