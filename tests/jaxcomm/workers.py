"""K workers that do steps with a transformation: simulated, or on a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from tests.jaxcomm.train_steps import init_state
from tests.jaxcomm.trees import params_of, shapes_of, zeros_of

AXIS = "data"


def is_per_worker(node: Any) -> bool:
    return isinstance(node, jc.PerWorker)


class Outcome:
    """The results of one step, in NumPy.

    Attributes:
      means: by name, the same on every worker.
      state: PerWorker rows are (K, ...).
      residual: (K, n); None for a method without one.
      metrics: the state's.
    """

    def __init__(self, means: Any, state: Any):
        self.means = {name: np.asarray(mean) for name, mean in means.items()}
        self.state = state
        self.metrics = jax.tree.map(int, jc.exchange_metrics(state))
        residual = getattr(state, "residual", None)
        self.residual = None if residual is None else np.asarray(residual.rows).reshape(len(residual.rows), -1)

    @property
    def skipped(self) -> bool:
        return bool(self.metrics.skipped)


def state_of_workers(tx: Any, tree: str, K: int) -> tuple[Any, Any]:
    """The first state, rows (K, 1, ...), and its axes for `jax.vmap`."""
    one = tx.init(zeros_of(tree))
    axes = jax.tree.map(lambda node: 0 if is_per_worker(node) else None, one, is_leaf=is_per_worker)
    first = jax.tree.map(
        lambda node: jax.tree.map(lambda row: jnp.repeat(row[None], K, 0), node) if is_per_worker(node) else node,
        one,
        is_leaf=is_per_worker,
    )
    return first, axes


class Simulated:
    """K workers under `jax.vmap`. Outputs other than `PerWorker` must be unbatched: the same on every worker."""

    def __init__(self, tx: Any, tree: str, K: int):
        self.first, axes = state_of_workers(tx, tree, K)
        params = params_of(tree)

        def update(gradients: Any, state: Any) -> Any:
            return tx.update(gradients, state, params)

        workers = jax.vmap(update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS)
        self.update = jax.jit(workers)

    def step(self, gradients: Any, state: Any) -> Outcome:
        """One step; gradients by name, (K, *shape)."""
        return Outcome(*self.update(gradients, state))


class OnMesh:
    """K workers on a mesh of K devices, with check_vma=True."""

    def __init__(self, tx: Any, tree: str, K: int):
        self.mesh = jc.make_mesh(**{AXIS: K})
        self.first = init_state(zeros_of(tree), tx, self.mesh, axis_name=AXIS).opt_state
        specs = jc.state_specs(self.first)
        params = params_of(tree)

        def update(gradients: Any, state: Any) -> Any:
            return tx.update(jax.tree.map(lambda row: row[0], gradients), state, params)

        self.update = jax.jit(jax.shard_map(update, mesh=self.mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs)))
        example = {name: jax.ShapeDtypeStruct((K, *s.shape), s.dtype) for name, s in shapes_of(tree).items()}
        self.compiled = self.update.lower(example, self.first).compile()

    def step(self, gradients: Any, state: Any) -> Outcome:
        """One step; gradients by name, (K, *shape)."""
        gradients = jax.device_put(gradients, NamedSharding(self.mesh, P(AXIS)))
        means, state = self.compiled(gradients, state)
        self.last = means, state
        return Outcome(means, state)
