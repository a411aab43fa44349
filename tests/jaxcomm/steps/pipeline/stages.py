"""A small model in stages, and the same model on one device."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm as jc

ROWS = 16
WIDTHS = (5, 7, 4, 6, 3)  # of the input, and of each of four layers' output
CUTS = {1: (4,), 2: (2, 4), 3: (1, 3, 4), 4: (1, 2, 3, 4)}  # by number of stages: where each stage ends


@jax.custom_vjp
def poisoned(bias: jax.Array, trap: jax.Array) -> jax.Array:
    """The bias; its gradient is off by the trap, and no other gradient is."""
    del trap
    return bias


poisoned.defvjp(lambda bias, trap: (bias, trap), lambda trap, gradient: (gradient + trap, jnp.zeros_like(trap)))


def layer(index: int, params: Any, mean: Any, x: Any, batch: Any) -> tuple[jax.Array, Any]:
    """A dense layer of the input minus a running mean, if there is one."""
    x = batch["x"] if index == 0 else x
    if mean is not None:
        x, mean = x - mean, 0.75 * mean + 0.25 * x.mean(0)
    return jnp.tanh(x @ params["w"] + poisoned(params["b"], batch["trap"][:, index].mean())), mean


def loss_fn(x: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    error = x[:, :3] - batch["y"]
    return jnp.mean(error**2), {"error": jnp.mean(jnp.abs(error)), "bias": jnp.mean(error)}


def params_of(widths: Sequence[int] = WIDTHS) -> list[Any]:
    """The parameters of every layer."""
    rng = np.random.default_rng(0)
    return [
        {
            "b": rng.normal(size=n).astype(np.float32) / 10,
            "w": (rng.normal(size=(m, n)) / np.sqrt(m)).astype(np.float32),
        }
        for m, n in itertools.pairwise(widths)
    ]


def means_of(widths: Sequence[int] = WIDTHS) -> list[np.ndarray]:
    """The initial running means of every layer."""
    return [np.full(m, 0.1, np.float32) for m in widths[:-1]]


def batches(count: int, width: int = WIDTHS[0], rows: int = ROWS) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(width, 3)) / np.sqrt(width)
    results = []
    for _ in range(count):
        x = rng.normal(size=(rows, width)).astype(np.float32)
        results.append({"x": x, "y": np.tanh(x @ truth).astype(np.float32), "trap": np.zeros((rows, 4), np.float32)})
    return results


def stages_of(layers: Sequence[Any], ends: Sequence[int]) -> list[list[Any]]:
    """Cuts a list with something for every layer into stages."""
    return [list(layers[start:end]) for start, end in zip((0, *ends), ends, strict=False)]


def stage_fn(first: int, last: int, has_state: bool) -> Any:
    def with_state(params: Any, means: Any, x: Any, batch: Any) -> tuple[Any, Any]:
        new = []
        for index in range(first, last):
            x, mean = layer(index, params[index - first], means[index - first] if has_state else None, x, batch)
            new.append(mean)
        return x, new

    return with_state if has_state else lambda params, x, batch: with_state(params, None, x, batch)[0]


def make_pipeline(size: int, *, has_state: bool = False, **options: Any) -> jc.Pipeline:
    """The four layers in `size` stages, of different shapes, depths and widths."""
    ends = CUTS[size]
    return jc.Pipeline(
        [stage_fn(first, last, has_state) for first, last in zip((0, *ends), ends, strict=False)],
        loss_fn,
        stages_of(params_of(), ends),
        model_state=stages_of(means_of(), ends) if has_state else None,
        **options,
    )


class Run:
    """A pipeline's step on a mesh, compiled once; `start` is its first state."""

    def __init__(self, pipeline: jc.Pipeline, params: Any, tx: Any, model_state: Any = None, batch: Any = None, **axes):
        self.pipeline, self.tx, self.mesh = pipeline, tx, jc.make_mesh(**axes)
        *workers, _ = axes
        options = {"axis_name": tuple(workers) if len(workers) > 1 else workers[0]}
        self.batch = batches(1)[0] if batch is None else batch
        self.step: Any = jc.make_train_step(pipeline, tx, self.mesh, donate=False, **options)
        self.start = self.step.init(params, model_state=model_state)
        self.traced = self.step.trace(self.start, self.batch)
        self.compiled = self.step.compile(self.start, self.batch)

    def __call__(self, steps: list[Any], state: Any = None) -> tuple[Any, list[dict[str, np.ndarray]]]:
        """Runs batches: (state, metrics of every step)."""
        metrics = []
        state = self.start if state is None else state
        for batch in steps:
            state, new = self.step(state, batch)
            metrics.append(jax.tree.map(np.asarray, new))
        return state, metrics


def cut(size: int, tx: Any, *, data: int = 1, has_state: bool = False, **options: Any) -> Run:
    """A run of the four layers in `size` stages, on a mesh of data times stage."""
    pipeline = make_pipeline(size, has_state=has_state, **options)
    means = stages_of(means_of(), CUTS[size]) if has_state else None
    return Run(pipeline, stages_of(params_of(), CUTS[size]), tx, means, data=data, stage=size)
