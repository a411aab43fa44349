"""Density of Deep Gradient Compression's partial sums on a ring, hop by hop, against a mask that all workers share.

    python -m benchmarks.density

trains the small convolutional network on scikit-learn's digits with K simulated workers (DGC, which sends a fixed
fraction of each worker's coordinates), and takes the real masks of all workers in a few of the steps. On a ring, h hops
unite the masks of h workers: these unions are counted, region by region, in the order of `benchmarks/sparse_ring.py`
(without a limit to the capacity of a region; the column no_room is the fraction of a selection that finds no slot if
the capacity is static). The shared mask unites the masks of r publishers: as many coordinates as DGC selects, those of
the largest importance |v| / |w| of the same accumulated momenta. It is the same in every hop.

Bytes are what each worker receives in a step: by the compiled programs, whose payloads have static capacity (a quarter
more than is selected, and the shared mask's a quarter more than the union that was counted), and for the ring also the
least that the counted unions could take (16 bits per value, positions at their entropy).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from sklearn.datasets import load_digits

import jaxcomm as jc
from benchmarks import harness
from benchmarks.sparse_ring import received_on_ring
from jaxcomm.codecs import value_codec
from jaxcomm.codecs.indices import entropy_bits
from jaxcomm.collectives.balanced import REGION_SLACK, Regions
from jaxcomm.kernels.bits import popcount
from jaxcomm.kernels.vectors import Stored
from jaxcomm.layout import BLOCK_WORDS, plan_layout
from jaxcomm.methods.iwp import draw_publishers
from jaxcomm.selectors import compact, select_topk
from jaxcomm.selectors.importance import importance
from jaxcomm.selectors.topk import n_kept as slots
from models.cnn import Cnn
from models.functional import apply, split
from train.data.digits import is_test_image
from train.figures import label_ends
from train.tables import print_table, write_records

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "density.png"
MOMENTUM = 0.9
EPS = 1e-6  # of importance, as in `iwp`


@dataclass(frozen=True)
class Config:
    """Show that the gradients of DGC get denser on a ring, and that those of a shared mask do not."""

    workers: str = "4,16,48,96"  # Numbers of workers, separated by commas; the tables of hops are for the largest.
    kept: str = "0.001,0.01"  # Fractions of the coordinates that each worker selects, separated by commas.
    publishers: str = "1,4"  # Numbers of workers whose masks are united in the shared mask, separated by commas.
    steps: int = 30  # Training steps.
    samples: int = 3  # Steps in which masks are taken, evenly spaced up to the last; densities are means over them.
    rows: int = 8  # Images of each worker in a step.
    learning_rate: float = 0.05  # Learning rate.
    seed: int = 0  # Seed of the parameters, of the order of the images, and of the publishers.
    figure: Path = FIGURE  # File for the figure.
    json: Path | None = None
    """File for the records: one for every number of workers, fraction and hop, and those of the bytes."""


def main(config: Config) -> None:
    """Trains, counts, prints the tables and draws the figure."""
    workers, fractions, publishers = _checked(config)
    hops, sizes = [], []
    for fraction in fractions:
        for K in workers:
            unions = measure(config, K, fraction, publishers)
            print(f"{K} workers, {fraction:.2%} kept: {unions[-1]['ring']:.2%} after the last hop", flush=True)
            hops += unions
            sizes.append(bytes_of(K, fraction, publishers, unions))
    for fraction in fractions:
        rows = [r for r in hops if r["kept"] == fraction and r["workers"] == workers[-1]]
        rows = [r for r in rows if r["hop"] & (r["hop"] - 1) == 0 or r["hop"] == workers[-1]]
        print_table(f"Density by hop, {workers[-1]} workers, {fraction:.2%} kept by each", rows)
    print_table("Bytes that each worker receives in a step", sizes)
    draw(config.figure, hops, sizes)
    write_records(config.json, hops + sizes)


def _checked(config: Config) -> tuple[list[int], list[float], list[int]]:
    workers = sorted(set(harness.numbers("--workers", config.workers)))
    fractions = sorted(set(harness.numbers("--kept", config.kept, float)))
    publishers = sorted(set(harness.numbers("--publishers", config.publishers)))
    if publishers[0] < 1 or publishers[-1] > workers[0] or not all(0 < fraction < 1 for fraction in fractions):
        raise ValueError(
            "--workers must be at least 1, --publishers from 1 to the fewest workers, and --kept between 0 and 1; got "
            f"{config.workers}, {config.publishers} and {config.kept}."
        )
    if not (1 <= config.samples <= config.steps and config.rows >= 1) or workers[-1] * config.rows > 1347:
        raise ValueError(
            "--steps must be at least --samples, --samples and --rows at least 1, and 1347 images enough for all "
            f"workers; got {config.steps}, {config.samples} and {config.rows} for {workers[-1]} workers."
        )
    return workers, fractions, publishers


def measure(config: Config, K: int, fraction: float, publishers: Sequence[int]) -> list[dict[str, Any]]:
    """Trains with K workers, and counts the unions of their masks: one record for each hop."""
    regions = regions_of(K, fraction)
    n = sum(regions.layout.sizes)
    rings, shared, selected, fitting, tensors = [], [], [], [], len(regions.layout.sizes)
    for step, largest, important in train(config, K, fraction):
        masks = cut(regions, largest)
        rings.append(hop_counts(masks))
        selected.append(np.bitwise_count(masks).sum())
        fitting.append(np.bitwise_count(accepted(regions, masks)).sum())
        unions = []
        for r in publishers:
            drawn = np.asarray(draw_publishers(config.seed, np.int32(step), K, r, tensors))
            of_words = np.repeat(drawn[regions.layout.segment_of_block()], BLOCK_WORDS, axis=0)  # (n/32, r)
            union = np.bitwise_or.reduce(important[of_words.T, np.arange(important.shape[1])])
            unions.append(np.bitwise_count(union).sum())
        shared.append(unions)
    ring, common, density_of_worker = np.mean(rings, 0) / n, np.mean(shared, 0) / n, np.mean(selected) / (K * n)
    return [
        {
            "workers": K,
            "kept": fraction,
            "hop": h,
            "ring": float(ring[h - 1]),
            "independent": float(1 - (1 - density_of_worker) ** h),
            **{f"shared_{r}": float(density) for r, density in zip(publishers, common, strict=True)},
            "no_room": float(1 - np.sum(fitting) / np.sum(selected)),
        }
        for h in range(1, K + 1)
    ]


def train(config: Config, K: int, fraction: float) -> Any:
    """Trains by DGC; yields (step, masks of the largest, masks of the most important), (K, n/32) uint32 per mask."""
    images, labels = _digits()
    model = split(Cnn((8, 8, 1), 10, rngs=nnx.Rngs(config.seed)))
    layout = regions_of(K, fraction).layout

    def loss(params: Any, batch: Any) -> jax.Array:
        logits, _ = apply(model.graph, params, {}, batch, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    tx = optax.chain(jc.dgc(1 - fraction, momentum=MOMENTUM, collective="gather"), optax.sgd(config.learning_rate))
    step = jc.simulate(loss, tx, K)
    state = step.init(model.params)

    def flat(tree: Any) -> jax.Array:
        return layout.flatten(layout.split(jax.tree.leaves(tree))[0])

    @jax.jit
    def accumulate(state: Any, batch: Any) -> jax.Array:
        """Returns the accumulated momenta of all workers in this step: (K, n)."""

        def worker(velocity: jax.Array, residual: jax.Array, rows: Any) -> jax.Array:
            return residual + (MOMENTUM * velocity + flat(jax.grad(loss)(state.params, rows)))

        exchange_state = state.opt_state[0]
        rows = jax.tree.map(lambda x: x.reshape(K, -1, *x.shape[1:]), batch)
        return jax.vmap(worker)(exchange_state.memory.rows.flat, exchange_state.residual.rows, rows)

    @jax.jit  # a program of its own: XLA would compute the momenta more than once, with other last bits
    def select(state: Any, momenta: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns what every worker selects in this step with `dgc`, and the equally many that `iwp` would select."""

        def worker(v: jax.Array) -> tuple[jax.Array, jax.Array]:
            important = importance(v / K, flat(state.params), EPS)
            return select_topk(Stored(v), layout).words, select_topk(Stored(important), layout).words

        return jax.vmap(worker)(momenta)

    rng = np.random.default_rng(config.seed)
    sampled = {config.steps * (i + 1) // config.samples for i in range(config.samples)}
    for index in range(1, config.steps + 1):
        indices = rng.permutation(len(labels))[: K * config.rows]
        batch = {"image": images[indices], "label": labels[indices]}
        if index in sampled:
            yield index, *map(np.asarray, select(state, accumulate(state, batch)))
        state, _ = step(state, batch)


def _digits() -> tuple[Any, Any]:
    """Returns the images to train on (1347, 8, 8, 1), from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    is_train = ~is_test_image(labels)
    return (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)[is_train], labels.astype(np.int32)[is_train]


def shapes() -> Any:
    """Returns the shapes of the network's parameters."""
    return jax.eval_shape(lambda: split(Cnn((8, 8, 1), 10, rngs=nnx.Rngs(0))).params)


def regions_of(K: int, fraction: float) -> Any:
    """Returns the regions of a ring of K workers, each of which keeps a fraction of the network's coordinates."""
    layout = plan_layout(shapes(), dense_below=512, capacity=lambda n: slots(n, 1 - fraction))
    return Regions(layout, K, value_codec("bfloat16"))


def cut(regions: Any, masks: Any) -> Any:
    """Cuts the workers' masks (K, n/32) into regions: (K, K, words of a region)."""
    K, words = len(masks), regions.size // 32
    return np.pad(masks, ((0, 0), (0, K * words - masks.shape[1]))).reshape(K, K, words)


def accepted(regions: Any, masks: Any) -> Any:
    """Keeps the part of the masks (K, K, words) that has a slot in its region of static capacity."""
    return jax.jit(jax.vmap(jax.vmap(lambda row: compact(row, regions.region).words)))(masks)


def hop_counts(masks: Any) -> Any:
    """Counts the coordinates that are sent on a ring: region j starts at worker j+1, and unites with one mask a hop.

    Args:
      masks: (K, K, words) uint32, worker i's mask of region j at [i, j].

    Returns:
      (K,) the coordinates of all regions together, after each hop.
    """
    K, region = len(masks), np.arange(len(masks))

    @jax.jit
    def count(masks: jax.Array) -> jax.Array:
        def hop(union: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
            union = union | masks[(region + h) % K, region]
            return union, popcount(union).sum()

        return lax.scan(hop, jnp.zeros_like(masks[0]), jnp.arange(1, K + 1))[1]

    return np.asarray(count(jnp.asarray(masks)))


def bytes_of(K: int, fraction: float, publishers: Sequence[int], hops: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the bytes that a worker receives, by the ring and by shared masks, as one record."""
    regions, params = regions_of(K, fraction), shapes()
    n, small = sum(regions.layout.sizes), regions.layout.n_dense

    def all_reduce(numbers: int) -> float:
        return 2 * (K - 1) / K * 4 * numbers

    def message_bytes(density: float) -> float:
        """Bytes of one message: the coordinates of one region, on average."""
        count = density * n
        return count * (16 + entropy_bits(n, max(round(count), 1))) / 8 / K

    *middle, last = [message_bytes(hop["ring"]) for hop in hops]
    shared = {}
    for r in publishers:
        room = min(1.0, REGION_SLACK * hops[0][f"shared_{r}"])
        shared[f"shared_{r}_bytes"] = jc.wire_report(jc.iwp(density=room, publishers=r), params, K).received
    return {
        "workers": K,
        "kept": fraction,
        "ring_bytes": received_on_ring(regions) + all_reduce(K + 2) + all_reduce(small),
        "ring_bytes_at_least": sum(middle) + (K - 1) * last + all_reduce(small),
        "gather_bytes": jc.wire_report(jc.dgc(1 - fraction, collective="gather"), params, K).received,
        **shared,
        "dense_bytes": all_reduce(n + small),
    }


def draw(path: Path, hops: Sequence[dict[str, Any]], sizes: Sequence[dict[str, Any]]) -> None:
    """Draws density against hops, and bytes against workers, one column for each fraction, as a PNG file."""
    fractions = sorted({record["kept"] for record in hops})
    largest = max(record["workers"] for record in hops)
    shared = next(name for name in hops[0] if name.startswith("shared_"))  # of the fewest publishers
    curves = {"ring": "DGC on a ring", "independent": "independent masks", shared: "shared mask"}
    costs = {"dense_bytes": "dense", "ring_bytes": "DGC on a ring", "gather_bytes": "DGC gathered"}
    costs |= {f"{shared}_bytes": "shared mask"}
    last = max((r for r in hops if r["workers"] == largest), key=lambda r: (r["kept"], r["hop"]))
    with harness.figure(path, 2, len(fractions), (6 * len(fractions), 7), dpi=150) as (drawing, panels):
        drawing.suptitle(
            f"{100 * last['kept']:g}% kept by each of {largest} workers: a sum on a ring fills up to "
            f"{last['ring']:.0%}, with a shared mask it has {last[shared]:.1%}"
        )
        for (upper, lower), fraction in zip(panels.T, fractions, strict=True):
            rows = [r for r in hops if r["kept"] == fraction and r["workers"] == largest]
            for name, label in curves.items():
                upper.plot([row["hop"] for row in rows], [100 * row[name] for row in rows], label=label)
            title = f"{100 * fraction:g}% kept, {largest} workers"
            upper.set(title=title, xlabel="hop", ylabel="density, %", yscale="log")
            rows = [r for r in sizes if r["kept"] == fraction]
            for name, label in costs.items():
                lower.plot([row["workers"] for row in rows], [row[name] for row in rows], marker=".", label=label)
            lower.set(xlabel="workers", ylabel="bytes received per worker and step", yscale="log")
            for panel in (upper, lower):
                panel.grid(alpha=0.3)
                label_ends(panel)


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
