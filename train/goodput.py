"""Goodput: the fraction of a run's time that its steps took, and what took the rest, over all its restarts."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.tables import reading

FILE = "goodput.json"  # in a run's folder
LONG = 1800.0  # seconds from which on a run's goodput is printed: a short one mostly starts and compiles
EVERY = 1.0  # seconds between two writes: what a killed run has not written counts as a restart
_REST = {  # what takes the rest, and its name in `line`
    "start": "start and compiling",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "restarts": "restarts",
    "lost": "lost steps",
}
_MARKS = 4  # checkpoints whose times are kept: more than a folder has


class Goodput:
    """Counts where the seconds of a run go, and keeps them in its folder, so that a resumed run goes on counting.

    Every second since the first start is of one kind: "steps" that count; "start", up to the end of the first step;
    "evaluation"; "checkpoints", as far as steps wait for them; "restarts", from the last write of a run that ended by a
    fault to the end of the first step after it; "lost", steps that had to be done again. The time between a stop and a
    manual `--resume` is not counted.
    """

    def __init__(self, folder: Path | None = None, *, begin: float | None = None, restarted: bool = False):
        """Starts to count, or goes on if the folder has counts.

        Args:
          folder: of the run; None keeps nothing.
          begin: `time.monotonic()` at the start of this process; now if not given.
          restarted: whether this is a restart after a fault.
        """
        self._path = None if folder is None else folder / FILE
        self._kind, self._since, self._written = "start", time.monotonic() if begin is None else begin, 0.0
        self._kept: dict[str, Any] = {"seconds": {}, "restarts": 0, "lost": 0, "runs": {}, "until": time.time()}
        self._name: str | None = None
        if self._path is not None and self._path.exists():
            with reading(self._path, "the counts of a run", "Remove it."):
                self._kept = _counts(self._kept | json.loads(self._path.read_text()))
            if restarted:
                self._kind = "restarts"
                self._kept["restarts"] += 1
                # Only here do two processes meet: the wall clock may jump, and counts nothing else.
                self._add("restarts", max(time.time() - self._kept["until"] - (time.monotonic() - self._since), 0.0))

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Counts the block as one kind, and then goes back to the kind before."""
        before = self._kind
        self._begin(kind)
        try:
            yield
        finally:
            self._begin(before)

    def take(self, name: str, step: int, dropped: int = 0) -> None:
        """Notes which run begins, after which step, and how many later steps an earlier start did, which are lost."""
        self._begin("restarts" if self._kind == "restarts" else "start")
        self._name = name
        run = self._run()
        if dropped:
            seconds = run["steps"] - run["marks"].get(str(step), run["steps"] * step / (step + dropped))
            run["steps"] -= seconds
            self._kept["lost"] += dropped
            self._add("steps", -seconds)
            self._add("lost", seconds)
        run["marks"] = {mark: at for mark, at in run["marks"].items() if int(mark) <= step}
        self.write()

    def step(self) -> None:
        """Notes that a step is done; the first one compiles, and the steps that count begin after it."""
        if self._kind in ("start", "restarts"):
            self._begin("steps")
        if self._path is not None and time.monotonic() >= self._written + EVERY:
            self.write()

    def saved(self, step: int) -> None:
        """Notes that there is a checkpoint of this step."""
        self._count()
        run = self._run()
        run["marks"] = dict([*run["marks"].items(), (str(step), run["steps"])][-_MARKS:])
        self.write()

    def write(self) -> None:
        """Writes what has been counted so far."""
        self._count()
        if self._path is not None:
            self._written, self._kept["until"] = time.monotonic(), time.time()
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(self._kept) + "\n")
            draft.replace(self._path)

    def record(self) -> dict[str, Any]:
        """Returns the seconds of every kind as "s_KIND", their sum, the goodput, and the restarts and lost steps."""
        kinds = {f"s_{kind}": self._kept["seconds"].get(kind, 0.0) for kind in ("steps", *_REST)}
        total = sum(kinds.values())
        counts = {"n_restarts": self._kept["restarts"], "n_lost_steps": self._kept["lost"]}
        return {"goodput": kinds["s_steps"] / total if total else 0.0, "seconds": total, **kinds, **counts}

    def line(self) -> str:
        """Returns the record as one line of text; nothing for a short run that was never restarted."""
        entry = self.record()
        if entry["seconds"] < LONG and not entry["n_restarts"] and not entry["n_lost_steps"]:
            return ""
        counts = {"restarts": ("restart", entry["n_restarts"]), "lost": ("lost step", entry["n_lost_steps"])}
        items = []
        for kind, noun in _REST.items():
            name, count = counts.get(kind, (noun, None))
            seconds = entry[f"s_{kind}"]
            if count or seconds >= 0.05:
                number = "" if count is None else f"{count} "
                items.append(f"{number}{name}{'s' if count not in (None, 1) else ''} {entry[f's_{kind}']:.1f} s")
        return (
            f"Goodput {entry['goodput']:.1%}: {entry['s_steps']:.1f} of {entry['seconds']:.1f} s in steps that count; "
            f"the rest: {', '.join(items)}"
        )

    def _begin(self, kind: str) -> None:
        self._count()
        self._kind = kind

    def _count(self) -> None:
        clock = time.monotonic()
        seconds = clock - self._since
        self._add(self._kind, seconds)
        if self._kind == "steps":
            self._run()["steps"] += seconds
        self._since = clock

    def _add(self, kind: str, seconds: float) -> None:
        self._kept["seconds"][kind] = self._kept["seconds"].get(kind, 0.0) + seconds

    def _run(self) -> dict[str, Any]:
        return self._kept["runs"].setdefault(self._name, {"steps": 0.0, "marks": {}})


def _counts(content: dict[str, Any]) -> dict[str, Any]:
    """Returns what a file has kept, its numbers as numbers; raises an error of any kind if it is something else."""
    runs = {
        name: {"steps": float(run["steps"]), "marks": {str(int(at)): float(s) for at, s in run["marks"].items()}}
        for name, run in content["runs"].items()
    }
    seconds = {kind: float(content["seconds"][kind]) for kind in content["seconds"]}
    counts = {"restarts": int(content["restarts"]), "lost": int(content["lost"])}
    return {"seconds": seconds, **counts, "runs": runs, "until": float(content["until"])}
