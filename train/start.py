"""Checks, before a run of several processes begins, that their settings agree and that they write into one folder.

Processes that differ in a setting, or in the library, would train different models to the end, or hang.
"""

import dataclasses
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

from configs.experiment import Experiment
from train.liveness import Store
from train.processes import Processes

MOST_DIFFERENCES = 3  # that a message lists
PATIENCE = 10.0  # seconds within which a file of process 0 must appear on all hosts
# Fields in which processes may differ. Process 0 decides whether the run resumes.
OWN = (
    "coordinator",
    "process_id",
    "num_processes",
    "data_dir",
    "out",
    "json",
    "plan",
    "resume",
    "restarts",
)
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class DisagreementError(ValueError):
    """Processes were started differently; raised in all of them."""


def agree(store: Store, processes: Processes, name: str, facts: Mapping[str, str], seconds: float) -> None:
    """Compares what every process was started with.

    Args:
      store: of all processes.
      processes: this one among the others.
      name: of this comparison; each name is used once.
      facts: what must be the same in all processes, by name.
      seconds: to wait for the others.

    Raises:
      DisagreementError: on all processes, if two differ; names the facts in which they do.
      TimeoutError: if a process does not come.
    """
    store.put(f"jaxcomm/{name}/{processes.index}", json.dumps(dict(facts)))
    deadline = time.monotonic() + seconds
    reports: list[dict[str, str]] = []
    for index in range(processes.count):
        try:
            reports.append(json.loads(store.get(f"jaxcomm/{name}/{index}", max(deadline - time.monotonic(), 0.001))))
        except TimeoutError:
            raise TimeoutError(
                f"Every process must say how it was started; got nothing from process {index} within {seconds:g} s. "
                "Look at what it has printed."
            ) from None
    for index, report in enumerate(reports):
        keys = [key for key in {**reports[0], **report} if reports[0].get(key) != report.get(key)]
        if keys:
            listed = "; ".join(
                f"{key}: {reports[0].get(key, 'nothing')} in process 0, {report.get(key, 'nothing')} in process {index}"
                for key in keys[:MOST_DIFFERENCES]
            )
            suffix = f"; and {len(keys) - MOST_DIFFERENCES} more" if len(keys) > MOST_DIFFERENCES else ""
            raise DisagreementError(
                f"All processes of a run must be started with the same settings; got {listed}{suffix}. Start all with "
                "the same."
            )


def facts_of(experiment: Experiment) -> dict[str, str]:
    """Returns what must be the same in all processes: settings, versions, the library's source, and the data.

    Raises:
      FileNotFoundError, ValueError: if the data are not there, or not what they should be.
    """
    from train.data.datasets import open_split  # takes seconds to import

    fields = {f.name: getattr(experiment, f.name) for f in dataclasses.fields(experiment) if f.name not in OWN}
    facts = {f"--{name.replace('_', '-')}": repr(value) for name, value in fields.items()}
    if experiment.plan is not None:
        facts["the contents of --plan"] = f"crc32 {crc32(experiment.plan.read_bytes()):08x}"
    facts |= {f"the version of {name}": importlib.metadata.version(name) for name in PACKAGES}
    facts["the text of this library"] = f"crc32 {library_crc32():08x}"
    rows = open_split(experiment.dataset, "train", experiment.data_dir)
    facts["the data"] = f"{len(rows)} rows, {dict(rows.identity)}"
    return facts


def library_crc32() -> int:
    """Returns a digest of the modules that a run uses."""
    root, checksum = Path(__file__).parents[1], 0
    for package in ("jaxcomm", "models", "configs", "train"):
        for path in sorted((root / package).rglob("*.py")):
            checksum = crc32(path.read_bytes(), crc32(path.relative_to(root).as_posix().encode(), checksum))
    return checksum


def check_shared(store: Store, processes: Processes, out: Path, seconds: float) -> None:
    """Checks that all processes write into one folder: a checkpoint is whole only with the part of each.

    Raises:
      DisagreementError: if one does not see a file that process 0 has written.
      OSError: if process 0 cannot write it.
      TimeoutError: in the others, if process 0 has not written it in time.
    """
    if processes.index == 0:
        out.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".jaxcomm-start-", dir=out)
        os.close(handle)
        path = Path(name)
        store.put("jaxcomm/file", path.name)
    else:
        try:
            path = out / store.get("jaxcomm/file", seconds)
        except TimeoutError:
            raise TimeoutError(
                f"Process 0 must write a file to --out; got none within {seconds:g} s. Look at what it has printed."
            ) from None
    deadline = time.monotonic() + PATIENCE
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    verb = "has" if path.exists() else f"({out.resolve()}) does not have"
    try:
        agree(store, processes, "out", {"the folder --out": f"{verb} the file of process 0"}, seconds + PATIENCE)
    finally:
        if processes.index == 0:
            path.unlink()
