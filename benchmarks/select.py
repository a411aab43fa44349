"""Time of each selection, compaction and index coding, against a copy of the same array.

    python -m benchmarks.select

All runs on one device, on normal noise. `copy` writes the array once; the other rows say how many such copies they
cost. The second table is the size of the indices, which depends only on n and the density.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.control import run
from train.tables import print_table, write_records


@dataclass(frozen=True)
class Config:
    """Time selection and compaction against a copy of the array."""

    n: int = 10_000_000
    """Elements of the array."""
    density: float = 0.01
    """Fraction of the elements that are kept."""
    repeats: int = 9
    """Timed runs of each; the median is shown."""
    slow: bool = True
    """Time jax.lax.sort as well, which takes seconds."""
    json: Path | None = None
    """File for both tables, as one list of records."""


def main(config: Config) -> None:
    """Prints both tables."""
    if not 0 < config.density < 1 or config.n < 1024 or config.repeats < 1:
        raise ValueError(
            f"--density must be between 0 and 1, --n at least 1024 and --repeats at least 1; got {config.density}, "
            f"{config.n} and {config.repeats}."
        )
    import jax

    device = jax.devices()[0]
    rows = time_all(config)
    print_table(f"{config.n:,} float32 on {device.device_kind}, {config.density:.2%} kept", rows)
    sizes = [row for density in (0.001, 0.003, 0.01, 0.03, 0.055, 0.1) for row in index_sizes(config.n, density)]
    print_table("Bits an index against the entropy bound", sizes)
    write_records(config.json, rows + sizes)


def time_all(config: Config) -> list[dict[str, Any]]:
    """Times every operation: records of name, n, density, ms_median, ms_min, ms_max, ratio_to_copy."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from jaxcomm.codecs import choose_index_codec
    from jaxcomm.codecs.indices import INDEX_CODECS
    from jaxcomm.kernels import bits
    from jaxcomm.kernels.vectors import Stored
    from jaxcomm.selectors import compact, select_threshold, select_topk, select_with_ties

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
    rows: list[dict[str, Any]] = []
    for name, (function, argument) in operations.items():
        repeats = 2 if name == "lax.sort" else config.repeats
        times = time_ms(jax.jit(function), argument, repeats)
        copy = rows[0]["ms_median"] if rows else statistics.median(times)
        rows.append(
            {
                "name": name,
                "n": config.n,
                "density": config.density,
                "ms_median": statistics.median(times),
                "ms_min": min(times),
                "ms_max": max(times),
                "ratio_to_copy": statistics.median(times) / copy,
            }
        )
    return rows


def time_ms(function: Callable[[Any], Any], argument: Any, repeats: int) -> list[float]:
    """Returns the milliseconds of each run, after a first one that compiles."""
    import jax

    jax.block_until_ready(function(argument))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function(argument))
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def index_sizes(n: int, density: float) -> list[dict[str, Any]]:
    """Returns the bits per index of every codec and of the automatic choice, against the entropy."""
    from jaxcomm.codecs.indices import INDEX_CODECS, choose_index_codec, entropy_bits

    layout = _layout(n, density)
    entropy = entropy_bits(layout.n, layout.n_slots)
    codecs, best = {name: codec(layout) for name, codec in INDEX_CODECS.items()}, choose_index_codec(layout)
    auto = next(name for name, codec in codecs.items() if codec == best)
    rows = []
    for name, codec in (codecs | {f"auto: {auto}": best}).items():
        bits_per_index = 32 * codec.n_words / layout.n_slots
        rows.append(
            {
                "name": name,
                "n": n,
                "density": density,
                "bits_per_index": bits_per_index,
                "entropy_bits": entropy,
                "ratio_to_entropy": bits_per_index / entropy,
            }
        )
    return rows


def _layout(n: int, density: float) -> Any:
    import math

    import jax

    from jaxcomm.layout import plan_layout

    like = [jax.ShapeDtypeStruct((n,), "float32")]
    return plan_layout(like, dense_below=0, capacity=lambda size: max(1, math.ceil(size * density)))


if __name__ == "__main__":
    run(Config, __doc__, main)
