"""Finds numbers that a model cannot take when a batch is made: a device would clamp them, or turn them into NaN."""

import numpy as np

from train.data.info import Batch, DatasetInfo


def check_rows(batch: Batch, info: DatasetInfo, numbers: np.ndarray) -> None:
    """Refuses rows with an id outside its table, or a number that is not finite.

    Args:
      batch: rows of a split.
      info: says what each array may hold, by `limits`.
      numbers: the rows' numbers in their split, (b,).

    Raises:
      ValueError: naming the array, the row, what it holds and what it may hold.
    """
    for name, limit in info.limits().items():
        array = batch[name]
        fits = np.isfinite(array) if limit is None else (array >= 0) & (array < limit.below)
        if fits.all():
            continue
        place = tuple(np.argwhere(~fits)[0].tolist())
        rule = (
            "finite" if limit is None else f"in [0, {np.broadcast_to(limit.below, array.shape)[place]}), {limit.what}"
        )
        where = "".join(f"[{index}]" for index in place[1:])
        raise ValueError(
            f"{name}{where} of {info.name} must be {rule}; got {array[place]} in row {numbers[place[0]]} of the split. "
            "The files are damaged, or not those that were prepared. Copy them again, or prepare the dataset anew."
        )
