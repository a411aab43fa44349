"""Time of each selection, compaction and index coding, against a copy of the same array.

    python -m benchmarks.select

All runs on one device, on normal noise. `copy` writes the array once; the other rows say how many such copies they
cost. The second table is the size of the indices, which depends only on n and the density.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.conditions import machine
from benchmarks.harness import Row
from jaxcomm.codecs import choose_index_codec
from jaxcomm.codecs.indices import INDEX_CODECS, entropy_bits
from jaxcomm.kernels import bits
from jaxcomm.kernels.vectors import Stored
from jaxcomm.layout import plan_layout
from jaxcomm.selectors import compact, select_threshold, select_topk, select_with_ties


@dataclass(frozen=True)
class Config(harness.Options):
    """Time selection and compaction against a copy of the array."""

    n: int = 10_000_000  # Elements of the array.
    density: float = 0.01  # Fraction of the elements that are kept.
    repeats: int = 9  # Timed runs of each; the median is shown.
    slow: bool = True  # Time jax.lax.sort as well, which takes seconds.


def main(config: Config) -> None:
    """Prints both tables."""
    if not 0 < config.density < 1 or config.n < 1024 or config.repeats < 1:
        raise ValueError(
            f"--density must be between 0 and 1, --n at least 1024 and --repeats at least 1; got {config.density}, "
            f"{config.n} and {config.repeats}."
        )
    sizes = [row for density in (0.001, 0.003, 0.01, 0.03, 0.055, 0.1) for row in index_sizes(config.n, density)]
    title = f"{config.n:,} float32 on {jax.devices()[0].device_kind}, {config.density:.2%} kept"
    harness.report(config.json, (title, time_all(config)), ("Bits an index against the entropy bound", sizes))


def time_all(config: Config) -> list[Row]:
    """Times every operation: records of name, n, density, ms_median, ms_min, ms_max, day, machine_ms, ratio_to_copy."""
    layout = _layout(config.n, config.density)
    k = layout.n_slots
    vector = jnp.pad(jax.random.normal(jax.random.key(0), (config.n,)), (0, layout.n - config.n))
    counts = jnp.full(1, k + 1)
    selected, threshold = jax.jit(lambda x: select_with_ties(Stored(x), layout, counts))(vector)
    words = selected.words
    selection = jax.jit(lambda w: compact(w, layout))(words)
    codec = choose_index_codec(layout)
    name = {kind: name for name, kind in INDEX_CODECS.items()}[type(codec)]
    payload = jax.jit(codec.encode)(selection)
    magnitude = jnp.abs(vector)

    operations: dict[str, tuple[Callable[..., Any], Any]] = {
        "copy": (lambda x: x * 1.0000001, vector),
        "pack mask": (lambda x: select_threshold(Stored(x), threshold, layout).words, vector),
        "compact (mask and positions)": (
            lambda x: compact(select_threshold(Stored(x), threshold, layout).words, layout),
            vector,
        ),
        "exact threshold and its mask (every life_span steps)": (
            lambda x: select_with_ties(Stored(x), layout, counts),
            vector,
        ),
        "exact top-k mask": (lambda x: select_topk(Stored(x), layout).words, vector),
        f"encode indices ({name})": (codec.encode, selection),
        f"decode indices ({name})": (codec.decode, payload),
        "count bits": (lambda w: bits.popcount(w).sum(), words),
        "jnp.nonzero(size=k)": (lambda x: jnp.nonzero(x >= threshold[0], size=k)[0], magnitude),
        "lax.top_k": (lambda x: lax.top_k(x, k), magnitude),
    }
    if config.slow:
        operations["lax.sort"] = (lax.sort, magnitude)
    rows, conditions = list[Row](), machine()
    for name, (function, argument) in operations.items():
        times = time_ms(jax.jit(function), argument, 2 if name == "lax.sort" else config.repeats)
        rows.append({"name": name, "n": config.n, "density": config.density, **harness.spread(times), **conditions})
        rows[-1]["ratio_to_copy"] = rows[-1]["ms_median"] / rows[0]["ms_median"]
    return rows


def time_ms(function: Callable[[Any], Any], argument: Any, repeats: int) -> list[float]:
    """Returns the milliseconds of each run, after a first one that compiles."""
    jax.block_until_ready(function(argument))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function(argument))
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def index_sizes(n: int, density: float) -> list[Row]:
    """Returns the bits per index of every codec and of the automatic choice, against the entropy."""
    layout = _layout(n, density)
    entropy = entropy_bits(layout.n, layout.n_slots)
    codecs, best = {name: codec(layout) for name, codec in INDEX_CODECS.items()}, choose_index_codec(layout)
    auto = next(name for name, codec in codecs.items() if codec == best)
    rows = []
    for name, codec in (codecs | {f"auto: {auto}": best}).items():
        n_bits, about = 32 * codec.n_words / layout.n_slots, {"name": name, "n": n, "density": density}
        rows.append(about | {"bits_per_index": n_bits, "entropy_bits": entropy, "ratio_to_entropy": n_bits / entropy})
    return rows


def _layout(n: int, density: float) -> Any:
    like = [jax.ShapeDtypeStruct((n,), "float32")]
    return plan_layout(like, dense_below=0, capacity=lambda size: max(1, math.ceil(size * density)))


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
