"""A random number for every row of a run, by hashing its place in the stream."""

import numpy as np


def mix(words: np.ndarray) -> np.ndarray:
    """Hashes 64-bit words one by one: the finalizer of SplitMix64, in which every bit depends on every bit.

    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.

    Args:
      words: any shape, uint64.

    Returns:
      The same shape, uint64; different words stay different.
    """
    words = np.asarray(words, np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # wraps around
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def row_seeds(seed: int, positions: np.ndarray) -> np.ndarray:
    """Returns a random number for each row, a function of only the run's seed and the row's place.

    Args:
      seed: of the run, in [0, 2**32).
      positions: places in the stream of all rows of the run, counted over all epochs and processes; (b,) integers.

    Returns:
      (b,) uint32.
    """
    # Words 2 and 3, as the first seeds the order. The keys of two runs are not near each other.
    low, high = np.random.SeedSequence(seed).generate_state(4)[2:].astype(np.uint64)
    key = low | high << np.uint64(32)
    golden = np.uint64(0x9E3779B97F4A7C15)
    return (mix(key + golden * np.asarray(positions).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
