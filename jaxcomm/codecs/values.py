"""Value codecs: float32 as it is, or rounded to bfloat16.

XLA's CPU collectives widen bfloat16 to four bytes, so values travel as the 32-bit words that hold them.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm.checks import check_range
from jaxcomm.kernels.bits import WORD
from jaxcomm.layout import Layout

_UPPER_HALF = np.uint32(0xFFFF0000)

ValueDtype = Literal["float32", "bfloat16"]
VALUE_DTYPES = get_args(ValueDtype)


@dataclass(frozen=True)
class ValueCodec:
    """Writes (C,) float32 values as words of 32 bits.

    Attributes:
      dtype: the type of a value on the wire: float32, or bfloat16, its upper 16 bits.
    """

    dtype: Any

    @property
    def bits(self) -> int:
        """Bits a value."""
        return self.dtype.itemsize * 8

    def rounded(self, values: jax.Array) -> jax.Array:
        """Returns the float32 values that the receiver will see.

        A finite value stays finite: one beyond the largest number of the wire's type is sent as that number (and error
        feedback keeps the rest).
        """
        info = jnp.finfo(self.dtype)
        values = jnp.clip(values, -float(info.max), float(info.max))
        # Not a cast there and back: XLA may take such a pair for the identity.
        return lax.reduce_precision(values, exponent_bits=info.nexp, mantissa_bits=info.nmant)

    def n_words(self, layout: Layout) -> int:
        """Returns the words of the values of all slots."""
        return -(-layout.n_slots * self.bits // WORD)

    def write(self, values: jax.Array, filled: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
        """Writes the values of slots (C,), 0 in empty ones; returns the words, and the values as they are read."""
        del filled, layout
        values = self.rounded(values)
        return self.encode(values), values

    def read(self, words: jax.Array, layout: Layout) -> jax.Array:
        """Reads the values of all slots: (C,) float32."""
        return self.decode(words, layout.n_slots)

    def encode(self, values: jax.Array) -> jax.Array:
        """Writes values (C,), rounded to the nearest, as W = ceil(C * bits / 32) words: (W,) uint32.

        With 16 bits, word i has value i in its low half and value W + i in its high half, so that neighbours are read
        together.
        """
        values = values.astype(jnp.float32)
        if self.bits == WORD:
            return lax.bitcast_convert_type(values, jnp.uint32)
        info = jnp.finfo(self.dtype)
        words = lax.bitcast_convert_type(lax.reduce_precision(values, info.nexp, info.nmant), jnp.uint32)
        low, high = jnp.pad(words, (0, words.size % 2)).reshape(2, -1)
        return high & _UPPER_HALF | low >> 16

    def decode(self, words: jax.Array, n: int) -> jax.Array:
        """Reads the first n values from their words: (n,) float32."""
        if self.bits < WORD:
            words = jnp.concatenate([words << 16, words & _UPPER_HALF])
        return lax.bitcast_convert_type(words[:n], jnp.float32)


def value_codec(dtype: Any) -> ValueCodec:
    """Makes the codec of a dtype.

    Raises:
      ValueError: if the dtype is neither float32 nor bfloat16.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    rule, remedy = f"one of {', '.join(VALUE_DTYPES)}", "Pass value_dtype='bfloat16' or 'float32'"
    check_range("value_dtype", name, rule, name in VALUE_DTYPES, remedy)
    return ValueCodec(jnp.dtype(name))
