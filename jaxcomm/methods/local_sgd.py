"""Local steps, and an outer optimizer on their change: DiLoCo, with any compressor, whole or in fragments."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm.checks import Rule, check_count, check_range, count, number
from jaxcomm.collectives.axis import other_axes, to_varying
from jaxcomm.exchange import (
    WHERE,
    Exchange,
    ExchangeState,
    Where,
    check_exchange,
    get_exchange,
    is_chosen,
    is_masked,
    join_trees,
    keep_unless,
    leaf_name,
    of_part,
    on_all_stages,
    transformation,
    without_frozen,
    zeros_unless,
)
from jaxcomm.kernels.numerics import is_applicable_tree, widened
from jaxcomm.layout import plan_layout
from jaxcomm.state import vary_rows
from jaxcomm.types import ExchangeMetrics, Params, PyTree


@dataclass(frozen=True, kw_only=True)
class LocalExchange(Exchange):
    """A method whose workers train on their own parameters between two exchanges.

    It comes after a complete local optimizer and takes its updates. Between exchanges it returns them unchanged; at an
    exchange it returns the updates that lead to the merged model. Both differ between workers. `update` needs the
    parameters. A local update that is not finite, or has a number of 2^90 or more, is not applied on its worker. If an
    exchange is skipped, this step's local updates are not applied (but see `reverts_on_skip`).
    """

    where: Annotated[Where | None, Rule("None for a local method", lambda x: x is None, "It merges all parameters")] = (
        None
    )

    keeps_residual: ClassVar[bool] = False
    start_remedy: ClassVar[str | None] = "Pass start= to the exchange inside"

    def check_params(self, params: Params) -> None:
        """Refuses updates without parameters."""
        if params is None:
            raise ValueError(
                f"params must be given to {self.name}, which compares them with the global model; got none. Call "
                "tx.update(updates, state, params)."
            )


class Anchored(NamedTuple):
    """Memory of `local_sgd`.

    Attributes:
      anchor: the global model, float32 (float64 for parameters of float64), in their tree; replicated.
      exchange: the state of the exchange, including its rows per worker.
      outer: the state of the outer optimizer; replicated.
    """

    anchor: PyTree
    exchange: Any
    outer: Any


class Fragment(NamedTuple):
    """Memory of `local_sgd` for each of its fragments, where it streams.

    Attributes:
      held: the memory of the fragment's parameters, with `optax.MaskedNode` in place of the others. Its anchor is what
        the workers merge next.
      merged_at: () int32, the step in which they merge it, or last did; 0 before the first exchange.
    """

    held: Anchored
    merged_at: jax.Array


def nesterov() -> optax.GradientTransformation:
    """Returns the outer optimizer of DiLoCo."""
    return optax.sgd(0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class LocalSgd(LocalExchange):
    """Trains each worker on its own for a few steps, and then moves all by an outer optimizer.

    On each worker:

      1. for H steps, update the worker's own parameters with the local optimizer alone
      2. then g = anchor - own parameters (the "outer gradient"), where the anchor is the model that all started from
      3. average g over the workers by `exchange`: dense, or any compressor of this library
      4. anchor = anchor + outer(mean g); all continue from the anchor

    `make_train_step` keeps a row per worker of the parameters and of the local optimizer's state, and
    `global_params(state)` returns the anchor, which is the model to evaluate. If the exchange is skipped, the anchor
    and the outer optimizer's state stay, and training continues to the next exchange. Parameters of 16 bits continue
    from it to a rounding, as updates have their type.

    `jc.chain(optax.adamw(3e-4), jc.local_sgd(100, exchange=jc.plump_dp()))`. Received: those of the
    exchange, once in `steps`. Memory: 4 bytes a parameter, and what the exchange and the outer optimizer keep.

    With `fragments`, `overlap` or `mix` it is Streaming DiLoCo. Every H/P steps the next of P fragments goes through
    lines 2 to 4, with its own exchange and outer optimizer state, while the workers keep their own parameters. Only
    `overlap` steps later, own = mix * own + (1 - mix) * anchor; until then no parameter depends on the exchange.
    However, a program returns only when its exchange is done, and on no backend does this library compute the next
    steps meanwhile. The gain is a peak of one fragment's bytes, and a global model that changes every H/P steps.

    A fragment holds whole tensors. Given their number alone, tensors are assigned from the largest to the smallest,
    each to the fragment with the fewest elements, then the fewest tensors, then the lowest index: fragments are of
    about equal size, but the tensors of one layer may be in several. The paper's fragments are whole blocks, every P-th
    in one fragment ("strided"): pass a pattern or a function for each.

    If a fragment's exchange is skipped, its anchor and outer optimizer's state stay, and nothing is merged. A worker
    whose local update is not finite, or has a number of 2^90 or more, does not apply it but merges what is due, and an
    exchange in that step is skipped; the other workers apply their local updates.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; "Streaming
    DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025, https://arxiv.org/abs/2501.18512.

    Attributes:
      steps: H, local steps from one exchange to the next. DiLoCo: 500.
      exchange: averages the outer gradients: `plump_dp()` (DiLoCo), or any compressor over the same axis; its residual
        carries over to the next exchange. `sparse_loco` has the settings of SparseLoCo.
      outer: an optimizer for the outer gradients; by default SGD with learning rate 0.7 and Nesterov momentum 0.9.
      fragments: P, a divisor of H and at most the number of tensors. The paper: one for every 3 layers. Or P patterns
        or functions (path, leaf) -> bool as in `where`, in the order of their turns; a tensor belongs to the first that
        chooses it, and each must belong to one.
      overlap: steps from an exchange to its merge, below H; 0 merges in the same step. The paper: 5.
      mix: weight of a worker's own parameters when they are merged with the anchor, 0 to 1. The paper: 0.5. With 0, the
        updates of the `overlap` steps between exchange and merge are discarded.
    """

    steps: Annotated[int, count(1, "1 exchanges in every step")] = 20
    _: KW_ONLY
    exchange: optax.GradientTransformation = field(compare=False)
    outer: optax.GradientTransformation | None = field(default=None, compare=False)
    fragments: int | Sequence[Where] = 1
    overlap: Annotated[int, count(0, "0 merges in the step of the exchange")] = 0
    mix: Annotated[
        float, number("at least 0 and at most 1 (the share of the own parameters)", lambda x: 0 <= x <= 1, "Pass 0.5")
    ] = 0.0

    has_positions: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.fragments, list):
            object.__setattr__(self, "fragments", tuple(self.fragments))  # what is static is hashed
        for where in self.fragments if isinstance(self.fragments, tuple) else ():
            WHERE.check("fragments", where)
        steps, P = self.steps, self.turns
        check_count("fragments", P, 1, "1 exchanges all parameters at once")
        check_range("steps", steps, f"a multiple of fragments ({P})", steps % P == 0, f"{-(-steps // P) * P} is one")
        rule = f"below steps ({steps}), when a fragment is exchanged again"
        check_range("overlap", self.overlap, rule, self.overlap < steps, "Pass a smaller overlap")

    @property
    def streams(self) -> bool:
        """Whether it exchanges in fragments, merges later, or mixes, unlike plain DiLoCo."""
        return isinstance(self.fragments, tuple) or self.turns > 1 or self.overlap > 0 or self.mix > 0

    @property
    def period(self) -> int:
        return self.steps // self.turns

    @property
    def turns(self) -> int:
        return len(self.fragments) if isinstance(self.fragments, tuple) else cast(int, self.fragments)

    @property
    def reverts_on_skip(self) -> bool:
        return not self.streams

    @property
    def checksum_remedy(self) -> str:
        return "Pass it to exchange="

    def global_model(self, state: ExchangeState, like: PyTree) -> PyTree:
        memory = state.memory
        anchors = functools.reduce(join_trees, [part.held.anchor for part in memory]) if self.streams else memory.anchor
        return jax.tree.map(lambda anchor, leaf: anchor.astype(leaf.dtype), anchors, like)

    def init_chosen(self, params: Params) -> ExchangeState:
        plan_layout(params, dense_below=0, capacity=lambda n: n, compress=lambda _: False)  # for its errors
        anchor = widened(params)
        if not self.streams:
            return self.first_state(self._first(anchor))
        parts = _cut(anchor, self.fragments)
        return self.first_state(tuple(Fragment(self._first(part), jnp.zeros((), jnp.int32)) for part in parts))

    def _first(self, anchor: PyTree) -> Anchored:
        with of_part():
            inner = self.exchange.init(anchor)
        check_exchange(inner, "exchange of local_sgd", self.axes)
        return Anchored(anchor, inner, (self.outer or nesterov()).init(anchor))

    def update_chosen(self, updates: PyTree, state: ExchangeState, params: Params) -> tuple[Any, ExchangeState]:
        self.check_params(params)
        extra_axes, old = other_axes(jax.tree.leaves(updates)[0], self.axis_name), state.memory
        ok = on_all_stages(is_applicable_tree(updates))
        if self.streams:
            return self._stream(updates, ok, state, params, extra_axes)

        def stay() -> tuple[Any, ExchangeState]:
            return zeros_unless(ok, updates), vary_rows(state.replace(metrics=ExchangeMetrics.zeros()), extra_axes)

        def communicate() -> tuple[Any, ExchangeState]:
            memory, metrics = self._outer_step(_outer_gradient(ok, old.anchor, params, updates), old)

            def to_anchor(a: jax.Array, p: jax.Array) -> jax.Array:
                return jnp.where(metrics.skipped == 0, a - widened(p), 0.0).astype(p.dtype)

            changes = to_varying(jax.tree.map(to_anchor, memory.anchor, params), self.axis_name)
            return changes, vary_rows(state.replace(metrics=metrics, memory=memory), extra_axes)

        if self.steps == 1:
            local_updates, new = communicate()
        else:
            # The usual branch is the one that communicates: reports give the bytes of an exchange, and its interval.
            local_updates, new = lax.cond((state.step + 1) % self.steps != 0, stay, communicate)
        return local_updates, new.replace(step=state.step + 1)

    def _outer_step(self, gradient: Any, old: Anchored) -> tuple[Anchored, ExchangeMetrics]:
        """Averages an outer gradient and moves the anchor by it, unless the exchange is skipped."""
        mean, inner = self.exchange.update(gradient, old.exchange, old.anchor)
        metrics = get_exchange(inner).metrics
        change, outer = (self.outer or nesterov()).update(mean, old.outer, old.anchor)
        change = without_frozen(change, get_exchange(inner))
        ok = metrics.skipped == 0
        anchor = jax.tree.map(lambda a, c: a + jnp.where(ok, c, 0.0), old.anchor, change)
        return Anchored(anchor, inner, keep_unless(ok, outer, old.outer)), metrics

    def _stream(
        self, updates: PyTree, ok: jax.Array, state: ExchangeState, params: Params, extra_axes: tuple[str, ...]
    ) -> tuple[Any, ExchangeState]:
        """Does `update_chosen` for fragments. No parameter depends on an exchange before its merge."""
        step, old = state.step + 1, state.memory
        local_updates = zeros_unless(ok, updates)

        def exchange(turn: int) -> Any:
            anchored, merged_at = old[turn]
            gradient = _outer_gradient(ok, anchored.anchor, params, local_updates)
            anchored, metrics = self._outer_step(gradient, anchored)
            new = Fragment(anchored, jnp.where(metrics.skipped == 0, step + self.overlap, merged_at))
            return vary_rows(((*old[:turn], new, *old[turn + 1 :]), metrics), extra_axes)

        def merge(turn: int) -> PyTree:
            def merged(a: Any, p: jax.Array, u: jax.Array) -> jax.Array:
                if is_masked(a):
                    return u
                change = a + self.mix * (widened(p) + widened(u) - a) - widened(p)
                return jnp.where(merged_at == step, change.astype(u.dtype), u)

            anchored, merged_at = memory[turn]
            return jax.tree.map(merged, anchored.anchor, params, local_updates, is_leaf=is_masked)

        def switch(step: jax.Array, in_turn: Callable[[int], Any], stay: Any) -> Any:
            """Runs the branch of this step's turn, or `stay`, the last one: `Program.in_turn` relies on this order."""
            turn = jnp.where(step % self.period == 0, (step // self.period - 1) % self.turns, self.turns)
            return lax.switch(turn, [*(functools.partial(in_turn, i) for i in range(self.turns)), lambda: stay])

        memory, metrics = switch(step, exchange, vary_rows((old, ExchangeMetrics.zeros()), extra_axes))
        local_updates = switch(step - self.overlap, merge, local_updates)
        return local_updates, state.replace(step=step, metrics=metrics, memory=memory)


def _outer_gradient(ok: jax.Array, anchor: PyTree, params: Params, updates: PyTree) -> Any:
    """Returns what a worker is away from the anchor, NaN unless `ok` holds; leaves that are masked in it stay so."""

    def away(a: Any, p: jax.Array, u: jax.Array) -> Any:
        return a if is_masked(a) else jnp.where(ok, a - (widened(p) + widened(u)), jnp.nan)

    return jax.tree.map(away, anchor, params, updates, is_leaf=is_masked)


def _cut(tree: PyTree, fragments: int | Sequence[Where]) -> list[Any]:
    """Splits a tree into a tree for each fragment, which has some of the tensors, and the others masked.

    Tensors are assigned as in `LocalSgd`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = _by_size(leaves, fragments) if isinstance(fragments, int) else _by_path(tree, fragments)
    masked = [[leaf if at in place else optax.MaskedNode() for at, leaf in enumerate(leaves)] for place in places]
    return [treedef.unflatten(part_leaves) for part_leaves in masked]


def _by_size(leaves: list[Any], count: int) -> list[list[int]]:
    """Returns the indices of every fragment's tensors: fragments of about equal size."""
    rule = f"at most the number of tensors ({len(leaves)}), which are exchanged whole"
    check_range("fragments", count, rule, count <= len(leaves), "Pass fewer")
    places: list[list[int]] = [[] for _ in range(count)]
    for at in sorted(range(len(leaves)), key=lambda at: -leaves[at].size):
        min(places, key=lambda place: (sum(leaves[i].size for i in place), len(place))).append(at)
    return places


def _by_path(tree: PyTree, fragments: Sequence[Where]) -> list[list[int]]:
    """Returns the indices of every fragment's tensors: those that its pattern is the first to choose."""
    places: list[list[int]] = [[] for _ in fragments]
    for at, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        first = next((turn for turn, where in enumerate(fragments) if is_chosen(where, path, leaf)), None)
        rule = f"patterns that choose every parameter, {leaf_name(path)!r} too"
        check_range("fragments", fragments, rule, first is not None, "Let the last one be '', for the others")
        places[cast(int, first)].append(at)
    rule = "patterns that each choose a parameter which none before chooses"
    check_range("fragments", fragments, rule, all(places), "Leave the others out")
    return places


local_sgd = transformation(LocalSgd)
