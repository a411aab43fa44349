"""Slim-DP: a core of significant parameters, and a random explorer."""

from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxcomm import bits, noise
from jaxcomm.collectives import axis_size, check_per_worker
from jaxcomm.collectives.axis import all_gather_same, to_varying
from jaxcomm.layout import plan_layout
from jaxcomm.selectors import select_topk
from jaxcomm.selectors.strata import pick
from jaxcomm.transforms.checks import check_count, check_range, count
from jaxcomm.transforms.local_sgd import local_sgd, vary_rows
from jaxcomm.transforms.plump_dp import plump_dp
from jaxcomm.transforms.sparse import own_row
from jaxcomm.types import Every, ExchangeMetrics, OwnedRows, PerWorker, part_of

UNSENT = ("local", "carry")


class SlimDpState(NamedTuple):
    """State of `slim_dp`.

    Attributes:
      metrics: counts of the last step's exchange; zeros in a step without one.
      every: steps from one exchange to the next.
      step: () int32, the steps so far.
      round: () int32, the communications so far, skipped ones included.
      due: () bool, whether a new core is owed after a skipped communication.
      order: (n,) int32, the coordinates of the core, then the others, ascending each.
      core: float32, the global model in the core, the same on every worker.
      server: (K, others) float32, the global model elsewhere, in that order; a worker's row is valid in its own part.
      delta: (K, n) float32, local updates that were not pushed yet; (K, 0) where a step's own updates are all there is.
    """

    metrics: ExchangeMetrics
    every: Every
    step: jax.Array
    round: jax.Array
    due: jax.Array
    order: jax.Array
    core: jax.Array
    server: OwnedRows
    delta: PerWorker

    def global_model(self, like: Any) -> Any:
        """Returns the global model in the shapes and types of the parameters `like`."""
        flat, unravel = ravel_pytree(like)
        ordered = jnp.concatenate([self.core, self.server.whole()])
        model = jnp.zeros_like(ordered).at[self.order].set(ordered, unique_indices=True)
        return unravel(model.astype(flat.dtype))


def slim_dp(
    alpha: float = 0.3,
    beta: float = 0.15,
    *,
    p: int = 1,
    q: int = 1000,
    c: float | None = None,
    server_rate: float | None = None,
    unsent: str = "local",
    seed: int = 0,
    axis_name: str = "data",
) -> optax.GradientTransformation:
    """Keeps the workers together on the significant parameters, and on a few random others.

    It comes after a whole local optimizer, and takes its updates. Parameters differ between workers; the global model
    is held by all of them together. Each worker, after every p local steps (communication t):

      1. delta = the local updates since the last communication
      2. the communication set: the core, which all share, of beta n coordinates, and the worker's own explorer, of
         (alpha - beta) n others, each equally likely, from (seed, t, worker): one of each of as many strata, which are
         rotated by an offset
      3. push delta there; the global model changes by server_rate * the sum of what was pushed
      4. pull the global model there; elsewhere the worker keeps its own values
      5. if q divides t + 1: push delta everywhere, and then choose as the new core the beta n coordinates of largest
         |w| + c |g|, of the global model w and the mean g of the workers' delta

    The core travels as one all-reduce, and the explorer goes to the owners of its coordinates and back; both ends know
    the coordinates from the seed, so that no index is sent. The first core is the largest |w|.

    A communication in which some delta is not finite is skipped by all: this step's local updates are not applied, and
    `metrics.skipped` is 1. Between communications a local update that is not finite is not applied on its worker.

    Args:
      alpha: size of the communication set over n, 0 < alpha <= 1. 1 is Plump-DP: everything, with local optimizers.
      beta: size of the core over n, 0 <= beta <= alpha. 0 exploits nothing, alpha explores nothing (the paper: fails to
        converge).
      p: local steps from one communication to the next.
      q: communications from one core to the next. The paper: 20,000 to 50,000; runs of a few hundred steps want 10 to
        50. Choosing costs 1.5 times a dense exchange.
      c: weight of the gradient in the significance; mean |w| / mean |g| at the time if not given.
      server_rate: of the global model's updates; 1/K, which averages, if not given.
      unsent: what becomes of delta where it was not pushed. "local" (the paper): it stays in the worker's own
        parameters alone, and is lost when those are pulled over; "carry": it goes on growing until it is pushed.
      seed: of the explorers, the same on all workers.
      axis_name: the axis of workers, of a mesh or of a `jax.vmap`.

    Returns:
      A transformation from each worker's local updates to the updates that lead to its merged model (both different on
      every worker): `optax.chain(optax.sgd(0.1, momentum=0.9), slim_dp())`. Its `update` needs the parameters. Each
      worker receives 2 (K-1)/K * 4 alpha n bytes in a communication. The state costs 8 bytes a parameter, 12 with p > 1
      or "carry".

    Raises:
      ValueError: for arguments out of range; at trace time for an empty tree, leaves that are not real floats, 2^31
        elements or more, no parameters, gradients that were already reduced, and outside the axis of workers.

    References:
      Sun et al., "Slim-DP: A Light Communication Data Parallelism for DNN", AAAI 2018, Algorithm 1.
    """
    holds = isinstance(alpha, Real) and 0 < alpha <= 1
    check_range("alpha", alpha, "above 0 and at most 1", holds, "0.3 sends 30% of the coordinates, 1 is plump_dp")
    holds = isinstance(beta, Real) and 0 <= beta <= alpha
    check_range("beta", beta, f"at least 0 and at most alpha ({alpha})", holds, "alpha / 2 is what the paper uses")
    check_count("p", p, 1, "1 communicates after every step")
    check_count("q", q, 1, "1 chooses a new core at every communication")
    for name, value in (("c", c), ("server_rate", server_rate)):
        holds = value is None or (isinstance(value, Real) and 0 < float(value) < float("inf"))
        check_range(name, value, "a positive number or None", holds, "None takes the default of the docstring")
    check_range("unsent", unsent, "'local' or 'carry'", unsent in UNSENT, "'local' is the paper's")
    if alpha == 1:
        if server_rate is not None:
            raise ValueError(
                f"slim_dp(alpha=1) is Plump-DP, which averages, got server_rate={server_rate}: leave it out, or use "
                "local_sgd with an outer optimizer."
            )
        return local_sgd(p, exchange=plump_dp(axis_name=axis_name), outer=optax.sgd(1.0), axis_name=axis_name)
    keeps_delta = p > 1 or unsent == "carry"

    def core_size(n: int) -> int:
        return round(beta * n)

    def explorer_size(n: int, workers: int) -> int:
        return min(round((alpha - beta) * n / workers), (n - core_size(n)) // workers)

    def choose_core(significance: jax.Array) -> jax.Array:
        """Returns the order (n,): the most significant coordinates, then the others."""
        n, size = significance.size, core_size(significance.size)
        if size == 0:
            return jnp.arange(n, dtype=jnp.int32)
        layout = plan_layout(jax.ShapeDtypeStruct((n,), jnp.float32), dense_below=0, capacity=lambda _: size)
        # Zeros are never selected; here they may have to be.
        positive = jnp.maximum(significance, np.finfo(np.float32).tiny)
        core = select_topk(layout.flatten([positive]), layout)
        others = bits.pack(jnp.arange(layout.n) < n) & ~core
        places = [
            bits.positions(words, bits.rank_of_words(words), count).position
            for words, count in ((core, size), (others, n - size))
        ]
        return jnp.concatenate(places)

    def init(params: Any) -> Any:
        plan_layout(params, dense_below=0, capacity=lambda n: n)
        flat = ravel_pytree(params)[0].astype(jnp.float32)
        order, size = choose_core(jnp.abs(flat)), core_size(flat.size)
        ordered = flat[order]
        return SlimDpState(
            metrics=ExchangeMetrics.zeros(),
            every=Every(p),
            step=jnp.zeros((), jnp.int32),
            round=jnp.zeros((), jnp.int32),
            due=jnp.asarray(False),
            order=order,
            core=ordered[:size],
            server=OwnedRows(ordered[None, size:]),
            delta=PerWorker(jnp.zeros((1, flat.size if keeps_delta else 0), jnp.float32)),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "Slim-DP pulls parameters over the workers' own, got none: call tx.update(updates, state, params)."
            )
        plan_layout(updates, dense_below=0, capacity=lambda n: n)
        check_per_worker(updates, axis_name)
        raveled, unravel = ravel_pytree(updates)
        own_update = raveled.astype(jnp.float32)  # (n,)
        n, workers, me = own_update.size, axis_size(axis_name), lax.axis_index(axis_name)
        size, share = core_size(n), explorer_size(n, workers)
        others, rate = n - size, 1 / workers if server_rate is None else server_rate
        old_delta = own_row(state.delta, n if keeps_delta else 0, axis_name)  # (1, n), or (1, 0)
        server = own_row(state.server, others, axis_name)[0]  # (others,)
        weights = ravel_pytree(params)[0].astype(jnp.float32)
        delta = own_update + old_delta[0] if keeps_delta else own_update
        core, rest = state.order[:size], state.order[size:]

        def explorer(worker: jax.Array, owner: jax.Array) -> jax.Array:
            """Returns where a worker's explorer lies in an owner's part, as places among the others: (e,) int32."""
            (start, part), key = part_of(others, workers, owner), noise.make_key(seed, state.round, worker)
            uniform = noise.uniform(key, share, owner * share)
            offset = noise.integers(key, part[None], workers * share + owner)[0]
            return start + pick(uniform, jnp.arange(share, dtype=jnp.int32), part, share, offset)

        everyone = jnp.arange(workers)
        asked = jax.vmap(lambda owner: explorer(me, owner))(everyone) if share else jnp.zeros((workers, 0), jnp.int32)
        served = jax.vmap(lambda worker: explorer(worker, me))(everyone) if share else asked  # both (K, e)

        def merge(ok: jax.Array, core_values: jax.Array, pulled: jax.Array) -> jax.Array:
            """Returns the update that leads to the pulled values (K, e), and elsewhere to the worker's own."""
            where = jnp.concatenate([core, rest[asked.reshape(-1)]])
            values = jnp.concatenate([core_values, pulled.reshape(-1)])
            return jnp.where(ok, own_update.at[where].set(values - weights[where]), 0.0)

        def push_set() -> tuple[jax.Array, SlimDpState]:
            # A delta that is not finite anywhere tells all workers by NaN, one that might make a sum infinite by its
            # size. The maximum alone would not do: compiled by XLA for a CPU, it may lose a NaN.
            largest = jnp.where(jnp.isfinite(delta).all(), jnp.max(jnp.abs(delta)), jnp.nan)
            sums = lax.psum(jnp.append(delta[core], largest), axis_name)
            ok = jnp.isfinite(sums).all()
            core_values, new_server, pulled = state.core + rate * sums[:-1], server, jnp.zeros((workers, 0))
            if share:
                arrived = lax.all_to_all(delta[rest[asked]], axis_name, 0, 0)  # (K, e), worker i's in row i
                new_server = server.at[served.reshape(-1)].add(rate * arrived.reshape(-1))
                pulled = lax.all_to_all(new_server[served], axis_name, 0, 0)  # (K, e), as asked
            carried = jnp.zeros_like(old_delta)
            if unsent == "carry":
                carried = delta.at[core].set(0.0).at[rest[asked.reshape(-1)]].set(0.0)[None]
            new_state = state._replace(
                metrics=count(ok, workers * (size + workers * share)),
                core=jnp.where(ok, core_values, state.core),
                server=OwnedRows(jnp.where(ok, new_server, server)[None]),
                delta=PerWorker(jnp.where(ok, carried, old_delta)),
            )
            return merge(ok, core_values, pulled), new_state

        def push_everything() -> tuple[jax.Array, SlimDpState]:
            sums = lax.psum(delta, axis_name)  # (n,)
            core_values, new_server = state.core + rate * sums[core], server + rate * sums[rest]
            most = -(-others // workers)
            own = lax.dynamic_slice(jnp.pad(new_server, (0, most)), (part_of(others, workers, me)[0],), (most,))
            gathered = all_gather_same(own, axis_name)  # (K, most)
            parts = [gathered[j, : part_of(others, workers, j)[1]] for j in range(workers)]
            ordered = jnp.concatenate([core_values, *parts])  # the new global model, the same on every worker
            ok = jnp.isfinite(sums).all() & jnp.isfinite(ordered).all()
            model = jnp.zeros(n, jnp.float32).at[state.order].set(ordered, unique_indices=True)
            gradient = jnp.abs(sums / workers)
            mean_w, mean_g = jnp.mean(jnp.abs(model)), jnp.mean(gradient)
            weight = c if c is not None else jnp.where(mean_g > 0, mean_w / jnp.where(mean_g > 0, mean_g, 1.0), 0.0)
            order = choose_core(jnp.abs(model) + weight * gradient)
            reordered = model[order]
            new_state = state._replace(
                metrics=count(ok, workers * n),
                due=~ok,
                order=jnp.where(ok, order, state.order),
                core=jnp.where(ok, reordered[:size], state.core),
                server=OwnedRows(jnp.where(ok, reordered[size:], server)[None]),
                delta=PerWorker(jnp.where(ok, 0.0, old_delta)),
            )
            return merge(ok, core_values, ordered[size:][asked]), new_state

        def settle(own: jax.Array, new_state: SlimDpState) -> tuple[jax.Array, SlimDpState]:
            return to_varying(own, axis_name), vary_rows(new_state, axis_name, own_update)

        def communicate() -> tuple[jax.Array, SlimDpState]:
            is_full = state.due | ((state.round + 1) % q == 0)
            own, new_state = lax.cond(is_full, lambda: settle(*push_everything()), lambda: settle(*push_set()))
            return own, new_state._replace(round=state.round + 1)

        def stay() -> tuple[jax.Array, SlimDpState]:
            ok = jnp.isfinite(delta).all()
            kept = jnp.where(ok, delta, old_delta[0])[None]
            own = jnp.where(ok, own_update, 0.0)
            return settle(own, state._replace(metrics=ExchangeMetrics.zeros(), delta=PerWorker(kept)))

        # The usual branch is the one that communicates: bytes are given for an exchange, and how often it comes.
        own, new_state = communicate() if p == 1 else lax.cond((state.step + 1) % p != 0, stay, communicate)
        return unravel(own.astype(raveled.dtype)), new_state._replace(step=state.step + 1)

    return optax.GradientTransformation(init, update)
