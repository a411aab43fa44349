"""Soak test: random faults hit a run of the trainer on a lab's hosts, and must not change its result.

    python -m benchmarks.faults --minutes 30 --mtbf 120 --seed 1
    python -m benchmarks.faults --minutes 30 --mtbf 120 --seed 1 --slow 3 --delay 20ms   # unequal workers, far apart

While `python -m train --restarts` runs, hosts' processes are killed, stopped, slowed down or cut off, and the newest
checkpoint is damaged, at random times of a seeded generator. When the time is over, SIGTERM stops the run. Then an
undisturbed run does as many steps, and the two checkpoints must hold the same bits. As root, hosts are network
namespaces; otherwise all are on loopback, where no link can be cut.
"""

import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks.conditions import heading
from benchmarks.harness import HostOptions
from benchmarks.netlab import Lab

METHOD = ("method:dct-dp", "--method.sparsity", "0.9")
NAME, STEPS, SLOW = "dct_dp", 10**6, 4.0  # folder; more steps than fit; seconds that a slow process is stopped
PATIENCE = 300.0  # seconds within which a run must train again
KINDS = ("kill", "stop", "slow", "cut", "damage")


@dataclass(frozen=True)
class Config(HostOptions):
    """Test a run with --restarts under random faults: same result as without, its goodput, and no leaks."""

    minutes: float = 30.0
    """How long faults go on."""
    mtbf: float = 120.0
    """Mean seconds between two faults."""
    seed: int = 1
    """Seed of the times, kinds and victims of the faults."""
    hosts: int = 3
    """Hosts, each with one process of one worker."""
    peer_timeout: float = 10.0
    """The trainer's --peer-timeout."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""


@dataclass(frozen=True)
class Fault:
    """A fault, as it happened.

    Attributes:
      kind: "kill", SIGKILL; "stop", SIGSTOP until the others have ended, then SIGKILL; "slow", SIGSTOP for some
        seconds; "cut", the host's link down until all have ended; "damage", a bit of the newest checkpoint, and a kill.
      host: whose process it was.
      at: seconds since the run began.
      step: the last step before it.
      seconds: from the fault until the run did another step.
    """

    kind: str
    host: int
    at: float
    step: int
    seconds: float


@dataclass
class Samples:
    """What the processes used while they trained, one sample a second.

    Attributes:
      rows: seconds since the run began, steps done, and the maximum over processes of MB of memory and of open
        descriptors.
    """

    rows: list[tuple[float, int, float, int]] = field(default_factory=list)

    def quarters(self) -> dict[str, float | None]:
        """Returns medians over the first and over the last quarter: MB, descriptors, and ms per step."""
        medians: dict[str, float | None] = {}
        quarter = len(self.rows) // 4
        for name, rows in (("first", self.rows[:quarter]), ("last", self.rows[len(self.rows) - quarter :])):
            # Only the time of steps: a second without a step belongs to a restart.
            pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(rows)]
            times = [seconds / steps * 1e3 for seconds, steps in pairs if 0 < seconds < 3 and steps > 0]
            medians[f"mb_{name}"] = statistics.median(row[2] for row in rows) if rows else None
            medians[f"descriptors_{name}"] = statistics.median(row[3] for row in rows) if rows else None
            medians[f"ms_step_{name}"] = statistics.median(times) if times else None
        return medians


class Soaked:
    """A run on the hosts of a lab, seen from outside.

    Attributes:
      folder: of the run.
    """

    def __init__(self, lab: Lab, out: Path, options: Sequence[str]):
        """Starts nothing yet.

        Args:
          lab: its hosts.
          out: --out of the run, which distinguishes its processes from others.
          options: of `python -m train`, before those of the method.
        """
        self.folder = out / "digits"
        self._lab, self._out = lab, out
        self._command = [sys.executable, "-m", "train", "digits", *options, "--out", str(out), *METHOD]
        self._thread = threading.Thread(target=self._run)
        self.results: list[Any] = []

    def _run(self) -> None:
        self.results = self._lab.run(self._command, env=environment(self._out))

    def begin(self) -> None:
        """Starts the processes."""
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits at most so long until all have ended; returns whether they have."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def processes(self, *, supervisors: bool = False) -> dict[int, int]:
        """Returns the process ids of the trainers, or of their supervisors, by host."""
        pids = {}
        for place in Path("/proc").iterdir():
            if not place.name.isdigit():
                continue
            try:
                words = (place / "cmdline").read_bytes().split(b"\0")
                values = dict(part.partition(b"=")[::2] for part in (place / "environ").read_bytes().split(b"\0"))
            except OSError:  # it has ended meanwhile
                continue
            is_ours = b"train" in words[2:3] and str(self._out).encode() in words
            if is_ours and (b"JAXCOMM_BEGUN" in values) != supervisors:
                pids[int(values[b"JAXCOMM_PROCESS_ID"])] = int(place.name)
        return pids

    def step(self) -> int:
        """Returns the last step in `metrics.jsonl`, 0 if there is none."""
        try:
            lines = (self.folder / NAME / "metrics.jsonl").read_bytes().splitlines()
            return json.loads(lines[-1])["step"]
        except (OSError, IndexError, ValueError):
            return 0

    def until_step(self, more_than: int) -> None:
        """Waits until the run has done more steps.

        Raises:
          RuntimeError: if it ends first, or does no step for too long.
        """
        self._until(lambda: self.step() > more_than)

    def _until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            if self.wait(0.1) or time.monotonic() > deadline:
                texts = "\n".join(result.stderr[-2000:] for result in self.results)
                raise RuntimeError(
                    f"The run must train on after every fault; got no step for {PATIENCE:g} s, or its end:\n{texts}"
                )

    def suffer(self, kind: str, host: int) -> float:
        """Inflicts a fault on a host's process; returns the seconds until the run has done another step."""
        if kind == "damage":
            self._until(lambda: len(self._checkpoints()) > 1)  # otherwise there is nothing to go on from
        begin, before, victim = time.monotonic(), self.processes(), self.processes()[host]
        if kind in ("kill", "damage"):
            os.kill(victim, signal.SIGKILL)
            if kind == "damage":
                self.damage()
        elif kind == "cut" and self._lab.set_link(host, up=False):
            self._until(lambda: not before.items() & self.processes().items())  # all have ended
            self._lab.set_link(host, up=True)
        else:
            os.kill(victim, signal.SIGSTOP)
            if kind == "slow":
                time.sleep(SLOW)
                os.kill(victim, signal.SIGCONT)
                self.until_step(self.step())
                return time.monotonic() - begin
            survivors = {number: pid for number, pid in before.items() if number != host}
            self._until(lambda: not survivors.items() & self.processes().items())
            os.kill(victim, signal.SIGKILL)
        self._until(lambda: self.processes().get(0, before[0]) != before[0])
        low = self.step()
        while (current := self.step()) <= low:  # the new process drops the steps after its checkpoint first
            low = min(low, current)
            self._until(lambda low=low: self.step() != low)
        return time.monotonic() - begin

    def damage(self) -> None:
        """Flips a bit in the middle of the largest file of the newest complete checkpoint."""
        newest = max(self._checkpoints(), key=lambda path: int(path.name))
        largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)

    def _checkpoints(self) -> list[Path]:
        """Returns the folders of the complete checkpoints."""
        place = self.folder / NAME / "checkpoints"
        return [path for path in place.iterdir() if path.name.isdigit()] if place.exists() else []

    def stop(self) -> None:
        """Asks the run to save and to end."""
        for pid in self.processes(supervisors=True).values():
            os.kill(pid, signal.SIGTERM)

    def sample(self, begin: float, samples: Samples) -> None:
        """Adds a sample."""
        rows = []
        for pid in self.processes().values():
            try:
                place = Path("/proc", str(pid))
                pages = int((place / "statm").read_text().split()[1])
                rows.append((pages * os.sysconf("SC_PAGESIZE") / 1e6, len(list((place / "fd").iterdir()))))
            except OSError:
                return
        if rows:
            samples.rows.append(
                (time.monotonic() - begin, self.step(), max(r[0] for r in rows), max(r[1] for r in rows))
            )


def environment(out: Path) -> dict[str, str]:
    """Returns the processes' variables: where the trainer is, and the cache of programs that they share."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(out.parent / "compiled"))
    return {"PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": cache}


def same_states(folders: Sequence[Path], step: int) -> list[str]:
    """Returns the names of the arrays whose bits differ between the checkpoints of two runs."""
    import logging

    import numpy as np
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about items that are not read
    states = []
    for folder in folders:
        with ocp.CheckpointManager(
            folder / NAME / "checkpoints", item_handlers={"state": ocp.StandardCheckpointHandler()}
        ) as manager:
            about = manager.item_metadata(step)["state"]
            like = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in dict(about).items()}
            states.append(manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"])
    first, second = states
    return [
        name
        for name in sorted(first.keys() | second.keys())
        if name not in first
        or name not in second
        or np.asarray(first[name]).tobytes() != np.asarray(second[name]).tobytes()
    ]


def soak(lab: Lab, config: Config, out: Path, say: Callable[[str], None]) -> tuple[list[Fault], dict[str, Any]]:
    """Inflicts faults on a run, and compares it with an undisturbed one.

    Args:
      lab: with one host per worker.
      config: the fields.
      out: an empty folder.
      say: called with a line about every fault.

    Returns:
      The faults, and the summary.

    Raises:
      RuntimeError: if the run does not train again after a fault, or ends by itself.
    """
    options = ["--workers", str(config.hosts), "--global-batch", str(8 * config.hosts), "--no-baseline"]
    options += ["--steps", str(STEPS), "--eval-every", "500", "--checkpoint-every", str(config.checkpoint_every)]
    options += ["--peer-timeout", str(config.peer_timeout)]
    run, chance, samples = (
        Soaked(lab, out / "soaked", [*options, "--restarts", "100000"]),
        random.Random(config.seed),
        Samples(),
    )
    faults: list[Fault] = []
    begin = time.monotonic()
    run.begin()
    try:
        run.until_step(1)
        due, end = time.monotonic() + chance.expovariate(1 / config.mtbf), begin + 60 * config.minutes
        while time.monotonic() < end:
            time.sleep(1.0)
            run.sample(begin, samples)
            if time.monotonic() < due:
                continue
            kind, host = chance.choice(KINDS), chance.randrange(config.hosts)
            at, step = time.monotonic() - begin, run.step()
            faults.append(Fault(kind, host, at, step, run.suffer(kind, host)))
            say(f"{at:6.0f} s, step {step}: {kind} of host {host}; trained again after {faults[-1].seconds:.1f} s")
            due = time.monotonic() + chance.expovariate(1 / config.mtbf)
        run.stop()
        if not run.wait(PATIENCE) or any(result.returncode for result in run.results):
            raise RuntimeError(f"The run must save and end with code 0 at SIGTERM; got {run.results}.")
    finally:
        run.stop()
    step = run.step()
    say(f"stopped after step {step}; now as many without a fault")
    control_run = Soaked(lab, out / "alone", [*options, "--stop-after", str(step)])
    control_run.begin()
    control_run.wait()
    different = same_states([run.folder, control_run.folder], step)
    from train.goodput import Goodput

    goodput = Goodput(run.folder).record()
    return faults, {
        "last_step": step,
        "faults": len(faults),
        "arrays_that_differ": len(different),
        **goodput,
        **samples.quarters(),
    }


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 0, 1 if the run ended differently or leaks, or 2 for bad input."""
    config = tyro.cli(Config, prog="python -m benchmarks.faults", args=argv)
    from train.tables import check_file, print_table, write_records

    try:
        check_file("--json", config.json)
        for name in ("minutes", "mtbf", "peer_timeout", "checkpoint_every"):
            if not 0 < getattr(config, name) < float("inf"):
                raise ValueError(
                    f"--{name.replace('_', '-')} must be positive and finite; got {getattr(config, name)}."
                )
        if config.hosts < 2:
            raise ValueError(f"--hosts must be at least 2, since a run that survives has others; got {config.hosts}.")
        options = config.lab(config.hosts)
        with tempfile.TemporaryDirectory(prefix="jaxcomm-faults-") as folder, Lab(config.hosts, None, **options) as lab:
            conditions = lab.conditions()
            faults, summary = soak(lab, config, Path(folder), lambda line: print(line, flush=True))
    except (ValueError, OSError) as error:
        print(f"faults: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 1
    if faults:
        print_table(f"Faults, seed {config.seed}", [asdict(fault) for fault in faults])
    rows = [{"what": name, "value": value} for name, value in summary.items()]
    print_table(heading("The run", [conditions]), rows)
    write_records(config.json, [row | conditions for row in (*map(asdict, faults), summary)])
    return 1 if summary["arrays_that_differ"] or _leaks(summary) else 0


def _leaks(summary: dict[str, Any]) -> bool:
    """Returns whether memory or descriptors have grown by more than a tenth. Step times only follow the load."""
    return any(
        summary[f"{name}_last"] > 1.1 * summary[f"{name}_first"]
        for name in ("mb", "descriptors")
        if summary[f"{name}_first"]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
