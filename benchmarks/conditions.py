"""Under what conditions a record was timed: the lab's congestion control and links, the day, and the machine's speed.

Records from before they were kept have none: their control is unknown, whatever the lab said then.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np

Row = dict[str, Any]

LINKS = ("delay", "jitter", "shares")  # records that differ in these are of different settings
CONDITIONS = ("control", *LINKS, "day", "machine_ms")
_REPEATS = 3


def machine() -> Row:
    """Returns the day, and the milliseconds that this machine takes for a fixed piece of work of one core."""
    x, times = np.linspace(0.0, 1.0, 1 << 21), []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        np.cumsum(np.sqrt(np.exp(-x) + 1.0))
        times.append(1e3 * (time.perf_counter() - begin))
    return {"day": date.today().isoformat(), "machine_ms": round(statistics.median(times), 2)}


def check_control(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuses to compare records of different congestion controls; one without a control is of an unknown one.

    Raises:
      ValueError: naming the controls.
    """
    controls = sorted({row.get("control", "unknown") for row in rows})
    if len(controls) > 1:
        raise ValueError(
            f"Records that are compared must have one congestion control; got {' and '.join(controls)}. Time all of "
            "them again, with another file for --json."
        )


def heading(title: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns a table's title with the conditions under which its rows were timed."""
    rows = list(rows)
    values = {name: [row[name] for row in rows if name in row] for name in CONDITIONS}
    texts = [_text(name, column) for name, column in values.items() if column]
    return "; ".join(text for text in (title, *texts) if text)


def headed(title: str, rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """Returns a table's title with the conditions of its rows, and the rows without what is only there."""
    kept = [name for name in LINKS if len({row.get(name) for row in rows}) > 1]
    hidden = {*CONDITIONS} - {*kept}
    return heading(title, rows), [{name: row[name] for name in row if name not in hidden} for row in rows]


def _text(name: str, values: Sequence[Any]) -> str:
    """Returns a condition for a heading, empty if there is nothing to say."""
    if name == "machine_ms":
        return f"machine {' to '.join(dict.fromkeys(f'{end(values):.1f}' for end in (min, max)))} ms"
    text = "/".join(sorted(set(values)))
    return "" if text == "none" else text if name == "day" else f"{name} {text}"
