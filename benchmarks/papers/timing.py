"""Timed exchanges and steps for the papers' tables, kept among their records."""

import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.conditions import check_control, machine
from benchmarks.harness import spread
from configs import CONFIGS
from configs.methods import PlumpDp
from train.records import Record, Records


def run_benchmark(module: str, options: Mapping[str, Any]) -> list[Record]:
    """Runs a benchmark that writes its table, in a process of its own.

    Args:
      module: of `benchmarks`, such as "exchange".
      options: values by option, without dashes; True for a switch.

    Returns:
      The records of its table.

    Raises:
      ValueError: if it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "table.json"
        words = [
            word
            for name, value in options.items()
            for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
        ]
        command = [sys.executable, "-m", f"benchmarks.{module}", *words, "--json", str(path)]
        if subprocess.run(command, check=False).returncode:
            raise ValueError(f"{' '.join(command)} failed; --json has what was done before.")
        return json.loads(path.read_text())


def time_benchmark(records: Records, module: str, *, inputs: Sequence[Path] = (), **options: Any) -> list[Record]:
    """Returns the records of a benchmark's table; runs it if they are missing, or of other contents of its `inputs`."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in inputs}
    key = {"of": module, "options": options} | ({"inputs": digests} if inputs else {})
    return records.get(key, lambda: {"table": run_benchmark(module, options)})["table"]


def time_exchanges(
    records: Records, *, shapes: str, hosts: int, rate: str, methods: Sequence[str], steps: int, **options: Any
) -> dict[str, Record]:
    """Times one exchange of each method by `benchmarks.exchange`, in processes of its own.

    Args:
      records: where they are kept.
      shapes: the benchmark's option, like the following.
      hosts: the number of hosts.
      rate: of their links.
      methods: the benchmark's names.
      steps: the number of timed steps.
      options: more options, such as sparsity.

    Returns:
      Its records by method, including those that were there before.

    Raises:
      ValueError: if those that were there are of another congestion control.
    """
    settings = {"shapes": shapes, "hosts": hosts, "rate": rate, "steps": steps, **options}
    keys = {method: {"of": "exchange", "method": method, **settings} for method in methods}
    known = {method: record for method, key in keys.items() if (record := records.find(key)) is not None}
    gaps = [method for method in keys if method not in known]
    if gaps:
        table = run_benchmark("exchange", {**settings, "method": ",".join(gaps)})
        check_control([*known.values(), *table])
        known |= {record["method"]: records.add({**keys[record["method"]], **record}) for record in table}
    return {method: known[method] for method in methods}


def time_compute(records: Records, name: str, rows: int, steps: int) -> Record:
    """Times the steps of one worker alone on this machine: forward, backward and update, on random rows.

    Returns:
      A record with the median, minimum and maximum in milliseconds, the day, and the machine's speed.
    """
    return records.get(compute_key(name, rows, steps), lambda: _compute(name, rows, steps))


def compute_key(name: str, rows: int, steps: int) -> dict[str, Any]:
    """Returns the key of `time_compute`'s record."""
    return {"of": "compute", "experiment": name, "rows": rows, "timed_steps": steps}


def _compute(name: str, rows: int, steps: int) -> Record:
    import jax
    import numpy as np

    from train.job import make_job

    # The dataset's rows are not read, only its shapes.
    job = make_job(dataclasses.replace(CONFIGS[name], workers=1, global_batch=rows), PlumpDp())
    rng, batch = np.random.default_rng(0), {}
    for field, (shape, dtype) in (job.info.row_types() | {"seed": ((), np.dtype(np.uint32))}).items():
        is_float = np.issubdtype(dtype, np.floating)
        values = rng.standard_normal((rows, *shape)) if is_float else np.zeros((rows, *shape))
        batch[field] = values.astype(dtype)
    state, times = job.start(0), []
    for _ in range(1 + steps):
        begin = time.perf_counter()
        state, metrics = job.step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(1e3 * (time.perf_counter() - begin))
    return spread(times[1:]) | machine()  # the first one compiles
