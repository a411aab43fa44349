"""The dense all-reduce, with which everything else is compared."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxcomm.codecs import value_codec
from jaxcomm.codecs.values import ValueCodec
from jaxcomm.collectives.axis import AxisName, axis_size
from jaxcomm.collectives.messages import sum_of
from jaxcomm.collectives.shared_mask import compact_sum
from jaxcomm.kernels.numerics import is_finite, is_finite_narrow, promotes, wide_type
from jaxcomm.kernels.platforms import in_memory, traced_platform
from jaxcomm.kernels.scopes import EXCHANGE
from jaxcomm.kernels.vectors import end_to_end, split_vector
from jaxcomm.layout import MAX_ELEMENTS, Layout

DenseDtype = Literal["float32", "bfloat16", "float16"]
DenseCollective = Literal["two_shot", "all_reduce"]
FLOAT32 = value_codec("float32")
_BUCKET = 25 << 20  # bytes in float32, as of PyTorch's DDP


@promotes
def dense_mean(
    tensors: Sequence[jax.Array],
    axis_name: AxisName,
    value_dtype: DenseDtype = "float32",
    checksum: bool = False,
    collective: DenseCollective = "two_shot",
) -> tuple[list[jax.Array], jax.Array]:
    """Averages tensors over the workers.

    The result is the same on every worker. In float32 it equals `jax.lax.pmean` of every tensor, in one all-reduce;
    float64 tensors travel in one of their own. In float16 that all-reduce sums what the workers divided by K and
    rounded, and rounds every partial sum. In bfloat16, which XLA's own all-reduce would send as 32 bits on a CPU, every
    worker owns a part, sums it in float32 in the order of the workers, and rounds the sum once more; two workers send
    each other everything, and round once. Each worker receives 2 (K-1)/K * 4 bytes an element, twice that in float64
    and half of it in 16 bits. Tensors of 2^31 elements and more together travel one part after the other.

    Where collectives are asynchronous (GPU, TPU), tensors travel in buckets of 25 MiB or more, so that gradients of the
    last layers travel while those of the first layers are computed.

    Args:
      tensors: each worker's own, of any floating dtype and shape; may be empty.
      axis_name: the axis of workers, or the axes.
      value_dtype: the type on the wire, "float32" (float64 for tensors of float64), "bfloat16" or "float16"; see
        `PlumpDp` for their ranges.
      checksum: see `jaxcomm.collectives.checksum`; only in bfloat16, by two shots.
      collective: of bfloat16, "all_reduce" for one all-reduce as in float16; not on CPUs.

    Returns:
      The means, in the tensors' shapes and dtypes, and whether every number of them is finite: () bool. If a tensor of
      some worker is not finite, neither is the mean.

    Raises:
      ValueError: for an all-reduce of bfloat16 on CPUs.
    """
    if value_dtype == "bfloat16" and collective == "all_reduce" and traced_platform() == "cpu":
        raise ValueError(
            "collective must be 'two_shot' for bfloat16 on CPUs, whose all-reduce sends it in 32 bits; got "
            "'all_reduce'. Leave it out, or run on GPUs or TPUs."
        )
    if not tensors:
        return [], jnp.asarray(True)
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        wide = wide_type(tensor.dtype) if value_dtype == "float32" else None
        places.setdefault(wide, []).append(place)
    by_place, finite = dict[int, jax.Array](), []
    for group in places.values():
        means: list[jax.Array] = []
        for bucket in _buckets([tensors[place] for place in group]):
            bucket_means, ok = _mean_at_once(bucket, axis_name, value_dtype, checksum, collective)
            means, finite = bucket_means + means, [ok, *finite]
        by_place |= dict(zip(group, means, strict=True))
    ok = finite[0] if len(finite) == 1 else jnp.stack(finite).all()
    return [by_place[place] for place in range(len(tensors))], ok


def dense_words(tensors: Sequence[jax.Array], codec: ValueCodec = FLOAT32) -> tuple[jax.Array, jax.Array]:
    """Writes tensors end to end as words, and tells whether what is read will be finite: (m,) uint32, () bool."""
    if not tensors:
        return jnp.zeros(0, jnp.uint32), jnp.asarray(True)
    vector = end_to_end([tensor.reshape(-1).astype(jnp.float32) for tensor in tensors])
    return codec.encode(vector), is_finite(codec.rounded(vector)) & is_finite(vector)


def read_dense(words: jax.Array, layout: Layout, codec: ValueCodec = FLOAT32) -> list[jax.Array]:
    """Reads the dense tensors of a layout from their words, in their shapes and dtypes."""
    _, shapes = layout.split(layout.shapes)
    if not shapes:
        return []
    _, dtypes = layout.split(layout.dtypes)
    parts = split_vector(codec.decode(words, layout.n_dense), shapes)
    return [part.astype(dtype) for part, dtype in zip(parts, dtypes, strict=True)]


def _buckets(tensors: Sequence[jax.Array]) -> Iterator[Sequence[jax.Array]]:
    """Yields the tensors that travel together, the last ones first: backpropagation has their gradients first."""
    min_size = MAX_ELEMENTS if traced_platform() in (None, "cpu") else _BUCKET // 4
    end, size = len(tensors), 0
    for place in reversed(range(1, len(tensors))):
        size += tensors[place].size
        if size >= min_size or size + tensors[place - 1].size >= MAX_ELEMENTS:  # indices have 31 bits
            yield tensors[place:end]
            end, size = place, 0
    yield tensors[:end]


def _mean_at_once(
    tensors: Sequence[jax.Array],
    axis_name: AxisName,
    value_dtype: DenseDtype,
    checksum: bool,
    collective: DenseCollective,
) -> tuple[list[jax.Array], jax.Array]:
    wide = wide_type(tensors[0].dtype) if value_dtype == "float32" else jnp.float32
    vector = end_to_end([tensor.reshape(-1).astype(wide) for tensor in tensors])
    workers = axis_size(axis_name)
    if value_dtype == "bfloat16" and collective == "two_shot":
        vector = in_memory(vector)
        summed = compact_sum(vector, is_finite(vector), "two_shot", value_codec(value_dtype), axis_name, checksum)
        mean = jnp.where(summed.ok, summed.total(summed.ok) / workers, jnp.nan)
        finite = summed.ok
    else:
        is_narrow = value_dtype != "float32"
        part = (vector / workers).astype(value_dtype) if is_narrow else vector
        with jax.named_scope(EXCHANGE):
            total = sum_of(part, axis_name)
        mean = total.astype(jnp.float32) if is_narrow else total / workers  # (n,)
        finite = is_finite(mean)
    parts = split_vector(mean, [tensor.shape for tensor in tensors])
    means = [part.astype(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
    return means, finite & is_finite_narrow(means)
