"""Quant-DP: random quantization of the gradient (QSGD)."""

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.checks import Rule, Seed, check_range, one_of
from jaxcomm.codecs.quantize import Buckets, PartCodec
from jaxcomm.collectives import axis_size
from jaxcomm.collectives.coded_sum import COLLECTIVES, integer_sum
from jaxcomm.collectives.reduced import Reduced
from jaxcomm.exchange import transformation
from jaxcomm.kernels import noise
from jaxcomm.kernels.scopes import ENCODE, EXCHANGE
from jaxcomm.kernels.vectors import Vector
from jaxcomm.layout import BLOCK, Layout
from jaxcomm.methods.coded import CodedExchange

Width = Literal[2, 4, 8, 16]
Norm = Literal["max", "l2"]
AUTO_WORKERS = 4  # the most for which "auto" sums 8-bit integers; with more workers, too few levels are left


def _is_bucket(value: object) -> bool:
    return isinstance(value, int) and 32 <= value <= BLOCK and value & (value - 1) == 0


@dataclass(frozen=True)
class QuantDp(CodedExchange):
    """Rounds every coordinate at random to one of a few levels: unbiased, and without a residual.

    Each step, on each worker, with s = 2^(bits-1) - 1 levels, in every bucket of consecutive coordinates of a tensor:

      1. scale = the largest |g| of the bucket (or its L2 norm)
      2. q = s |g| / scale, rounded up with the probability of its fraction, else down
      3. send the sign and q in `bits` bits, and the scale of the bucket in 32
      4. return the mean over the workers of sign * scale * q / s

    With "psum", the sum is an all-reduce of integers. "auto" takes it with 16 bits, and with 8 bits for up to 4 workers
    without a checksum. The workers first agree on the largest scale of each bucket, in an all-reduce of 4 bytes a
    bucket. They then use floor(s / K) levels instead of s, so that the sum fits the same number of bits. This sends the
    bytes of two shots and packs no bits, but has fewer levels: with 8 bits, for independent normal gradients, the
    variance that rounding adds to the mean is 2.4 times that of two shots for K = 2, 10 times for K = 4 and 45 times
    for K = 8, which is 0.05%, 0.24% and 1.0% of the variance of the mean itself (n = 8192, 300 draws, bucket 512).

    In two shots, the owner of a part quantizes the sum once more in the same way. `collective="gather"` is the paper's,
    where sums are not rounded again.

    The second rounding multiplies the rounding variance of the mean by about 1 + S^2 / (s_1^2 + ... + s_K^2), where s_k
    is the scale of worker k and S that of the sum, and by K where all gradients are equal. Measured (mean squared error
    over 300 draws, n = 8192, 8 bits, bucket 512, norm "max", `jax.vmap`): 2.0 for independent normal gradients, K = 4,
    and 1.9 to 2.0 for K = 2 to 16; at K = 4 it is 1.6 for Laplace, 1.7 for Student's t with 3 degrees of freedom, 3.7
    for uniform gradients, 3.5 where workers share half of the variance (K = 16: 9.7), 4.0 where they share all of it
    (K = 16: 16). With 4 bits these factors differ by at most 0.13; with 2 bits the factor is 3.2 for normal gradients.

    Received: 2 (K-1)/K * `bits` n bits. Memory: none. `jc.chain(jc.quant_dp(8), optax.sgd(0.1))`.

    Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017;
    Sun et al., "Slim-DP: A Light Communication Data Parallelism for DNN", AAAI 2018, calls it Quant-DP (8 bits, bucket
    512).

    Attributes:
      bits: bits a coordinate, 2, 4, 8 or 16. The variance that rounding adds grows as 1/s^2; 2 bits (ternary) need
        smaller buckets and a smaller learning rate.
      bucket: coordinates that share a scale, a power of two from 32 to 1024. It costs 32 / bucket bits a coordinate.
      norm: "max" or "l2". The paper analyses l2 and trains with max.
      seed: seed of the rounding.
    """

    bits: Annotated[Width, one_of(get_args(Width), "8 is safe, and dct_dp or sign send fewer")] = 8
    _: KW_ONLY
    collective: Annotated[str, one_of((*COLLECTIVES, "psum", "auto"), "Or pass 'auto'")] = "auto"
    bucket: Annotated[int, Rule(f"a power of two from 32 to {BLOCK}", _is_bucket, "The paper uses 512")] = 512
    norm: Annotated[Norm, one_of(get_args(Norm), "'max' adds less variance")] = "max"
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = self.collective != "psum" or self.bits >= 8
        check_range("bits", self.bits, "8 or 16 with collective='psum'", holds, "Sums of fewer bits go in two shots")
        holds = self.bits != 16 or self.collective in ("psum", "auto")
        check_range("collective", self.collective, "'psum' for 16 bits", holds, "Or pass 'auto', or bits=8")

    @property
    def checksum_remedy(self) -> str | None:
        if self.bits == 16:
            return "Pass bits=8 and collective='two_shot'"
        return "Pass collective='two_shot'" if self.collective == "psum" else None

    def way(self, workers: int) -> str:
        """Returns the collective that K workers use; "auto" leaves the choice to `coded_sum`."""
        adds_up = self.collective == "auto" and self.bits == 8 and workers <= AUTO_WORKERS and not self.checksum
        return "psum" if adds_up or self.bits == 16 else self.collective

    def summed(self, vector: Vector, layout: Layout, step: jax.Array) -> tuple[Reduced, jax.Array, int]:
        workers, values = axis_size(self.axis_name), vector.sum()
        if self.way(workers) != "psum":
            return super().summed(vector, layout, step)
        codec = self.codecs(layout, step, lax.axis_index(self.axis_name))[0]
        levels = codec.levels // workers
        if not levels:
            raise ValueError(
                f"collective='psum' must have room for a level of each worker in {self.bits} bits; got {workers} "
                "workers. Pass collective='two_shot'."
            )
        local_scale, ok = codec.scale(values)
        with jax.named_scope(EXCHANGE):
            scale = lax.pmax(local_scale, self.axis_name)
        with jax.named_scope(ENCODE):
            codes = codec.draw(values, scale, levels, 0).astype(jnp.int8 if self.bits == 8 else jnp.int16)
        return integer_sum(codes, ok, self.axis_name), scale, levels

    def codecs(self, layout: Layout, step: jax.Array, worker: jax.Array | int) -> tuple[Buckets, PartCodec]:
        make = functools.partial(Buckets, self.bits, self.bucket, self.norm)
        # All owners share the second key: each rounds its own part of the sum with that part of the random sequence.
        return make(noise.make_key(self.seed, step, 0, worker)), make(noise.make_key(self.seed, step, 1))


quant_dp = transformation(QuantDp)
