"""Local steps, and an outer optimizer on what they changed: DiLoCo, with any compressor."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, NamedTuple

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
    keep_unless,
    transformation,
    zeros_unless,
)
from jaxcomm.layout import plan_layout
from jaxcomm.numerics import is_finite_tree
from jaxcomm.states import vary_rows
from jaxcomm.types import ExchangeMetrics


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

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.

    Attributes:
      steps: H, local steps from one exchange to the next. DiLoCo: 500.
      exchange: averages the outer gradients: `plump_dp()` (DiLoCo), or any compressor over the same axis; its residual
        carries what was not sent over to the next exchange. `sparse_loco` has the settings of SparseLoCo.
      outer: an optimizer for the outer gradients; by default SGD with learning rate 0.7 and Nesterov momentum 0.9.
    """

    steps: int = 20
    _: KW_ONLY
    exchange: optax.GradientTransformation = field(compare=False)
    outer: optax.GradientTransformation | None = field(default=None, compare=False)

    name: ClassVar[str] = "local_sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("steps", self.steps, 1, "1 exchanges in every step")

    @property
    def period(self) -> int:
        return self.steps

    @property
    def instead_of_checksum(self) -> str:
        return "Pass it to exchange="

    def global_model(self, state: ExchangeState, like: Any) -> Any:
        return jax.tree.map(lambda anchor, leaf: anchor.astype(leaf.dtype), state.memory.anchor, like)

    def init_chosen(self, params: Any) -> ExchangeState:
        plan_layout(params, dense_below=0, capacity=lambda n: n)  # for its errors
        anchor = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        inner = self.exchange.init(anchor)
        check_exchange(inner, "exchange of local_sgd")
        memory = Anchored(anchor, inner, (self.outer or _nesterov()).init(anchor))
        return self.first_state(memory)

    def update_chosen(self, updates: Any, state: ExchangeState, params: Any) -> tuple[Any, ExchangeState]:
        self.check_params(params)
        others, old = other_axes(jax.tree.leaves(updates)[0], self.axis_name), state.memory

        def stay() -> tuple[Any, ExchangeState]:
            own = zeros_unless(is_finite_tree(updates), updates)
            return own, vary_rows(state.replace(metrics=ExchangeMetrics.zeros()), others)

        def communicate() -> tuple[Any, ExchangeState]:
            gradient = jax.tree.map(lambda a, p, u: a - (_wide(p) + _wide(u)), old.anchor, params, updates)
            mean, inner = self.exchange.update(gradient, old.exchange, old.anchor)
            metrics = get_exchange(inner).metrics
            change, outer = (self.outer or _nesterov()).update(mean, old.outer, old.anchor)
            ok = metrics.skipped == 0
            anchor = jax.tree.map(lambda a, c: a + jnp.where(ok, c, 0.0), old.anchor, change)
            to_anchor = jax.tree.map(
                lambda a, p: to_varying(jnp.where(ok, a - _wide(p), 0.0).astype(p.dtype), self.axis_name),
                anchor,
                params,
            )
            memory = Anchored(anchor, inner, keep_unless(ok, outer, old.outer))
            return to_anchor, vary_rows(state.replace(metrics=metrics, memory=memory), others)

        if self.steps == 1:
            own, new = communicate()
        else:
            # The usual branch is the one that communicates: bytes are given for an exchange, and how often it comes.
            own, new = lax.cond((state.step + 1) % self.steps != 0, stay, communicate)
        return own, new.replace(step=state.step + 1)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32)


local_sgd = transformation(LocalSgd)
