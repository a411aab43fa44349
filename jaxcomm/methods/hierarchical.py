"""Two levels of links: dense over the fast ones inside a group, compressed over the slow ones across groups."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcomm.checks import check_range
from jaxcomm.collectives import axis_size
from jaxcomm.collectives.axis import to_varying
from jaxcomm.collectives.messages import all_gather_same, sum_scatter
from jaxcomm.exchange import (
    Exchange,
    ExchangeState,
    check_exchange,
    clips_in,
    get_exchange,
    keep_unless,
    methods_in,
    transformation,
    zeros_unless,
)
from jaxcomm.kernels.numerics import is_finite_narrow, wide_type
from jaxcomm.kernels.scopes import EXCHANGE
from jaxcomm.layout import plan_layout
from jaxcomm.types import ExchangeMetrics, Params, PyTree, from_shards, in_shards


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Averages densely inside a group of workers, and by a compressed exchange across the groups.

    For groups with fast links inside, such as the GPUs of a host or the chips of a TPU slice. Each of the I workers of
    a group handles a share of every tensor, 1/I of it:

      1. reduce-scatter inside: every worker has the group's mean of its share
      2. the exchange of that share alone, across the groups
      3. all-gather inside: every worker has the whole mean

    So the slow links carry each coordinate once per group, not once per worker. If the exchange of any share is
    skipped, all are, and nothing but the metrics changes, not even the step count.

    For a mesh with both axes: `make_train_step(..., axis_name=(across, inside))`. Inside, each worker receives 2
    (I-1)/I * 4 bytes a parameter, and 2 (I-1)/I * 20 bytes of counts; across, see
    `wire_report(...).received_over(across)`. Received: those of the exchange for n/I parameters, across groups. Memory:
    that of the exchange for n/I parameters. What differs
    between workers stays a row per worker, and what the exchange replicates becomes a row per share.

    Attributes:
      exchange: any exchange of gradients, made with `axis_name=across`. It sees only shares: a tensor of N elements
        appears as N / I elements (`dense_below`, thresholds and blocks apply to these).
      inside: the axis of fast links.
      across: the axis of slow links.
    """

    exchange: optax.GradientTransformation = field(compare=False)
    _: KW_ONLY
    inside: str = "data"
    across: str = "slice"

    keeps_residual: ClassVar[bool] = False
    start_remedy: ClassVar[str | None] = "Pass start= to the exchange inside"
    has_positions: ClassVar[bool] = False  # the exchange of the shares has them

    def __post_init__(self) -> None:
        differs = self.across != self.inside
        check_range("across", self.across, "another axis than inside", differs, "Name both axes of the mesh")
        super().__post_init__()

    @property
    def axes(self) -> tuple[str, ...]:
        return self.across, self.inside

    @property
    def checksum_remedy(self) -> str:
        return "Pass it to exchange="

    def init_chosen(self, params: Params) -> ExchangeState:
        # Zeros of a share's shape are enough: gradient exchanges do not read the parameters' values in `init`.
        rows, sizes = self._shares(params)
        inner = self.exchange.init(jax.tree.map(lambda size: jnp.zeros(size, rows.dtype), sizes))
        exchange = check_exchange(inner, "exchange of hierarchical", (self.across,))
        rule = "without clip=, which would clip each share by a norm of its own"
        check_range("exchange", clips_in(exchange), rule, not clips_in(exchange), "Clip before hierarchical")
        names = [method.name for method in methods_in(exchange) if method.needs_matrices]
        check_range("exchange", names, "of vectors, which shares are", not names, "Take topk, or dct_dp")
        return self.first_state(in_shards(inner, (self.inside,)))

    def update_chosen(self, updates: PyTree, state: ExchangeState, params: Params) -> tuple[Any, ExchangeState]:
        rows, sizes = self._shares(self._wait_for_group(updates))
        with jax.named_scope(EXCHANGE):
            share = sum_scatter(rows, self.inside) / axis_size(self.inside)  # (T,)
        own_params = None
        if params is not None:
            own_params = _cut(self._shares(params)[0][lax.axis_index(self.inside)], sizes)
        old = to_varying(from_shards(state.memory, (self.inside,)), self.inside)
        means, new = self.exchange.update(_cut(share, sizes), old, own_params)
        counts = jnp.stack([jnp.asarray(value, jnp.float32) for value in get_exchange(new).metrics])
        with jax.named_scope(EXCHANGE):
            n_sent, overflow, skipped, drained = lax.psum(counts, self.inside)
        ok = skipped == 0
        mean = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(means)])
        gathered = all_gather_same(jnp.where(ok, mean, 0.0), self.inside)  # (I, T)
        whole = jax.tree.map(_whole, _cut(gathered, sizes), updates)
        ok &= is_finite_narrow(jax.tree.leaves(whole))
        metrics = ExchangeMetrics.of(ok, n_sent, overflow, drained=drained > 0)
        memory = in_shards(keep_unless(ok, new, old), (self.inside,))
        new = state.replace(metrics=metrics, step=state.step + ok.astype(jnp.int32), memory=memory)
        return zeros_unless(ok, whole), new

    def _wait_for_group(self, updates: PyTree) -> Any:
        """Returns the updates once every worker of the group has its own, by an all-reduce of one number.

        Gloo's reduce-scatter fails if another worker is more than 30 s late, whatever timeout is set
        (jax-ml/jax#40831). Its all-reduce waits.
        """
        first = jax.tree.leaves(updates)[0].reshape(-1)[:1]
        with jax.named_scope(EXCHANGE):
            count = lax.psum(jnp.isfinite(first).all().astype(jnp.float32), self.inside)
        arrived = count <= axis_size(self.inside)  # always true, but XLA does not know and keeps the order
        return jax.tree.map(lambda update: jnp.where(arrived, update, 0), updates)

    def _shares(self, tree: PyTree) -> tuple[jax.Array, Any]:
        """Returns a tree as (I, T), row i being share i, and the size of a share of each leaf.

        It is float32, or float64 for a tree with float64 in it.
        """
        plan_layout(tree, dense_below=0, capacity=lambda n: n, compress=lambda _: False)  # for its errors
        size = axis_size(self.inside)
        dtype = wide_type(*(jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)))
        rows = []
        for leaf in jax.tree.leaves(tree):
            flat = leaf.reshape(-1).astype(dtype)
            rows.append(jnp.pad(flat, (0, -flat.size % size)).reshape(size, -1))
        return jnp.concatenate(rows, axis=1), jax.tree.map(lambda leaf: -(-leaf.size // size), tree)


def _cut(share: jax.Array, sizes: Any) -> Any:
    """Cuts shares (..., T) into a tree of those of each leaf."""
    counts, treedef = jax.tree.flatten(sizes)
    return treedef.unflatten(jnp.split(share, np.cumsum(counts)[:-1], axis=-1))


def _whole(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Joins the shares (I, size) of a leaf."""
    return rows.reshape(-1)[: like.size].reshape(like.shape).astype(like.dtype)


hierarchical = transformation(Hierarchical)
