"""Workers under a simulated clock, with a store in memory: one thread, and the same events in every run."""

import functools
import hashlib
import heapq
import itertools
from collections import Counter
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import optax
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

import jaxcomm as jc
from jaxcomm.rounds import records
from jaxcomm.rounds.records import Manifest

SHAPES = {"w": (33, 64), "b": (5,)}
EXCHANGE, OUTER = jc.topk(0.9, value_dtype="float32"), optax.sgd(0.5, momentum=0.5)
MOST_SECONDS = 10_000.0


class Work(Future):
    """A generator that a simulated clock runs."""

    def __init__(self, generator, owner):
        super().__init__()
        self.generator, self.owner = generator, owner


class SimClock:
    """Simulated time. Work of one owner ends together."""

    def __init__(self, rng=None):
        self.time, self.queue, self.order = 0.0, [], itertools.count()
        self.spent, self.owner, self.kept, self.rng = 0.0, None, None, rng
        self.moments, self.deaths = Counter(), {}

    def now(self):
        return self.time + self.spent

    def spend(self, seconds):
        """Lets the work that runs now take time."""
        self.spent += seconds

    def start(self, generator, owner=None, at=0.0):
        work = Work(generator, owner or self.owner)
        work.is_program = owner is not None
        self._push(at, work)
        return work

    def run(self, generator):
        """Keeps work for `taken`, so that other work runs beside it."""
        self.kept = generator

    def taken(self):
        """Returns the work that `run` was last given."""
        kept, self.kept = self.kept, None
        return kept

    def _push(self, delay, work):
        heapq.heappush(self.queue, (self.time + delay, next(self.order), work))

    def kill(self, owner):
        """Ends all work of an owner."""
        self.queue = [item for item in self.queue if item[2].owner != owner]
        heapq.heapify(self.queue)

    def loop(self, until=lambda: False):
        """Runs all work to its end."""
        while self.queue and not until():
            self.time, _, work = heapq.heappop(self.queue)
            assert self.time < MOST_SECONDS, f"work of {work.owner} does not end"
            self.owner, self.spent = work.owner, 0.0
            self.moments[work.owner] += 1
            if self.deaths.get(work.owner) == self.moments[work.owner]:
                self.kill(work.owner)
                continue
            try:
                delay = next(work.generator)
            except StopIteration as end:
                work.set_result(end.value)
            except Exception as error:
                work.set_exception(error)
                if work.is_program:
                    raise
            else:
                jitter = 0.0 if self.rng is None else self.rng.exponential(0.02)
                self._push(self.spent + delay + jitter, work)


class Faulty:
    """A store some of whose requests fail, before or after they are done."""

    def __init__(self, store, rng, share):
        self.store = self.behind = store
        self.rng, self.share, self.failed = rng, share, 0

    def __getattr__(self, verb):
        request = getattr(self.store, verb)

        def tried(*args, **kwargs):
            draw = self.rng.random()
            if draw < self.share:
                self.failed += 1
                if draw < self.share / 2:
                    request(*args, **kwargs)  # done, and the answer is lost
                raise GenericError("status 500")
            return request(*args, **kwargs)

        return tried


@jax.jit
def step(params, local, batch):
    """Moves towards targets that the rows say."""
    pull = jnp.mean(batch)

    def move(x, at):
        return x + 0.1 * (jnp.sin(pull * jnp.arange(x.size).reshape(x.shape) + at) - x)

    params = {"w": move(params["w"], 0.0), "b": move(params["b"], 1.0)}
    return params, local, {"loss": pull}


def first_params(seed=0):
    keys = jax.random.split(jax.random.key(seed))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)}


def batches(name, rows=4):
    """Yields a worker's batches, the same in every run."""
    rng = np.random.default_rng(list(name.encode()))
    while True:
        yield rng.normal(size=(rows, 3)).astype(np.float32)


class Archive:
    """A store that keeps every payload that was ever put, also after it is removed."""

    def __init__(self):
        self.store, self.payloads = MemoryStore(), {}

    def put(self, path, raw, **kwargs):
        self.store.put(path, raw, **kwargs)
        if "/payload/" in path or path.startswith("snapshots/"):
            self.payloads[path] = raw

    def __getattr__(self, verb):
        return getattr(self.store, verb)

    def paths(self):
        return sorted(item["path"] for page in self.store.list() for item in page)


def tree(function, *trees):
    return {key: function(*(np.asarray(x[key], np.float64) for x in trees)) for key in SHAPES}


class Site:
    """A worker's program, perhaps in several lives: it begins, trains until a round, and counts what it does.

    Attributes:
      done: rows * change of all that it has done before its last payload, float64, apart from the library.
      worker: the worker of the last life.
    """

    def __init__(self, clock, store, name, *, seconds=1.0, rows=4, last=8, seed=0, **options):
        self.clock, self.store, self.name, self.seconds, self.rows, self.last = clock, store, name, seconds, rows, last
        self.options = {
            "exchange": EXCHANGE,
            "outer": OUTER,
            "steps": 4,
            "overlap": 2,
            "every": 3,
            "total": last,
        } | options
        self.done, self.seed, self.batches = tree(np.zeros_like, first_params()), seed, batches(name, rows)
        self.count, self.change = 0, self.done  # since the last payload
        self.worker = None

    def step(self, params, local, batch):
        self.clock.spend(self.seconds)
        before = jax.tree.map(np.copy, params)
        if self.worker._rows == 0:
            self.close()
        params, local, metrics = step(params, local, batch)
        self.count, self.change = self.count + len(batch), tree(lambda c, b, p: c + b - p, self.change, before, params)
        return params, local, metrics

    def close(self):
        """A payload has the change so far."""
        self.done = tree(lambda d, c: d + self.count * c, self.done, self.change)
        self.count, self.change = 0, tree(np.zeros_like, self.done)

    def main(self, most=None, leave=False):
        self.worker = jc.rounds(
            self.store, self.step, first_params(self.seed), worker=self.name, clock=self.clock, **self.options
        )
        yield from self.clock.taken()
        for _ in range(most or 10**6):
            if self.worker.done or self.worker.stopped:
                break
            yield from self.worker.advance(next(self.batches))
        if leave:
            yield from self.worker.depart(5.0, True)
            self.close()

    def start(self, at=0.0, **kwargs):
        return self.clock.start(self.main(**kwargs), self.name, at)

    def unsent(self):
        """Returns rows * change of what the worker has not sent, apart from its steps since its last payload."""
        worker = self.worker
        state = worker._unsent if worker._sending is None else worker._sending.packing.late
        layout, leaves = worker._model.layout, jax.tree.leaves(state.change)
        dense = [np.zeros_like(leaf) for leaf in layout.split(leaves)[1]]
        rows = layout.join(layout.unflatten(np.asarray(state.residual[0])), dense)
        residual = jax.tree.unflatten(jax.tree.structure(state.change), rows)
        return tree(lambda e, c: state.weight * e + state.rows * c, residual, state.change)


def manifests(store):
    """Returns the manifests of a run, in order."""
    paths = [path for path in sorted(item["path"] for page in store.list("manifests") for item in page)]
    return [Manifest.of(bytes(store.get(path).bytes())) for path in paths]


def applied(archive, model, name):
    """Returns rows * change of a worker's payloads that count."""
    total = tree(np.zeros_like, first_params())
    for manifest in manifests(archive):
        for member in manifest.members:
            if member.header.worker == name:
                raw = archive.payloads[records.payload_path(manifest.number, name)]
                assert hashlib.sha256(raw).hexdigest() == member.digest
                words = records.read_payload(raw, name, model.n_words)[1]
                leaves = unpack(model.method, model.layout, words, member.header.base)
                own = jax.tree.unflatten(jax.tree.structure(total), leaves)
                total = tree(lambda t, x, rows=member.header.rows: t + rows * x, total, own)
    return total


@functools.partial(jax.jit, static_argnums=(0, 1))
def unpack(method, layout, words, number):
    return method.unpack(words, layout, number)


def check_nothing_is_lost(archive, *sites):
    """What counts and what is unsent add up to what a worker has done."""
    for site in sites:
        if site.worker._rows == 0:
            site.close()
        counted = applied(archive, site.worker._model, site.name)
        for key in SHAPES:
            whole = counted[key] + site.unsent()[key]
            np.testing.assert_allclose(
                whole, site.done[key], rtol=1e-4, atol=2e-4 * np.abs(site.done[key]).max() + 1e-9
            )


def check_replay(archive, model):
    """A replay of the whole log has the state of every manifest, to the bit, and that of a transcription of SGD."""
    _, body = records.split(archive.payloads["snapshots/00000000"])
    state = jax.tree.unflatten(
        jax.tree.structure(model.like), map(jnp.asarray, records.split_arrays(body, jax.tree.leaves(model.like)))
    )
    params, trace = tree(np.copy, state.params), tree(np.zeros_like, state.params)
    for manifest in manifests(archive):
        assert manifest.state in ("", model.digest(state))
        mean = tree(np.zeros_like, params)
        words = []
        for member in manifest.members:
            raw = archive.payloads[records.payload_path(manifest.number, member.header.worker)]
            words.append(records.read_payload(raw, member.header.worker, model.n_words)[1])
            own = jax.tree.unflatten(
                jax.tree.structure(mean), unpack(model.method, model.layout, words[-1], member.header.base)
            )
            mean = tree(lambda m, x, s=member.header.rows / manifest.rows: m + s * x, mean, own)
        trace = tree(lambda t, m: m + 0.5 * t, trace, mean)
        params = tree(lambda p, t: p - 0.5 * t, params, trace)
        state = model.apply(state, manifest, words)
        for key in SHAPES:
            np.testing.assert_allclose(state.params[key], params[key], rtol=1e-4, atol=1e-5)
    return state
