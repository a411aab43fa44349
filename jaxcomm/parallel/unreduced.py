"""The second way to each worker's own gradients: a mesh of Explicit axes, under plain `jax.jit`."""

import math
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName
from jaxcomm.parallel.hybrid import compile_step, whole_loss
from jaxcomm.parallel.slices import SlicedExchange
from jaxcomm.parallel.step import LossFn, Step


def make_unreduced_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    param_specs: Any,
    *,
    has_aux: bool = False,
    has_state: bool = False,
    axis_name: AxisName = "data",
    donate: bool = True,
) -> Step:
    """Compiles a train step from a loss of all rows, written for a mesh of Explicit axes, as for one device.

    Types of arrays say where they lie, and JAX derives from them what must be reduced. Parameters that are copied to
    the workers are marked as `reduced` over their axis, `jax.reshard(w, P(..., reduced={"data"}))`: `jax.grad` then
    returns gradients that are not summed over the workers yet, of type `unreduced`, and each worker exchanges its own
    part. Tensor parallelism over the other axes is left to the compiler.

        mesh = jax.make_mesh((4, 2), ("data", "model"))  # Explicit axes are JAX's default
        specs = {"up": P(None, "model"), "down": P("model")}

        def loss_fn(params, batch):  # all rows, whole kernels, where they lie is in their types
            hidden = jax.nn.relu(batch["x"] @ params["up"])  # (B@data, H@model)
            y = jnp.einsum("bh,ho->bo", hidden, params["down"], out_sharding=P("data"))
            return jnp.mean((y - batch["y"]) ** 2)

        tx = optax.chain(jc.quant_dp(8), optax.adamw(3e-4))
        state = jc.init_hybrid_state(params, tx, mesh, specs)
        step = jc.make_unreduced_step(loss_fn, tx, mesh, specs)

    The loss runs with the mesh set, so that PartitionSpecs are enough. What JAX 0.10.2 and 0.12.0 can do with a
    parameter that is marked:

    | use in the loss                                          | result                                               |
    | -------------------------------------------------------- | ---------------------------------------------------- |
    | products and einsums, casts, transposes, `lax.scan`,     | as with any other array; where a product sums over a |
    |   `jax.checkpoint`, functions of the parameter alone     |   dimension that is cut, JAX asks for `out_sharding` |
    | rows of a table, `w[index]`                              | `w.at[index].get(out_sharding=P("data"))`            |
    | a sum or a product with rows, number by number (a bias)  | refused by JAX; give the bias the shape and the      |
    |                                                          |   place of y first, which is free:                   |
    |                                                          |   `jax.reshard(jnp.broadcast_to(b, y.shape), P(..))` |
    | convolutions                                             | not in JAX yet: use `make_partitioned_step`          |
    | `jax.reshard(w, P())`                                    | no longer marked: a dense all-reduce of the gradient |

    Args:
      loss_fn: (params, batch) -> the mean loss of all rows; or (loss, dict of scalars) with `has_aux`.
      tx: as in `make_hybrid_step`.
      mesh: a mesh with the axis of workers, of axes of type Explicit.
      param_specs: as in `make_hybrid_step`.
      has_aux: whether `loss_fn` returns a dict of scalars as well.
      has_state: as in `make_train_step`; the new state is made from all rows, and the same on all devices.
      axis_name: as in `make_hybrid_step`.
      donate: as in `make_hybrid_step`.

    Returns:
      As in `make_hybrid_step`. Rows of the batch are dealt out to the workers in order, wherever they lay. What XLA
      moves for the tensor parallelism and for the loss shows in compiled text only.

    Raises:
      ValueError: as in `make_hybrid_step`; JAX raises where it cannot derive a type.
    """
    if not all(kind == AxisType.Explicit for kind in mesh.axis_types):
        raise ValueError(
            f"Gradients that are not reduced come from a mesh with axes of type Explicit, got {mesh.axis_types}: make "
            "it with jax.make_mesh(sizes, names), or use make_partitioned_step."
        )

    loss_of = whole_loss(loss_fn, has_aux, has_state)

    def gradients(
        exchange: SlicedExchange, params: Any, model_state: Any, batch: Any
    ) -> tuple[dict[str, jax.Array], Any, Any]:
        leaves, treedef = jax.tree.flatten(params)
        triples = list(zip(leaves, exchange.specs, exchange.whole, strict=True))
        names = frozenset(exchange.names)
        rows = jax.tree.map(lambda x: jax.reshard(x, NamedSharding(mesh, P(exchange.names))), batch)

        def objective(params: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return loss_of(params, model_state, rows)

        marked = [
            leaf if is_whole else jax.reshard(leaf, NamedSharding(mesh, P(*spec, reduced=names)))
            for leaf, spec, is_whole in triples
        ]
        found, (scalars, new_state) = jax.grad(objective, has_aux=True)(treedef.unflatten(marked))
        own = [
            gradient if is_whole else _rows_of_workers(gradient, spec, exchange)
            for gradient, (_, spec, is_whole) in zip(jax.tree.leaves(found), triples, strict=True)
        ]
        return scalars, new_state, treedef.unflatten(own)

    return compile_step(gradients, tx, mesh, param_specs, axis_name, donate)


def _rows_of_workers(gradient: jax.Array, spec: P, exchange: SlicedExchange) -> jax.Array:
    """Hands each worker its own part of a gradient that is not reduced: (K, *shape), a row for each. Free: no bytes.

    A part of the mean over all rows is a K-th of the mean over the worker's own.
    """
    rows = jax.shard_map(
        lambda part: math.prod(exchange.sizes) * part[None],
        mesh=exchange.mesh,
        in_specs=P(*spec, unreduced=frozenset(exchange.names)),
        out_specs=P(exchange.names, *spec),
        check_vma=False,  # JAX has no cast yet from what is unreduced to what differs between workers
    )
    return rows(gradient)
