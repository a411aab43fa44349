"""The base of every method of exchanging gradients: state, checks, metrics, and the leaves that bypass it.

A method is a frozen dataclass of its hyper-parameters, a subclass of `Exchange` that fills in a few hooks.
`transformation` makes an Optax transformation of it. The state holds its method, so that the rest of the library can
ask the method itself what it keeps and does.
"""

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple, ParamSpec, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import KeyPath

from jaxcomm.checks import Rule, check_range, check_transformation, count, one_of, rules_of
from jaxcomm.collectives.axis import AxisName, axis_names, axis_size, check_per_worker, is_tracked, to_varying, varies
from jaxcomm.collectives.dense import dense_mean
from jaxcomm.collectives.messages import sum_of_few
from jaxcomm.collectives.sparse import Accumulated
from jaxcomm.kernels import noise
from jaxcomm.kernels.numerics import is_finite_tree, promotes
from jaxcomm.layout import BLOCK, MAX_ELEMENTS, Layout, stage_axis
from jaxcomm.serialization import has_lost_types, register_with_flax
from jaxcomm.types import (
    AccumulatedState,
    DelayedState,
    ExchangeMetrics,
    Params,
    PerWorker,
    PyTree,
    is_per_worker,
    map_rows,
    nodes_of,
)

P = ParamSpec("P")
_INDEX_BITS = 16  # of the number that says of which worker a row is
_FROZEN = "optax.set_to_zero"
SCOPE = "jaxcomm.update"  # the `jax.named_scope` of a whole exchange, with all of its collectives
DELAYED = "jaxcomm.delayed"  # that of the gradients that the exchange of the next step takes
ARGUMENTS = "jaxcomm.arguments"  # inside `SCOPE`, that of the loss and gradient that a line search takes
_IS_PART: ContextVar[bool] = ContextVar("of a part of the parameters", default=False)
# Chooses leaves: a regular expression that is searched for in a leaf's path ("encoder/kernel"), or a function of the
# path and the leaf, which may read the leaf's shape and dtype.
Where = str | Callable[[str, Any], bool]


def _is_where(where: object) -> bool:
    with contextlib.suppress(re.error, TypeError):  # the errors of `compile` and `bind`
        if callable(where):
            with contextlib.suppress(ValueError):  # some functions have no signature
                inspect.signature(where).bind("", 0)
            return True
        return where is None or (isinstance(where, str) and bool(re.compile(where)))
    return False


WHERE = Rule(
    "a regular expression of paths, (path, leaf) -> bool, or None", _is_where, 'Paths are as in "encoder/kernel"'
)


_AXIS = Rule(
    "the name of an axis of the mesh, or a tuple of names",
    lambda value: isinstance(value, str) or (isinstance(value, tuple) and all(isinstance(x, str) for x in value)),
    '"data" is usual',
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangeState:
    """State of an exchange.

    Attributes:
      metrics: counts of the last exchange.
      step: () int32, the exchanges so far, skipped ones included; for a local method, its steps.
      residual: (K, n), what was not sent yet, a row per worker, in `residual_dtype`; None for methods without one.
      memory: what else the method keeps; see the method's `first_memory`.
      others: the state of the second exchange, for the leaves that `where` leaves out; None without one.
      worker: (K, 1) int32, which worker of how many each row is of, see `worker_of`; -1 before the first update. None
        for methods without rows. If a row is on another worker, or of another number of workers, all skip the step.
      method: the method that made this state. Static.
    """

    metrics: ExchangeMetrics
    step: jax.Array
    residual: PerWorker | None
    memory: PyTree
    others: Any
    worker: PerWorker | None
    method: "Exchange" = field(metadata={"static": True})

    def replace(self, **changes: Any) -> "ExchangeState":
        """Returns a copy with other attributes."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Paths:
    """Chooses the leaves of some paths, as `where`."""

    names: frozenset[str]

    def __call__(self, name: str, leaf: PyTree) -> bool:
        """Returns whether a leaf's path is one of them."""
        del leaf
        return name in self.names


class Gradient(NamedTuple):
    """One worker's gradient, as the hooks of a method get it.

    Attributes:
      layout: how its leaves are laid out.
      leaves: its leaves in tree order; they differ between workers.
      params: the parameters' leaves in tree order, or None.
      residual: (1, n) float32, the worker's row, or None.
    """

    layout: Layout
    leaves: list[jax.Array]
    params: list[jax.Array] | None
    residual: jax.Array | None

    @property
    def dense(self) -> list[jax.Array]:
        """The leaves that are not compressed."""
        return self.layout.split(self.leaves)[1]

    def vector(self) -> jax.Array:
        """Returns the compressed leaves as one vector, (n,) float32."""
        return self.layout.flatten(self.layout.split(self.leaves)[0])

    def accumulated(self) -> Accumulated:
        """Returns gradient + residual of the compressed leaves."""
        assert self.residual is not None, "a method that accumulates keeps a residual"
        return Accumulated(self.vector(), self.residual)


class Exchanged(NamedTuple):
    """The result of an exchange on one worker.

    Attributes:
      means: the leaves' means in tree order, the same on every worker; zeros if the exchange was skipped.
      residual: (1, n) float32, this worker's new row; None for methods without one.
      metrics: counts, the same on every worker.
    """

    means: list[jax.Array]
    residual: jax.Array | None
    metrics: ExchangeMetrics

    @property
    def ok(self) -> jax.Array:
        """Whether the exchange was not skipped: () bool, the same on every worker."""
        return self.metrics.skipped == 0


class Packed(NamedTuple):
    """One worker's payload as words, made without a collective; see `Exchange.pack`.

    Attributes:
      words: (m,) uint32, what travels. m depends on shapes alone.
      residual: (1, n) float32, the worker's new row if the payload counts; None for methods without one.
      ok: () bool, whether the gradient, and what a receiver will read, is finite. Else the payload must not be sent.
    """

    words: jax.Array
    residual: jax.Array | None
    ok: jax.Array


def zeros_unless(ok: jax.Array, tree: PyTree) -> PyTree:
    """Replaces all leaves by zeros unless `ok` holds."""
    return jax.tree.map(lambda leaf: _select(ok, leaf, jnp.zeros_like(leaf)), tree)


def on_all_stages(ok: jax.Array) -> jax.Array:
    """Returns whether something holds on every stage of a pipeline, () bool; without stages, whether it holds here.

    A stage receives 4 bytes of each other stage.
    """
    axis_name = stage_axis()
    return ok if axis_name is None else sum_of_few((~ok).astype(jnp.int32), axis_name) == 0


def keep_unless(ok: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns the leaves of the new tree if `ok` holds, else those of the old tree."""
    return jax.tree.map(lambda n, o: _select(ok, n, o), new, old)


def _select(ok: jax.Array, new: PyTree, old: PyTree) -> jax.Array:
    """Does `jnp.where`; for arrays of one type without a function call, which counts where there are many arrays."""
    is_one_type = hasattr(new, "dtype") and hasattr(old, "dtype") and (new.shape, new.dtype) == (old.shape, old.dtype)
    return lax.select(ok, new, old) if is_one_type else jnp.where(ok, new, old)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A method of exchanging gradients: each worker's gradient in, their mean out.

    In each step, a worker's gradient goes to the hook `average`, which returns the mean over the workers. (The gradient
    must differ between workers: one that JAX has already reduced is refused.) If some worker's gradient has a number
    that is not finite, all workers skip the exchange: zeros come back, the residual and the method's memory stay, and
    `metrics.skipped` is 1. In methods with a residual, a number of 2^100 or more counts as not finite, since through
    the residual it would make the sums of every later step infinite.

    Attributes:
      where: the leaves that are exchanged; None for all. The gradients of the others are already reduced and bypass
        the exchange, or go to `others`. A step applies both parts or neither: if one part skips, both do.
      others: a second exchange, for the leaves that `where` leaves out. It may have its own `where`. Or
        `optax.set_to_zero()`, for frozen leaves: they are not sent, and a `jaxcomm.chain` and every step keep them
        as they are, even with weight decay behind the exchange.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`.
      checksum: whether every payload has one more word, a digest of the rest. If a worker finds a flipped bit in what
        it received, all workers skip the exchange. Costs 4 bytes a payload, an all-reduce of 4 bytes, and a pass over
        the payloads at both ends. Whatever is summed on its way (dense tensors, drains, warm-ups) has no checksum.
      residual_dtype: "float32", or "bfloat16" to keep the residual in 2 bytes a parameter instead of 4. Every step then
        rounds it to one of its two neighbours at random, so that it is right on average over many steps. Each rounding
        error is up to 1/128 of the residual.
      start: steps at the beginning that send the gradient dense, in float32: 2 (K-1)/K * 4 bytes a parameter. Then the
        method begins, with an empty residual.

    Raises:
      ValueError: for arguments out of range; at trace time for an empty tree, leaves that are not real floats, float64
        or 2^31 elements in a tensor that is compressed, gradients that were already reduced, a state of another method,
        and outside the axis of workers.
    """

    where: Annotated[Where | None, WHERE] = None
    others: optax.GradientTransformation | None = field(default=None, compare=False)
    axis_name: Annotated[Any, _AXIS] = "data"
    checksum: Annotated[bool, one_of((False, True), "True counts a check of every payload")] = False
    residual_dtype: str = "float32"
    start: Annotated[int, count(0, "0 compresses from the first step")] = 0

    name: ClassVar[str] = "exchange"  # in messages and tables; a method of the library is named as its file
    keeps_residual: ClassVar[bool] = True
    has_positions: ClassVar[bool] = True  # in one vector of all tensors; they have 31 bits
    needs_matrices: ClassVar[bool] = False  # it compresses nothing else
    start_remedy: ClassVar[str | None] = None  # what to suggest if it cannot begin with dense steps

    def __init_subclass__(cls) -> None:
        package, _, module = cls.__module__.rpartition(".")
        if package == "jaxcomm.methods":
            cls.name = module

    def __post_init__(self) -> None:
        rules = rules_of(type(self))
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            if isinstance(value, np.generic):  # has a type of its own, to which it would convert what it multiplies
                value = value.item()
                object.__setattr__(self, name, value)
            remedy = "It decides the sizes of messages: put optax.inject_hyperparams around the optimizer alone"
            check_range(name, value, "no array of JAX's", not isinstance(value, jax.Array), remedy)
            if name in rules:
                rules[name].check(name, value)
        if self.where is None and self.others is not None:
            raise ValueError("others must be the exchange of what where= leaves out; got no where=. Pass both.")
        if self.checksum and self.checksum_remedy is not None:
            raise ValueError(
                f"checksum must be False for {self.name} with a collective that sums on the way, where no worker "
                f"receives what was sent; got True. {self.checksum_remedy}."
            )
        kinds = ("float32", "bfloat16") if self.keeps_residual else ("float32",)
        rule = " or ".join(kinds) + ("" if self.keeps_residual else f" for {self.name}, which keeps no residual itself")
        remedy = "bfloat16 halves its memory" if self.keeps_residual else "Pass it to the exchange that has one"
        check_range("residual_dtype", self.residual_dtype, rule, self.residual_dtype in kinds, remedy)

        remedy = self.start_remedy or ""
        check_range("start", self.start, f"0 for {self.name}", not self.start or not remedy, remedy)

    # What the rest of the library asks of a method.

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which its rows differ."""
        return axis_names(self.axis_name)

    @property
    def period(self) -> int | None:
        """Steps from one exchange of a local method to the next; None if the parameters are replicated."""
        return None

    @property
    def full_every(self) -> int | None:
        """Exchanges from one that sends everything, or its masks, to the next, on average; None without one."""
        inner = getattr(getattr(self, "exchange", None), "method", None)
        return None if inner is None else inner.full_every

    @property
    def turns(self) -> int:
        """How many exchanges, `period` steps apart, a local method takes to exchange all parameters once."""
        return 1

    @property
    def reverts_on_skip(self) -> bool:
        """Whether a step whose exchange is skipped leaves the parameters and the optimizer as they were."""
        return True

    @property
    def momentum_inside(self) -> float:
        """The momentum that it applies before compression; an optimizer after it must not apply momentum again."""
        return 0.0

    @property
    def has_error_feedback(self) -> bool:
        """Whether what was not sent accumulates until it is sent: a mean then has gradients of many steps."""
        return self.keeps_residual

    @property
    def reads_whole_tensors(self) -> bool:
        """Whether it does something before compression that needs whole tensors, such as clipping by a norm."""
        return False

    @property
    def checksum_remedy(self) -> str | None:
        """The remedy to suggest if receivers cannot check what they get, so that a checksum is refused; else None."""
        return "Take a method that sends payloads, as topk and sign do"

    @property
    def pack_remedy(self) -> str | None:
        """The remedy to suggest if it cannot pack a payload without a collective; else None."""
        return "Take topk, demo, pulse, random_k, sign, quant_dp or plump_dp"

    # The hooks.

    def plan(self, tree: PyTree) -> Layout:
        """Returns the layout of a gradient's leaves. Static: it depends on shapes alone."""
        raise NotImplementedError

    def first_memory(self, params: Params, layout: Layout) -> Any:
        """Returns the memory before the first step: arrays, and `PerWorker` where workers differ."""
        del params, layout
        return ()

    def average(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        """Averages one worker's gradient over the workers; returns the result and the new memory."""
        raise NotImplementedError

    def average_densely(self, gradient: Gradient, state: ExchangeState) -> tuple[Exchanged, Any]:
        """Does `average` by one dense all-reduce, in the first `start` steps: there is no residual to send yet."""
        means, ok = dense_mean(gradient.leaves, self.axis_name)
        sent, is_drained = gradient.layout.n_elements() * axis_size(self.axis_name), bool(gradient.layout.sizes)
        metrics = ExchangeMetrics.of(ok, sent, drained=is_drained)

        memory = map_rows(lambda node: to_varying(node, node.axes), state.memory)  # as are rows of `average`
        return Exchanged(zeros_unless(ok, means), gradient.residual, metrics), memory

    def pack(self, gradient: Gradient, step: jax.Array, worker: jax.Array | int) -> Packed:
        """Writes one worker's gradient, plus its residual, as words. Needs no axis of workers.

        The mean of what `unpack` reads of all workers is what `average` returns where it gathers payloads.

        Args:
          gradient: the worker's gradient.
          step: () int32, the exchanges so far, equal on all workers.
          worker: () uint32, the worker's number, from which random rounding is drawn.

        Raises:
          ValueError: if the method needs another worker's answer; see `check_packs`.
        """
        raise NotImplementedError

    def unpack(self, words: jax.Array, layout: Layout, step: jax.Array) -> list[jax.Array]:
        """Reads what `pack` wrote in the same step: the leaves in tree order, float32 or their own types."""
        raise NotImplementedError

    def check_packs(self) -> None:
        """Refuses a method that needs a collective's answer before it can write a payload."""
        remedy = self.pack_remedy
        if self.where is not None and remedy is None:
            remedy = "Leave where= out: all parameters travel"
        if self.start and remedy is None:
            remedy = "Leave start= out: every payload has as many words"
        if remedy is not None:
            raise ValueError(
                f"exchange must pack a worker's gradient without another worker's answer; got {self.name} with "
                f"collective={getattr(self, 'collective', None)!r}, where={self.where!r}, start={self.start}. {remedy}."
            )

    def global_model(self, state: ExchangeState, like: PyTree) -> PyTree:
        """Returns a local method's model to evaluate, in the shapes and types of the parameters `like`."""
        raise NotImplementedError

    def resized(self, state: ExchangeState) -> ExchangeState:
        """Adapts a state whose rows were just carried over to another number of workers: sets `due` in its memory.

        That is where a method notes that it owes a refresh; a memory without it stays as it is.
        """
        if not hasattr(state.memory, "due"):
            return state
        due = jax.tree.map(jnp.ones_like, state.memory.due)  # for every shard, if each has its own
        return state.replace(memory=state.memory._replace(due=due))

    # The transformation.

    def transform(self) -> optax.GradientTransformation:
        """Returns the Optax transformation."""
        for name, value in vars(self).items():
            if name == "exchange" or (name in ("others", "outer") and value is not None):
                check_transformation(name, value)
        init: Any = promotes(self.init)
        update: Any = promotes(self.update)
        bound = ExchangeTransformation(init, update)
        bound.method = self
        return bound

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled: `optax.set_to_zero()`, whose functions cannot be, by its name."""
        is_frozen = self.others is not None and _freezes(self.others)
        return self.__dict__ | ({"others": _FROZEN} if is_frozen else {})

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        is_frozen = attributes["others"] == _FROZEN
        self.__dict__.update(attributes | ({"others": optax.set_to_zero()} if is_frozen else {}))

    def init(self, params: Params) -> ExchangeState:
        """Returns the state of one worker before the first step: rows are (1, ...).

        For the placeholder of `optax.tree_map_params` it is the method, one leaf in the place of the whole state, none
        of which has the shape of the parameters.
        """
        if is_placeholder(params):
            return cast(ExchangeState, self)
        if (parts := self._in_parts(params)) is not self:
            return parts.init(params).replace(method=self)
        if self.where is None:
            return self.init_chosen(params)
        inside, outside = self._part(params, True), self._part(params, False)
        chosen, bypass = (jax.tree_util.tree_leaves_with_path(part) for part in (inside, outside))
        if self.others is None:
            return self.init_chosen(inside) if chosen else self.first_state()
        if bypass and not chosen and not _IS_PART.get():
            raise ValueError(
                f"where must choose some parameters; got {self.where!r}, which chooses none of {len(bypass)}. Paths "
                f"are as in {leaf_name(bypass[0][0])!r}."
            )
        is_frozen = _freezes(self.others)
        if chosen and not bypass and not is_frozen and not _IS_PART.get():
            raise ValueError(
                f"where must leave some parameters to others=; got {self.where!r}, which chooses all {len(chosen)}. "
                "Leave out where= and others=, or narrow the pattern."
            )
        second_state = self.others.init(outside) if bypass or is_frozen else ()
        state = self.init_chosen(inside) if chosen or not bypass else self.first_state()
        if bypass and not is_frozen:
            check_exchange(second_state, f"others of {self.name}", self.axes, of_all=False)
            self._check_momentum(state, next(exchange_states(second_state)))
        return state.replace(others=second_state)

    def _check_momentum(self, state: ExchangeState, second: ExchangeState) -> None:
        """Refuses `others` with another momentum: none may follow the exchange, since it would be applied twice."""
        own, theirs = momentum_inside(state), momentum_inside(second)
        if own != theirs:
            dense = (
                f"jaxcomm.{self.name if own else second.method.name}(momentum={own or theirs:g}, dense_below=2**31-1)"
            )
            raise ValueError(
                f"An exchange and its others= must apply the same momentum; got {own:g} in {self.name} and {theirs:g} "
                f"in {second.method.name}. Pass momentum=0, and the optimizer's momentum behind; or exchange a part "
                f"densely with the same by {dense}."
            )

    def _in_parts(self, tree: PyTree) -> "Exchange":
        """Returns the exchange of a part of the tree, with those of the other parts as `others` of each other.

        A part has fewer than 2^31 elements. One that has as few is exchanged by the method itself.
        """
        parts: list[set[str]] = [set()]
        size = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if self.has_positions else ():
            if self.chooses(path, leaf):
                length = -(-math.prod(jnp.shape(leaf)) // BLOCK) * BLOCK
                if size and size + length >= MAX_ELEMENTS:
                    parts.append(set())
                    size = 0
                parts[-1].add(leaf_name(path))
                size += length
        if len(parts) == 1:
            return self
        last = parts.pop()
        method = self if self.where is None else replace(self, where=Paths(frozenset(last)))
        for names in reversed(parts):
            method = replace(self, where=Paths(frozenset(names)), others=method.transform())
        return method

    def init_chosen(self, params: Params) -> ExchangeState:
        """Does `init` for the leaves that `where` chooses."""
        layout = self.plan(params)
        residual = PerWorker(jnp.zeros((1, layout.n), self.residual_dtype), self.axes) if self.keeps_residual else None
        return self.first_state(self.first_memory(params, layout), residual)

    def first_state(self, memory: PyTree = (), residual: PerWorker | None = None) -> ExchangeState:
        """Returns the state before the first step."""
        register_with_flax(ExchangeState, PerWorker, AccumulatedState, DelayedState)
        has_rows = any(map(is_per_worker, nodes_of((memory, residual), PerWorker, ExchangeState)))
        worker = self.per_worker(jnp.full((1, 1), -1, jnp.int32)) if has_rows else None
        step = jnp.zeros((), jnp.int32)
        return ExchangeState(ExchangeMetrics.zeros(), step, residual, memory, None, worker, self)

    def update(self, updates: PyTree, state: ExchangeState, params: Params = None) -> tuple[Any, ExchangeState]:
        """Exchanges the gradients of one worker; returns their means and the new state."""
        if not isinstance(state, ExchangeState) or type(state.method) is not type(self):
            owner = state.method.name if isinstance(state, ExchangeState) else type(state).__name__
            raise ValueError(f"The state must be that of {self.name}; got that of {owner}. Initialise it with this tx.")
        state = state.replace(method=self)  # which may choose other leaves than the one that made the state
        workers = axis_size(self.axes)  # its error comes before any work
        _check_shapes(self.name, updates, params)
        if (parts := self._in_parts(updates)) is not self:
            means, state = parts.update(updates, state, params)
            return means, state.replace(method=self)
        with jax.named_scope(SCOPE):
            if state.worker is None:
                # True, but XLA does not know. Else it would send nothing where no loss reads the parameters.
                return self._on_stages(*self._update(updates, state, params, state.step >= 0), state)
            position, row = lax.axis_index(self.axes), own_row(state.worker, 1)
            index, k = worker_of(row[0, 0])
            is_own = (row[0, 0] < 0) | ((index == position) & ((k == workers) | (k == 0)))
            updates, state = self._on_stages(*self._update(updates, state, params, is_own), state)
            numbered = position + (workers << _INDEX_BITS if workers < 1 << (31 - _INDEX_BITS) else 0)
            return updates, state.replace(worker=self.per_worker(jnp.where(row < 0, numbered, row)))

    def _update(self, updates: PyTree, state: ExchangeState, params: Params, is_own: Any) -> tuple[Any, ExchangeState]:
        """Does `update`; all workers skip the exchange unless `is_own` holds on each."""
        if self.where is None:
            return self.update_chosen(self._checked(updates, is_own), state, params)
        inside, outside = self._part(updates, True), self._part(updates, False)
        if self.others is None:
            _check_reduced(outside, self.axes)
            ok, second_state, second = is_finite_tree(outside), state.others, ExchangeMetrics.zeros()
        else:
            if next(exchange_states(state.others), None) is None:  # frozen: zeros, replicated
                outside = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), outside)
            second_state = state.others
            if jax.tree.leaves(outside):
                outside, second_state = self.others.update(outside, second_state, self._part(params, False))
            second = next((inner.metrics for inner in exchange_states(second_state)), ExchangeMetrics.zeros())
            ok = second.skipped == 0
        if any(jnp.size(leaf) for leaf in jax.tree.leaves(inside)):  # else no number could tell that the rest is not ok
            inside, state = self.update_chosen(self._checked(inside, ok & is_own), state, self._part(params, True))
        else:
            inside = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), inside)  # nothing, replicated
            state = state.replace(step=state.step + 1, metrics=ExchangeMetrics.of(ok, sent=0))
        ok = state.metrics.skipped == 0
        outside = zeros_unless(ok, outside)
        if self.others is not None:
            metrics = ExchangeMetrics.of(
                ok,
                state.metrics.sent + second.sent,
                state.metrics.overflow + second.overflow,
                drained=state.metrics.drained | second.drained,
            )
            state = state.replace(metrics=metrics, others=keep_unless(ok, second_state, state.others))
        return join_trees(inside, outside), state

    def _on_stages(self, means: PyTree, new: ExchangeState, old: ExchangeState) -> tuple[Any, ExchangeState]:
        """Returns the results of a pipeline's stage: if another stage has skipped its exchange, this one has, too."""
        if stage_axis() is None or self.period is not None:
            return means, new
        ok = on_all_stages(new.metrics.skipped == 0)
        reverted = keep_unless(ok | (new.metrics.skipped > 0), new, old)
        metrics = keep_unless(ok, new.metrics, ExchangeMetrics.of(ok, sent=0))
        return zeros_unless(ok, means), reverted.replace(step=new.step, metrics=metrics)

    def update_chosen(self, updates: PyTree, state: ExchangeState, params: Params) -> tuple[Any, ExchangeState]:
        """Does `update` for the leaves that `where` chooses."""
        layout = self.plan(updates)
        leaves, treedef = jax.tree.flatten(updates)
        param_leaves = None if params is None else jax.tree.leaves(params)
        row = None if state.residual is None else own_row(state.residual, layout.n).astype(jnp.float32)
        gradient = Gradient(layout, leaves, param_leaves, row)
        if self.start:
            ways = (functools.partial(way, gradient, state) for way in (self.average_densely, self.average))
            out, memory = lax.cond(state.step < self.start, *ways)
        else:
            out, memory = self.average(gradient, state)
        residual = None if out.residual is None else self.per_worker(self._kept(out.residual, state.step))
        new = state.replace(metrics=out.metrics, step=state.step + 1, residual=residual, memory=memory)
        return treedef.unflatten(out.means), new

    def _kept(self, residual: jax.Array, step: jax.Array) -> jax.Array:
        """Returns a residual (1, n) float32 in `residual_dtype`; a row that was not changed stays the same."""
        if self.residual_dtype == "float32":
            return residual
        return noise.round_to_bfloat16(residual, noise.make_key(step, lax.axis_index(self.axes)))

    def _checked(self, updates: PyTree, ok: Any) -> Any:
        """Returns updates that differ between workers, with a NaN in them unless `ok` holds."""
        for name in self.axes:
            check_per_worker(updates, name)
        return _nan_unless(ok, updates)

    def per_worker(self, rows: PyTree, resizing: str = "mean") -> PerWorker:
        """Marks state as differing between workers."""
        return PerWorker(rows, self.axes, resizing)

    def chooses(self, path: KeyPath, leaf: PyTree) -> bool:
        """Returns whether `where` chooses a leaf, by its path."""
        return self.where is None or is_chosen(self.where, path, leaf)

    def _part(self, tree: PyTree, is_inside: bool) -> Any:
        """Returns the part of a tree that `where` chooses, or the rest, with empty nodes for all other leaves."""

        def choose(path: KeyPath, leaf: PyTree) -> Any:
            return leaf if self.chooses(path, leaf) == is_inside else optax.MaskedNode()

        return jax.tree_util.tree_map_with_path(choose, tree)


def _check_shapes(name: str, updates: PyTree, params: Params) -> None:
    """Refuses gradients of other shapes than the parameters, if both are given, such as one for each row."""
    if params is None or jax.tree.structure(updates) != jax.tree.structure(params):
        return
    pairs = zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True)
    for (path, update), param in pairs:
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"Gradients must have the shapes of their parameters; got {jnp.shape(update)} for {jnp.shape(param)} "
                f"at {jax.tree_util.keystr(path)!r}. Reduce gradients of rows before {name}: "
                "optax.contrib.differentially_private_aggregate(..., noise_multiplier=0) goes before it."
            )


class ExchangeTransformation(optax.GradientTransformation):
    """The Optax transformation of an exchange.

    Attributes:
      method: the method that it exchanges by.
    """

    method: Exchange

    def __reduce__(self) -> tuple[Any, ...]:
        return self.method.transform, ()


def is_placeholder(params: Params) -> bool:
    """Returns whether these are the placeholder of `optax.tree_map_params`: neither a tensor nor a container."""
    node = jax.tree.structure(params)
    return node.num_leaves == 0 and node.num_nodes == 1 and not isinstance(params, dict | list | tuple | None)


def axis_name_of(tx: optax.GradientTransformation) -> AxisName:
    """Returns the axis of workers of the exchange in a `jaxcomm.chain`; "data" where another chain hides it."""
    for link in getattr(tx, "links", (tx,)):
        if isinstance(link, ExchangeTransformation):
            return link.method.axes[0] if len(link.method.axes) == 1 else link.method.axes
    return "data"


def is_local(tx: optax.GradientTransformation) -> bool:
    """Returns whether the exchange in a `jaxcomm.chain` is a local method; False where another chain hides it."""
    links = getattr(tx, "links", (tx,))
    return any(isinstance(link, ExchangeTransformation) and link.method.period is not None for link in links)


def transformation(method: Callable[P, Exchange]) -> Callable[P, optax.GradientTransformation]:
    """Makes the factory of a method's Optax transformation, with the method's arguments and docstring."""

    @functools.wraps(method, updated=())
    def factory(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformation:
        return method(*args, **kwargs).transform()

    factory.__name__ = factory.__qualname__ = getattr(method, "name", "exchange")
    return factory


def exchange_states(state: PyTree) -> Iterator[ExchangeState]:
    """Iterates over the states of the exchanges in an optimizer's state, but not those inside other exchanges."""
    return iter(nodes_of(state, ExchangeState))


def methods_in(exchange: ExchangeState) -> list[Exchange]:
    """Returns the method of a gradient exchange, and those of the exchanges that it holds."""
    inner = exchange_states((exchange.memory, exchange.others))
    return [exchange.method, *(method for state in inner for method in methods_in(state))]


def clips_in(exchange: ExchangeState) -> list[str]:
    """Returns the methods in a gradient exchange that clip by a norm, as messages name them."""
    return [f"{method.name} with clip=" for method in methods_in(exchange) if method.reads_whole_tensors]


def momentum_inside(exchange: ExchangeState) -> float:
    """Returns the momentum that a gradient exchange applies before it compresses."""
    return max(method.momentum_inside for method in methods_in(exchange))


def is_exchange_state(node: PyTree) -> TypeGuard[ExchangeState]:
    """Returns whether a node of a state is that of an exchange."""
    return isinstance(node, ExchangeState)


def get_exchange(state: PyTree) -> ExchangeState:
    """Returns the state of the one exchange in an optimizer's state; refuses a state without."""
    exchange = next(exchange_states(state), None)
    if exchange is None and has_lost_types(state):
        raise ValueError(
            "A state must have its types; got dicts and lists. Restore a checkpoint with the state of tx.init, or of "
            "step.shapes(params), as its target."
        )
    if exchange is None:
        raise ValueError(
            "A data-parallel step must have an exchange, the transformation that averages over the workers; got a "
            "chain without. Put jaxcomm.plump_dp() (dense) or a compressor such as jaxcomm.dct_dp(0.99) first in "
            "jaxcomm.chain(...)."
        )
    return exchange


@contextlib.contextmanager
def of_part() -> Iterator[None]:
    """Lets an exchange be initialised for a part of the parameters, of which `where` may choose all, or none."""
    token = _IS_PART.set(True)
    try:
        yield
    finally:
        _IS_PART.reset(token)


def lets_bypass(state: ExchangeState) -> bool:
    """Returns whether `where` leaves out leaves that no other exchange takes, so that their gradients bypass it."""
    method = state.method
    if method.where is None or method.others is None:
        return method.where is not None
    return any(lets_bypass(inner) for inner in exchange_states(state.others))


def bypasses(state: ExchangeState, path: KeyPath, leaf: PyTree) -> bool:
    """Returns whether a leaf bypasses both an exchange and its `others`."""
    method = state.method
    if method.where is None or method.chooses(path, leaf):
        return False
    return method.others is None or any(bypasses(inner, path, leaf) for inner in exchange_states(state.others))


def _frozen_in(state: ExchangeState) -> Callable[[KeyPath, PyTree], bool]:
    """Returns (path, leaf) -> whether a leaf is left to `others=optax.set_to_zero()`, here or by an exchange inside."""
    method = state.method
    inside, others = ([_frozen_in(inner) for inner in exchange_states(part)] for part in (state.memory, state.others))

    def is_frozen(path: KeyPath, leaf: PyTree) -> bool:
        if method.where is None or method.chooses(path, leaf):
            return any(is_inside(path, leaf) for is_inside in inside)
        return method.others is not None and (not others or any(is_in_others(path, leaf) for is_in_others in others))

    return is_frozen


def without_frozen(updates: PyTree, state: ExchangeState) -> PyTree:
    """Returns updates with zeros for frozen leaves, whatever a weight decay behind the exchange has made of them."""
    is_frozen = _frozen_in(state)

    def zero(path: KeyPath, leaf: PyTree) -> Any:
        return jnp.zeros_like(leaf) if is_frozen(path, leaf) else leaf

    return jax.tree_util.tree_map_with_path(zero, updates)


def check_exchange(state: PyTree, name: str, axes: tuple[str, ...], *, of_all: bool = True) -> ExchangeState:
    """Returns the state of an exchange that is inside another transformation.

    Args:
      state: the inner exchange's state.
      name: what to call the inner exchange in an error.
      axes: those that it must average over, in any order.
      of_all: whether it must exchange every gradient that it gets.

    Raises:
      ValueError: if there is no exchange, if it is a local method, if gradients bypass it despite `of_all`, or if it
        averages over other axes.
    """
    exchange = next(exchange_states(state), None)
    if exchange is None or exchange.method.period is not None or (of_all and lets_bypass(exchange)):
        raise ValueError(
            f"{name} must be an exchange of gradients; got a transformation that is none, is local itself, or lets "
            "gradients bypass it. Pass jaxcomm.plump_dp(), jaxcomm.dct_dp(0.99) or another compressor; as others= also "
            "optax.set_to_zero()."
        )
    if {*exchange.method.axes} != {*axes}:
        raise ValueError(
            f"{name} must average over {axes}; got {exchange.method.name} over {exchange.method.axes}. Pass "
            f"axis_name={axes[0] if len(axes) == 1 else axes!r} to it."
        )
    return exchange


def _freezes(tx: optax.GradientTransformation) -> bool:
    """Returns whether a transformation is `optax.set_to_zero`, by trying it."""
    ones = {"": jnp.ones(2)}
    try:
        with jax.ensure_compile_time_eval():
            zeros, state = tx.update(ones, tx.init(ones), ones)
            return not jax.tree.leaves(state) and not any(leaf.any() for leaf in jax.tree.leaves(zeros))
    except Exception:  # an exchange, outside the axis of workers
        return False


def worker_of(row: Any) -> tuple[Any, Any]:
    """Returns the index of a row's worker, and the number of workers, from `ExchangeState.worker`.

    The number is 0 if it is not known: with 2^15 workers or more, and in checkpoints of earlier versions.
    """
    return row & ((1 << _INDEX_BITS) - 1), row >> _INDEX_BITS


def own_row(rows: PerWorker, n: int) -> jax.Array:
    """Returns this worker's own row (1, n); refuses a state that was made for another tree, or has several rows."""
    if rows.rows.shape != (1, n):
        raise ValueError(
            f"A worker must hold one row of state, (1, {n}) for this gradient; got {rows.rows.shape}. Initialise the "
            "state with the parameters that are trained, and shard its PerWorker leaves over the axis of workers "
            "(step.init of jaxcomm.make_train_step does both). A state of another number of workers goes through "
            "jaxcomm.resize_workers."
        )
    return to_varying(rows.rows, rows.axes)


def _check_reduced(tree: PyTree, axes: tuple[str, ...]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for name in axes:
            if is_tracked(name) and varies(leaf, name):
                raise ValueError(
                    f"A gradient that bypasses the exchange must be already reduced; got one at "
                    f"{jax.tree_util.keystr(path)!r} that differs along {name!r}. Differentiate with respect to a "
                    "replicated parameter (make_train_step does), choose the leaf by where=, or pass others=."
                )


def is_chosen(where: Where, path: KeyPath, leaf: PyTree) -> bool:
    """Returns whether a pattern or a function chooses a leaf, by its path."""
    name = leaf_name(path)
    return re.search(where, name) is not None if isinstance(where, str) else bool(where(name, leaf))


def leaf_name(path: KeyPath) -> str:
    """Returns the path of a leaf as `where=` sees it: "encoder/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _nan_unless(ok: Any, gradients: PyTree) -> PyTree:
    """Puts NaN into the smallest gradient unless `ok` holds, so that all workers skip the exchange."""
    leaves, treedef = jax.tree.flatten(gradients)
    kinds = [(jnp.size(leaf), jnp.result_type(leaf)) for leaf in leaves]
    sizes = [(size, at) for at, (size, dtype) in enumerate(kinds) if size and jnp.issubdtype(dtype, jnp.floating)]
    if sizes and ok is not True:
        _, smallest = min(sizes)
        leaves[smallest] = jnp.where(ok, leaves[smallest], jnp.nan)
    return treedef.unflatten(leaves)


def is_masked(node: PyTree) -> TypeGuard[optax.MaskedNode]:
    """Returns whether a node of a tree is the placeholder of a leaf that is in another part."""
    return isinstance(node, optax.MaskedNode)


def join_trees(first: Any, second: Any) -> PyTree:
    """Joins two parts of a tree: leaves that are masked in the first come from the second."""
    return jax.tree.map(lambda a, b: b if is_masked(a) else a, first, second, is_leaf=is_masked)
