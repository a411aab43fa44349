"""DeMo: the largest components of each worker's momentum after a discrete cosine transform."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.checks import Rule, count
from jaxcomm.exchange import transformation
from jaxcomm.layout import BLOCK, Layout
from jaxcomm.methods.sparse import SparseExchange
from jaxcomm.types import PyTree


class CosineLayout(Layout):
    """A flat vector of the compressed tensors' coefficients in an orthonormal cosine basis.

    A tensor is a matrix whose columns are its last dimension. The matrix is cut into chunks, each transformed on its
    own. Each side of a chunk is the largest divisor of the matrix's side that is at most the square root of `chunk`. A
    vector becomes a matrix with as many columns as the largest such divisor of its size.
    """

    def flatten(self, tensors: Sequence[jax.Array]) -> jax.Array:
        return super().flatten([self._transform(tensor, "paqb,ia,jb->pqij") for tensor in tensors])

    def unflatten(self, vector: jax.Array) -> list[jax.Array]:
        return [self._transform(tensor, "pqij,ia,jb->paqb") for tensor in super().unflatten(vector)]

    def _transform(self, tensor: jax.Array, formula: str) -> jax.Array:
        columns = tensor.shape[-1] if tensor.ndim > 1 else self._divisor(tensor.size)
        rows = tensor.size // columns
        a, b = self._divisor(rows), self._divisor(columns)
        sizes = {"p": rows // a, "a": a, "i": a, "q": columns // b, "b": b, "j": b}
        parts = tensor.astype(jnp.float32).reshape([sizes[letter] for letter in formula[:4]])
        out = jnp.einsum(formula, parts, cosines(a), cosines(b), precision=lax.Precision.HIGHEST)
        return out.reshape(tensor.shape)

    def _divisor(self, size: int) -> int:
        return max(d for d in range(1, math.isqrt(self.chunk or BLOCK) + 1) if size % d == 0)


def cosines(n: int) -> np.ndarray:
    """Returns the orthonormal matrix of the discrete cosine transform II: (n, n) float32, a row per frequency."""
    frequency, place = np.mgrid[:n, :n]
    basis = np.cos(np.pi * frequency * (2 * place + 1) / (2 * n)) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis.astype(np.float32)


def _is_chunk(value: Any) -> bool:
    return isinstance(value, int) and value > 0 and value % BLOCK == 0 and math.isqrt(value) ** 2 == value


@dataclass(frozen=True)
class Demo(SparseExchange):
    """Sends the largest components of every worker's momentum in a cosine basis, and keeps the rest as momentum.

    Each step, on each worker, with momentum m, initially 0:

      1. m = decay * m + gradient
      2. q = the k largest coefficients of m in the discrete cosine transform II of every 64 x 64 chunk of a matrix
      3. send q; subtract the rounded values that were sent from m
      4. return the mean over the workers of what was sent, transformed back

    The paper trains with the sign of that mean: `jc.chain(jc.demo(), optax.sign_sgd(3e-4))`. Other optimizers take the
    mean itself. Dense tensors come back as their mean gradient: all of their momentum is sent in every step.

    The transform is linear, so the residual holds decay * m as coefficients, and only the mean is transformed back.
    Compute: two products with 64 x 64 matrices before the exchange, and two after it.

    Source: Peng et al., "DeMo: Decoupled Momentum Optimization", ICLR 2026, https://arxiv.org/abs/2411.19870. The paper
    cuts tensors into cubes whose side divides every dimension. Here a tensor is a matrix, see `CosineLayout`. Where 64
    does not divide a dimension, the chunk's side is that dimension's largest divisor below 64, and k coefficients are
    sent of every 4096, which then span several chunks; of a vector of 8192, 64 are sent, where the published code cuts
    it into chunks of 64 and sends k of each. A coefficient's mean is over all workers, including those that do not send
    it; the published code divides by those that do, so that some signs differ. It also sums learning rate * gradient in
    m, where this sums gradients: the same signs only while the learning rate is constant.

    Attributes:
      k: coefficients sent per chunk. The paper trains with 1 to 32.
      chunk: coefficients per chunk, the square of its side: 1024, 4096 (the paper's 64 x 64), 9216, ...
      decay: decay of the momentum, above 0 and at most 1.
    """

    k: Annotated[int, count(1, "The paper trains with 1 to 32 of 4096")] = 32
    _: KW_ONLY
    chunk: Annotated[
        int | None, Rule(f"a multiple of {BLOCK} and a square", _is_chunk, "The paper has 4096, 64 x 64")
    ] = 4096
    decay: float = 0.999

    def capacity(self, n: int) -> int:
        return min(n, -(-self.k * n // (self.chunk or n)))

    def plan(self, tree: PyTree) -> Layout:
        layout = super().plan(tree)
        return CosineLayout(**{attribute.name: getattr(layout, attribute.name) for attribute in fields(layout)})


demo = transformation(Demo)
