"""Makes a worker, and checks its arguments before any work."""

import functools
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jaxcomm.checks import check_count, check_range, check_transformation, positive
from jaxcomm.exchange import Exchange, ExchangeTransformation, keep_unless, leaf_name, zeros_unless
from jaxcomm.kernels.numerics import is_applicable_tree
from jaxcomm.methods.local_sgd import nesterov
from jaxcomm.order import check_outer
from jaxcomm.rounds import records
from jaxcomm.rounds.clock import Clock, WallClock
from jaxcomm.rounds.log import Log
from jaxcomm.rounds.model import Model
from jaxcomm.rounds.store import Objects, open_store
from jaxcomm.rounds.worker import LocalStep, Worker
from jaxcomm.types import Params, PyTree

_ENGINE = ("axis_name", "checksum", "collective", "others", "where")  # fields that say nothing of a payload


def rounds(
    store: Any,
    step: Any,
    params: Params,
    *,
    exchange: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    steps: int = 30,
    quorum: int = 2,
    grace: float | None = None,
    overlap: int = 5,
    local: PyTree = None,
    batch_axis: PyTree = 0,
    worker: str | None = None,
    total: int | None = None,
    every: int = 20,
    limit: float = 100.0,
    settings: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    stop: Callable[[], bool] | None = None,
    clock: Clock | None = None,
) -> Worker:
    """Makes a worker of a training run whose workers are separate programs, and whose rounds are a log in a store.

    `worker = jc.rounds("s3://bucket/run-7", (loss_fn, optax.adamw(3e-4)), params, exchange=jc.topk(0.99))`; then
    `metrics = worker(batch)` for each batch, and at the end `worker.leave()`.

    It is DiLoCo without a process group. In each round, every worker

      1. takes `steps` local steps from the global model, or as many as it can in the round's usual time
      2. writes an object: the change of its parameters, as `exchange` packs it, with what it has not sent before
      3. waits, while it takes up to `overlap` more local steps, until a manifest says which payloads count. The first
         worker that sees a quorum writes it, as soon as all members of the last round, and all others who have
         announced a payload, are there, or after a grace time. It is written once, by a put that fails if there is one
      4. takes the outer step by the mean of these payloads, weighted by their rows, and goes on from there with its own
         later steps

    A payload that came too late, or was refused, is part of the worker's next one: for each worker, rows * change of
    all payloads that count, and of what it has not sent, add up to rows * change of its local steps (for methods with a
    residual and `decay` 1, or without compression; others round). A worker whose payloads are late doubles the grace of
    the rounds that it announces.

    The global state is a function of the log: a worker that joins late, or was away, reads the newest snapshot and the
    payloads since, and has the same bits as all others. `params` is then read for its shapes alone. A worker that finds
    its state to differ (another library, faulty hardware) says so, and starts again from the snapshot; it keeps what it
    has not sent. Of a worker that is killed, that is lost.

    A payload counts if it is whole, finite, of a worker with the same global state, and not far larger than the others.
    Nothing is unpickled. Whoever can write to the store can end training.

    Sent: a payload a round. Received: those of all workers, its own too, a round; a joiner receives a snapshot, the
    float32 parameters and the outer optimizer's state. Memory: 16 bytes a parameter beside the local optimizer, and
    what `exchange` and `outer` keep.

    A worker may be one device, or a mesh of its own: pass sharded `params`.

    Source: Douillard et al., "DiLoCo", 2023, https://arxiv.org/abs/2311.08105; Sarfi et al., "SparseLoCo", 2025,
    https://arxiv.org/abs/2508.15706; "Decoupled DiLoCo", 2026, https://arxiv.org/abs/2604.21428 (quorum, grace and
    weights).

    Args:
      store: a URL (s3://, gs://, az://), a folder that all workers see, or a store of obstore's, which may have
        credentials and other options. It must have conditional puts. Equal on all workers, like every argument up to
        `grace`, and `total`, `every`, `limit` and `settings`.
      step: (loss_fn, optimizer), where loss_fn(params, batch) is the mean loss of the rows; or a function
        (params, local, batch) -> (params, local, dict of metrics), compiled already.
      params: the parameters to start from, float32 or 16 bits; read by the run's first worker alone.
      exchange: packs the change: `topk`, `demo`, `pulse`, `random_k`, `sign`, `quant_dp` or `plump_dp`.
      outer: an optimizer of the mean change; by default SGD with learning rate 0.7 and Nesterov momentum 0.9.
      steps: H, local steps of a round.
      quorum: payloads without which no round ends.
      grace: seconds that a round waits for others after the quorum; None for 1.2 of a round's usual time, in
        which a worker that is out of step with the others comes into step. A dead one costs it once.
      overlap: local steps that a worker may take while its round is under way, below `steps`; 0 waits.
      local: the first local state, if `step` is a function.
      batch_axis: the axis of the rows in every array of a batch, or a tree of axes, None for what has no rows, as class
        weights.
      worker: the worker's name, other than every other worker's; None for one made of host and process. A worker that
        comes back under its old name takes up what it has left.
      total: rounds of the run, after which `worker.done`; None for a run without end.
      every: rounds from one snapshot to the next. Payloads before the last but one are removed.
      limit: the largest norm of a payload that counts, in units of the median of its round.
      settings: what else all workers must have in common, by name, as JSON: the data, the architecture, the learning
        rate. Parameters of other shapes are refused without; other data or another rate are not.
      timeout: seconds for which a request to the store is tried again.
      stop: returns whether the work is to end, as after a signal, and does so from then on. It is asked before every
        step and while the worker waits for a round, which it then does no longer: `worker.stopped`. Call `leave` next.
        Where a worker has several processes, all pass one, and that of the first counts.
      clock: where time passes; None for real time. Tests simulate it.

    Raises:
      ValueError: for arguments out of range, a method that needs a collective's answer to pack a payload, parameters
        that no payload can hold, a missing obstore, a run in the store with other settings (naming the first one that
        differs), and a store that refuses.
    """
    if not isinstance(exchange, ExchangeTransformation):
        check_transformation("exchange", exchange)
        raise ValueError("exchange must be one of jaxcomm's; got another transformation. Pass jaxcomm.topk(0.99), say.")
    method = exchange.method
    if method.period is not None:
        raise ValueError(
            f"exchange must be an exchange of gradients, as rounds have local steps themselves; got {method.name}. "
            "Pass what was its exchange=, and outer= and steps= to rounds."
        )
    method.check_packs()
    if outer is not None:
        check_transformation("outer", outer)
        check_outer(outer, params)
    check_count("steps", steps, 1, "DiLoCo has 500, SparseLoCo 30")
    check_count("quorum", quorum, 1, "1 lets a worker train alone")
    if total is not None:
        check_count("total", total, 1, "None trains without end")
    check_count("every", every, 1, "1 writes a snapshot after every round")
    check_count("overlap", overlap, 0, "0 waits for the round")
    remedy = "A worker cannot be more than a round ahead"
    check_range("overlap", overlap, f"below steps ({steps})", overlap < steps, remedy)
    rule = "a number of seconds of at least 0, or None"
    check_range("grace", grace, rule, grace is None or 0 <= grace < float("inf"), "None follows the round's time")
    positive("It is the most that a payload's norm may be above the median").check("limit", limit)
    positive("It ends a request that the store does not answer").check("timeout", timeout)
    _check_settings(settings)
    name = _own_name() if worker is None else worker
    rule = "1 to 64 letters, digits, - and _, of which the first is a letter or a digit"
    check_range("worker", name, rule, records.is_name(name), "It is part of the names of objects: 'site-a-3', say")
    params = jax.tree.map(jnp.asarray, params)
    model = _model(method, outer, jax.tree.structure(params), tuple(map(jax.typeof, jax.tree.leaves(params))))
    local_step, local = _local_step(step, params, local)
    clock = WallClock() if clock is None else clock
    objects = Objects(open_store(store), clock, timeout)
    log = Log(objects, name, model.n_words, model.norm, quorum, grace, steps, limit, total)
    shapes = {leaf_name(path): str(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes)}
    agreement = {
        "format": 1,
        "exchange": _described(method),
        "outer": model.fingerprint,
        "steps": steps,
        "quorum": quorum,
        "grace": grace,
        "total": total,
        "every": every,
        "limit": limit,
        "params": shapes,
    }
    agreement |= {f"settings[{key!r}]": value for key, value in (settings or {}).items()}
    made = Worker(
        log,
        model,
        clock,
        local_step,
        params,
        local,
        batch_axis=batch_axis,
        overlap=overlap,
        every=every,
        settings=agreement,
        stop=stop,
    )
    clock.run(made.begin())
    return made


def _check_settings(settings: Any) -> None:
    rule, remedy = "values of JSON by name", 'Pass {"data": "c4", "learning rate": 3e-4}, say'
    holds = settings is None or (isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings))
    check_range("settings", settings, rule, holds, remedy)
    try:
        json.dumps(settings and dict(settings), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"settings must be {rule}; got {settings!r}: {error}. {remedy}.") from error


def _own_name() -> str:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()).strip("-")[:48]
    return f"{host or 'worker'}-{os.getpid()}"


def _local_step(step: Any, params: Params, local: PyTree) -> tuple[LocalStep, Any]:
    """Returns the step of (loss_fn, optimizer), or the user's own, and the first local state."""
    if callable(step):
        return cast(LocalStep, step), () if local is None else local
    is_pair = isinstance(step, tuple | list) and len(step) == 2 and callable(step[0])
    rule = "(loss_fn, optimizer), or a function (params, local, batch) -> (params, local, metrics)"
    check_range("step", step, rule, is_pair, "Pass (loss_fn, optax.adamw(3e-4)), say")
    check_range("local", local, "None with (loss_fn, optimizer), which has its own", local is None, "Leave it out")
    loss_fn, optimizer = step
    check_transformation("optimizer", optimizer)

    def take(params: Params, local: PyTree, batch: PyTree) -> tuple[Params, Any, dict[str, Any]]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, new = optimizer.update(gradients, local, params)
        ok = is_applicable_tree(gradients) & is_applicable_tree(updates)
        params = optax.apply_updates(params, zeros_unless(ok, updates))
        return params, keep_unless(ok, new, local), {"loss": loss, "skipped": 1 - ok.astype(jnp.int32)}

    return jax.jit(take, donate_argnums=(0, 1)), jax.jit(optimizer.init)(params)


def _described(method: Exchange) -> str:
    """Returns a method and its settings that decide what a payload is."""
    values = {item.name: getattr(method, item.name) for item in fields(method) if item.name not in _ENGINE}
    return f"{method.name}({', '.join(f'{name}={value!r}' for name, value in sorted(values.items()))})"


@functools.lru_cache(maxsize=8)
def _model(method: Exchange, outer: Any, treedef: Any, types: tuple[Any, ...]) -> Model:
    """Makes a model once for all workers of a process."""
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in types]
    return Model(method, nesterov() if outer is None else outer, treedef.unflatten(shapes))
