"""SparseLoCo: local steps, of which the largest changes are sent in two bits a value."""

import math
from collections.abc import Sequence
from typing import Any

import optax

from jaxcomm.checks import check_count
from jaxcomm.collectives.axis import AxisName
from jaxcomm.exchange import Where
from jaxcomm.layout import BLOCK
from jaxcomm.methods.local_sgd import local_sgd
from jaxcomm.methods.topk import topk

KEPT = 64  # of every chunk


def sparse_loco(
    steps: int = 30,
    *,
    chunk: int = 4096,
    decay: float = 0.95,
    learning_rate: float = 1.0,
    fragments: int | Sequence[Where] = 1,
    overlap: int = 0,
    mix: float = 0.0,
    axis_name: AxisName = "data",
) -> optax.GradientTransformation:
    """Makes `local_sgd` with the compressor and the outer optimizer of SparseLoCo.

    On each worker, with residual e, initially 0:

      1. for H steps, update the worker's own parameters with the local optimizer alone
      2. then e = decay * e + (anchor - own parameters)
      3. select the 64 largest |e| of every chunk of 4096 elements, exactly
      4. send them in 2 bits a value (a sign and one of two magnitudes of the chunk), and the positions
      5. subtract the rounded values that were sent from e
      6. anchor = anchor - learning_rate * the mean of what was sent; all continue from the anchor

    There is no outer momentum: the residual takes its place. `jc.chain(optax.adamw(1.3e-4), jc.sparse_loco())`.
    Received: K-1 payloads of about 10.4 bits a sent coordinate, 1/197 of float32, once in `steps`.
    Memory: 8 bytes a parameter.

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
    https://arxiv.org/abs/2508.15706; the settings are those of the Covenant-72B run, 2026,
    https://arxiv.org/abs/2603.08163. Three things differ. Their chunks are 64 x 64 tiles of a matrix, here 4096
    consecutive elements. Their 2 bits are four bins of equal width, with a mean each over a whole tensor; here a sign
    and one of two magnitudes, whose means are a chunk's. Their published code divides the sum of a coordinate by the
    workers that sent it, where the paper's Algorithm 1 divides by all workers, as here.

    Args:
      steps: H, local steps from one exchange to the next.
      chunk: elements of a chunk, a multiple of 1024. Of each, 64 are sent.
      decay: decay of the residual.
      learning_rate: learning rate of the outer SGD.
      fragments: see `local_sgd`.
      overlap: see `local_sgd`.
      mix: see `local_sgd`.
      axis_name: the axis of workers.
    """
    check_count("chunk", chunk, BLOCK, f"Take a multiple of {BLOCK}; the paper has 4096")
    sparsity = math.nextafter(1 - KEPT / chunk, 1)  # of which exactly 64 are left, however it is rounded
    exchange = topk(sparsity, chunk=chunk, value_dtype="2bit", decay=decay, axis_name=axis_name)
    streaming: dict[str, Any] = {"fragments": fragments, "overlap": overlap, "mix": mix}
    return local_sgd(steps, exchange=exchange, outer=optax.sgd(learning_rate), **streaming, axis_name=axis_name)
