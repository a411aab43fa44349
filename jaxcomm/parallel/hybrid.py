"""Train steps for parameters that lie in slices on a mesh: hybrid parallelism, tensor parallelism beside workers."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomm.collectives.axis import AxisName, to_varying
from jaxcomm.parallel.hybrid_state import HybridState, place
from jaxcomm.parallel.slices import SlicedExchange, plan_slices
from jaxcomm.parallel.state import TrainState
from jaxcomm.parallel.step import LossFn, Step, check_batch

# (exchange, params, model_state, batch) -> (loss and scalars, new model_state, gradients as the exchange takes them)
Gradients = Callable[[SlicedExchange, Any, Any, Any], tuple[dict[str, jax.Array], Any, Any]]


def make_hybrid_step(
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
    """Compiles a train step in which some parameters are copied to the workers and others lie in slices.

    The loss runs in a region that is manual over all axes of the mesh, and gets a worker's own rows and a device's own
    slices. It says itself what moves between the devices. A parameter's PartitionSpec says what becomes of its
    gradient:

    - P(): data-parallel. Each worker's own gradient, exchanged by `tx` over `axis_name`.
    - with `axis_name` in it, P(None, "data"): model-parallel over the workers themselves, as `split_dense` takes it.
      The gradient is whole: that of the mean over all rows. It passes the exchange by, and goes through the rest of the
      chain.
    - with other axes, P(None, "model"): model-parallel over other devices. Each worker's gradient, exchanged slice by
      slice over `axis_name` alone.

    The exchange, and what comes before it in the chain, work on slices: a threshold, a rank, a capacity is that of a
    device's own slice of a tensor. What comes after it sees whole arrays, as under plain `jax.jit`: a global norm is
    that of all parameters. So a step equals that of one device with all rows, momentum and weight decay included, to
    float rounding (with `plump_dp`). If any gradient of any device is not finite, all skip the step alike: parameters
    and the optimizer's state stay as they were, but for the counts.

    Convolutions copied, dense layers in slices of the same devices:

        params = {"convolutions": ..., "kernel": (9216, 4096), "bias": (4096,)}
        specs = {"convolutions": P(), "kernel": P(None, "data"), "bias": P("data")}

        def loss_fn(params, batch):  # on one worker: its own rows, its own slices
            features = convolutions(params["convolutions"], batch["image"])  # (B/K, 9216)
            logits = jc.split_dense(features, params["kernel"], params["bias"])  # (B/K, 4096)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        tx = optax.chain(jc.dct_dp(0.99), optax.add_decayed_weights(5e-4), optax.sgd(0.01, momentum=0.9))
        state = jc.init_hybrid_state(params, tx, mesh, specs)
        step = jc.make_hybrid_step(loss_fn, tx, mesh, specs)

    The two tricks of the paper, to sum instead of averaging and to divide the weight decay of the copied part by the
    number of its copies, are what this scaling comes to in its units; there is nothing left for the user to scale.

    Args:
      loss_fn: (params, batch) -> the mean loss of a worker's own rows; or of all rows, where it is the same on every
        worker; or (loss, dict of scalars) with `has_aux`. Along other axes than the workers' it is the same on all
        devices.
      tx: a chain with one exchange of gradients among its links.
      mesh: a mesh with the axis of workers, of axes of type Auto.
      param_specs: the PartitionSpec of every parameter, in a tree like theirs or a prefix of it.
      has_aux: whether `loss_fn` returns a dict of scalars as well; they are averaged over the workers.
      has_state: as in `make_train_step`.
      axis_name: the axis of workers, or the axes along which they lie, outermost first.
      donate: reuse the state's buffers for the new state. The old state cannot be read afterwards.

    Returns:
      A jitted step(state, batch) -> (state, metrics), the state from `init_hybrid_state`; batch and metrics as in
      `make_train_step`. On the wire: what the loss moves, what `tx` costs for the gradients that are exchanged, and
      two all-reduces, of 4 bytes a scalar and of 16.

    Raises:
      ValueError: as for `init_hybrid_state`, and for axes of another type; at trace time for batches as in
        `make_train_step`, and for a loss that differs along other axes.

    References:
      Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
      https://arxiv.org/abs/1404.5997.
    """
    return _make_by_hand(loss_fn, tx, mesh, param_specs, tuple(mesh.axis_names), has_aux, has_state, axis_name, donate)


def make_partitioned_step(
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
    """Compiles a train step whose tensor parallelism is left to the compiler, beside workers that exchange gradients.

    As `make_hybrid_step`, but the loss runs in a region that is manual over the axis of workers alone. It gets a
    worker's own rows and whole tensors, and is written as for one device; XLA partitions it over the other axes,
    following the parameters' PartitionSpecs. The gradients then go, as they lie, into a region that is manual over all
    axes, where each device exchanges its own slices: a gradient is not gathered over the other axes.

        specs = {"up": P(None, "model"), "down": P("model")}  # a mesh make_mesh(data=4, model=2)

        def loss_fn(params, batch):  # on one worker: its own rows, whole kernels
            hidden = jax.nn.relu(batch["x"] @ params["up"])
            return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

        tx = optax.chain(jc.powersgd(4), optax.adamw(3e-4))
        state = jc.init_hybrid_state(params, tx, mesh, specs)
        step = jc.make_partitioned_step(loss_fn, tx, mesh, specs)

    Args:
      loss_fn: (params, batch) -> the mean loss of a worker's own rows, or (loss, dict of scalars) with `has_aux`.
      tx: as in `make_hybrid_step`.
      mesh: as in `make_hybrid_step`.
      param_specs: as in `make_hybrid_step`.
      has_aux: as in `make_hybrid_step`.
      has_state: as in `make_hybrid_step`.
      axis_name: as in `make_hybrid_step`.
      donate: as in `make_hybrid_step`.

    Returns:
      As in `make_hybrid_step`. What XLA moves for the tensor parallelism shows in compiled text only: `step_report`
      does not count it.

    Raises:
      ValueError: as in `make_hybrid_step`.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    return _make_by_hand(loss_fn, tx, mesh, param_specs, names, has_aux, has_state, axis_name, donate)


def _make_by_hand(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    param_specs: Any,
    manual: tuple[str, ...],
    has_aux: bool,
    has_state: bool,
    axis_name: AxisName,
    donate: bool,
) -> Step:
    if not all(kind == AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"Each worker's gradient comes from a jax.shard_map over a mesh with axes of type Auto, got "
            f"{mesh.axis_types}: make the mesh with jaxcomm.make_mesh, or use make_unreduced_step."
        )

    loss_of = whole_loss(loss_fn, has_aux, has_state)

    def gradients(
        exchange: SlicedExchange, params: Any, model_state: Any, batch: Any
    ) -> tuple[dict[str, jax.Array], Any, Any]:
        treedef = jax.tree.structure(params)
        inside = [_over(spec, manual) for spec in exchange.specs]
        rows = [
            spec if is_whole else P(exchange.names, *spec)
            for spec, is_whole in zip(inside, exchange.whole, strict=True)
        ]
        worker = jax.shard_map(
            partial(_worker_gradients, loss_of, exchange),
            mesh=mesh,
            axis_names=set(manual),
            in_specs=(treedef.unflatten(inside), P(), P(exchange.names)),
            out_specs=(P(), P(), treedef.unflatten(rows)),
        )
        return worker(params, model_state, batch)

    return compile_step(gradients, tx, mesh, param_specs, axis_name, donate)


def _worker_gradients(
    loss_of: Callable[..., Any], exchange: SlicedExchange, params: Any, model_state: Any, batch: Any
) -> tuple[dict[str, jax.Array], Any, Any]:
    """Differentiates the sum of the workers' losses: with respect to a worker's own copies, or to slices."""
    workers = math.prod(exchange.sizes)
    leaves, treedef = jax.tree.flatten(params)
    pairs = zip(leaves, exchange.whole, strict=True)
    own = treedef.unflatten([leaf if is_whole else to_varying(leaf, exchange.axis_name) for leaf, is_whole in pairs])

    def objective(params: Any) -> tuple[jax.Array, Any]:
        loss, aux = loss_of(params, model_state, batch)
        _check_same_along_others(aux, exchange)
        # A loss of all rows, the same on every worker, becomes each worker's own: the sum is then K times it as well.
        return to_varying(loss, exchange.axis_name), aux

    gradients, aux = jax.grad(objective, has_aux=True)(own)
    pairs = zip(jax.tree.leaves(gradients), exchange.whole, strict=True)
    rows = [gradient / workers if is_whole else gradient[None] for gradient, is_whole in pairs]

    vector, back = ravel_pytree(aux)  # one all-reduce
    mean = lax.psum(to_varying(vector, exchange.axis_name), exchange.axis_name) / workers
    return *back(mean), treedef.unflatten(rows)


def whole_loss(loss_fn: LossFn, has_aux: bool, has_state: bool) -> Callable[..., Any]:
    """Returns (params, model_state, batch) -> (loss, ({"loss": loss, **scalars}, new model_state)) of any loss."""

    def loss_of(params: Any, model_state: Any, batch: Any) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
        if has_state:
            loss, (scalars, new_state) = loss_fn(params, model_state, batch)
        else:
            if jax.tree.leaves(model_state):
                raise ValueError(
                    "A model's state is given to the loss, which returns a new one, got a state for a loss without: "
                    "pass has_state=True, or leave model_state out of init_hybrid_state."
                )
            value = loss_fn(params, batch)
            loss, scalars = value if has_aux else (value, {})
            new_state = model_state
        for name, scalar in {"loss": loss, **scalars}.items():
            if jnp.shape(scalar) != ():
                raise ValueError(
                    f"A loss and what is reported with it are scalars, got {name!r} of shape {jnp.shape(scalar)}: take "
                    "its mean."
                )
        scalars = {name: jnp.asarray(scalar, jnp.float32) for name, scalar in {"loss": loss, **scalars}.items()}
        return loss, (scalars, new_state)

    return loss_of


def compile_step(
    gradients: Gradients,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    param_specs: Any,
    axis_name: AxisName,
    donate: bool,
) -> Step:
    """Compiles a step from a way to come by each worker's own gradients; the rest is the same for all ways."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        exchange = plan_slices(tx, mesh, param_specs, state.params, axis_name)
        check_batch(batch, math.prod(exchange.sizes))
        old = state.opt_state
        if not isinstance(old, HybridState):
            raise ValueError(
                f"A step for slices takes its own state, got an optimizer's state of {type(old).__name__}: make it "
                "with jaxcomm.init_hybrid_state."
            )
        scalars, model_state, found = gradients(exchange, state.params, state.model_state, batch)
        means, exchanged = exchange(found, old.exchange, state.params)
        updates, rest = exchange.chain.after.update(means, old.rest, state.params)
        ok = exchanged.metrics.skipped == 0
        new = (optax.apply_updates(state.params, updates), rest, model_state)
        new = jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, (state.params, old.rest, state.model_state))
        params, rest, model_state = place(new, state.params, exchange)
        state = TrainState(params, HybridState(exchanged, rest), state.step + 1, model_state)
        return state, {**scalars, **exchanged.metrics._asdict()}

    return jax.jit(step, donate_argnums=0 if donate else ())


def _over(spec: P, manual: tuple[str, ...]) -> P:
    """Returns what a PartitionSpec says about some of the axes."""
    entries = []
    for entry in spec:
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        entries.append(tuple(name for name in names if name in manual) or None)
    return P(*entries)


def _check_same_along_others(tree: Any, exchange: SlicedExchange) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        others = [axis for axis in exchange.others if axis in jax.typeof(leaf).manual_axis_type.varying]
        if others:
            raise ValueError(
                f"A loss, and what comes with it, is the same on all devices along other axes than "
                f"{exchange.axis_name!r}, got one at {jax.tree_util.keystr(path)!r} that may differ along {others}: "
                "sum its parts with jax.lax.psum(..., axis), or, where all are equal, take jax.lax.pmean."
            )
