"""`local_sgd` in fragments: Streaming DiLoCo against its algorithm, what it sends, and what becomes of its state."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from jaxcomm.accounting.hlo import read_program
from jaxcomm.kernels.numerics import is_finite_tree
from jaxcomm.methods.local_sgd import Anchored
from tests.jaxcomm.train_steps import linear as loss
from tests.jaxcomm.train_steps import make_step, normal
from tests.reference.plump_dp import PlumpDpReference
from tests.reference.streaming import StreamingReference
from tests.reference.topk import TopKReference
from tests.refusals import refused

SHAPES = {"a": (7,), "b": (61,), "c": (20, 13), "s": ()}
# Tensors of 260, 61, 7 and 1 elements, the largest first, each go to the fragment with the fewest elements.
FRAGMENTS = {1: [["a", "b", "c", "s"]], 2: [["c"], ["a", "b", "s"]], 3: [["c"], ["b"], ["a", "s"]]}
FRAGMENTS[GIVEN := ("a|s", "")] = [["a", "s"], ["b", "c"]]
K, H, RATE, STEPS = 3, 6, 0.125, 20
BAD = {1: np.nan, 4: 1e37, 8: np.inf, 9: np.nan}  # on the last worker, in the steps 2, 5, 9 and 10
DENSE, TOPK = "dense", "topk"


def first_params(dtype=np.float32):
    return normal(SHAPES, dtype=dtype)


def batch_of(step, bad=None, worker=K - 1):
    batch = normal(SHAPES, (step, 7), K)
    if bad is not None:
        batch["b"][worker, 3] = bad
    return batch


def streaming(fragments=2, overlap=2, mix=0.5, *, exchange=DENSE):
    inner = jc.plump_dp() if exchange == DENSE else jc.topk(0.9, dense_below=60, value_dtype="float32")
    tx = jc.local_sgd(H, exchange=inner, fragments=fragments, overlap=overlap, mix=mix)
    return jc.chain(optax.sgd(RATE), tx)


def step_of(kind="simulated", fragments=2, overlap=2, mix=0.5, exchange=DENSE):
    """A step, compiled once for all tests; K workers."""
    return _step_of(kind, fragments, overlap, mix, exchange)


@functools.cache
def _step_of(kind, fragments, overlap, mix, exchange):
    return make_step(kind, loss, streaming(fragments, overlap, mix, exchange=exchange), workers=K, donate=False)


def state_after(step, count):
    state = step.init(first_params())
    for i in range(count):
        state, _ = step(state, batch_of(i))
    return state


def memory(state):
    return state.opt_state[1].memory


def rows(state, name):
    return np.asarray(state.params.rows[name])


USUAL = [(1, 2, 0.25, DENSE), (2, 2, 0.5, TOPK), (3, 5, 0.25, DENSE)]  # in the last two fragments are on their way
SETTINGS = [
    *USUAL,
    (1, 0, 0.5, DENSE),
    (2, 0, 0.5, DENSE),
    (3, 0, 0.0, DENSE),
    (1, 2, 0.0, TOPK),
    (3, 5, 0.25, TOPK),
    (2, 2, 1.0, DENSE),
    (GIVEN, 2, 0.5, DENSE),
]


@pytest.mark.parametrize(
    ("fragments", "overlap", "mix", "exchange"),
    [pytest.param(*setting, marks=() if setting in USUAL else pytest.mark.slow) for setting in SETTINGS],
)
def test_steps_are_the_papers(fragments, overlap, mix, exchange):
    """Every worker's parameters in every step, and the anchors once an exchange is merged."""
    step = step_of(fragments=fragments, overlap=overlap, mix=mix, exchange=exchange)
    state = step.init(first_params())
    make = PlumpDpReference if exchange == DENSE else lambda: TopKReference(0.9, dense_below=60)
    settings = {"fragments": FRAGMENTS[fragments], "H": H, "tau": overlap, "alpha": mix, "lr": 0.7, "momentum": 0.9}
    reference, skips = StreamingReference(first_params(), K, **settings, exchange=make), 0
    for i in range(STEPS):
        batch = batch_of(i, BAD.get(i))
        state, metrics = step(state, batch)
        skipped = reference.step(
            [{name: -np.float32(RATE) * rows[w] for name, rows in batch.items()} for w in range(K)]
        )
        assert bool(metrics["skipped"]) == skipped, i
        skips += skipped
        for name in SHAPES:
            np.testing.assert_allclose(rows(state, name), [w[name] for w in reference.params], rtol=3e-6, atol=3e-6)
            if not reference.on_its_way:
                model = step.params(state)[name]
                np.testing.assert_allclose(model, reference.global_model[name], rtol=3e-6, atol=3e-6)
    count = len(FRAGMENTS[fragments])
    assert skips == {1: 0, 2: 1, 3: 2}[count]  # step 9 of each third, and 2 and 10 of each second step


def test_strided_fragments():
    layers = {f"{i:02}": {"kernel": np.zeros((4, 4)), "bias": np.zeros(4)} for i in range(12)}
    parts = streaming(fragments=3).init(layers)[1].memory
    for turn, part in enumerate(parts):
        names = {path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(part.held.anchor)}
        assert names == {f"{i:02}" for i in range(turn, 12, 3)}
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(part.held.anchor)) for part in parts]
    assert sizes == [4 * 20] * 3
    assert [part.held.outer[0].trace["00"]["bias"].shape for part in parts[:1]] == [(4,)]
    assert len(jax.tree.leaves(parts[1].held.outer)) == len(jax.tree.leaves(parts[1].held.anchor))


def blocks(number, of=4, layers=12):
    """The paper's strided pattern: every of-th block, as a pattern of its tensors' paths."""
    return "^layer({})/".format("|".join(f"{i:02}" for i in range(number, layers, of)))


@pytest.mark.parametrize(
    "fragments",
    [[blocks(p) for p in range(4)], tuple(lambda path, leaf, p=p: int(path[5:7]) % 4 == p for p in range(4))],
    ids=["patterns", "functions"],
)
def test_fragments_by_the_user(fragments):
    """Of layers of several tensors, which are divided if only their number is given; 12 local steps, one in 3."""
    shapes = {"attention": (6, 18), "out": (6, 6), "up": (6, 24), "down": (24, 6)}
    layers = {f"layer{i:02}": {name: np.zeros(shape) for name, shape in shapes.items()} for i in range(12)}

    def blocks_of(fragments):
        tx = jc.local_sgd(12, exchange=jc.plump_dp(), fragments=fragments)
        report = jc.wire_report(tx, layers, workers=2)
        assert (report.every, report.turns) == (3, 4)
        parts = [jax.tree_util.tree_leaves_with_path(part.held.anchor) for part in tx.init(layers).memory]
        return [{path[0].key for path, _ in part} for part in parts], [len(part) for part in parts]

    assert blocks_of(fragments) == ([{f"layer{i:02}" for i in range(p, 12, 4)} for p in range(4)], [12] * 4)
    assert max(map(len, blocks_of(4)[0])) > 3


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        (["a", "b"], r"fragments must be patterns that choose every parameter, 'c' too; got .*Let the last one be ''"),
        (["a", "[a-c]", "b", ""], "fragments must be patterns that each choose a parameter which none before chooses"),
        ([], "fragments must be an integer of at least 1; got 0"),
        ("ab", "fragments must be an integer of at least 1; got 'ab'"),
    ],
)
def test_bad_fragments(fragments, message):
    with pytest.raises(ValueError, match=message):
        jc.local_sgd(12, exchange=jc.plump_dp(), fragments=fragments).init(first_params())


def test_without_fragments():
    state = jc.local_sgd(H, exchange=jc.plump_dp(), fragments=1, overlap=0, mix=0.0).init(first_params())
    assert type(state.memory) is Anchored
    assert jax.tree.structure(state.memory.anchor) == jax.tree.structure(first_params())


def test_nothing_is_lost():
    """Law 1, of each fragment: mean + mean of residuals is the mean of the outer gradients + that of the old residuals.

    The mean is the input of the outer momentum. An exchange is not merged in its own step.
    """
    step = step_of(exchange=TOPK)
    state, checked = step.init(first_params()), 0
    for i in range(STEPS):
        before, (state, _) = state, step(state, batch_of(i))
        if (i + 1) % 3:
            continue
        turn = i // 3 % 2
        old_part, new_part = memory(before)[turn], memory(state)[turn]
        for name in {"b", "c"} & set(FRAGMENTS[2][turn]):
            traces = (np.asarray(part.held.outer[0].trace[name], np.float64).ravel() for part in (new_part, old_part))
            mean = next(traces) - 0.9 * next(traces)
            gradients = np.asarray(old_part.held.anchor[name], np.float64) - rows(state, name)
            old, new = (np.asarray(part.held.exchange.residual.rows)[:, : mean.size] for part in (old_part, new_part))
            went_in = gradients.reshape(K, -1).mean(0) + old.mean(0)
            np.testing.assert_allclose(mean + new.mean(0), went_in, atol=2e-6)
            checked += np.any(new != old)
    assert checked == 6


@pytest.mark.parametrize("overlap", [0, 2, 5])
def test_overlap(overlap):
    """Another worker's model at an exchange does not affect this one's until `overlap` steps later."""
    step = step_of(fragments=2, overlap=overlap, mix=0.5)
    states = [step.init(first_params())] * 2
    for i in range(3 + overlap):
        variant = batch_of(i)
        if i == 2:  # the exchange of the first fragment is in the third step
            variant["c"][1:] += 1
        for index, batch in enumerate((batch_of(i), variant)):
            states[index], _ = step(states[index], batch)
        first, yours = ({name: rows(state, name)[0] for name in SHAPES} for state in states)
        equal = all(np.array_equal(first[name], yours[name]) for name in SHAPES)
        assert equal == (i < 2 + overlap)


def test_a_skip_merges_nothing():
    """Each worker keeps what it has learned; only the worker with NaN misses its step."""
    step = step_of(exchange=TOPK)
    state = state_after(step, 8)
    bad, metrics = step(state, batch_of(8, np.nan))
    assert metrics["skipped"] == 1
    turn = 0
    old_part, new_part = memory(state)[turn], memory(bad)[turn]
    assert (old_part.merged_at, new_part.merged_at) == (5, 5)  # the exchange of step 3 was the last
    for name in ("anchor", "outer"):
        jax.tree.map(np.testing.assert_array_equal, getattr(new_part.held, name), getattr(old_part.held, name))
    np.testing.assert_array_equal(new_part.held.exchange.residual.rows, old_part.held.exchange.residual.rows)
    expected = {name: rows(state, name).copy() for name in SHAPES}
    for i in range(8, 11):
        for name in SHAPES:
            good = K - 1 if i == 8 else K
            expected[name][:good] -= RATE * batch_of(i)[name][:good]
        if i > 8:
            bad, metrics = step(bad, batch_of(i))
        for name in SHAPES:
            np.testing.assert_allclose(rows(bad, name), expected[name], rtol=1e-6, atol=1e-6)


def test_a_skip_between_exchanges():
    """Else its next outer gradient would be the anchor's own progress, backwards."""
    step = step_of(mix=0.0)
    state = state_after(step, 4)
    before = {name: rows(state, name) for name in SHAPES}
    state, metrics = step(state, batch_of(4, np.nan))  # the fragment of step 3 is merged in step 5
    assert metrics["skipped"] == 0
    anchor = memory(state)[0]
    assert anchor.merged_at == 5
    for name in SHAPES:
        if name in FRAGMENTS[2][0]:
            np.testing.assert_allclose(rows(state, name), [anchor.held.anchor[name]] * K, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(rows(state, name)[-1], before[name][-1])
            assert not np.array_equal(rows(state, name)[0], before[name][0])


def test_training_goes_on():
    """Law 8, in a step with an exchange and in one without; above 4,096 elements."""
    params = {"w": np.zeros(4106, np.float32), "v": np.ones(9, np.float32)}
    tx = jc.chain(optax.sgd(1.0), jc.local_sgd(4, exchange=jc.topk(0.9), fragments=2, overlap=1, mix=0.5))
    step = jc.simulate(loss, tx, K, donate=False)
    for at, value in itertools.product((4, 5), (np.nan, np.inf, 3e38, 1e37)):
        state, skipped = step.init(params), []
        for i in range(24):
            batch = {name: np.ones((K, leaf.size), np.float32) for name, leaf in params.items()}
            if i == at:
                batch["w"][1, 4097] = value
            state, metrics = step(state, batch)
            skipped.append(int(metrics["skipped"]))
        assert skipped == [i == at == 5 for i in range(24)]
        assert is_finite_tree(jax.tree.map(jnp.asarray, state))
        assert all((np.asarray(leaf) < -5).any() for leaf in jax.tree.leaves(step.params(state)))


def test_mesh_and_simulation():
    mesh, simulated = step_of("mesh"), step_of()
    one_state, two_state = mesh.init(first_params()), simulated.init(first_params())
    for i in range(12):
        one_state, metrics = mesh(one_state, batch_of(i, BAD.get(i)))
        two_state, expected = simulated(two_state, batch_of(i, BAD.get(i)))
        assert (metrics["skipped"], metrics["sent"]) == (expected["skipped"], expected["sent"])
        for a, b in zip(*map(jax.tree.leaves, (one_state.params, two_state.params)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    for leaf in jax.tree.leaves([(part.held.anchor, part.held.outer) for part in memory(one_state)]):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, leaf.addressable_shards[0].data)


def all_reduced(numbers, workers=K):
    return 2 * (workers - 1) / workers * 4 * numbers


@pytest.mark.parametrize("workers", [1, 2, 16])
def test_bytes(workers):
    """At most the largest fragment in a step, and on average all parameters in H steps."""
    report = jc.wire_report(streaming(fragments=3, overlap=1), first_params(), workers)
    assert (report.every, report.turns) == (2, 3)
    sizes = [float(exchange.received) for exchange in report.exchanges()]
    assert sizes == pytest.approx([all_reduced(n, workers) for n in (260, 61, 8)])
    assert report.received_in_exchange == report.received_at_most == pytest.approx(all_reduced(260, workers))
    assert report.received == pytest.approx(all_reduced(329, workers) / H)
    steps = [float(report.of_step(step).received) for step in range(1, 9)]
    assert steps == pytest.approx([all_reduced(n, workers) for n in (0, 260, 0, 61, 0, 8, 0, 260)])
    assert report.received_over("data") == report.received_in_exchange
    second = jc.wire_report(streaming(), {"a": np.ones(50), "b": np.ones(40), "c": np.ones(40)}, workers)
    assert second.received_in_exchange == second.received_over("data") == pytest.approx(all_reduced(80, workers))


def test_compiled_bytes():
    fragments, step = 2, step_of("mesh")
    state = step.init(first_params())
    report = step.verify(state, batch_of(0))
    sizes = [sum(int(np.prod(SHAPES[name])) for name in names) for names in FRAGMENTS[fragments]]
    assert [float(part.received) for part in report.exchanges()] == pytest.approx([all_reduced(n) for n in sizes])
    assert report.received_in_exchange == report.received_at_most == pytest.approx(all_reduced(260))
    assert report.received == pytest.approx(all_reduced(329) / H)
    assert f"bytes in the largest of {fragments} exchanges in turn, one in {H // fragments} steps" in str(report)
    text = step.lower(state, batch_of(0)).compile().as_text()
    (branches,) = read_program(text).conditionals
    assert [float(branch.received) for branch in branches] == pytest.approx([*map(all_reduced, sizes), 0])


def test_bytes_beyond_the_claim():
    """Though the first and the largest fragment are as claimed."""
    step, larger = step_of("mesh"), {**first_params(), "b": np.zeros(70, np.float32)}
    state, options = step.init(first_params()), {"tx": streaming(), "workers": K}
    jc.verify(step, state, batch_of(0), params=first_params(), **options)
    with pytest.raises(ValueError, match=r"must send its whole exchange; got 368 bytes where the exchange is 416"):
        jc.verify(step, state, batch_of(0), params=larger, **options)
    smaller = {**first_params(), "b": np.zeros(50, np.float32)}
    with pytest.raises(ValueError, match=r"at most 9 bytes more; got 368 where the exchange is 309"):
        jc.verify(step, state, batch_of(0), params=smaller, other_bytes=9, **options)


@pytest.mark.parametrize("workers", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_another_number_of_workers(workers):
    """Also between an exchange and its merging: after 4 steps the first fragment waits."""
    step = step_of(exchange=TOPK)
    state = state_after(step, 10)
    resized = step.resize(state, workers)
    new = make_step("simulated", loss, streaming(exchange=TOPK), workers=workers, donate=False)
    jax.tree.map(np.testing.assert_array_equal, new.params(resized), step.params(state))
    for old_part, new_part in zip(memory(state), memory(resized), strict=True):
        assert new_part.merged_at == old_part.merged_at
        owed = [np.asarray(part.held.exchange.residual.rows).mean(0) for part in (old_part, new_part)]
        np.testing.assert_allclose(*owed, atol=1e-6)
    anchor, model = np.asarray(memory(resized)[0].held.anchor["c"]), np.asarray(resized.params.rows["c"])
    state, metrics = new(jax.tree.map(jnp.asarray, resized), {k: np.zeros((workers, *s)) for k, s in SHAPES.items()})
    np.testing.assert_allclose(rows(state, "c"), model / 2 + anchor / 2, rtol=1e-5, atol=1e-6)  # merged in step 11
    assert metrics["skipped"] == 0


def test_checkpoints():
    step = step_of(exchange=TOPK)
    state = state_after(step, 10)
    restored = serialization.from_bytes(step.init(first_params()), serialization.to_bytes(state))
    restored = jax.tree.map(jnp.asarray, restored)
    for i in range(10, 14):
        state, _ = step(state, batch_of(i))
        restored, _ = step(restored, batch_of(i))
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_sparse_loco():
    params = {name: jnp.zeros((64, 64)) for name in "ab"}
    report = jc.wire_report(jc.sparse_loco(6, fragments=2, overlap=1, mix=0.5), params, 2)
    whole = jc.wire_report(jc.sparse_loco(6), params, 2)
    assert (report.every, report.turns) == (3, 2)
    assert report.received_in_exchange < 0.7 * whole.received_in_exchange  # each has a header


def test_parameters_of_16_bits():
    step = step_of()
    state = step.init(first_params(jnp.bfloat16))
    for i in range(8):
        state, metrics = step(state, {name: leaf.astype(jnp.bfloat16) for name, leaf in batch_of(i).items()})
        assert metrics["skipped"] == 0
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, step.params(state)))} == {np.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fragments", 0),
        ("fragments", 6),
        ("overlap", -1),
        ("overlap", 6),
        ("overlap", 1.5),
        ("mix", 1.5),
        ("mix", np.nan),
    ],
)
def test_bad_arguments(name, value):
    """There are fewer tensors than six."""
    refused(lambda: jc.local_sgd(H, exchange=jc.plump_dp(), **{name: value}).init(first_params()), name, f"got {value}")


def test_steps_and_fragments():
    refused(lambda: jc.local_sgd(H, exchange=jc.plump_dp(), fragments=4), "steps", "fragments (4)", "got 6")


def test_the_planner():
    """Though every step exchanges only one of them: two steps exchange all parameters."""
    params = {name: jax.ShapeDtypeStruct((300, 400), np.float32) for name in "ab"}
    settings = {"whole": {}, "parts": {"fragments": 2, "overlap": 1}}
    methods = {name: jc.local_sgd(2, exchange=jc.topk(0.99), **options) for name, options in settings.items()}
    advice = jc.planner.estimate(params, workers=4, rate=1e8, latency=0.01, compute=0.1, methods=methods)
    whole, parts = advice["whole"], advice["parts"]
    assert parts.coding == pytest.approx(whole.coding)
    assert parts.latency == pytest.approx(2 * whole.latency)
    assert parts.wire - parts.latency == pytest.approx(whole.wire - whole.latency, rel=0.01)  # each has a header
    assert (parts.every, parts.delayed) == (2, None)
    assert advice.best not in methods


@pytest.mark.slow
def test_shards_of_workers():
    """Each worker is two devices, and a fragment is the same tensors; also where an exchange is skipped."""
    shapes = {"a": (8, 3), "b": (4, 6), "c": (12, 2)}
    params = normal(shapes)
    tx, specs = streaming(fragments=3, overlap=1), dict.fromkeys(shapes, P("fsdp"))
    mesh, two = jc.make_mesh(data=2, fsdp=2), jc.simulate(loss, tx, 2)
    one = jc.make_train_step(loss, tx, mesh, specs=specs, auto=("fsdp",))
    one_state, two_state, turns, skips = one.init(params), two.init(params), 0, []
    for i in range(10):
        batch = normal(shapes, i, 4)
        if i in (2, 5):  # of one shard of one worker, between exchanges and in one
            batch["c"][3, 1] = np.nan
        turns = turns or one.verify(one_state, batch).turns
        (one_state, metrics), (two_state, expected_metrics) = one(one_state, batch), two(two_state, batch)
        assert metrics["skipped"] == expected_metrics["skipped"]
        skips.append(int(metrics["skipped"]))
        for a, b in (
            (one_state.params.rows, two_state.params.rows),
            (one.params(one_state), two.params(two_state)),
        ):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)
    assert turns == 3
    assert sum(skips) == 1
