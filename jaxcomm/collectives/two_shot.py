"""The all-reduce of coded values in two shots: every worker owns a part, sums it, and codes the sum again.

A gather of coded payloads grows with K. Here, each part goes to its owner (all-to-all), is decoded, summed and coded
again, and goes to all workers (all-gather): twice the payload, whatever K is.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxcomm.collectives.axis import AxisName
from jaxcomm.collectives.checksum import gather_checked, move
from jaxcomm.collectives.messages import all_to_all


def two_shot(
    rows: jax.Array,
    at_owner: Callable[[jax.Array], tuple[jax.Array, Any]],
    axis_name: AxisName,
    checksum: bool = False,
) -> tuple[jax.Array, Any, jax.Array]:
    """Exchanges coded parts by way of their owners.

    Each worker receives (K-1)/K of its rows' bytes, and then (K-1) times the bytes that an owner returns; with a
    checksum 8 (K-1) bytes more.

    Args:
      rows: (K, m) uint32, the worker's own code of every part; row j goes to worker j.
      at_owner: from the K codes of the worker's own part (K, m), worker i's in row i, to the code of their sum (m2,)
        uint32, and anything that the owner keeps for itself.
      axis_name: the axis of workers.
      checksum: see `move`.

    Returns:
      The codes of all sums (K, m2), the same on every worker; what this worker's `at_owner` kept; and whether this
      worker received everything as it was sent, () bool.
    """
    received, is_intact = move(rows, lambda rows: all_to_all(rows, axis_name), checksum)
    code, kept = at_owner(received)
    codes, are_intact = gather_checked(code, axis_name, checksum)
    return codes, kept, is_intact & are_intact
