"""How a number of a traced program scales with the rows of a batch, and what else is known of it."""

import math
from typing import NamedTuple

import numpy as np


class Integers:
    """An array of integers, which is equal to itself alone."""

    def __init__(self, array: np.ndarray):
        self.array = array


class Scaling(NamedTuple):
    """What becomes of a number if a worker has n times as many rows, each of its own n times.

    Attributes:
      power: it is n**power times as large: 1 for a sum over rows, 0 for a mean, -inf for 0; NaN if it is not known.
      is_own: whether it is computed from a worker's own rows.
      is_weighted: whether it was divided by a sum over own rows, such as a number of valid tokens.
      is_ratio: whether it is a quotient of two numbers of which each has no rows left.
      is_extreme: whether it is the largest or smallest of own rows.
      has_extreme: whether the largest or smallest of own rows is in it.
      is_mixed: whether terms were added that scale differently.
      is_total: whether it is of the rows of all workers.
      is_multiple: whether the sum over the workers of what is no sum over rows, such as a mean, is in it.
      is_of_parts: whether the sum over the workers of what is neither a sum nor a mean over own rows is in it.
      is_shared: whether it is computed from numbers of other workers.
      is_gathered: whether these are rows, as after `jax.lax.all_gather`, and not their sum or mean.
      is_spread: whether a gradient is in it that JAX has summed over the workers, since it is that of a constant.
      is_curved: whether it is a function, and no linear one, of own numbers that have no rows left, and no mean over
        rows was taken since.
      has_mean: whether a sum or a mean over own rows is in it.
      is_normalised: whether it is a function, and no linear one, of rows and such means, as a normalisation is.
      is_by_place: whether it depends on where a row stands among a worker's own, as `jnp.arange(len(x))` does.
      is_of_worker: whether it depends on the worker's number.
      is_alike: whether random numbers of rows are in it whose key is the same on all workers.
      is_sized: whether it depends on a worker's number of rows, and not in proportion to a power of it.
      stacks: how many arrays of all rows stand one behind another along the axis of rows; 0 if all rows are equal.
      blocks: into how many blocks rows were cut, each of rows that stand together; 0 if they were not.
      places: its integers, if they are computed from constants of the program alone.
      constant: its value, if it is a constant of the program; of a number of rows, that of the first trace.
      summed: of how many rows it is a sum, of how many numbers, and by which number of rows it was divided; empty if it
        is none.
      has_backward: whether a function that has a backward pass of its own (`jax.custom_vjp`) is in it.
    """

    power: float = 0
    is_own: bool = False
    is_weighted: bool = False
    is_ratio: bool = False
    is_extreme: bool = False
    has_extreme: bool = False
    is_mixed: bool = False
    is_total: bool = False
    is_multiple: bool = False
    is_of_parts: bool = False
    is_shared: bool = False
    is_gathered: bool = False
    is_spread: bool = False
    is_curved: bool = False
    has_mean: bool = False
    is_normalised: bool = False
    is_by_place: bool = False
    is_of_worker: bool = False
    is_alike: bool = False
    is_sized: bool = False
    stacks: int = 0
    blocks: int = 0
    places: Integers | None = None
    constant: float | None = None
    summed: tuple[float, ...] = ()
    has_backward: bool = False

    @property
    def is_count(self) -> bool:
        """Whether it has a number of rows in it, and nothing else of a worker's own."""
        return not (self.is_own or self.is_total or math.isnan(self.power)) and self.power not in (0, -math.inf)

    @property
    def reduction(self) -> str:
        """What it is of own rows, "sum" or "max", so that the mean over workers is wrong; else ""."""
        return "max" if self.is_extreme else "sum" if self.power == 1 and not self.is_total else ""

    @property
    def is_unknown(self) -> bool:
        """Whether it may be neither a mean nor a sum over rows, and is computed from a worker's own alone."""
        is_neither = (self.is_mixed or self.power not in (0, 1, -math.inf)) and not self.is_quotient
        is_neither |= self.is_by_place or (self.has_extreme and not self.is_extreme)
        is_power = self.is_shared and not (self.is_own or self.is_total or math.isnan(self.power))
        if is_power and self.power not in (0, 1, -math.inf):  # as the root of the mean of the workers' sums
            return True
        is_of_size = self.is_sized and math.isnan(self.power)
        # A row's place among a worker's own is none among those of all, but for the rows of the workers before.
        is_excused = self.is_gathered and (self.is_of_worker or not self.is_by_place)
        return self.is_of_parts or is_of_size or (self.is_own and not is_excused and is_neither)

    @property
    def is_share(self) -> bool:
        """Whether a number of one row has a part that shrinks as rows become more, as the gradient of a mean does."""
        return self.is_own and not self.is_gathered and (self.is_mixed or -math.inf < self.power < 0)

    @property
    def is_quotient(self) -> bool:
        """Whether it is of one size for any number of rows, and was divided by a number of a worker's own."""
        return self.power == 0 and (self.is_weighted or self.is_ratio)

    @property
    def is_of_mean(self) -> bool:
        """Whether it is a function of a worker's own means, such as the root of one, or of rows and these."""
        is_known = self.power == 0 and not (self.is_gathered or self.is_quotient or self.is_unknown)
        return is_known and (self.is_curved or self.is_normalised)

    def of_micro_batch(self, part: "Scaling") -> "Scaling":
        """Returns that of a number of one micro-batch of several: none is of all rows.

        `part` is known of the same number if collectives are left out.
        """
        names = ("is_weighted", "is_ratio", "is_curved", "is_normalised")
        marks = {name: getattr(self, name) or getattr(part, name) for name in names}
        is_own = self.is_own or self.is_shared
        return self._replace(is_own=is_own, is_total=False, is_shared=False, is_gathered=False, **marks)

    def beside(self, alone: "Scaling") -> "Scaling":
        """Returns it with what is known of the same number if one of K workers has the rows of all.

        That is K times a mean divided by K, and a Kth of a mean times K.
        """
        is_part = self.power == 0 and alone.power == 1 and alone.is_own
        is_multiple = alone.power == -1 and (alone.is_own or len(alone.summed) > 0)
        is_of_all = self.is_sized and not (alone.is_sized or self.is_shared)  # by a number of the rows of all
        return self._replace(
            power=1 if is_part else alone.power if is_of_all else self.power,
            is_multiple=self.is_multiple or is_multiple,
            is_alike=self.is_alike and alone.is_alike,  # not of the rows of all, which are as many in both
            is_sized=self.is_sized and alone.is_sized,
        )
