"""What all benchmarks share: the command line, hosts that are timed together, rows, tables and figures.

A benchmark has a `Config`, and a `main` that makes rows and ends in `report`. If it times hosts, the first process
makes a lab, and starts its own command again on every host, where `run_host` of the benchmark yields rows; the first
process merges them. Rates change while the hosts run, so that every program is compiled only once: host 0 asks for a
rate by writing a file, and the first process sets it.
"""

import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import tyro
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.conditions import LINKS, check_control, headed
from benchmarks.netlab import MAX_HOSTS, Lab, parse_rates, slow_last
from benchmarks.trace import received_bytes
from train.processes import connect, prepare_jax
from train.tables import check_file, print_table, write_records

Row = dict[str, Any]
Number = TypeVar("Number", int, float)

_FOLDER = "JAXCOMM_BENCHMARK_CONTROL"  # set in a host's process: the folder where the hosts ask for a rate
SETTLE_CALLS, SETTLE_SECONDS = 5, 5.0  # before what is timed at another rate


@dataclass(frozen=True)
class Options:
    """The options of every benchmark."""

    json: Path | None = None  # File for the table, as a list of records.


@dataclass(frozen=True)
class HostOptions(Options):
    """The options of a benchmark that times a lab's hosts; see `benchmarks.netlab`."""

    delay: str = "none"  # What a frame takes longer from one host to another, such as "50ms"; a round trip, twice this.
    jitter: str = "none"  # The most that a frame takes longer than that, at random.
    slow: float = 1.0  # How many times slower the last host computes: its share of a core.

    def lab(self, hosts: int) -> dict[str, Any]:
        """Returns the arguments of `Lab` that these options are."""
        return {"delay": self.delay, "jitter": self.jitter, "shares": slow_last(hosts, self.slow)}

    def link(self, rate: str) -> str:
        """Returns what the links of a lab are, for the key of a record: the rate alone, if that is all."""
        usual = HostOptions()
        names = [name for name in ("delay", "jitter", "slow") if getattr(self, name) != getattr(usual, name)]
        return ", ".join([rate, *(f"{name} {getattr(self, name)}" for name in names)])


C = TypeVar("C")


def run(
    config: type[C],
    description: str | None,
    main: Callable[[C], Any],
    host: Callable[[C, "Control"], Iterable[Row]] | None = None,
) -> None:
    """Reads the command line, and does this process's part: that of a host, if it is one, or `main`.

    Input that cannot be used ends the process with one line and exit code 2.
    """
    arguments: Any = tyro.cli(config, description=description)
    if host is not None and _FOLDER in os.environ:
        for row in host(arguments, Control()):
            print(json.dumps({"row": row}), flush=True)
        return
    try:
        check_file("--json", getattr(arguments, "json", None))
        main(arguments)
    except (ValueError, OSError) as error:
        path = Path(sys.argv[0])
        print(f"{path.parent.name if path.stem == '__main__' else path.stem}: {error}", file=sys.stderr)
        sys.exit(2)


def report(path: Path | None, *tables: tuple[str, Sequence[Row]]) -> None:
    """Prints tables, each with a title and the conditions of its rows, and writes the rows of all where asked."""
    write_records(path, [row for _, rows in tables for row in rows])
    for title, rows in tables:
        print_table(*headed(title, rows))


def choose(methods: Mapping[str, Any], names: Sequence[str], option: str = "--methods") -> dict[str, Any]:
    """Returns the methods with these names, each once.

    Raises:
      ValueError: for an unknown name, or if there are no names.
    """
    strangers = [name for name in names if name not in methods]
    if strangers or not names:
        raise ValueError(f"{option} must be some of {', '.join(methods)}; got {', '.join(strangers) or 'none'}.")
    return {name: methods[name] for name in names}


def numbers(option: str, text: str, kind: Callable[[str], Number] = int, least: float = -np.inf) -> list[Number]:
    """Returns the numbers of an option, which commas separate.

    Raises:
      ValueError: for something else, or a number below `least`.
    """
    values = []
    for word in text.split(","):
        value = None
        with contextlib.suppress(ValueError):
            value = kind(word)
        if value is None or not value >= least:
            bound = "" if least == -np.inf else f" of at least {least:g}"
            raise ValueError(f"{option} must be numbers{bound}, separated by commas; got {word!r}.")
        values.append(value)
    return values


def check_least(config: Any, least: float, *names: str) -> None:
    """Refuses a number below `least` in the fields of a configuration.

    Raises:
      ValueError: for the first such field.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least:g}; got {value}.")


def check_run(rate: str, steps: int, *, one: bool = False) -> list[str]:
    """Returns the rates, which commas separate.

    Raises:
      ValueError: for a rate that no link has, several rates where `one` is asked for, or fewer than one step.
    """
    rates = rate.split(",")
    for link_rates in rates:
        parse_rates(link_rates, MAX_HOSTS)
    if one and len(rates) > 1:
        raise ValueError(f"--rate must be one rate; got {rate}. Run this once for each.")
    if steps < 1:
        raise ValueError(f"--steps must be at least 1; got {steps}.")
    return rates


def on_hosts(
    hosts: int,
    rate: str,
    options: HostOptions = HostOptions(),
    *,
    env: Mapping[str, str] | None = None,
    kernel: str = "bytes_kernel",
    sums: Sequence[str] = (),
) -> list[Row]:
    """Runs this process's command on every host of a lab; returns the merged rows, with the lab's conditions.

    Args:
      hosts: their number.
      rate: of the links at the start; the hosts ask for others.
      options: what else the lab is.
      env: more environment variables for the hosts.
      kernel: as for `merge_rows`.
      sums: as for `merge_rows`.

    Returns:
      The rows; with the rate "none" on loopback, whatever was asked for.

    Raises:
      SystemExit: if a host fails, with its stderr.
    """
    stop, module = threading.Event(), sys.modules["__main__"].__spec__
    assert module is not None
    with tempfile.TemporaryDirectory() as folder, Lab(hosts, rate, **options.lab(hosts)) as lab:
        server = threading.Thread(target=_serve_rates, args=(lab, Path(folder), stop), daemon=True)
        server.start()
        conditions = lab.conditions()
        try:
            command = [sys.executable, "-m", module.name, *sys.argv[1:]]
            results = lab.run(command, env={_FOLDER: folder, **(env or {})})
        finally:
            stop.set()
            server.join()
        isolated = lab.isolated
    failed = [result for result in results if result.returncode]
    if failed:
        raise SystemExit(f"host {failed[0].host} failed:\n{failed[0].stderr[-4000:]}")
    rows = [[json.loads(line)["row"] for line in r.stdout.splitlines() if line.startswith('{"row":')] for r in results]
    return [row | conditions for row in merge_rows(rows, isolated, kernel, sums)]


def _serve_rates(lab: Lab, folder: Path, stop: threading.Event) -> None:
    while not stop.is_set():
        for request in folder.glob("*.want"):
            try:
                lab.set_rate(request.read_text())
            except Exception as error:  # the hosts must not wait for ever
                request.write_text(f"{type(error).__name__}: {error}")
                request.rename(request.with_suffix(".failed"))
                continue
            request.rename(request.with_suffix(".set"))
        time.sleep(0.02)


def merge_rows(
    hosts: Sequence[Sequence[Row]], isolated: bool, kernel: str = "bytes_kernel", sums: Sequence[str] = ()
) -> list[Row]:
    """Takes times from host 0 (see `Control.timed`), and merges the bytes received.

    Args:
      hosts: the rows of each host, the same ones in the same order.
      isolated: whether hosts have interfaces of their own. On loopback the kernel counts all hosts together, and the
        bytes are None.
      kernel: the column of the bytes: numbers are averaged, lists concatenated. Rows without it are those of host 0.
      sums: columns that are added.
    """
    merged = []
    for first, *others in zip(*hosts, strict=True):
        row = first | {name: sum(r[name] for r in (first, *others)) for name in sums}
        if kernel in row:
            counts = [r[kernel] for r in (first, *others)]
            is_list = isinstance(counts[0], list)
            merged_counts = list(itertools.chain(*counts)) if is_list else statistics.fmean(counts)
            row[kernel] = merged_counts if isolated else None
        merged.append(row)
    return merged


def spread(times: Sequence[float]) -> dict[str, float]:
    """Returns the median, minimum and maximum of milliseconds as columns of a row."""
    return {"ms_median": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


def over_rounds(rounds: Sequence[Sequence[Row]], *columns: str) -> list[Row]:
    """Returns a row for each of a round's: medians of columns without None, the least and most of all steps, the days.

    Raises:
      ValueError: for rounds of different congestion controls.
    """
    rows = []
    check_control(itertools.chain(*rounds))
    for repeats in zip(*rounds, strict=True):
        medians = {
            name: statistics.median(values)
            for name in ("ms_median", "machine_ms", *columns)
            if None not in (values := [row.get(name) for row in repeats])
        }
        ends = {"ms_min": min(row["ms_min"] for row in repeats), "ms_max": max(row["ms_max"] for row in repeats)}
        days = "/".join(sorted({row["day"] for row in repeats if "day" in row}))
        rows.append({**repeats[0], **medians, **ends, **({"day": days} if days else {})})
    return rows


def find(rows: Sequence[Row], **values: Any) -> Row | None:
    """Returns the first row with these values; None if there is none."""
    return next((row for row in rows if values.items() <= row.items()), None)


def compare(
    rows: Sequence[Row],
    same: Sequence[str],
    bytes_of: Callable[[Row], float] = lambda row: row["bytes_compiled"],
    **base: Any,
) -> list[Row]:
    """Returns the rows with the columns times_fewer_bytes and times_faster, None where there is nothing to compare.

    Args:
      rows: with ms_median.
      same: columns in which a row and the one that it is compared with have the same values, beside those of their
        links' delays and shares.
      bytes_of: (row) -> its bytes.
      base: other values of the row to compare with.

    Raises:
      ValueError: for rows of different congestion controls.
    """
    check_control(rows)
    compared = []
    for row in rows:
        like = {name: row[name] for name in same} | {name: row[name] for name in LINKS if name in row}
        other, fewer, faster = find(rows, **like, **base), None, None
        if other is not None:
            fewer = bytes_of(other) / bytes_of(row) if bytes_of(row) else None
            faster = other["ms_median"] / row["ms_median"]
        compared.append({**row, "times_fewer_bytes": fewer, "times_faster": faster})
    return compared


class Control:
    """A process's control: asks the lab for a rate, waits for the other processes, and times what all do together.

    Outside of a lab, links have the rates that they have, and nobody counts bytes.
    """

    def __init__(self) -> None:
        """Connects this process with the others; must come before JAX's first use of a device."""
        prepare_jax()
        processes = connect(None, None, None)
        self.host, self.hosts = processes.index, processes.count
        self.folder = Path(os.environ[_FOLDER]) if _FOLDER in os.environ else None
        self.requests = 0
        self.unsettled = 0

    def timed(self, function: Callable[[], Any]) -> tuple[float, int | None, Any]:
        """Returns the milliseconds of a call on the slowest host, the bytes received here (None outside), the result.

        After its last collective a step still computes, and hosts that share cores do not end it together.
        """
        self.barrier()
        interface = os.environ.get("NETLAB_INTERFACE") if self.folder else None
        before, begin = received_bytes(interface) if interface else 0, time.perf_counter()
        result = jax.block_until_ready(function())
        ms, count = (time.perf_counter() - begin) * 1e3, received_bytes(interface) - before if interface else None
        return float(multihost_utils.process_allgather(np.float32(ms)).max()), count, result

    def measure(
        self, step: Callable[[Any], Any], state: Any, times: int, prepare: Callable[[Any], Any] = lambda state: state
    ) -> tuple[list[float], list[Any], Any]:
        """Times (state) -> state several times in a row: milliseconds, bytes received here, and the last state.

        `prepare`, also (state) -> state, comes before every call, and is not timed. The first calls after a change of
        the rate are left out, `SETTLE_CALLS` or those that begin within `SETTLE_SECONDS`: TCP adapts to the rate. Of 4
        hosts at 100 Mbit/s, after links without a limit, steps of 0.45 s first took 1.0, 0.7, 0.7 and 0.6 s.
        """
        milliseconds, counts, settling = [], [], 0.0
        while len(milliseconds) < times:
            state = jax.block_until_ready(prepare(state))
            ms, count, state = self.timed(lambda state=state: step(state))
            if self.unsettled and settling < 1e3 * SETTLE_SECONDS:
                self.unsettled, settling = self.unsettled - 1, settling + ms
            else:
                self.unsettled = 0
                milliseconds.append(ms)
                counts.append(count)
        return milliseconds, counts, state

    def barrier(self) -> None:
        """Waits until all hosts are here; costs a few hundred bytes."""
        multihost_utils.sync_global_devices("benchmark")

    def set_rate(self, rate: str) -> None:
        """Changes the rate of all links of a lab.

        Raises:
          ValueError: if the lab cannot, with its reason.
        """
        if self.folder is None:
            return
        self.requests += 1
        self.unsettled = SETTLE_CALLS
        self.barrier()
        request = self.folder / f"{self.requests}.want"
        if self.host == 0:
            draft = request.with_suffix(".draft")
            draft.write_text(rate)
            draft.rename(request)
        while not request.with_suffix(".set").exists():
            if (failed := request.with_suffix(".failed")).exists():
                raise ValueError(f"--rate must be one that the lab can set; got {rate!r}: {failed.read_text()}")
            time.sleep(0.02)
        self.barrier()


def place(mesh: Any, tree: Any, spec: P | None = None) -> Any:
    """Places a tree of this process's rows on a mesh, by its axis "data" or another spec."""
    spec = P("data") if spec is None else spec
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(NamedSharding(mesh, spec), rows), tree)


def timed_compile(function: Any, *arguments: Any) -> tuple[Any, str, float]:
    """Compiles a jitted function or a step: the compiled one, its text, and the seconds that it took."""
    begin = time.perf_counter()
    compiled = function.lower(*arguments).compile()
    return compiled, compiled.as_text(), time.perf_counter() - begin


@contextlib.contextmanager
def figure(
    path: Path, rows: int, columns: int, size: tuple[float, float], dpi: int = 120
) -> Iterator[tuple[Any, np.ndarray]]:
    """Makes a figure and its panels (rows, columns), which is written as a PNG file at the end of the block."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawing, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    yield drawing, panels
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=dpi)
    plt.close(drawing)
    print(f"Drawn: {path}")
