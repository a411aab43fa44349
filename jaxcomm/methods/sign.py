"""Signs with error feedback: one bit a coordinate."""

from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxcomm.codecs.quantize import BlockSigns, PartCodec
from jaxcomm.exchange import transformation
from jaxcomm.layout import Layout
from jaxcomm.methods.coded import CodedExchange


@dataclass(frozen=True, kw_only=True)
class Sign(CodedExchange):
    """Sends the sign of every coordinate and the mean magnitude of every block, and keeps the rest (error feedback).

    Each step, on each worker, in every block of 1024 consecutive coordinates of a tensor (the last may be shorter):

      1. x = gradient + residual
      2. scale = mean |x| of the block
      3. send scale * sign(x) (zeros as positive): 1 bit a coordinate, 32 a block
      4. the residual is x minus what was sent
      5. return the mean over the workers of what was sent

    In two shots, the owner of a part codes the sum in the same way, and adds the coding error to its own residual.
    Received: 2 (K-1)/K * n bits. Memory: 4 bytes a parameter. `jc.chain(jc.sign(), optax.sgd(0.1))`.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019; Zheng
    et al., "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", NeurIPS 2019 (blocks, and
    both directions).
    """

    keeps_residual: ClassVar[bool] = True

    def codecs(self, layout: Layout, step: jax.Array, worker: jax.Array | int) -> tuple[PartCodec, PartCodec]:
        return BlockSigns(layout), BlockSigns(layout)


sign = transformation(Sign)
