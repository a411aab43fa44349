"""Local steps, and an outer optimizer on what they changed: DiLoCo, with any compressor, at once or in fragments."""

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm.checks import check_count, check_range
from jaxcomm.collectives.axis import other_axes, to_varying
from jaxcomm.exchange import (
    Exchange,
    ExchangeState,
    check_exchange,
    get_exchange,
    is_masked,
    join_trees,
    keep_unless,
    transformation,
    zeros_unless,
)
from jaxcomm.layout import plan_layout
from jaxcomm.numerics import is_finite_tree
from jaxcomm.states import vary_rows
from jaxcomm.types import ExchangeMetrics

_TOO_LARGE = 2.0**90  # a thousand such updates are below the 2^100 that no exchange with a residual takes


@dataclass(frozen=True, kw_only=True)
class LocalExchange(Exchange):
    """A method whose workers train on their own parameters between two exchanges.

    It comes after a whole local optimizer, and takes its updates: a transformation from each worker's local updates to
    the updates that keep it on its way, or lead it to the merged model (both differ between workers). `update` needs
    the parameters. A local update that is not finite is not applied on its worker. If an exchange is skipped, this
    step's local updates are not applied.
    """

    keeps_residual: ClassVar[bool] = False

    def global_model(self, state: ExchangeState, like: Any) -> Any:
        """Returns the model to evaluate, in the shapes and types of the parameters `like`."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = self.where is None
        check_range("where", self.where, f"None for {self.name}", holds, "a local method merges all parameters")

    def check_params(self, params: Any) -> None:
        """Refuses updates without parameters."""
        if params is None:
            raise ValueError(
                f"params must be given to {self.name}, which compares them with the global model; got none. Call "
                "tx.update(updates, state, params)."
            )


class Anchored(NamedTuple):
    """Memory of `local_sgd`.

    Attributes:
      anchor: the global model, float32, in the tree of the parameters; replicated.
      exchange: the state of the exchange, its rows per worker included.
      outer: the state of the outer optimizer; replicated.
    """

    anchor: Any
    exchange: Any
    outer: Any


class Fragment(NamedTuple):
    """Memory of `local_sgd` for one fragment, where there are several or they are merged later: a tuple of these.

    Attributes:
      anchor: the global model, float32, in the tree of the parameters, `optax.MaskedNode` in the place of those of
        other fragments; replicated. It is what the workers have yet to merge, too: no other copy is kept.
      exchange: the state of the fragment's exchange, its rows per worker included.
      outer: the state of the fragment's outer optimizer; replicated.
      merged_at: () int32, the step in which the workers merge it, after the last exchange that was not skipped; or 0.
    """

    anchor: Any
    exchange: Any
    outer: Any
    merged_at: jax.Array


_Memory = TypeVar("_Memory", Anchored, Fragment)


def _nesterov() -> optax.GradientTransformation:
    return optax.sgd(0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class LocalSgd(LocalExchange):
    """Trains each worker on its own for a few steps, and then moves all by an outer optimizer.

    On each worker:

      1. for H steps, change the own parameters by the local optimizer alone
      2. then g = anchor - own parameters (the "outer gradient"), where the anchor is what all began with
      3. average g over the workers by `exchange`: dense, or any compressor of this library
      4. anchor = anchor + outer(mean g); all continue from the anchor

    `make_train_step` keeps a row per worker of the parameters and of the local optimizer's state, and
    `global_params(state)` returns the anchor, which is the model to evaluate. If the exchange is skipped, the anchor
    and the outer optimizer stay, and training continues to the next exchange.

    `optax.chain(optax.adamw(3e-4), jc.local_sgd(100, exchange=jc.plump_dp()))`. On the wire: the exchange, once in H
    steps. Memory: 4 bytes a parameter, and what the exchange and the outer optimizer keep.

    With `fragments`, `overlap` or `mix` it is Streaming DiLoCo. The parameters are cut into P fragments, each with an
    exchange and an outer optimizer of its own, and every H/P steps another one has its turn:

      1. in the step of fragment p, do 2 to 4 with its parameters, but let the workers go on with theirs
      2. `overlap` steps later, own = mix * own + (1 - mix) * anchor, for the parameters of fragment p

    So the most that a step sends is the largest fragment, while the bytes of H steps are the same, and what the workers
    have learned since the exchange is kept in part. No parameter depends on an exchange before step 2. But a step
    returns when its exchange is done: this library does not compute the next steps meanwhile. What is gained is the
    smaller peak, and models that never differ by the whole H steps.

    A fragment has whole tensors. The largest tensor comes first, and each goes to the fragment with the fewest
    elements, of equal ones to the first: layers of equal shapes are dealt out in turn, the paper's strided pattern. A
    fragment is no smaller than its largest tensor. If its exchange is skipped, its anchor and outer optimizer stay, and
    nothing is merged. A worker whose local update is not finite, or has a number of 2^90 or more, stays as it was in
    this step, and an exchange of this step is skipped; the others keep their local updates.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; "Streaming
    DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025, https://arxiv.org/abs/2501.18512,
    which sends 4 bits a value besides.

    Attributes:
      steps: H, local steps from one exchange to the next. DiLoCo: 500.
      exchange: averages the outer gradients: `plump_dp()` (DiLoCo), or any compressor over the same axis; its residual
        carries what was not sent over to the next exchange. `sparse_loco` has the settings of SparseLoCo.
      outer: an optimizer for the outer gradients; by default SGD with learning rate 0.7 and Nesterov momentum 0.9.
      fragments: P, which divides H; at most the number of tensors. The paper: one for every 3 layers.
      overlap: steps from an exchange to its use, below H; 0 merges in the same step. The paper: 5.
      mix: the share of a worker's own parameters where they are merged with the anchor, 0 to 1. The paper: 0.5.
    """

    steps: int = 20
    _: KW_ONLY
    exchange: optax.GradientTransformation = field(compare=False)
    outer: optax.GradientTransformation | None = field(default=None, compare=False)
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0

    name: ClassVar[str] = "local_sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        steps, count = self.steps, self.fragments
        check_count("steps", steps, 1, "1 exchanges in every step")
        check_count("fragments", count, 1, "1 exchanges all parameters at once")
        remedy = f"steps={-(-steps // count) * count} is one"
        check_range("steps", steps, f"a multiple of fragments ({count})", steps % count == 0, remedy)
        check_count("overlap", self.overlap, 0, "0 merges in the step of the exchange")
        rule = f"below steps ({steps}), in which the next exchange of a fragment is due"
        check_range("overlap", self.overlap, rule, self.overlap < steps, "pass fewer steps")
        is_share = isinstance(self.mix, Real) and 0 <= self.mix <= 1
        check_range("mix", self.mix, "at least 0 and at most 1 (the share of the own parameters)", is_share, "pass 0.5")

    @property
    def streams(self) -> bool:
        """Whether it does anything but exchange all parameters at once and continue from the anchor."""
        return self.fragments > 1 or self.overlap > 0 or self.mix > 0

    @property
    def period(self) -> int:
        return self.steps // self.fragments

    @property
    def turns(self) -> int:
        return self.fragments

    @property
    def undoes_skipped(self) -> bool:
        return not self.streams

    @property
    def instead_of_checksum(self) -> str:
        return "Pass it to exchange="

    def global_model(self, state: ExchangeState, like: Any) -> Any:
        memory = state.memory
        whole = functools.reduce(join_trees, [part.anchor for part in memory]) if self.streams else memory.anchor
        return jax.tree.map(lambda anchor, leaf: anchor.astype(leaf.dtype), whole, like)

    def init_chosen(self, params: Any) -> ExchangeState:
        plan_layout(params, dense_below=0, capacity=lambda n: n)  # for its errors
        anchor = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        if not self.streams:
            return self.first_state(self._first(anchor))
        parts = [self._first(part) for part in _cut(anchor, self.fragments)]
        return self.first_state(tuple(Fragment(*part, jnp.zeros((), jnp.int32)) for part in parts))

    def _first(self, anchor: Any) -> Anchored:
        inner = self.exchange.init(anchor)
        check_exchange(inner, "exchange of local_sgd")
        return Anchored(anchor, inner, (self.outer or _nesterov()).init(anchor))

    def update_chosen(self, updates: Any, state: ExchangeState, params: Any) -> tuple[Any, ExchangeState]:
        self.check_params(params)
        others, old = other_axes(jax.tree.leaves(updates)[0], self.axis_name), state.memory
        if self.streams:
            return self._stream(updates, state, params, others)

        def stay() -> tuple[Any, ExchangeState]:
            own = zeros_unless(is_finite_tree(updates), updates)
            return own, vary_rows(state.replace(metrics=ExchangeMetrics.zeros()), others)

        def communicate() -> tuple[Any, ExchangeState]:
            gradient = jax.tree.map(lambda a, p, u: a - (_wide(p) + _wide(u)), old.anchor, params, updates)
            memory, metrics = self._outer_step(gradient, old)
            to_anchor = jax.tree.map(
                lambda a, p: to_varying(
                    jnp.where(metrics.skipped == 0, a - _wide(p), 0.0).astype(p.dtype), self.axis_name
                ),
                memory.anchor,
                params,
            )
            return to_anchor, vary_rows(state.replace(metrics=metrics, memory=memory), others)

        if self.steps == 1:
            own, new = communicate()
        else:
            # The usual branch is the one that communicates: bytes are given for an exchange, and how often it comes.
            own, new = lax.cond((state.step + 1) % self.steps != 0, stay, communicate)
        return own, new.replace(step=state.step + 1)

    def _outer_step(self, gradient: Any, old: _Memory) -> tuple[_Memory, ExchangeMetrics]:
        """Averages an outer gradient, and moves the anchor by it, unless the exchange is skipped."""
        mean, inner = self.exchange.update(gradient, old.exchange, old.anchor)
        metrics = get_exchange(inner).metrics
        change, outer = (self.outer or _nesterov()).update(mean, old.outer, old.anchor)
        ok = metrics.skipped == 0
        anchor = jax.tree.map(lambda a, c: a + jnp.where(ok, c, 0.0), old.anchor, change)
        return old._replace(anchor=anchor, exchange=inner, outer=keep_unless(ok, outer, old.outer)), metrics

    def _stream(
        self, updates: Any, state: ExchangeState, params: Any, others: tuple[str, ...]
    ) -> tuple[Any, ExchangeState]:
        """Does `update_chosen` for fragments. What is exchanged in a step reaches no parameter before it is merged."""
        step, old = state.step + 1, state.memory
        small = [(jnp.abs(leaf) < _TOO_LARGE).all() for leaf in jax.tree.leaves(updates)]  # NaN is not
        ok = jnp.stack(small).all()
        own = zeros_unless(ok, updates)

        def exchange(turn: int) -> Callable[[], Any]:
            def branch() -> Any:
                part = old[turn]
                gradient = jax.tree.map(
                    lambda a, p, u: a if is_masked(a) else jnp.where(ok, a - (_wide(p) + _wide(u)), jnp.nan),
                    part.anchor,
                    params,
                    own,
                    is_leaf=is_masked,
                )
                new, metrics = self._outer_step(gradient, part)
                merged_at = jnp.where(metrics.skipped == 0, step + self.overlap, part.merged_at)
                new = new._replace(merged_at=merged_at)
                return vary_rows(((*old[:turn], new, *old[turn + 1 :]), metrics), others)

            return branch

        def merge(turn: int) -> Callable[[], Any]:
            def mixed(a: Any, p: jax.Array, u: jax.Array) -> jax.Array:
                if is_masked(a):
                    return u
                merged = a + self.mix * (_wide(p) + _wide(u) - a)
                return jnp.where(ok & (memory[turn].merged_at == step), (merged - _wide(p)).astype(u.dtype), u)

            return lambda: jax.tree.map(mixed, memory[turn].anchor, params, own, is_leaf=is_masked)

        def turn_at(step: jax.Array) -> jax.Array:
            """Returns whose turn it is, from 0; `fragments` where it is nobody's."""
            return jnp.where(step % self.period == 0, (step // self.period - 1) % self.fragments, self.fragments)

        # The branch of a turn has its number, and the last one stays: so reports know them (`Program.in_turn`).
        turns, stay = range(self.fragments), vary_rows((old, ExchangeMetrics.zeros()), others)
        memory, metrics = lax.switch(turn_at(step), [*map(exchange, turns), lambda: stay])
        own = lax.switch(turn_at(step - self.overlap), [*map(merge, turns), lambda: own])
        return own, state.replace(step=step, metrics=metrics, memory=memory)


def _cut(tree: Any, count: int) -> list[Any]:
    """Cuts a tree into trees of about as many elements: of whole tensors, the others masked.

    The largest comes first, and each goes to the fragment with the fewest elements, of equal ones to the first.
    """
    leaves, treedef = jax.tree.flatten(tree)
    remedy = "whole tensors are exchanged in turn, so pass fewer fragments"
    check_range("fragments", count, f"at most the number of tensors ({len(leaves)})", count <= len(leaves), remedy)
    places: list[list[int]] = [[] for _ in range(count)]
    for at in sorted(range(len(leaves)), key=lambda at: -leaves[at].size):
        min(places, key=lambda place: (sum(leaves[i].size for i in place), len(place))).append(at)
    masked = [[leaf if at in place else optax.MaskedNode() for at, leaf in enumerate(leaves)] for place in places]
    return [treedef.unflatten(each) for each in masked]


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32)


local_sgd = transformation(LocalSgd)
