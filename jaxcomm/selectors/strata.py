"""Random coordinates, one in every stratum: no two are the same, and whoever has the seed knows them.

If the coordinates do not divide evenly, some strata are longer by one. So the strata are rotated by a random offset,
and every coordinate is drawn equally often.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.kernels import noise
from jaxcomm.kernels.bits import Slots
from jaxcomm.kernels.scopes import SELECT
from jaxcomm.layout import BLOCK, Layout


def pick(
    uniform: jax.Array, stratum: jax.Array, size: jax.Array | int, strata: jax.Array | int, offset: jax.Array
) -> jax.Array:
    """Draws one number from every stratum.

    The numbers below `size` are cut into `strata` consecutive strata of size // strata numbers, the first
    size % strata of them one longer. The first stratum begins at `offset`, and the last wraps around.

    Args:
      uniform: random float32 numbers in [0, 1), any shape.
      stratum: int32, the index of the stratum to draw each from.
      size: int32, at least `strata`.
      strata: int32, at least 1.
      offset: int32, from 0 to size - 1; drawn evenly, it makes every number equally likely.

    Returns:
      int32, in the shape of `uniform`, all different.
    """
    width, longer = size // strata, size % strata
    start = stratum * width + jnp.minimum(stratum, longer)
    width = width + (stratum < longer)
    # The product may round up to the width.
    number = start + jnp.minimum((uniform * width.astype(jnp.float32)).astype(jnp.int32), width - 1)
    return jnp.where(number >= size - offset, number - (size - offset), number + offset)


@jax.named_scope(SELECT)
def select_strata(key: jax.Array, layout: Layout) -> Slots:
    """Draws, in every segment, one coordinate for each of its slots, all equally likely.

    Args:
      key: from `noise.make_key`. Its first C numbers draw in the strata, the next S draw the offset of each segment.
      layout: the segments; a segment's capacity is the number of its strata.

    Returns:
      The slots of each segment together, all filled (in a pipeline, those that the stage uses); they do not ascend
      where the strata wrap around.
    """
    n_slots = layout.n_slots
    first_slot = np.cumsum((0, *layout.capacities[:-1]))
    segment = layout.segment_of_slot()  # (C,)
    sizes, rooms = jnp.maximum(layout.elements(), 1), jnp.maximum(layout.rooms(), 1)
    table = [first_slot, sizes, rooms, np.cumsum((0, *layout.blocks[:-1])) * BLOCK]
    first, size, strata, start = jnp.stack([jnp.asarray(column, jnp.int32) for column in table])[:, segment]
    offset = noise.integers(key, sizes, n_slots)[segment]
    stratum = jnp.arange(n_slots, dtype=jnp.int32) - first
    position = start + pick(noise.uniform(key, n_slots), jnp.minimum(stratum, strata - 1), size, strata, offset)
    return Slots(position, jnp.ones(n_slots, bool) if layout.stages is None else stratum < strata)
