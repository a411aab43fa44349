"""A worker: local steps, and beside them the round that they belong to."""

import math
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxcomm.checks import check_range
from jaxcomm.rounds import records
from jaxcomm.rounds.clock import Clock, T, Waiting
from jaxcomm.rounds.hosts import Hosts
from jaxcomm.rounds.log import Log, News
from jaxcomm.rounds.model import Global, Model, Packing, Unsent, number_of
from jaxcomm.steps.batch import check_batch, row_axes
from jaxcomm.types import Params, PyTree

POLL = 0.005  # seconds between two looks at a task that a step waits for
SLACK = 1.2  # of a round's usual time: a worker is slow if its steps would take longer
FIRST = 3  # steps after which a worker knows how long they take
# (params, local state, batch) -> (params, local state, metrics)
LocalStep = Callable[[Params, Any, Any], tuple[Params, Any, Mapping[str, Any]]]


@dataclass
class Sending:
    """A payload on its way.

    Attributes:
      header: what it says of itself.
      packing: its words, and what is unsent if it counts or if it does not.
      number: the round into which it is put; None before.
      digest: of its object.
      is_withdrawn: whether it must not be put any more.
    """

    header: records.Header
    packing: Packing
    number: int | None = None
    digest: str = ""
    is_withdrawn: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)  # a payload is put, or withdrawn: never both

    def payload(self, number: int) -> bytes | None:
        """Makes the object for a round; None if it must not be put."""
        raw = records.write_payload(self.header, np.asarray(self.packing.words))
        digest = records.digest(raw)
        with self._lock:
            if self.is_withdrawn:
                return None
            self.number, self.digest = number, digest
        return raw

    def withdraw(self) -> bool:
        """Keeps the payload from being put; returns False if it is put already, or about to be."""
        with self._lock:
            self.is_withdrawn = self.number is None
            return self.is_withdrawn


class Worker:
    """One of the programs that train a model together; `jaxcomm.rounds` makes it.

    Attributes:
      name: its name in the store.
      round: the number of the round that it works on; as many are over.
      counted: how many of its payloads counted.
      late: how many did not; what they held is in later ones.
      stopped: whether `stop` has said so: it takes no more steps.
    """

    def __init__(
        self,
        log: Log,
        model: Model,
        clock: Clock,
        step: LocalStep,
        params: Params,
        local: PyTree,
        *,
        batch_axis: PyTree,
        overlap: int,
        every: int,
        settings: Mapping[str, Any],
        stop: Callable[[], bool] | None = None,
    ):
        self.name, self.round, self.counted, self.late = log.name, 0, 0, 0
        self._log, self._model, self._clock, self._local_step = log, model, clock, step
        self._batch_axis, self._overlap, self._every, self._settings = batch_axis, overlap, every, settings
        self._own = self._sent = jax.tree.map(jnp.copy, params)  # a step may donate them
        self._local, self._global, self._unsent = local, model.first(params), model.unsent(params)
        self._sending: Sending | None = None
        self._task: Future[News] | None = None
        self._saving: list[Future[None]] = []
        self._rows, self._steps, self._ahead, self._missed = 0.0, 0, 0, 0
        self._paces: list[float] = []
        self._last: Any = None
        self._has_left, self._hosts = False, Hosts()
        self._stop, self.stopped = stop, False

    # What the user calls.

    def __call__(self, batch: PyTree) -> dict[str, Any]:
        """Takes a local step, and what the round asks for.

        It waits for the round only where the next step may not run ahead of it. Every array of the batch has the
        worker's own rows along `batch_axis`; their number is the step's weight.

        Returns:
          The step's metrics, and `round`, the number of the round that comes next. Only that if the worker is stopped,
          and has taken no step.

        Raises:
          ValueError: for arrays of different numbers of rows, or none; if the store refuses, or holds what no worker
            wrote.
          TimeoutError: if the store fails for `timeout` seconds.
        """
        return self._clock.run(self.advance(batch))

    @property
    def done(self) -> bool:
        """Whether all rounds of the run are over."""
        return self._log.total is not None and self.round >= self._log.total

    @property
    def taken(self) -> int:
        """Local steps of the round that it works on, taken so far; some may be from before the last round was over."""
        return self._steps

    @property
    def local(self) -> Any:
        """The local state of this worker: the optimizer's, or what `step` returned last."""
        return self._local

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes of objects "sent" and "received" so far, and the number of "requests" to the store."""
        return dict(self._log.objects.traffic)

    @property
    def params(self) -> Params:
        """The global model before this round, in the types of the parameters; equal on all workers in the round."""
        return jax.tree.map(lambda g, p: g.astype(p.dtype), self._global.params, self._own)

    def digest(self) -> str:
        """Returns the digest of the global state, parameters and outer optimizer; equal on all workers in the round."""
        return self._model.digest(self._global)

    def leave(self, wait: float = 60.0, *, keep: bool = True) -> None:
        """Ends the work.

        Args:
          wait: the most seconds to wait for the worker's round. An upload that has begun is waited for in any case.
          keep: whether what is not sent stays in the store, where a worker of the same name takes it up: 8 bytes a
            parameter, and 8 more if the round is not over. Pass False at the end of training.
        """
        self._clock.run(self.depart(wait, keep))

    # The same, as work that a clock runs.

    def begin(self) -> Waiting[None]:
        """Agrees on the settings, takes up what a worker of this name has left, and reads the global state."""
        self._model.compile(self._global, self._own, self._unsent)
        hosts, objects, path = self._hosts, self._log.objects, records.worker_path(self.name)
        yield from hosts.first(self._log.agree(self._settings))
        if not hosts.flag(bool((yield from hosts.first(objects.sizes("snapshots"))))):
            snapshot = self._snapshot(0, self._global)
            yield from hosts.first(objects.create(records.snapshot_path(0), snapshot))
        raw = yield from hosts.first(objects.read(path))
        if hosts.flag(raw is not None):
            yield from self._recall(hosts.parts([raw or b""])[0])
            if self._has_left:
                return
        yield from self._take(hosts.news((yield from hosts.first(self._log.resume()))))
        yield from hosts.first(objects.remove([path]))  # only now: until here, another life could take it up

    def advance(self, batch: PyTree) -> Waiting[dict[str, Any]]:
        """Does `__call__`."""
        check_batch(batch, 1, batch_axis=self._batch_axis)
        axes = row_axes(batch, self._batch_axis)
        rows = [np.shape(x)[axis] for x, axis in zip(jax.tree.leaves(batch), axes, strict=True) if axis is not None]
        check_range("batch", rows, "arrays of at least one row", bool(rows) and rows[0] > 0, "Pass the worker's rows")
        rule = "one that has not left, in a run that is not over"
        check_range("worker", self.name, rule, not self._has_left and not self.done, "Stop when worker.done")
        yield from self._settle(self._overlap)
        if self._stop is not None and self._hosts.flag(self._is_stopped()):
            self.stopped = True
            return {"round": self.round}
        began = self._clock.now()
        self._own, self._local, metrics = self._local_step(self._own, self._local, batch)
        self._rows, self._steps = self._rows + rows[0], self._steps + 1
        self._ahead += self._sending is not None
        jax.block_until_ready(self._last)  # of the step before: one step is always under way
        self._last = metrics
        yield 0.0
        self._paces = [*self._paces, self._clock.now() - began][-self._log.steps :]
        if self._sending is None and not self.done and self._hosts.flag(self._is_over()):
            yield from self._send()
            if self._overlap == 0:
                yield from self._settle(0)
        return {**metrics, "round": self.round}

    def depart(self, wait: float, keep: bool) -> Waiting[None]:
        """Does `leave`."""
        if self._has_left:
            return
        until = self._clock.now() + wait
        while self._task is not None and not self._task.done() and self._clock.now() < until:
            yield POLL
        if self._hosts.flag(self._task is not None and self._task.done()):
            yield from self._settle(0)
        for task in self._saving:
            while not task.done():
                yield POLL
            task.result()
        self._has_left, sending = True, self._sending
        unsent, base = self._unsent, self._global.params
        if sending is not None:
            base = self._sent
            if self._hosts.flag(sending.withdraw()):
                unsent, sending = sending.packing.late, None
            else:  # the round decides on it later, once it is there: what came after it is kept apart
                while self._task is not None and not self._task.done() and self._log.put != sending.number:
                    yield POLL
                unsent = unsent._replace(rows=0.0)
        if self._rows:
            change = self._model.change(base, self._own)
            if self._hosts.flag(bool(self._model.is_finite(change))):
                unsent = self._model.joined(unsent, change, self._rows)
            else:
                self._warn_of_change("it is lost")
        is_empty = sending is None and unsent.residual is None and not unsent.rows
        if keep and not is_empty:
            memo = self._memo(unsent, sending)
            yield from self._hosts.first(self._log.objects.create(records.worker_path(self.name), memo))

    # Parts of them.

    def _is_stopped(self) -> bool:
        """Asks `stop`, in this process."""
        return self._stop is not None and self._stop()

    def _unless_stopped(self, work: Waiting[T]) -> Waiting[T | None]:
        """Does work until it is done, or the worker is stopped: then returns None."""
        while not self._is_stopped():
            try:
                seconds = next(work)
            except StopIteration as end:
                return end.value
            yield seconds
        return None

    def _is_over(self) -> bool:
        """Returns whether the round's local steps are done: all, or as many as a slow worker can in the usual time.

        That is told by the median of its steps, so that neither compiling nor a step that was held up counts.
        """
        steps, previous = self._log.steps, self._log.previous
        if previous is not None and len(self._paces) >= min(FIRST, steps):
            usual, full = previous.usual_seconds(steps), self._pace() * steps
            if full > SLACK * usual:
                steps = max(1, int(steps * usual / full))
        return self._steps >= steps

    def _pace(self) -> float:
        """Returns the seconds of a local step, the median of a round's."""
        return float(np.median(self._paces))

    def _warn_of_change(self, what: str) -> None:
        warnings.warn(
            f"Worker {self.name!r} has a change that is not finite in round {self.round}: {what}.", stacklevel=3
        )

    def _send(self) -> Waiting[None]:
        """Packs what is not sent, and takes part in the round.

        A change that is not finite is dropped before it is announced, as others would wait for it.
        """
        yield 0.0
        anchor, state = self._global.params, self._model.digest(self._global)
        packing = self._model.pack(anchor, self._own, self._rows, self._unsent, self.round, number_of(self.name))
        header = records.Header(self.name, self.round, state, packing.late.rows, self._steps, self._pace())
        self._rows, self._steps, self._ahead = 0.0, 0, 0
        if not self._hosts.flag(bool(packing.ok)):
            self._warn_of_change("it is not sent, and the worker goes on from the global model")
            self._own = self._sent = self.params
            news = yield from self._hosts.first(self._log.follow(self.round))
            return (yield from self._take(self._hosts.news(news)))
        self._sending = Sending(header, packing)
        self._sent = jax.tree.map(jnp.copy, self._own)
        if self._hosts.is_first:
            work = self._log.take_part(self.round, self._missed, self._sending.payload)
            self._task = self._clock.start(work)

    def _settle(self, ahead: int) -> Waiting[None]:
        """Takes what the log has of this round; waits for it if as many local steps were done meanwhile."""
        while self._sending is not None:
            task = self._task
            while task is not None and not task.done() and self._ahead >= ahead and not self._is_stopped():
                yield POLL
            if not self._hosts.flag(task is not None and task.done()):
                return
            self._task = None
            yield from self._take(self._hosts.news(None if task is None else task.result()))

    def _take(self, news: News) -> Waiting[None]:
        """Settles what became of the payload, takes the outer steps of all rounds, and continues from there."""
        sending, self._sending = self._sending, None
        if sending is not None:
            self._settle_payload(sending, news)
        state, number, is_read = self._global, self.round, news.snapshot is not None
        if news.snapshot is not None:
            number, state = news.snapshot[0], self._read(*news.snapshot)
        for manifest, words in news.rounds:
            if (digest := self._model.digest(state)) != manifest.state and manifest.state:
                what = f"Worker {self.name!r} has another global state before round {manifest.number}, {digest}, than "
                what += f"the log, {manifest.state}: another library, or a fault of its hardware"
                if not is_read:
                    warnings.warn(f"{what}. It starts again from the newest snapshot.", stacklevel=2)
                    news = self._hosts.news((yield from self._hosts.first(self._log.resume())))
                    return (yield from self._take(news))
                warnings.warn(f"{what}, even after the newest snapshot.", stacklevel=2)
            state, number = self._model.apply(state, manifest, words), manifest.number + 1
            turn = manifest.members[number // self._every % len(manifest.members)]
            if number % self._every == 0 and turn.header.worker == self.name and manifest.state in ("", digest):
                self._saving = [task for task in self._saving if not task.done() or task.result()]
                snapshot = self._snapshot(number, state)
                if self._hosts.is_first:
                    self._saving.append(self._clock.start(self._log.save(number, snapshot)))
            yield 0.0
        self._own = self._model.rebase(state.params, self._own, self._sent)
        self._global, self.round, self._sent = state, number, self._own

    def _settle_payload(self, sending: Sending, news: News) -> None:
        """Keeps what is unsent, by what the manifest says of the payload."""
        digest = self._hosts.parts([sending.digest.encode()])[0].decode()
        if news.own is not None and news.own.find(digest):
            self._unsent, self._missed, self.counted = sending.packing.counted, 0, self.counted + 1
        else:
            self._unsent, self.late = sending.packing.late, self.late + 1
            reason = None if news.own is None else news.own.refused.get(self.name)
            self._missed += news.own is not None and reason is None  # a longer grace would not help one that is refused
            if news.own is not None and reason:
                warnings.warn(
                    f"The payload of {self.name!r} in round {news.own.number} was refused by {news.own.writer!r}: "
                    f"{reason}. What it held goes into the next; a worker of another name starts without it.",
                    stacklevel=2,
                )

    def _snapshot(self, number: int, state: Global) -> bytes:
        """Writes a global state."""
        record = {"round": number, "state": self._model.digest(state)}
        return records.join(record, [_on_host(leaf) for leaf in jax.tree.leaves(state)])

    def _read(self, number: int, raw: bytes) -> Global:
        """Reads a global state, to where the present one is."""
        try:
            record, body = records.split(raw)
            leaves = records.split_arrays(body, jax.tree.leaves(self._model.like))
            if record.get("round") != number:
                raise records.DamagedError(f"round {record.get('round')}")
        except records.DamagedError as error:
            raise ValueError(
                f"A snapshot must be one that a worker wrote; got {error} in {records.snapshot_path(number)!r}. "
                "Somebody else writes to the store: start a new run from a checkpoint."
            ) from None
        return _placed(leaves, self._global)

    def _memo(self, unsent: Unsent, sending: Sending | None) -> bytes:
        """Writes what is unsent, and a payload that waits for its round."""
        record: dict[str, Any] = {"weight": unsent.weight, "rows": unsent.rows, "sending": None}
        trees = [unsent.residual, unsent.change]
        if sending is not None:
            counted, late = sending.packing.counted, sending.packing.late
            trees += [counted.residual, late.change]
            at = {"digest": sending.digest, "weight": counted.weight, "rows": late.rows, "number": sending.number}
            record["sending"] = at
        return records.join(record, [_on_host(leaf) for leaf in jax.tree.leaves(trees)])

    def _recall(self, raw: bytes) -> Waiting[None]:
        """Reads what `_memo` wrote; waits for the round of a payload that was on its way, unless it is stopped."""
        empty = self._unsent
        try:
            record, body = records.split(raw)
            at = record["sending"]
            trees = [empty.residual, empty.change] * (1 if at is None else 2)
            placed = _placed(records.split_arrays(body, jax.tree.leaves(trees)), trees)
            unsent = Unsent(placed[0], float(record["weight"]), placed[1], float(record["rows"]))
            at = None if at is None else (int(at["number"]), str(at["digest"]), float(at["weight"]), float(at["rows"]))
        except (records.DamagedError, KeyError, TypeError) as error:
            raise ValueError(
                f"What a worker has left must be as it wrote it; got {error!r} in {records.worker_path(self.name)!r}. "
                "Remove the object, or take another name."
            ) from None
        if at is not None:
            number, digest, weight, rows = at
            manifest = yield from self._hosts.first(self._unless_stopped(self._log.outcome(number)))
            if self._hosts.flag(manifest is None):
                self._has_left = self.stopped = True  # what it has left stays there
                return
            if self._hosts.flag(manifest is not None and manifest.find(digest) is not None):
                unsent = unsent._replace(residual=placed[2], weight=weight)
            else:
                unsent = self._model.joined(unsent, placed[3], rows)
        is_finite = bool(self._model.is_finite((unsent.residual, unsent.change)))
        if self._hosts.flag(is_finite and math.isfinite(unsent.weight + unsent.rows)):
            self._unsent = unsent
        else:  # no payload that holds it would ever count
            warnings.warn(
                f"What worker {self.name!r} has left is not finite: it is dropped, and the worker goes on from the "
                "global model.",
                stacklevel=2,
            )


def _on_host(leaf: PyTree) -> np.ndarray:
    """Returns an array, gathered from all processes of this worker if they hold parts of it."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)


def _placed(leaves: Any, like: PyTree) -> Any:
    """Puts arrays where those of a tree are."""
    old, treedef = jax.tree.flatten(like)
    return treedef.unflatten([jax.device_put(new, leaf.sharding) for new, leaf in zip(leaves, old, strict=True)])
