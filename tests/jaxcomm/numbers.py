"""Arrays of the kinds of numbers that selectors and codecs must take."""

import numpy as np


def numbers(rng, kind, shape):
    """As float32."""
    x = rng.normal(size=shape)
    if kind == "heavy":
        x = x * 10.0 ** rng.integers(-30, 30, size=shape)
    elif kind == "ties":
        x = rng.integers(-2, 3, size=shape).astype(float)
    elif kind == "zeros":  # of both signs
        x = x * 0
    elif kind == "few":  # fewer numbers than a sample sends
        x = np.where(rng.random(shape) < 0.1, x, 0)
    elif kind == "one":
        x = np.where(np.arange(x.size).reshape(shape) == rng.integers(x.size), 3.0, 0.0)
    elif kind == "tiny":  # the smallest numbers that there are
        return rng.integers(0, 3, size=shape).astype(np.uint32).view(np.float32)
    elif kind in ("infinite", "nan"):
        x = np.where(rng.random(shape) < 0.3, -np.inf if kind == "infinite" else np.nan, x)
        x = np.where(rng.random(shape) < 0.3, np.inf, x)
    return x.astype(np.float32)
