"""Slim-DP: a core of significant parameters, and a random explorer."""

from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxcomm.checks import Seed, check_range, count, number, one_of, positive
from jaxcomm.collectives import axis_size
from jaxcomm.collectives.axis import other_axes, to_varying
from jaxcomm.collectives.messages import all_gather_same, all_to_all, sum_of
from jaxcomm.exchange import ExchangeState, on_all_stages, own_row, transformation, zeros_unless
from jaxcomm.kernels import bits, noise
from jaxcomm.kernels.numerics import is_applicable_tree
from jaxcomm.kernels.scopes import EXCHANGE
from jaxcomm.kernels.vectors import Stored
from jaxcomm.layout import plan_layout
from jaxcomm.methods.local_sgd import LocalExchange, local_sgd
from jaxcomm.methods.plump_dp import plump_dp
from jaxcomm.selectors import select_topk
from jaxcomm.selectors.strata import pick
from jaxcomm.state import vary_rows
from jaxcomm.types import ExchangeMetrics, Params, PerWorker, PyTree, join_parts, part_of

Unsent = Literal["local", "carry"]


class SlimMemory(NamedTuple):
    """Memory of `slim_dp`.

    Attributes:
      round: () int32, the communications so far, skipped ones included.
      due: () bool, whether a new core is owed after a skipped communication.
      order: (n,) int32, the coordinates of the core, then the others, each in ascending order.
      core: float32, the global model in the core; replicated.
      server: (K, others) float32, the global model elsewhere, in that order; a worker's row is valid in its own part.
      delta: (K, n) float32, local updates that were not pushed yet; (K, 0) if none wait for more than one step.
    """

    round: jax.Array
    due: jax.Array
    order: jax.Array
    core: jax.Array
    server: PerWorker
    delta: PerWorker


@dataclass(frozen=True)
class SlimDp(LocalExchange):
    """Synchronises the workers on the significant parameters, and on a few random others.

    It comes after a complete local optimizer, and takes its updates. Parameters differ between workers, who hold the
    global model jointly. Each worker, after every p local steps (communication t):

      1. delta = the local updates since the last communication
      2. the communication set: the core of beta n coordinates, which all share, and the worker's own explorer of
         (alpha - beta) n others, each equally likely, from (seed, t, worker): one in each of as many strata, rotated by
         a random offset
      3. push delta there; the global model changes by server_rate * the sum of what was pushed
      4. pull the global model there; elsewhere the worker keeps its own values
      5. if q divides t + 1: push delta everywhere, and then choose as the new core the beta n coordinates with the
         largest |w| + c |g|, where w is the global model and g the mean of the workers' delta

    The core travels by one all-reduce. The explorer goes to the owners of its coordinates and back; both ends know the
    coordinates from the seed, so that no index is sent. The first core is the largest |w|. If some delta is not finite,
    all workers skip the communication.

    `jc.chain(optax.sgd(0.1, momentum=0.9), jc.slim_dp())`. Received: 2 (K-1)/K * 4 alpha n bytes,
    once in `p` steps. Memory: 8 bytes a parameter, 12 with p > 1 or "carry".

    Source: Sun et al., "Slim-DP: A Light Communication Data Parallelism for DNN", AAAI 2018, Algorithm 1.

    Attributes:
      alpha: communication set as a fraction of n, 0 < alpha <= 1. 1 is Plump-DP: everything, with local optimizers.
      beta: core as a fraction of n, 0 <= beta <= alpha. 0 exploits nothing, alpha explores nothing (the paper: fails to
        converge).
      p: local steps from one communication to the next.
      q: communications from one core to the next. The paper: 20,000 to 50,000; use 10 to 50 for runs of a few hundred
        steps. Choosing a core costs 1.5 times a dense exchange.
      c: weight of the gradient in the significance; by default mean |w| / mean |g| at that time.
      server_rate: factor on what is pushed to the global model; by default 1/K, which averages.
      unsent: what becomes of delta where it was not pushed. "local" (the paper): it stays in the worker's own
        parameters alone, and is overwritten by a later pull; "carry": it accumulates until it is pushed.
      seed: seed of the explorers, the same on all workers.
    """

    alpha: Annotated[
        float,
        number("above 0 and at most 1", lambda x: 0 < x <= 1, "0.3 sends 30% of the coordinates, 1 is plump_dp"),
    ] = 0.3
    beta: float = 0.15
    _: KW_ONLY
    p: Annotated[int, count(1, "1 communicates after every step")] = 1
    q: Annotated[int, count(1, "1 chooses a new core at every communication")] = 1000
    c: Annotated[float | None, positive("None takes the default of the docstring", or_none=True)] = None
    server_rate: Annotated[float | None, positive("None takes the default of the docstring", or_none=True)] = None
    unsent: Annotated[Unsent, one_of(get_args(Unsent), "'local' is the paper's")] = "local"
    seed: Seed = 0

    start_remedy: ClassVar[str | None] = "Take local_sgd, whose exchange has it"
    has_positions: ClassVar[bool] = False  # in parts: one vector has all parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        alpha, beta = self.alpha, self.beta
        holds = isinstance(beta, Real) and 0 <= beta <= alpha
        check_range("beta", beta, f"at least 0 and at most alpha ({alpha})", holds, "alpha / 2 is what the paper uses")
        rule = "None for slim_dp(alpha=1), which is Plump-DP and averages"
        holds = alpha != 1 or self.server_rate is None
        check_range(
            "server_rate", self.server_rate, rule, holds, "Leave it out, or use local_sgd with an outer optimizer"
        )

    def transform(self) -> optax.GradientTransformation:
        if self.alpha < 1:
            return super().transform()
        exchange = plump_dp(axis_name=self.axis_name)
        return local_sgd(self.p, exchange=exchange, outer=optax.sgd(1.0), axis_name=self.axis_name)

    @property
    def period(self) -> int:
        return self.p

    @property
    def full_every(self) -> int | None:
        return self.q if self.q > 1 else None

    @property
    def keeps_delta(self) -> bool:
        """Whether updates may wait for more than one step until they are pushed."""
        return self.p > 1 or self.unsent == "carry"

    def global_model(self, state: ExchangeState, like: PyTree) -> PyTree:
        flat, unravel = ravel_pytree(like)
        ordered = jnp.concatenate([state.memory.core, join_parts(state.memory.server.rows)])
        model = jnp.zeros_like(ordered).at[state.memory.order].set(ordered, unique_indices=True)
        return unravel(model.astype(flat.dtype))

    def core_size(self, n: int) -> int:
        """Returns how many of n coordinates are in the core: at least one, unless there is none."""
        return max(round(self.beta * n), self.beta > 0)

    def explorer_size(self, n: int, workers: int) -> int:
        """Returns how many coordinates of an explorer are in one owner's part."""
        return min(round((self.alpha - self.beta) * n / workers), (n - self.core_size(n)) // workers)

    def choose_core(self, significance: jax.Array) -> jax.Array:
        """Returns the order (n,): the most significant coordinates, then the others."""
        n, size = significance.size, self.core_size(significance.size)
        if size == 0:
            return jnp.arange(n, dtype=jnp.int32)
        layout = plan_layout(jax.ShapeDtypeStruct((n,), jnp.float32), dense_below=0, capacity=lambda _: size)
        # Zeros are never selected; here they may have to be.
        positive = jnp.maximum(significance, np.finfo(np.float32).tiny)
        core = select_topk(Stored(layout.flatten([positive])), layout).words
        outside = bits.pack(jnp.arange(layout.n, dtype=jnp.int32) < n) & ~core
        places = [
            bits.positions(words, bits.rank_of_words(words), count).position
            for words, count in ((core, size), (outside, n - size))
        ]
        return jnp.concatenate(places)

    def init_chosen(self, params: Params) -> ExchangeState:
        plan_layout(params, dense_below=0, capacity=lambda n: n)  # for its errors
        flat = ravel_pytree(params)[0].astype(jnp.float32)
        order, size = self.choose_core(jnp.abs(flat)), self.core_size(flat.size)
        ordered = flat[order]
        memory = SlimMemory(
            round=jnp.zeros((), jnp.int32),
            due=jnp.asarray(False),
            order=order,
            core=ordered[:size],
            server=self.per_worker(ordered[None, size:], "parts"),
            delta=self.per_worker(jnp.zeros((1, flat.size if self.keeps_delta else 0), jnp.float32)),
        )
        return self.first_state(memory)

    def update_chosen(self, updates: PyTree, state: ExchangeState, params: Params) -> tuple[Any, ExchangeState]:
        self.check_params(params)
        plan_layout(updates, dense_below=0, capacity=lambda n: n)  # for its errors
        old, axis_name, seed = state.memory, self.axis_name, self.seed
        raveled, unravel = ravel_pytree(updates)
        own_update = raveled.astype(jnp.float32)  # (n,)
        n, workers, me = own_update.size, axis_size(axis_name), lax.axis_index(axis_name)
        size, share = self.core_size(n), self.explorer_size(n, workers)
        n_outside, rate = n - size, 1 / workers if self.server_rate is None else self.server_rate
        old_delta = own_row(old.delta, n if self.keeps_delta else 0)  # (1, n), or (1, 0)
        server = own_row(old.server, n_outside)  # (1, n_outside)
        weights = ravel_pytree(params)[0].astype(jnp.float32)
        delta = own_update + old_delta[0] if self.keeps_delta else own_update
        core = old.order[:size]

        def explorer(worker: jax.Array, owner: jax.Array) -> jax.Array:
            """Returns a worker's explorer coordinates in an owner's part, as indices into `server`: (e,) int32."""
            (start, part), key = part_of(n_outside, workers, owner), noise.make_key(seed, old.round, worker)
            uniform = noise.uniform(key, share, owner * share)
            offset = noise.integers(key, part[None], workers * share + owner)[0]
            return start + pick(uniform, jnp.arange(share, dtype=jnp.int32), part, share, offset)

        everyone = jnp.arange(workers, dtype=jnp.int32)
        queries = jax.vmap(lambda owner: explorer(me, owner))(everyone) if share else jnp.zeros((workers, 0), jnp.int32)
        served = jax.vmap(lambda worker: explorer(worker, me))(everyone) if share else queries  # both (K, e)

        def merge(core_values: jax.Array, explored: jax.Array, pulled: jax.Array) -> jax.Array:
            """Returns the update to the global values in the core and where pulled (K, e); elsewhere the local one."""
            # The pulled values come last of all: after them XLA can set both where the update is.
            merged = own_update.at[explored].set(pulled - weights[explored], mode="promise_in_bounds")
            return merged.at[core].set(core_values - weights[core], mode="promise_in_bounds")

        def push_set() -> tuple[jax.Array, jax.Array, ExchangeState]:
            # The sum is not finite if any delta is not, or if the sum over the workers might overflow.
            with jax.named_scope(EXCHANGE):
                sums = sum_of(jnp.append(delta[core], jnp.sum(jnp.abs(delta))), axis_name)
            ok = on_all_stages(jnp.isfinite(jnp.sum(jnp.abs(sums))))
            explored = old.order[size + queries]  # (K, e), coordinates
            core_values = old.core + rate * jnp.where(ok, sums[:-1], 0.0)
            new_server, pulled = server, jnp.zeros((workers, 0), jnp.float32)
            if share:
                with jax.named_scope(EXCHANGE):
                    arrived = all_to_all(delta[explored], axis_name)  # (K, e), worker i's in row i
                changes = jnp.where(ok, rate * arrived, 0.0)
                new_server = server[0].at[served].add(changes, mode="promise_in_bounds")[None]
                with jax.named_scope(EXCHANGE):
                    pulled = all_to_all(new_server[0, served], axis_name)  # (K, e), as asked
            carried = jnp.zeros_like(old_delta)
            if self.unsent == "carry":
                carried = delta.at[core].set(0.0).at[explored].set(0.0)[None]
            metrics = ExchangeMetrics.of(ok, workers * (size + workers * share))
            memory = old._replace(
                core=core_values,
                server=self.per_worker(new_server, "parts"),
                delta=self.per_worker(jnp.where(ok, carried, old_delta)),
            )
            return merge(core_values, explored, pulled), ok, state.replace(metrics=metrics, memory=memory)

        def push_everything() -> tuple[jax.Array, jax.Array, ExchangeState]:
            with jax.named_scope(EXCHANGE):
                sums = sum_of(delta, axis_name)  # (n,)
            core_values, new_server = old.core + rate * sums[core], server[0] + rate * sums[old.order[size:]]
            part_size = -(-n_outside // workers)
            part_values = lax.dynamic_slice(
                jnp.pad(new_server, (0, part_size)), (part_of(n_outside, workers, me)[0],), (part_size,)
            )
            gathered = all_gather_same(part_values, axis_name)  # (K, part_size)
            parts = [gathered[j, : part_of(n_outside, workers, j)[1]] for j in range(workers)]
            ordered = jnp.concatenate([core_values, *parts])  # the new global model, replicated
            ok = on_all_stages(jnp.isfinite(sums).all() & jnp.isfinite(ordered).all())
            model = jnp.zeros(n, jnp.float32).at[old.order].set(ordered, unique_indices=True)
            gradient = jnp.abs(sums / workers)
            mean_w, mean_g = jnp.mean(jnp.abs(model)), jnp.mean(gradient)
            weight = self.c
            if weight is None:
                weight = jnp.where(mean_g > 0, mean_w / jnp.where(mean_g > 0, mean_g, 1.0), 0.0)
            order = self.choose_core(jnp.abs(model) + weight * gradient)
            reordered = model[order]
            metrics = ExchangeMetrics.of(ok, workers * n)
            memory = old._replace(
                due=~ok,
                order=jnp.where(ok, order, old.order),
                core=jnp.where(ok, reordered[:size], old.core),
                server=self.per_worker(jnp.where(ok, reordered[size:], server), "parts"),
                delta=self.per_worker(jnp.where(ok, 0.0, old_delta)),
            )
            explored, pulled = old.order[size + queries], ordered[size + queries]
            return merge(core_values, explored, pulled), ok, state.replace(metrics=metrics, memory=memory)

        def settle(
            merged: jax.Array, ok: jax.Array, new_state: ExchangeState
        ) -> tuple[jax.Array, jax.Array, ExchangeState]:
            return *to_varying((merged, ok), axis_name), vary_rows(new_state, other_axes(own_update, axis_name))

        def communicate() -> tuple[jax.Array, jax.Array, ExchangeState]:
            def everything() -> tuple[jax.Array, jax.Array, ExchangeState]:
                return settle(*push_everything())

            is_full = old.due | ((old.round + 1) % self.q == 0)
            result = everything() if self.q == 1 else lax.cond(is_full, everything, lambda: settle(*push_set()))
            local_update, ok, new_state = result
            return local_update, ok, new_state.replace(memory=new_state.memory._replace(round=old.round + 1))

        def stay() -> tuple[jax.Array, jax.Array, ExchangeState]:
            ok = on_all_stages(is_applicable_tree(own_update) & jnp.isfinite(delta).all())
            delta_row = jnp.where(ok, delta, old_delta[0])[None]
            memory = old._replace(delta=self.per_worker(delta_row))
            return settle(own_update, ok, state.replace(metrics=ExchangeMetrics.zeros(), memory=memory))

        # The usual branch is the one that communicates: reports give the bytes of an exchange, and its interval.
        local_update, ok, new_state = (
            communicate() if self.p == 1 else lax.cond((state.step + 1) % self.p != 0, stay, communicate)
        )
        local_update = zeros_unless(ok, unravel(local_update.astype(raveled.dtype)))
        return local_update, new_state.replace(step=state.step + 1)


slim_dp = transformation(SlimDp)
