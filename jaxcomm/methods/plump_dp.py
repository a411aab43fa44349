"""Plump-DP: the dense exchange."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

import jax
import optax

from jaxcomm.checks import check_range, count, one_of
from jaxcomm.codecs import value_codec
from jaxcomm.collectives import dense_mean
from jaxcomm.collectives.dense import DenseCollective, DenseDtype, dense_words, read_dense
from jaxcomm.exchange import Exchange, Exchanged, ExchangeState, Gradient, Packed, transformation, zeros_unless
from jaxcomm.layout import Layout, plan_layout
from jaxcomm.methods.local_sgd import local_sgd
from jaxcomm.types import ExchangeMetrics, PyTree


@dataclass(frozen=True, kw_only=True)
class PlumpDp(Exchange):
    """Averages the workers' gradients densely: the baseline, and what every compressor equals when it sends everything.

    Received: 2 (K-1)/K * 4 n bytes, in one all-reduce of float32; in 16 bits, half of that. Memory: none.

    float16 is one all-reduce too. bfloat16 takes two shots, in which every worker owns a part, sums it in float32, and
    rounds the sum once more; two workers send each other everything, and round once. GPUs and TPUs can all-reduce it as
    well: fewer passes over memory, but every partial sum is rounded to 8 bits, in an order that the backend chooses.

    With p > 1 it averages models instead of gradients: each worker takes p local steps, and then all continue from the
    mean of their parameters. It then comes after a complete local optimizer, and is `local_sgd` with an outer optimizer
    that takes the mean as it is.

    Source: the name is from Sun et al., "Slim-DP: A Light Communication Data Parallelism for DNN", AAAI 2018.

    Attributes:
      p: local steps from one communication to the next.
      value_dtype: "float32" (float64 stays), "bfloat16" or "float16". There is no residual for rounding errors.
        bfloat16 has the range of float32 and 8 bits of precision. float16 has 11 bits and a smaller range: a gradient
        divided by K is zero below 3e-8, and infinite above 65,519, which skips the step: scale the loss.
      collective: "two_shot", or "all_reduce" for one all-reduce of bfloat16, on GPUs and TPUs only: CPUs would send 32
        bits. float32 and float16 are always one.
    """

    p: Annotated[int, count(1, "1 averages gradients in every step")] = 1
    value_dtype: Annotated[
        DenseDtype, one_of(get_args(DenseDtype), "Pass value_dtype='bfloat16' or 'float16' for half the bytes")
    ] = "float32"
    collective: Annotated[DenseCollective, one_of(get_args(DenseCollective), "Leave it out")] = "two_shot"

    keeps_residual: ClassVar[bool] = False
    has_positions: ClassVar[bool] = False
    start_remedy: ClassVar[str | None] = "It is dense in every step"

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = self.collective == "two_shot" or self.value_dtype == "bfloat16"
        check_range("collective", self.collective, "left out unless value_dtype='bfloat16'", holds, "Others all-reduce")

    @property
    def period(self) -> int | None:
        return self.p if self.p > 1 else None

    def transform(self) -> optax.GradientTransformation:
        if self.p == 1:
            return super().transform()
        exchange = plump_dp(
            value_dtype=self.value_dtype, collective=self.collective, checksum=self.checksum, axis_name=self.axis_name
        )
        return local_sgd(self.p, exchange=exchange, outer=optax.sgd(1.0), where=self.where, axis_name=self.axis_name)

    @property
    def checksum_remedy(self) -> str | None:
        is_summed_by_owners = self.value_dtype == "bfloat16" and self.collective == "two_shot"
        return None if is_summed_by_owners else "Pass value_dtype='bfloat16' in two shots, which owners sum"

    def plan(self, tree: PyTree) -> Layout:
        return plan_layout(tree, dense_below=0, capacity=lambda n: n, compress=lambda _: False)

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        means, ok = dense_mean(gradient.leaves, self.axis_name, self.value_dtype, self.checksum, self.collective)
        return Exchanged(zeros_unless(ok, means), None, ExchangeMetrics.of(ok, sent=0)), state.memory

    @property
    def pack_remedy(self) -> str | None:
        if self.p > 1:
            return "Leave p= out: rounds have steps="
        return "Pass value_dtype='bfloat16'" if self.value_dtype == "float16" else None

    def pack(self, gradient: Gradient, step: jax.Array, worker: jax.Array | int) -> Packed:
        del step, worker
        words, ok = dense_words(gradient.leaves, value_codec(self.value_dtype))
        return Packed(words, None, ok)

    def unpack(self, words: jax.Array, layout: Layout, step: jax.Array) -> list[jax.Array]:
        del step
        return read_dense(words, layout, value_codec(self.value_dtype))


plump_dp = transformation(PlumpDp)
