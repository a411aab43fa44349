"""Workers of `jaxcomm.rounds`: what they equal, what they refuse, and what they do about damage."""

import functools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from obstore.exceptions import GenericError, NotFoundError, PermissionDeniedError
from obstore.store import MemoryStore

import jaxcomm as jc
from jaxcomm.rounds import records
from jaxcomm.rounds.records import DamagedError, Header, Manifest
from tests.jaxcomm.rounds.simulation import EXCHANGE, Archive, SimClock, Site, first_params, manifests
from tests.jaxcomm.rounds.test_laws import check, members
from tests.jaxcomm.train_steps import linear
from tests.refusals import refusals, refused

SHAPES = {"w": (40, 60), "b": (9,)}
METHODS = {
    "plump_dp": jc.plump_dp(),
    "topk": jc.topk(0.9, collective="gather"),
    "topk in bins": jc.topk(1 - 64 / 1024, chunk=1024, value_dtype="2bit", decay=0.95, collective="gather"),
    "sign": jc.sign(collective="gather"),
    "pulse": jc.pulse(0.9, value_dtype="float32", collective="gather"),
    "random_k": jc.random_k(0.9, value_dtype="float32"),
    "demo": jc.demo(collective="gather"),
}


def normal(shapes, seed, *rows):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(*rows, *shape)).astype(np.float32) for name, shape in shapes.items()}


def loss(params, batch):
    return sum(jnp.sum(jnp.square(params[name] - batch[name])) for name in params) / len(batch["w"])


@pytest.mark.parametrize("name", METHODS)
def test_equal_workers_are_local_sgd_in_one_program(name):
    """Without faults, with the same rows, to float rounding."""
    exchange, local, outer, steps = METHODS[name], optax.adam(0.01), optax.sgd(0.7, momentum=0.9, nesterov=True), 3
    step = jc.simulate(loss, jc.chain(local, jc.local_sgd(steps, exchange=exchange, outer=outer)), 2)
    params = jax.tree.map(jnp.asarray, normal(SHAPES, 0))
    state, data = step.init(params), [normal(SHAPES, 1 + number, 4) for number in range(4 * steps)]
    for batch in data:
        state, _ = step(state, batch)
    expected = step.params(state)

    clock, archive = SimClock(), Archive()
    workers = {}

    def main(k):
        options = {"exchange": exchange, "outer": outer, "steps": steps, "overlap": 0, "worker": f"w{k}"}
        workers[k] = jc.rounds(archive, (loss, local), params, clock=clock, **options)
        yield from clock.taken()
        for batch in data:
            yield from workers[k].advance(jax.tree.map(lambda rows: rows[2 * k : 2 * k + 2], batch))

    for k in range(2):
        clock.start(main(k), f"w{k}")
    clock.loop()
    assert workers[0].round == workers[1].round == 4
    for leaf in SHAPES:
        np.testing.assert_array_equal(workers[0].params[leaf], workers[1].params[leaf])
        np.testing.assert_allclose(workers[0].params[leaf], expected[leaf], rtol=2e-5, atol=2e-6)
        assert np.abs(expected[leaf] - params[leaf]).max() > 0.01


def run_two(archive, break_payload=None, names="abc", last=6, meddle=None, **options):
    """Runs sites; `break_payload` changes what the last one puts."""
    clock = SimClock()
    sites = [Site(clock, archive, name, last=last, **options) for name in names]
    if break_payload is not None:
        sites[-1].store = Meddling(archive, break_payload)
    for site in sites:
        site.start()
    clock.loop(until=(meddle and functools.partial(meddle, sites)) or (lambda: False))
    clock.loop()
    return sites


class Meddling:
    """A store that damages the payloads of rounds 2 and 3 on their way."""

    def __init__(self, store, damage):
        self.store, self.damage = store, damage

    def put(self, path, raw, **kwargs):
        if "/payload/" in path and int(path.split("/")[1]) in (2, 3):
            raw = self.damage(raw)
        self.store.put(path, raw, **kwargs)

    def __getattr__(self, verb):
        return getattr(self.store, verb)


def rewritten(raw, words=lambda words: words, **header):
    record, body = records.split(raw)
    return records.join(record | header, [words(np.frombuffer(body, np.uint32).copy())])


def set_floats(words, value):
    words[-5:] = np.full(5, value, np.float32).view(np.uint32)  # the dense tensor
    return words


DAMAGE = {
    "flipped bit": (lambda raw: raw[:-3] + bytes([raw[-3] ^ 4]) + raw[-2:], "damaged: a wrong digest"),
    "short": (lambda raw: rewritten(raw, lambda words: words[:-1]), "damaged: .* bytes of words instead of"),
    "long": (lambda raw: raw + bytes(200_000), "length: "),
    "empty": (lambda raw: b"", "damaged: an object of another kind"),
    "pickle": (lambda raw: b"\x80\x04K\x01.", "damaged: an object of another kind"),
    "another's": (lambda raw: rewritten(raw, worker="a"), "damaged: the header of 'a'"),
    "extra field": (lambda raw: rewritten(raw, more=1), "damaged: no header"),
    "no rows": (lambda raw: rewritten(raw, rows=0), "damaged: a header with numbers out of range"),
    "many rows": (lambda raw: rewritten(raw, rows=float("inf")), "damaged: a header with numbers out of range"),
    "from the future": (lambda raw: rewritten(raw, base=9), "damaged: packed for round 9"),
    "not finite": (lambda raw: rewritten(raw, lambda words: set_floats(words, np.nan)), "not finite"),
    "infinite": (lambda raw: rewritten(raw, lambda words: set_floats(words, np.inf)), "not finite"),
    "large": (lambda raw: rewritten(raw, lambda words: set_floats(words, 1e6)), "norm: 2.24e\\+06, and the median is"),
    "another state": (lambda raw: rewritten(raw, state="0" * 32), "state: 0{32} instead of"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_payloads_are_refused_and_named(kind):
    """The others go on without; the refused worker keeps what it did, and counts again."""
    damage, reason = DAMAGE[kind]
    archive = Archive()
    with pytest.warns(UserWarning, match=f"payload of 'c' in round [23] was refused by '[abc]': {reason}"):
        sites = run_two(archive, damage)
    assert members(archive) == ["abc", "abc", "ab", "ab", "abc", "abc"]
    assert list(manifests(archive)[2].refused) == ["c"]
    check(archive, *sites)


def test_a_worker_whose_state_differs_starts_again_from_the_snapshot():
    archive = Archive()

    def meddle(sites):
        """Flips bits of a worker's global state in round 4."""
        worker = sites[2].worker
        if worker is None or worker.round != 4:
            return False
        worker._global = worker._global._replace(params=jax.tree.map(lambda x: x * 1.01, worker._global.params))
        return True

    is_refused = pytest.warns(UserWarning, match="payload of 'c' in round .* was refused .*: state: ")
    starts_again = pytest.warns(UserWarning, match="Worker 'c' has another global state .* from the newest snapshot")
    with is_refused, starts_again:
        sites = run_two(archive, last=10, meddle=meddle)
    assert members(archive)[-2:] == ["abc"] * 2
    assert sites[2].worker.digest() == sites[0].worker.digest()


def test_two_writers_of_one_manifest():
    """Both see a quorum at once, and write manifests that differ: one is written, and both follow it."""
    archive, written = Archive(), []

    class Tied:
        def put(self, path, raw, **kwargs):
            if path.startswith("manifests/"):
                written.append((path, json.loads(raw)["writer"]))
            archive.put(path, raw, **kwargs)

        def __getattr__(self, verb):
            return getattr(archive, verb)

    clock = SimClock()
    sites = [Site(clock, Tied(), name, last=6) for name in "ab"]
    for site in sites:
        site.start()
    clock.loop()
    writers = [[writer for path, writer in written if path == records.manifest_path(number)] for number in range(6)]
    assert sum(len(names) > 1 for names in writers) >= 3  # tried to
    assert [manifest.writer for manifest in manifests(archive)] == [names[0] for names in writers]
    sites[0].store = sites[1].store = archive
    check(archive, *sites)


def test_snapshots_replace_old_objects():
    archive = Archive()
    sites = run_two(archive, names="ab", last=13)
    paths = archive.paths()
    numbers = sorted(int(path.split("/")[1]) for path in paths if path.startswith("snapshots"))
    assert numbers == [9, 12]
    assert {int(path.split("/")[1]) for path in paths if path.startswith("rounds")} == {9, 10, 11, 12}
    assert len([path for path in paths if path.startswith("manifests")]) == 13
    clock = SimClock()
    late = Site(clock, archive, "late", last=13, seed=5)
    late.start()
    clock.loop()
    assert late.worker.digest() == sites[0].worker.digest()


def make(store, **options):
    settings = {"exchange": EXCHANGE, "worker": "a", "quorum": 1, "timeout": 5.0} | options
    return jc.rounds(store, (linear, optax.sgd(0.1)), first_params(), **settings)


@refusals(
    (lambda: make(MemoryStore(), exchange=jc.powersgd(2)), "exchange", "powersgd"),
    (lambda: make(MemoryStore(), exchange=jc.topk(0.9, collective="balanced")), "exchange", "balanced"),
    (lambda: make(MemoryStore(), exchange=jc.sparse_loco(30)), "exchange", "local_sgd"),
    (lambda: make(MemoryStore(), exchange=optax.sgd(0.1)), "exchange"),
    (lambda: make(MemoryStore(), exchange=jc.topk), "exchange", "topk"),
    (lambda: make(MemoryStore(), outer=0.7), "outer", "float"),
    (lambda: make(MemoryStore(), steps=0), "steps", "0"),
    (lambda: make(MemoryStore(), quorum=0), "quorum", "0"),
    (lambda: make(MemoryStore(), overlap=30), "overlap", "30"),
    (lambda: make(MemoryStore(), grace=-1.0), "grace", "-1.0"),
    (lambda: make(MemoryStore(), every=0), "every", "0"),
    (lambda: make(MemoryStore(), total=0), "total", "0"),
    (lambda: make(MemoryStore(), limit=0.0), "limit", "0.0"),
    (lambda: make(MemoryStore(), timeout=0.0), "timeout", "0.0"),
    (lambda: make(MemoryStore(), worker="../a"), "worker", "'../a'"),
    (lambda: make(MemoryStore(), worker=""), "worker", "''"),
    (lambda: make("memory:///"), "store", "memory:///"),
    (lambda: make(7), "store", "7"),
    (lambda: jc.rounds(MemoryStore(), 3, first_params(), exchange=EXCHANGE), "step", "3"),
    (lambda: jc.rounds(MemoryStore(), (linear, 3), first_params(), exchange=EXCHANGE), "optimizer", "int"),
    (lambda: jc.rounds(MemoryStore(), linear, {"n": jnp.arange(3)}, exchange=EXCHANGE), "params['n']", "int32"),
)
def test_refused_arguments(call, said):
    refused(call, *said)


def stepping(batch, **options):
    """A worker that has taken a step which reads nothing of the batch."""

    def step(params, local, batch):
        return params, local, {}

    worker = jc.rounds(MemoryStore(), step, first_params(), exchange=EXCHANGE, worker="a", quorum=1, **options)
    worker(batch)
    return worker


WEIGHTED = {"class_weights": np.ones(10, np.float32), "x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)}


@refusals(
    (lambda: stepping(WEIGHTED), "same number of rows", "10 at", "'class_weights': None"),
    (lambda: stepping({"key": jax.random.PRNGKey(0), "x": WEIGHTED["x"]}), "random key", "'key'"),
    (lambda: stepping({"x": np.ones((0, 3), np.float32)}), "batch", "0 rows"),
    (lambda: stepping({}), "batch", "at least one row"),
    (lambda: stepping(WEIGHTED, batch_axis=2), "batch_axis", "2"),
)
def test_batches_without_one_number_of_rows(call, said):
    """It would be the weight of the worker's change."""
    refused(call, *said)


def test_the_weight_of_a_change_is_its_rows():
    assert stepping(WEIGHTED, batch_axis={"class_weights": None, "x": 0, "y": 0})._rows == 8
    assert stepping({"text": np.ones((5, 8), np.int32), "key": jax.random.key(0)}, batch_axis=1)._rows == 8


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("steps", {"steps": 7}),
        ("exchange", {"exchange": jc.topk(0.8)}),
        ("outer", {"outer": optax.sgd(0.1)}),
        ("quorum", {"quorum": 2}),
        ("grace", {"grace": 3.0}),
        ("every", {"every": 3}),
        ("total", {"total": 3}),
        ("limit", {"limit": 3.0}),
    ],
)
def test_settings_that_differ_from_those_in_the_store(name, change):
    store = MemoryStore()
    make(store)
    refused(lambda: make(store, worker="b", **change), name, "run in the store")


@pytest.mark.parametrize("settings", [{"data": "b"}, {"data": "a", "rate": 0.1}, {}, None])
def test_further_settings_are_compared(settings):
    store = MemoryStore()
    make(store, settings={"data": "a", "sizes": (1, 2)})
    make(store, worker="b", settings={"data": "a", "sizes": [1, 2]})
    refused(lambda: make(store, worker="c", settings=settings), "settings['", "run in the store")


@pytest.mark.parametrize("settings", [["data"], {1: "a"}, {"rate": np.float32(1)}, {"rate": float("nan")}])
def test_settings_that_are_not_json(settings):
    refused(lambda: make(MemoryStore(), settings=settings), "settings", "values of JSON by name", "Pass ")


def test_another_collective_is_no_other_setting():
    store = MemoryStore()
    make(store)
    make(store, exchange=jc.topk(0.9, value_dtype="float32", collective="gather", axis_name="workers"))


def test_folder_and_threads(tmp_path):
    """In real time: two workers of one process, each with threads of its own."""
    rng = np.random.default_rng(0)

    def loss_fn(params, rows):
        return jnp.mean(jnp.square(rows @ params["w"])) + jnp.sum(jnp.square(params["b"]))

    workers = [
        jc.rounds(
            str(tmp_path / "run"), (loss_fn, optax.sgd(0.05)), first_params(), exchange=EXCHANGE, steps=4, worker=name,
            overlap=2, total=3, grace=5.0,
        )
        for name in "ab"
    ]  # fmt: skip
    while not all(worker.done for worker in workers):
        for worker in workers:
            if not worker.done:
                worker(rng.normal(size=(4, 33)).astype(np.float32))
    for worker in workers:
        worker.leave()
    assert workers[0].digest() == workers[1].digest()
    assert [worker.counted for worker in workers] == [3, 3]
    assert (tmp_path / "run" / "workers" / "a").exists()
    refused(lambda: workers[0](np.ones((4, 33))), "worker", "'a'")


def test_records():
    header = Header("a", 3, "0" * 32, 5, 2, 0.5)
    raw = records.write_payload(header, np.arange(4, dtype=np.uint32))
    assert records.read_payload(raw, "a", 4)[0] == header
    manifest = Manifest(3, "0" * 32, (records.Member(header, "f" * 64, 1.0),), {"b": "late"}, "a")
    assert Manifest.of(manifest.to_bytes()) == manifest
    for damaged in (b"", b"{}", b"[1]", b'{"members": 1}', manifest.to_bytes()[:-1], b"\x80\x04K\x01."):
        with pytest.raises(DamagedError):
            Manifest.of(damaged)
    assert [name for name in ("a/b", "a.b", "a\n", "-a", "a" * 65, 7) if records.is_name(name)] == []


def test_a_worker_on_a_mesh_of_its_own():
    """Its parameters are sharded over its devices, as in FSDP; it and a worker of one device have the same bits."""
    mesh = jc.make_mesh(fsdp=4)
    shards = {"w": NamedSharding(mesh, P(None, "fsdp")), "b": NamedSharding(mesh, P())}
    whole = jax.tree.map(jnp.asarray, normal({"w": (40, 64), "b": (9,)}, 0))
    clock, archive, workers = SimClock(), Archive(), {}

    def main(name, params):
        options = {"exchange": EXCHANGE, "steps": 3, "overlap": 1, "worker": name, "total": 4}
        workers[name] = jc.rounds(archive, (loss, optax.adam(0.01)), params, clock=clock, **options)
        yield from clock.taken()
        number = 0
        while not workers[name].done:
            number += 1
            yield from workers[name].advance(normal({"w": (40, 64), "b": (9,)}, number, 4))

    clock.start(main("sharded", jax.device_put(whole, shards)), "sharded")
    clock.start(main("one", whole), "one")
    clock.loop()
    assert members(archive) == ["onesharded"] * 4
    assert workers["sharded"].digest() == workers["one"].digest()
    worker = workers["sharded"]
    for tree in (worker._global.params, worker._own, worker._unsent.change, worker._global.outer[0].trace):
        assert tree["w"].sharding.spec == P(None, "fsdp")
    assert worker._unsent.residual.sharding.spec == P(None, ("fsdp",))


def test_a_change_that_is_not_finite_is_dropped_by_name():
    """The worker goes on from the global model, and counts in the next round."""
    archive, clock = Archive(), SimClock()

    class Diverging(Site):
        def step(self, params, local, batch):
            params, local, metrics = super().step(params, local, batch)
            if self.worker.round == 2:
                params = jax.tree.map(lambda x: x * np.nan, params)
            return params, local, metrics

    sites = [Site(clock, archive, "a"), Diverging(clock, archive, "b", quorum=1)]
    sites[0].options["quorum"] = 1
    for site in sites:
        site.start()
    with pytest.warns(UserWarning, match="Worker 'b' has a change that is not finite in round"):
        clock.loop()
    assert members(archive)[:2] == ["ab", "ab"]
    assert "a" in members(archive)
    assert members(archive)[-1] == "ab"
    assert sites[0].worker.digest() == sites[1].worker.digest()


class Sick(Site):
    """Its parameters become NaN in the steps before `until`."""

    def __init__(self, *args, until=10**6, **options):
        super().__init__(*args, **options)
        self.until = until

    def step(self, params, local, batch):
        params, local, metrics = super().step(params, local, batch)
        if self.clock.now() < self.until:
            params = jax.tree.map(lambda x: x * np.nan, params)
        return params, local, metrics


@pytest.mark.parametrize(("overlap", "quorum"), [(0, 1), (2, 1), (2, 2)])
def test_workers_whose_changes_are_not_finite_say_so_at_once(overlap, quorum):
    """They wait for no round, and take part as soon as they are finite."""
    archive, clock = Archive(), SimClock()
    sites = [Sick(clock, archive, name, until=20.0, overlap=overlap, quorum=quorum) for name in "ab"]
    for site in sites:
        site.start()
    with pytest.warns(UserWarning, match="Worker '[ab]' has a change that is not finite in round 0") as said:
        clock.loop()
    assert len(said) == 2 * 5  # one in every four steps
    assert members(archive) == ["ab"] * 8
    assert clock.time < 20 + 8 * 4 + 20


def test_nobody_waits_for_a_worker_whose_changes_are_never_finite():
    archive, clock = Archive(), SimClock()
    sites = [Site(clock, archive, "a"), Site(clock, archive, "b"), Sick(clock, archive, "c")]
    for site in sites:
        site.start()
    with pytest.warns(UserWarning, match="Worker 'c' has a change that is not finite in round"):
        clock.loop()
    assert members(archive) == ["ab"] * 8
    assert [site.worker.round for site in sites] == [8, 8, 8]
    assert clock.time < 8 * 4 + 10
    check(archive, *sites[:2])


@pytest.mark.parametrize("most", [1, 5])
def test_a_change_that_is_not_finite_is_not_left(most):
    """It leaves in the middle of a round; its next life counts."""
    archive, clock = Archive(), SimClock()
    sites = [Site(clock, archive, "a", last=12, quorum=1), Sick(clock, archive, "b", until=10.0, last=12, quorum=1)]

    def lives():
        yield from sites[1].main(most=most, leave=True)
        yield 20.0
        yield from sites[1].main()

    sites[0].start()
    clock.start(lives(), "b")
    with pytest.warns(UserWarning, match="Worker 'b' has a change that is not finite in round .: ") as said:
        clock.loop()
    assert str(said[-1].message).endswith("it is lost.")
    assert members(archive)[-3:] == ["ab"] * 3


def test_what_is_left_and_not_finite_is_dropped_by_name():
    """An object that a worker without the rule above has left."""
    store = MemoryStore()
    worker = make(store, steps=2, overlap=0)
    record = {"weight": 0.0, "rows": 4.0, "sending": None}
    leaves = [np.zeros_like(leaf) for leaf in jax.tree.leaves((worker._unsent.residual, worker._unsent.change))]
    for number, value in enumerate((np.nan, np.inf)):
        leaves[-1][:] = value
        store.put(records.worker_path("a"), records.join(record, leaves))
        with pytest.warns(UserWarning, match="What worker 'a' has left is not finite: it is dropped"):
            worker = make(store, steps=2, overlap=0)
        for _ in range(2):
            worker(normal({"w": (33, 64), "b": (5,)}, number, 4))
        assert worker.counted == 1


def test_a_payload_that_is_made_while_its_worker_leaves_counts_once(monkeypatch):
    """It is put, or left in the store: never both."""
    store, at, goes_on = MemoryStore(), threading.Event(), threading.Event()
    worker, batch = make(store, steps=2, overlap=1, grace=0.0), normal({"w": (33, 64), "b": (5,)}, 0, 4)
    write = records.write_payload

    def write_slowly(*args):
        at.set()
        goes_on.wait(60)
        return write(*args)

    monkeypatch.setattr(records, "write_payload", write_slowly)
    worker(batch)
    worker(batch)
    assert at.wait(60)
    worker.leave(wait=0.0)
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "jaxcomm-rounds":
            thread.join(1.0)  # it waits for a round in which nobody takes part, or has put the payload
    monkeypatch.undo()
    again = make(store, steps=2, overlap=1, grace=0.0)
    steps = 2
    while again.round < 1:
        again(batch)
        steps += 1
    again.leave()
    rows = [member.header.rows for manifest in manifests(store) for member in manifest.members]
    assert sum(rows) <= 4 * steps
    assert rows[0] == 16.0  # what it had not sent, and the next life's first steps


def test_a_worker_does_not_leave_before_its_payload_is_put():
    """Else its next life, and all others, would wait for a round whose payload never comes."""
    archive, clock = Archive(), SimClock()
    sites = [Site(clock, archive, name, last=6) for name in "ab"]

    class Closed:
        def put(self, path, raw, **kwargs):
            if path.endswith("payload/a") and clock.now() < 40.0:
                raise GenericError("status 500")
            archive.put(path, raw, **kwargs)

        def __getattr__(self, verb):
            return getattr(archive, verb)

    sites[0].store = Closed()

    def lives():
        yield from sites[0].main(most=4, leave=True)
        clock.kill("a")  # with its threads
        yield from sites[0].main()

    clock.start(lives(), "a")
    sites[1].start()
    with pytest.warns(UserWarning, match="Trying again"):
        clock.loop()
    assert members(archive) == ["ab"] * 6
    sites[0].store = archive
    check(archive, *sites)


def test_a_worker_that_waits_can_be_stopped():
    """Alone, without a quorum: it takes no more steps, leaves what it has, and goes on when others are there."""
    archive, clock = Archive(), SimClock()
    sites = [Site(clock, archive, name, last=6, stop=lambda end=end: clock.now() >= end) for name, end in
             (("a", 30.0), ("b", 10**6))]  # fmt: skip

    def lives():
        yield from sites[0].main(leave=True)
        assert sites[0].worker.stopped
        assert clock.now() < 30.0 + 5.0 + 2.0
        assert sites[0].count <= 8
        assert "workers/a" in archive.paths()
        left = archive.store.get("workers/a").bytes()
        yield from sites[0].main(leave=True)  # its stop is still true: it does not wait for the round of its payload
        assert sites[0].worker.stopped
        assert archive.store.get("workers/a").bytes() == left
        sites[0].options["stop"] = None
        yield from sites[0].main()

    clock.start(lives(), "a")
    sites[1].start(at=60.0)
    clock.loop()
    assert members(archive) == ["ab"] * 6
    check(archive, *sites)


SCRIPT = """
import os, sys
store, name, index, port = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
import jax
if port != "0":
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
import jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxcomm as jc
mesh = jc.make_mesh(fsdp=jax.device_count())
def place(x, spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])
rng = np.random.default_rng(0)
params = {"w": place(rng.normal(size=(64, 64)).astype(np.float32), P("fsdp")), "b": place(np.ones(3, np.float32), P())}
def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch @ params["w"])) + jnp.sum(jnp.square(params["b"]))
worker = jc.rounds(store, (loss_fn, optax.adam(0.01)), params, exchange=jc.topk(0.9), steps=4, overlap=1, worker=name,
                   total=5, every=2, grace=20.0)
number = 0
while not worker.done:
    number += 1
    rows = np.random.default_rng(number).normal(size=(8, 64)).astype(np.float32)
    worker(place(rows, P("fsdp")))
worker.leave()
print("digest", worker.digest(), worker.counted, flush=True)
"""


@pytest.mark.slow
def test_a_worker_of_two_processes(tmp_path):
    """Process 0 of one worker talks to the store for both; the other worker is one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    starts = [("two", "0", port), ("two", "1", port), ("one", "0", "0")]
    processes = [
        subprocess.Popen([sys.executable, script, tmp_path / "run", *words], env=environment, stdout=subprocess.PIPE)
        for words in starts
    ]
    lines = [process.communicate(timeout=300)[0].decode().splitlines()[-1].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert lines[0][:2] == lines[1][:2] == lines[2][:2]
    assert lines[0][0] == "digest"
    assert int(lines[0][2]) >= 4


@pytest.mark.parametrize("module", ["store", "exceptions"])
def test_without_obstore(monkeypatch, tmp_path, module):
    monkeypatch.setitem(sys.modules, f"obstore.{module}", None)
    refused(lambda: make(str(tmp_path)), "store", "obstore", "pip install 'jaxcomm[rounds]'")


def test_a_store_that_refuses_is_not_tried_again():
    class Closed(MemoryStore):
        def put(self, *args, **kwargs):
            raise PermissionDeniedError("403")

    refused(lambda: make(Closed()), "store", "settings", "PermissionDeniedError", "credentials")


@pytest.mark.parametrize("verb", ["put", "list"])
def test_a_bucket_that_is_missing_is_not_waited_for(verb):
    def missing(*args, **kwargs):
        raise NotFoundError("status 404 NoSuchBucket")

    store = Archive()
    setattr(store, verb, missing)
    refused(lambda: make(store), "store", "NotFoundError", "NoSuchBucket", "its bucket exists")


def test_a_worker_whose_payloads_are_refused_is_not_waited_for_longer():
    """It dies before its payload: the others wait one grace time for it."""
    archive, clock = Archive(), SimClock()
    sites = [Site(clock, archive, name, last=10) for name in "abcd"]

    class Refused(Meddling):
        def put(self, path, raw, **kwargs):
            if "/payload/" in path:
                raw = rewritten(raw, lambda words: set_floats(words, 1e6))
            self.store.put(path, raw, **kwargs)
            if "/coming/d" in path and int(path.split("/")[1]) == 7:
                clock.deaths["d"] = clock.moments["d"] + 1

    sites[3].store = Refused(archive, None)
    for site in sites:
        site.start()
    with pytest.warns(UserWarning, match="payload of 'd' in round . was refused"):
        clock.loop()
    assert members(archive) == ["abc"] * 10
    assert clock.time < 10 * 4 + 15


def test_traffic_is_what_the_objects_have(tmp_path):
    worker = make(str(tmp_path), steps=2, overlap=0, total=2)
    for number in range(4):
        worker({name: rows for name, rows in normal({"w": (33, 64), "b": (5,)}, number, 2).items()})
    worker.leave(keep=False)
    sizes = {path.relative_to(tmp_path): path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    assert worker.traffic["sent"] == sum(sizes.values())  # settings, a snapshot, two payloads, two manifests
    snapshot = next(size for path, size in sizes.items() if "snapshots" in path.parts)
    payloads = sum(size for path, size in sizes.items() if "payload" in path.parts)
    assert worker.traffic["received"] == snapshot + payloads
