"""The options that steps of all kinds share, checked once."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from jaxcomm.checks import check_count, check_range
from jaxcomm.collectives.axis import AxisName
from jaxcomm.steps.batch import Batch, check_batch
from jaxcomm.steps.loss import LossFn, Scalars, loss_of
from jaxcomm.types import PyTree


class StepOptions(TypedDict, total=False):
    """The options of `make_train_step` that `simulate` takes, too."""

    has_aux: bool
    has_state: bool
    sum: str | None
    max: str | None
    accumulate: int
    batch_axis: PyTree
    rng: jax.Array | None
    donate: bool


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The options of a step; see `make_train_step`."""

    axis_name: AxisName
    has_aux: bool = False
    has_state: bool = False
    sum: str | None = None
    max: str | None = None
    accumulate: int = 1
    batch_axis: PyTree = 0
    rng: jax.Array | None = None
    donate: bool = True
    compiler_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_count("accumulate", self.accumulate, 1, "1 takes all rows of a worker at once")
        is_key = self.rng is None or isinstance(self.rng, jax.Array)
        check_range("rng", self.rng, "a random key, or None", is_key, "Make one of a seed: jax.random.key(5)")
        if self.rng is not None and not jnp.issubdtype(self.rng.dtype, jax.dtypes.prng_key):
            object.__setattr__(self, "rng", jax.random.wrap_key_data(self.rng))

    @cached_property
    def kinds(self) -> Scalars:
        """How the scalars of the loss become one over the workers."""
        return Scalars(self.sum, self.max, self.accumulate)

    @property
    def jit(self) -> Callable[..., Any]:
        """`jax.jit` with the compiler options."""
        return partial(jax.jit, compiler_options=self.compiler_options)

    def loss(self, loss_fn: LossFn, with_rows: Collection[str] = ()) -> LossFn:
        """Wraps the user's loss, see `loss_of`."""
        return loss_of(loss_fn, self.has_aux, self.has_state, self.axis_name, self.kinds, with_rows)

    def batch(self, step: jax.Array, batch: PyTree, workers: int, *, takes_scalars: bool = True) -> Batch:
        """Checks that a batch divides, and takes it apart; adds the key of the step, if there is one."""
        check_batch(batch, workers, self.accumulate, self.batch_axis, takes_scalars=takes_scalars)
        key = None if self.rng is None else jax.random.fold_in(self.rng, step)
        return Batch.of(batch, self.batch_axis, key)
