"""The tables of "Practical Lessons of Distributed Deep Learning", and its placement problem.

Source: Yang et al., 2017.

    python -m benchmarks.papers.practical_lessons --table 2 --json docs/data/papers.json

Table 1: late-multiply, by `benchmarks.late_multiply`. Tables 2 and 3: steps of AlexNet on hosts, by `benchmarks.hybrid
--run`, and its bytes, by `benchmarks.hybrid`; here both tables come from the same runs, where the paper has M40 and K40
GPUs. Hosts share the cores of this machine, so a step computes as long on eight hosts as on one: compare hybrid with
data-parallel on equally many hosts. "placement": the optimal placement that the paper leaves to future work, by
`benchmarks.placement`.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from benchmarks.conditions import check_control, heading
from benchmarks.papers import common, timing
from benchmarks.papers.report import Difference, all_hold, print_claim
from benchmarks.planner import COSTS
from train.records import Record, Records
from train.tables import print_table

ROWS = 256  # of the paper's step
# Table 1, ms without and with late-multiply, by number of GPUs.
TABLE_1 = {
    "10gbit": {2: (894.0, 164.0), 4: (1287.0, 399.0)},  # Ethernet
    "56gbit": {2: (90.0, 51.0), 4: (185.0, 136.0)},  # InfiniBand
}


class Gpu(NamedTuple):
    """Table 2 or table 3.

    Attributes:
      name: of the GPU.
      fake: seconds of a step with fake data, by layout and number of GPUs; with one GPU, both layouts are the same.
      real: the same with real data.
      gap: how many times faster hybrid is at least, according to the text.
    """

    name: str
    fake: dict[str, dict[int, float]]
    real: dict[str, dict[int, float]]
    gap: float

    def seconds(self, data: str) -> dict[str, dict[int, float]]:
        """Returns the seconds with "fake" or "real" data."""
        return self.fake if data == "fake" else self.real


DENSE, ONE_DEVICE = "data-parallel", "hybrid, one device"
GPUS = {
    "2": Gpu(
        "M40",
        {
            DENSE: {1: 2.297, 2: 2.906, 4: 3.672, 8: 5.466},
            ONE_DEVICE: {1: 2.297, 2: 1.238, 4: 0.662, 8: 0.443},
        },
        {
            DENSE: {1: 2.615, 2: 2.861, 4: 3.574, 8: 5.882},
            ONE_DEVICE: {1: 2.615, 2: 1.500, 4: 0.831, 8: 0.552},
        },
        1.9,
    ),
    "3": Gpu(
        "K40",
        {
            DENSE: {1: 2.95, 2: 3.517, 4: 5.737, 8: 7.169},
            ONE_DEVICE: {1: 2.95, 2: 1.615, 4: 0.957, 8: 0.681},
        },
        {
            DENSE: {1: 3.487, 2: 8.956, 4: 9.906, 8: 7.407},
            ONE_DEVICE: {1: 3.487, 2: 2.304, 4: 1.329, 8: 0.776},
        },
        2.17,
    ),
}


@dataclass(frozen=True)
class Config(common.Config):
    """The tables of practical lessons of distributed deep learning."""

    rate: str = "10gbit"  # Speed of the hosts' links in tables 2 and 3; table 1 uses the paper's two speeds.
    hosts: tuple[int, ...] = (2, 4, 8)
    """Numbers of hosts, out of the paper's three; one host is added in tables 2 and 3."""
    batch: int = 64
    """Rows of a step in tables 2 and 3, fewer than the paper's 256: the hosts share the cores that compute them."""
    timed_steps: int = 3  # Timed steps of each setting.

    @property
    def counted_rows(self) -> int:
        """Rows per step for which bytes are counted."""
        return self.batch if self.smoke else ROWS

    SMALLEST: ClassVar = {"rate": "none", "hosts": (2,), "batch": 8, "timed_steps": 1}


def table_1(config: Config, records: Records) -> None:
    """Times late-multiply against the reduction of gradients: only the communication."""
    rates = {"none": TABLE_1["10gbit"]} if config.smoke else TABLE_1
    places = [
        (rate, K, *paper)
        for rate, rows_of_rate in rates.items()
        for K, paper in rows_of_rate.items()
        if K in config.hosts
    ]
    size = {"layers": "64x32", "batch": 8} if config.smoke else {"batch": 256}
    options = {"hosts": ",".join(str(K) for K in config.hosts if K in TABLE_1["10gbit"]), "rate": ",".join(rates)}
    timed = timing.time_benchmark(records, "late_multiply", **options, **size, steps=config.timed_steps)
    by_setting = {(record["rate"], record["hosts"], record["mode"]): record for record in timed}
    rows: list[Record] = []
    for rate, K, paper, paper_late in places:
        reduced, late = by_setting[rate, K, "reduce"], by_setting[rate, K, "late"]
        times = reduced["ms_communication"] / late["ms_communication"]
        rows.append(
            {
                "rate": rate,
                "hosts": K,
                "T": reduced["ms_communication"],
                "paper_T": paper,
                "T_opt": late["ms_communication"],
                "paper_T_opt": paper_late,
                "times_faster": times,
                "paper_times_faster": paper / paper_late,
                "whole_step": reduced["ms_median"],
                "whole_step_opt": late["ms_median"],
                "bytes": reduced["bytes_compiled"],
                "bytes_opt": late["bytes_compiled"],
            }
        )
        print_claim(
            f"late-multiply makes the communication of {K} workers {paper / paper_late:.1f} times faster at {rate}",
            Difference(times - 1, 0.0).agrees(paper / paper_late - 1, or_more=True),
            f"{times:.2f} times",
        )
    title = (
        f"Table 1: ms of communication for AlexNet's dense layers, medians of {config.timed_steps}; the whole step "
        "also multiplies"
    )
    print_table(heading(title, timed), rows)


def iteration_times(table: str, config: Config, records: Records) -> None:
    """Times steps of AlexNet, data-parallel and hybrid, with fake and real data."""
    gpu = GPUS[table]
    if not set(config.hosts) < gpu.fake[DENSE].keys():
        raise ValueError(f"--hosts must be some of the paper's 2, 4 and 8; got {config.hosts}. Leave out the others.")
    timed = [record for K in config.hosts for record in _timed(config, records, K)]
    check_control(timed)
    by_layout = {(record["layout"], record["devices"], record["data"]): record for record in reversed(timed)}
    sizes = _sizes(config, records) if table == "2" else {}  # which table 3 does not have
    note = f"; MiB of {config.counted_rows} rows, as the paper counts them" if sizes else ""
    title = (
        f"Table {table} ({gpu.name}): seconds of a step of {config.batch} rows on hosts that share this machine's "
        f"cores, at {config.rate}, medians of {config.timed_steps}{note}"
    )
    print_table(heading(title, timed), [_row(gpu, by_layout[place], sizes) for place in sorted(by_layout)])
    for (layout, K, data), record in by_layout.items():
        if layout != ONE_DEVICE:
            continue
        paper, faster = gpu.seconds(data), record["times_data_parallel"]
        print_claim(
            f"with {data} data on {K} {gpu.name}, hybrid is {paper[DENSE][K] / paper[ONE_DEVICE][K]:.2f} times faster "
            f"than data-parallel, and at least {gpu.gap} with all",
            all_hold(
                Difference(faster - 1, 0.0).agrees(paper[DENSE][K] / paper[ONE_DEVICE][K] - 1, or_more=True),
                faster >= gpu.gap,
            ),
            f"{faster:.2f} times",
        )
        ours = [by_layout[place, K, data]["speed_up"] for place in (ONE_DEVICE, DENSE)]
        theirs = [paper[place][1] / paper[place][K] for place in (ONE_DEVICE, DENSE)]
        print_claim(
            f"there hybrid is {theirs[0]:.2f} times faster than one GPU, and data-parallel {theirs[1]:.2f} times",
            all_hold(*(Difference(a - 1, 0.0).agrees(b - 1, or_more=True) for a, b in zip(ours, theirs, strict=True))),
            f"{ours[0]:.2f} and {ours[1]:.2f} times, with hosts that compute no faster together than one alone",
        )


def _timed(config: Config, records: Records, K: int) -> list[Record]:
    size = {"image": 63, "hidden": 64} if config.smoke else {"image": 224, "hidden": 4096}
    where = {} if config.data_dir is None else {"data-dir": str(config.data_dir)}
    options = {"devices": K, "batch": config.batch, "rate": config.rate, "steps": config.timed_steps}
    return timing.time_benchmark(records, "hybrid", run=True, **options, **size, **where)


def _sizes(config: Config, records: Records) -> dict[tuple[str, int], Record]:
    """Returns the bytes of compiled steps with the paper's number of rows, by layout and workers."""
    size = {"batch": config.counted_rows, "image": 63 if config.smoke else 224}
    devices = ",".join(map(str, config.hosts))
    table = timing.time_benchmark(records, "hybrid", devices=devices, **size)
    return {(record["layout"], record["devices"]): record for record in table}


def _row(gpu: Gpu, record: Record, sizes: dict[tuple[str, int], Record]) -> Record:
    """Returns a row of table 2 or 3; the paper has no sharded dense layers."""
    place = layout, K = record["layout"], record["devices"]
    paper, size = gpu.seconds(record["data"]), sizes.get(place, {})
    theirs = paper.get(layout, {}).get(K)
    return {
        "layout": layout,
        "hosts": K,
        "data": record["data"],
        "seconds": record["ms_median"] / 1e3,
        "min": record["ms_min"] / 1e3,
        "max": record["ms_max"] / 1e3,
        "paper_seconds": theirs,
        "speed_up": record["speed_up"],
        "paper_speed_up": theirs and paper[layout][1] / theirs,
        "times_data_parallel": record["times_data_parallel"],
        "paper_times_data_parallel": theirs and paper[DENSE][K] / theirs,
        "mib": size.get("as_paper_mib"),
        "paper_mib": size.get("paper_mib"),
    }


def placement(config: Config, records: Records) -> None:
    """Places models on devices by the planner."""
    models, devices = ("dlrm", "2") if config.smoke else ("alexnet,vgg16,resnet50,dlrm,transformer", "2,4,8,16,32,64")
    rate = "10gbit" if config.smoke else config.rate  # nothing is sent, but the planner needs a rate
    options = {"models": models, "devices": devices, "rate": rate}
    table = timing.time_benchmark(records, "placement", inputs=[COSTS], **options)
    rows = [plan | {"times_faster": plan["ms_dense"] / plan["ms_step"]} for plan in table]
    print_table(f"Placement at {rate}, predicted", rows)
    slowest, solved = max(plan["seconds"] for plan in rows), sum(plan["optimal"] for plan in rows)
    print_claim(
        "it is not always expected to find the optimal placement, and heuristics look for a good one",
        solved < len(rows),
        f"{solved} of {len(rows)} are proven to be optimal, the slowest plan took {slowest:.2f} s; the space that is "
        "searched is workers, stages and an exchange for each tensor, not any subgraph on any device",
    )


TABLES = {"1": table_1, "2": partial(iteration_times, "2"), "3": partial(iteration_times, "3"), "placement": placement}
TIMED = ("1", "2", "3")

if __name__ == "__main__":
    common.run(Config, TABLES, __doc__, timed=TIMED, devices=1)
