"""Tables of records: printed for people, written as JSON for programs."""

import json
import math
import os
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import HEAVY_HEAD, SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table

WIDTH = 80  # of a terminal that has not been made wider
_CELL = 12  # characters of a text in a table of a given width, before it is broken at a space


def display_name(method: str) -> str:
    """Returns what tables, figures and logs call a method."""
    return f"dense ({method})" if method == "plump_dp" else method


def setting_of(row: Mapping[str, Any]) -> str:
    """Returns what a setting is called: the method, and what distinguishes it from the method's other settings."""
    return f"{display_name(row['method'])} {row['setting']}".rstrip()


def print_table(title: str, records: Sequence[Mapping[str, Any]], width: int | None = None) -> None:
    """Prints records, all with the same keys, one a row.

    Args:
      title: above the table.
      records: the rows.
      width: in characters, into which headers, long texts and the first column are broken at their spaces. None takes
        what the table needs.
    """
    table = Table(title=title, box=HEAVY_HEAD if width is None else SIMPLE_HEAVY)
    if not records:
        raise ValueError("A table must have at least one record; got none.")
    rows = [[format_cell(value) for value in record.values()] for record in records]
    columns = [[str(key), *cells] for key, *cells in zip(records[0], *rows, strict=True)]
    for number, value in enumerate(records[0].values()):
        can_wrap = width is not None and number == 0
        if width is not None and number:
            words = [word for cell in columns[number] for word in cell.split()]
            column_width = max(max(map(len, words)), min(_CELL, max(map(len, columns[number][1:]))))
            columns[number] = [textwrap.fill(cell, column_width) for cell in columns[number]]
        justify = "left" if isinstance(value, str) else "right"
        table.add_column(columns[number][0], justify=justify, no_wrap=not can_wrap, overflow="fold")
    for row in zip(*(cells[1:] for cells in columns), strict=True):
        table.add_row(*row)
    # A narrow terminal (or a pipe) would break numbers apart; without a width the table takes what it needs.
    Console(width=width or 1000).print(table, crop=False)


def stdev(numbers: Sequence[float]) -> float | None:
    """Returns the standard deviation; None (a dash in a table) for a single number."""
    return statistics.stdev(numbers) if len(numbers) > 1 else None


def format_cell(value: Any) -> str:
    """Formats one value: four significant digits, thousands separated, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is the old one or the new one, also if the disk is full or this process is killed meanwhile.

    What is no file, as /dev/stdout, and a file in a folder that may not be written, are written in place. A file that
    is equal stays.
    """
    path = path.resolve()  # a link stays one
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_bytes() != text.encode():
        draft = path.with_name(f"{path.name}.draft")
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def write_records(path: Path | None, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes records as a JSON list; does nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps([plain(record) for record in records], indent=2) + "\n")


def check_file(option: str, path: Path | None) -> None:
    """Refuses an output file that cannot be written, before the work is done.

    Raises:
      ValueError: if the path is a folder, or in a place that is none, or may not be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} must be a file; got the folder {path}. Name a file in it.")
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if (there != path.absolute() and not there.is_dir()) or not os.access(there, os.W_OK):
        raise ValueError(f"{option} must be a file that can be written; got {path}. Name one in a folder of yours.")


@contextmanager
def reading(path: Path, content: str, remedy: str) -> Iterator[None]:
    """Names the file in every error of a block that reads it, since what is damaged may raise any.

    Raises:
      ValueError: in place of an error of the block; errors of the system pass.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path} must hold {content}; got {error!r}. {remedy}") from None


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with None for NaN and infinity, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
