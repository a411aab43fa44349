"""The trees of shapes on which every law is tested, and kinds of gradients."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

# Sizes around a block, half a block, and one; scalars, matrices, and 16-bit types. JAX returns dictionaries sorted by
# key.
TREES = {
    "odd": {
        "a": (1,),
        "b": (7,),
        "c": (511,),
        "d": (512,),
        "e": (513,),
        "f": (1023,),
        "g": (32, 32),
        "h": (5, 205),
        "i": (3, 683),
        "s": (),
    },
    "half": {"a": (513,), "b": (1025,), "c": (7,), "d": (600,)},
    "single": {"w": (2049,)},
    "pair": {"b": (7,), "w": (5, 823)},  # more than 4096, where a maximum that XLA compiles for a CPU loses NaN
    "blocks": {"b": (7,), "w": (4, 1024)},
}
DTYPES = {("half", "a"): np.float16, ("half", "b"): ml_dtypes.bfloat16, ("half", "c"): np.float16}

EPS = 2.0**-23  # of float32
KINDS = ("normal", "heavy", "zeros", "ties", "huge", "largest", "single")


def blocks(n: int) -> int:
    """The elements of the whole blocks of 1024 that a tensor of n elements has in a flat vector."""
    return -(-n // 1024) * 1024


def cut(rows: Any, shapes: dict[str, tuple[int, ...]], is_padded: bool = True) -> dict[str, np.ndarray]:
    """Cuts rows (K, ...) of a flat vector, with zeros as padding, into tensors (K, *shape)."""
    rows, tensors = np.asarray(rows).reshape(len(rows), -1), {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        part, rows = np.split(rows, [blocks(size)], axis=1)
        tensors[name] = part[:, :size].reshape(len(rows), *shape)
        assert not (is_padded and part[:, size:].any())
    assert rows.shape[1] == 0
    return tensors


def shapes_of(tree: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(shape, DTYPES.get((tree, name), np.float32)) for name, shape in TREES[tree].items()
    }


def zeros_of(tree: str) -> dict[str, jax.Array]:
    return {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes_of(tree).items()}


def params_of(tree: str) -> dict[str, np.ndarray]:
    """Weights for the methods that use them; some are zero."""
    rng = np.random.default_rng(99)
    results = {}
    for name, s in shapes_of(tree).items():
        weights = rng.normal(size=s.shape) * (rng.random(s.shape) > 0.01)
        results[name] = np.asarray(weights, s.dtype)
    return results


def gradients(kind: str, seed: int, tree: str, K: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Each worker's own gradient, finite in its type: (K, *shape) by name."""
    rng = np.random.default_rng(seed)
    results = {}
    for name, shape in shapes_of(tree).items():
        full = (K, *shape.shape)
        if kind in ("normal", "huge", "largest"):
            values = rng.normal(size=full)
        elif kind == "heavy":
            values = rng.normal(size=full) * 10.0 ** rng.integers(-6, 3, size=full)
        elif kind in ("zeros", "single"):
            values = np.zeros(full)
        elif kind == "ties":
            values = rng.integers(-2, 3, size=full).astype(float)
        elif kind == "dyadic":
            values = rng.integers(-64, 65, size=full) / 8
        else:
            raise ValueError(kind)
        results[name] = values * scale
    if kind in ("huge", "largest", "single"):
        # One coordinate of one tensor of one worker.
        name = str(rng.choice(list(results)))
        flat = results[name].reshape(-1)
        flat[rng.integers(flat.size)] = {"huge": 1e30, "largest": -3.4e38, "single": 2.5}[kind]
    return {name: to_dtype(values, shapes_of(tree)[name].dtype) for name, values in results.items()}


def finfo(dtype: Any) -> Any:
    return ml_dtypes.finfo(dtype)


def to_dtype(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds to a type; finite numbers stay finite."""
    largest = float(finfo(dtype).max)
    return np.clip(values, -largest, largest).astype(dtype)
