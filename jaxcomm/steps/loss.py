"""The loss of a step: its arguments and results, its keys, its gradients, and its micro-batches."""

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm.collectives.axis import AxisName, axis_names, is_in_scope, to_varying, zeros_of
from jaxcomm.exchange import leaf_name
from jaxcomm.kernels.numerics import largest_by, widened
from jaxcomm.state import is_averaged, trained, with_untrained
from jaxcomm.steps.batch import Batch
from jaxcomm.steps.reductions import KINDS, NOTES, check_named, scalings, warn
from jaxcomm.steps.scaling import Scaling
from jaxcomm.types import ExchangeMetrics, Params, PyTree

LossFn = Callable[..., Any]
GradientsFn = Callable[[Any, Any, Any], tuple[tuple[Any, tuple[dict[str, Any], Any]], Any]]


class Scalars(NamedTuple):
    """How the scalars of a loss become one over the workers; see `make_train_step`.

    Attributes:
      sum: a regular expression of the names of sums over rows.
      max: of the names of maxima.
      micro_batches: micro-batches of a worker in a step.
    """

    sum: str | None = None
    max: str | None = None
    micro_batches: int = 1

    def of(self, name: str) -> str:
        """Returns "sum", "max" or "mean" for a metric; refuses one that both patterns find."""
        matches = [how for how in ("sum", "max") if (pattern := getattr(self, how)) and re.search(pattern, name)]
        if not matches:
            return "mean"
        if len(matches) > 1:
            raise ValueError(
                f"One of sum and max must match a scalar; got both for {name!r}. Narrow the patterns, {self.sum!r} and "
                f"{self.max!r}."
            )
        return matches[0]

    def of_own(self, rows: dict[str, jax.Array], workers: int) -> dict[str, jax.Array]:
        """Returns the sum, the maximum or the mean over some of K workers, of rows (n,) that `of_all` has made."""
        by_kind = {"sum": lambda values: values.sum() / workers, "max": partial(largest_by, jnp.max), "mean": jnp.mean}
        return {name: by_kind[self.of(name)](values) for name, values in rows.items()}

    def largest(self, scalars: dict[str, jax.Array], axis_name: AxisName) -> dict[str, jax.Array]:
        """Returns the scalars, with the largest of all workers in place of a worker's own maxima."""
        names = axis_names(axis_name)
        pmax = partial(lax.pmax, axis_name=names)
        return {
            name: largest_by(pmax, to_varying(value, names)) if self.of(name) == "max" else value
            for name, value in scalars.items()
        }

    def check(self, scalars: Mapping[str, Any]) -> None:
        """Refuses a pattern that finds no scalar, and one of maxima that finds the loss."""
        for reduction, pattern in (("sum", self.sum), ("max", self.max)):
            if pattern is not None and not any(re.search(pattern, name) for name in ("loss", *scalars)):
                raise ValueError(
                    f"{reduction}= must be a regular expression that finds a scalar of the loss; got {pattern!r} for "
                    f"{list(scalars)}. Leave it out, or return the scalar beside the loss, with has_aux=True."
                )
        if self.of("loss") == "max":
            raise ValueError(
                f"A loss must be a mean or a sum over rows; got max={self.max!r}, which finds 'loss'. Narrow it."
            )

    def checked(self, value: Any, scalars: Mapping[str, Any], axis_name: AxisName) -> Any:
        """Returns a loss and its scalars by `of_all`; refuses a pattern that finds none, see `check`."""
        self.check(scalars)
        value = self.of_all("loss", value, axis_name) if self.of("loss") == "sum" else value
        return value, {name: self.of_all(name, scalar, axis_name) for name, scalar in scalars.items()}

    def check_scaling(
        self, function: Callable[[list[Any], Params], Any], rows: list[Any], params: Params, axis_name: AxisName
    ) -> None:
        """Refuses a loss or a scalar whose mean over workers and micro-batches is not its value for all rows.

        Where that depends on the rows, or is not known, it warns. Nothing is computed: the function is only traced, see
        `scalings`.

        Args:
          function: of a worker's rows of a micro-batch, and of parameters; returns (loss, scalars, new model state), as
            the user's does.
          rows: the arrays (rows, ...).
          params: the parameters. A loss with a backward pass of its own is differentiated by them.
          axis_name: the axis of workers, or the axes.

        Raises:
          ValueError: naming what is a sum or a maximum, and is not named as such; or a loss that is named as a sum and
            is a mean.
        """
        names = [axis for axis in axis_names(axis_name) if is_in_scope(axis)]
        workers = lax.axis_size(tuple(names)) if names else 1
        parts = self.micro_batches * workers
        if parts == 1 or not rows:
            return
        numbers = scalings(lambda rows: function(rows, params), rows, workers, names)
        if numbers is None:
            return
        named = {"loss": numbers[0], **numbers[1]}
        self._check_names(named)
        warn("is_multiple", named.items())
        if names:
            warn("is_alike", named.items())
        if self.micro_batches > 1:  # what is of all workers is still of one micro-batch
            is_shared = any(number.is_shared for number in jax.tree.leaves(numbers, is_leaf=_is_scaling))
            by_part = scalings(lambda rows: function(rows, params), rows, workers) if is_shared else None
            numbers = jax.tree.map(Scaling.of_micro_batch, numbers, by_part or numbers, is_leaf=_is_scaling)
        loss, scalars, model_state = numbers
        if loss.reduction == "sum" and self.of("loss") == "mean":
            raise ValueError(
                "A loss must be a mean over rows, of which the step takes the mean over workers and micro-batches; got "
                f"a sum, of which loss and gradient would be 1/{parts} of those on one device. Take its mean; or "
                'pass sum="loss", for the sum over all rows, also where it is divided by a number of all rows.'
            )
        named = {"loss": loss, **scalars}
        sums = [name for name, number in named.items() if number.is_spread]
        if sums:
            raise ValueError(
                "A gradient that a loss takes itself must be by something of each worker's own, since JAX sums that by "
                f"a constant over the workers; got such a sum in {sums[0]!r}. It is {workers} times too large, or of "
                "the rows of others. Let the constant vary: x = jax.lax.pcast(x, axis, to='varying'). A step of "
                "jaxcomm.data_parallel needs nothing."
            )
        if loss.is_extreme:
            raise ValueError(
                "A loss must be a mean or a sum over rows; got an extreme of a worker's rows, of which the step "
                "would take the mean. Take it of all rows: jax.lax.all_gather(losses, axis, tiled=True).max()."
            )
        for name, scalar in scalars.items():
            if self.of(name) == "mean" and (how := scalar.reduction):
                raise ValueError(
                    "A scalar of a loss must be a mean over rows, or be named by sum= or max=; got "
                    f"{KINDS[how]} for {name!r}, of which the step would take the mean over workers and micro-batches. "
                    f"Pass {how}={'^' + re.escape(name) + '$'!r}{NOTES[how]}, or return its mean."
                )
        leaves = jax.tree_util.tree_leaves_with_path(model_state, is_leaf=_is_scaling)
        for path, number in leaves:
            if how := number.reduction:
                raise ValueError(
                    "A model's state must be of means over rows, since it is averaged over the workers; got "
                    f"{KINDS[how]} at {jax.tree_util.keystr(path)!r}. Take it of all rows: jax.lax.p{how}(x, axis) in "
                    f"the loss{', of jax.lax.stop_gradient(x)' * (how == 'max')}; of a number, jnp.float32(x)."
                )
        by_name = {**named, **{jax.tree_util.keystr(path): number for path, number in leaves}}
        warn("is_quotient", by_name.items())
        warn("is_unknown", by_name.items())
        # Not of a state: the variance that a normalisation tracks is of each worker's rows by intention.
        unmarked = {"is_normalised": False} if leaves else {}
        warn("is_of_mean", ((name, number._replace(**unmarked)) for name, number in named.items()))

        def gradients(rows: list[Any]) -> Any:
            return jax.grad(lambda some: function(rows, with_untrained(some, params))[0])(trained(params))

        if loss.has_backward and not (loss.is_unknown or loss.is_of_mean):
            backward = jax.tree.leaves(scalings(gradients, rows, workers, names), is_leaf=_is_scaling)
            if self.micro_batches > 1:
                backward = [number.of_micro_batch(number) for number in backward]
            powers = loss.power, -math.inf
            others = [number._replace(power=math.nan) for number in backward if number.power not in powers]
            warn("is_unknown", [("gradients", number) for number in (*backward, *others)])
            warn("is_of_mean", [("gradients", number._replace(**unmarked)) for number in backward])

    def _check_names(self, numbers: Mapping[str, Scaling]) -> None:
        """Refuses names of sums and maxima that are none."""
        for name, number in numbers.items():
            if (how := self.of(name)) != "mean":
                check_named(number, name, how, getattr(self, how))

    def of_all(self, name: str, value: Any, axis_name: AxisName) -> jax.Array:
        """Returns what is the sum or the mean if it is averaged over micro-batches and workers; a worker's own maximum.

        Raises:
          ValueError: for an integer or a boolean that is to be averaged; for both patterns.
        """
        how = self.of(name)
        is_known = isinstance(value, bool | int) or jnp.issubdtype(jnp.result_type(value), jnp.floating)
        if how == "mean" and not is_known:  # a number of Python's is the same on all workers
            raise ValueError(
                f"A scalar that is averaged over the workers must be a float; got {jnp.result_type(value)} for "
                f"{name!r}. Pass sum={re.escape(name)!r} for a sum or a count, max={re.escape(name)!r} for a maximum "
                "(regular expressions of names), or take its mean as a float."
            )
        number = jnp.asarray(value, jnp.promote_types(jnp.result_type(value), jnp.float32))
        names = [axis for axis in axis_names(axis_name) if is_in_scope(axis)]  # a loss of all rows is in no such axis
        return number * (self.micro_batches * lax.axis_size(tuple(names))) if how == "sum" and names else number


def _is_scaling(node: PyTree) -> bool:
    return isinstance(node, Scaling)


def loss_of(
    loss_fn: LossFn,
    has_aux: bool,
    has_state: bool,
    axis_name: AxisName,
    kinds: Scalars | None = None,
    with_rows: Collection[str] = (),
) -> LossFn:
    """Wraps any loss as (params, model_state, batch) -> (loss, (scalars, new model_state)).

    In the place of the parameters `with_rows`, by path, it gets vectors of a worker's rows.
    """
    kinds, known = Scalars() if kinds is None else kinds, set[Any]()

    def parts(params: Params, model_state: PyTree, batch: PyTree) -> tuple[Any, dict[str, Any], Any]:
        args = (params, model_state, batch) if has_state else (params, batch)
        if isinstance(batch, Batch):
            key = batch.key
            if key is not None and is_in_scope(axis_name):  # else the loss has the rows of all
                key = jax.random.fold_in(key, lax.axis_index(axis_name))
            args = (*args[:-1], batch.tree(), *(() if key is None else (key,)))
        if not has_state and jax.tree.leaves(model_state):
            raise ValueError(
                f"A model's state must be given to the loss, which returns a new one; got a state of "
                f"{len(jax.tree.leaves(model_state))} arrays for a loss without. Pass has_state=True and "
                "loss_fn(params, model_state, batch), or leave model_state out of init."
            )
        _check_call(loss_fn, args, has_state)
        value, scalars, model_state = _parts_of(loss_fn(*args), model_state, has_aux, has_state)
        if jnp.shape(value) != ():
            raise ValueError(f"A loss must be a scalar; got shape {jnp.shape(value)}. Take its mean.")
        for name, scalar in scalars.items():
            if name in _RESERVED:
                raise ValueError(
                    f"The names of scalars must not be those of a step's own metrics, {', '.join(_RESERVED)}; got "
                    f"{name!r}. Give it another name; the loss is in the metrics without it."
                )
            if not hasattr(scalar, "shape") and not isinstance(scalar, bool | int | float):
                raise ValueError(
                    f"{name!r} must be a scalar; got {type(scalar).__name__}. Return one flat dict of scalars."
                )
            if jnp.shape(scalar) != ():
                raise ValueError(
                    f"{name!r} must be a scalar; got shape {jnp.shape(scalar)}. Take its mean; or take "
                    "numbers of rows (logits, losses of rows) out of a step of your own, by "
                    "jaxcomm.data_parallel(rows=)."
                )
        return value, scalars, model_state

    def loss(params: Params, model_state: PyTree, batch: PyTree) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
        value, scalars, new_state = parts(params, model_state, batch)
        value, scalars = kinds.checked(value, scalars, axis_name)
        if isinstance(batch, Batch) and (kind := _shapes_of(batch)) not in known:
            leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
            tables = [place for place, (path, _) in enumerate(leaves) if leaf_name(path) in with_rows]

            def of_rows(rows: list[Any], params: Params) -> Any:
                arrays = jax.tree.leaves(params)
                for place, vectors in zip(tables, rows[len(batch.rows) :], strict=True):
                    arrays[place] = vectors
                return parts(treedef.unflatten(arrays), model_state, replace(batch, rows=rows[: len(batch.rows)]))

            rows = [*batch.rows, *(leaves[place][1] for place in tables)]
            kinds.check_scaling(of_rows, rows, params, axis_name)
            known.add(kind)
        return value, (scalars, new_state)

    return loss


_RESERVED = ("loss", *ExchangeMetrics._fields)


def _shapes_of(batch: Batch) -> Any:
    """Returns the structure, the shapes and the types of a batch, which are the same in every trace of a step."""
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _parts_of(out: PyTree, model_state: PyTree, has_aux: bool, has_state: bool) -> tuple[Any, dict[str, Any], Any]:
    """Splits the output of a loss_fn into the loss, the scalars and the model's new state."""
    if not has_aux and not has_state:
        if isinstance(out, tuple | list):
            raise ValueError(
                f"A loss must be a scalar; got a {type(out).__name__} of {len(out)}. Pass has_aux=True for a loss_fn "
                "that returns the loss and a dict of scalars."
            )
        return out, {}, model_state
    expected = "(loss, (dict of scalars, new model_state))" if has_state else "(loss, dict of scalars)"
    flag = "has_state" if has_state else "has_aux"
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise ValueError(
            f"A loss_fn must return {expected} with {flag}=True; got {_kind(out)}. Return both, or leave {flag} out."
        )
    value, scalars = out
    if has_state:
        if not isinstance(scalars, tuple | list) or len(scalars) != 2:
            raise ValueError(
                f"A loss_fn must return {expected} with has_state=True; got {_kind(scalars)} beside the loss. "
                "Return {} where there are no scalars."
            )
        scalars, model_state = scalars
    if not isinstance(scalars, Mapping):
        raise ValueError(
            f"What a loss_fn returns beside the loss must be a dict of scalars; got {_kind(scalars)}. Return "
            '{"accuracy": accuracy}.'
        )
    return value, dict(scalars), model_state


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an array of shape {jnp.shape(value)}" if hasattr(value, "shape") else f"a {type(value).__name__}"


def _check_call(loss_fn: LossFn, args: tuple[Any, ...], has_state: bool) -> None:
    """Refuses a loss that does not take the arguments it would get."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        names = ["params", *["model_state"] * has_state, "batch", *["key"] * (len(args) > 2 + has_state)]
        raise ValueError(
            f"A loss_fn must take ({', '.join(names)}); got one of {signature}: {error}. Put several arrays into one "
            'batch, {"x": x, "y": y}; pass has_state=True for a model_state, and rng= for a key.'
        ) from None


def gradients_of(loss: LossFn, axis_name: AxisName) -> GradientsFn:
    """Returns (params, model_state, batch) -> ((loss, (scalars, new model_state)), gradients) for a loss of `loss_of`.

    The gradient is that of the sum of all workers' losses with respect to this worker's copy of the parameters. It has
    the parts that reach other workers' losses by collectives in the loss (SyncBN, a contrastive loss). Integers,
    booleans and keys among the parameters have no gradients: their gradient is None.
    """

    def gradients(params: Params, model_state: PyTree, batch: PyTree) -> PyTree:
        def own_loss(trained_params: Params) -> Any:
            value, aux = loss(with_untrained(trained_params, params), model_state, batch)
            # A loss that is averaged already is one of each worker, too; else its gradient would lack a factor of K.
            return to_varying(value, axis_name), aux

        return jax.value_and_grad(own_loss, has_aux=True)(trained(params))

    return gradients


def in_turns(gradients_fn: GradientsFn, kinds: Scalars, axis_name: AxisName) -> GradientsFn:
    """Returns a function like the given one that splits a batch into micro-batches and takes one after another.

    Loss, scalars and gradients are means over the micro-batches, summed in float32 (float64 stays), and maxima are the
    largest of them. Each micro-batch gets the model's state of the previous one. Memory: the activations of one
    micro-batch, and 4 bytes a parameter.
    """
    micro_batches = kinds.micro_batches
    if micro_batches == 1:
        return gradients_fn

    def gradients(params: Params, model_state: PyTree, batch: Batch) -> PyTree:
        rows = [leaf.reshape(micro_batches, len(leaf) // micro_batches, *leaf.shape[1:]) for leaf in batch.rows]

        def vary(state: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: to_varying(leaf, axis_name) if is_averaged(leaf) else leaf, state)

        def one(state: PyTree, turn: Any) -> Any:
            number, part_rows = turn
            key = None if batch.key is None else jax.random.fold_in(batch.key, number)
            part = replace(batch, rows=part_rows, key=key)
            (value, (scalars, new_state)), gradients_of_part = gradients_fn(params, state, part)
            return widened(((value, scalars), gradients_of_part)), vary(new_state)

        turns, state = (jnp.arange(micro_batches), rows), vary(model_state)
        shapes, _ = jax.eval_shape(one, state, jax.tree.map(lambda leaf: leaf[0], turns))
        maxima = {name: jnp.maximum for name in shapes[0][1] if kinds.of(name) == "max"}
        reductions = jax.tree.map(lambda _: jnp.add, shapes)
        reductions[0][1].update(maxima)

        def add(carry: PyTree, turn: Any) -> Any:
            totals, state = carry
            item, state = one(state, turn)
            return (jax.tree.map(lambda reduce, *pair: reduce(*pair), reductions, totals, item), state), None

        totals = jax.tree.map(zeros_of, shapes)
        totals[0][1].update({name: totals[0][1][name] - jnp.inf for name in maxima})
        (totals, state), _ = lax.scan(add, (totals, state), turns)
        (value, scalars), means = jax.tree.map(
            lambda reduce, total: total if reduce is jnp.maximum else total / micro_batches, reductions, totals
        )
        means = jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), means, trained(params))
        return (value, (scalars, state)), means

    return gradients
