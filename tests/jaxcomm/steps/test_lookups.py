"""Tables whose rows the step looks up: they train as on one device, and untouched rows are not moved."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm as jc
from tests.marks import slow_except

ROWS, D, F, B = 24, 4, 3, 8
SPECS = {"words": {"table": P("data")}, "places": P(None, "data"), "w": P()}
LOOKUPS = {"words/table": lambda batch: batch["words"], "places": lambda batch: batch["place"]}
RATE = optax.linear_schedule(0.0, 0.3, 2)


def start():
    rng = np.random.default_rng(0)
    shapes = {"words": {"table": (ROWS, D)}, "places": (10, D), "w": (D,)}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def batch_of(seed):
    """A batch with few rows of the table, so that workers share some, and a worker has some twice."""
    rng = np.random.default_rng(seed)
    return {
        "words": rng.integers(0, 9, (B, F)).astype(np.int32),
        "place": rng.integers(0, 4, B).astype(np.int32),
        "y": rng.standard_normal(B).astype(np.float32),
    }


def loss_of(words, places, w, y):
    """A loss of vectors (B, F, D) and (B, D)."""
    return jnp.mean((jnp.tanh(words.sum(axis=1) * places) @ w - y) ** 2)


def loss_fn(params, batch):
    return loss_of(params["words"]["table"], params["places"], params["w"], batch["y"])


def make(K, tx=None, specs=SPECS, lookups=LOOKUPS, **options):
    tx = tx or jc.chain(jc.plump_dp(), optax.sgd(RATE))
    return jc.make_train_step(loss_fn, tx, jc.make_mesh(data=K), specs=specs, lookups=lookups, **options)


@pytest.mark.parametrize("K", slow_except([2, 4], 2))
def test_tables_are_one_device(K):
    def whole(params, batch):
        rows = params["words"]["table"][batch["words"]], params["places"][batch["place"]]
        return loss_of(*rows, params["w"], batch["y"])

    one, step = start(), make(K)
    tx, state = optax.sgd(RATE), step.init(one)
    opt_state = tx.init(one)
    gradient = jax.jit(jax.value_and_grad(whole))
    for number in range(4):
        batch = batch_of(number)
        state, metrics = step(state, batch)
        loss, gradients = gradient(one, batch)
        updates, opt_state = tx.update(gradients, opt_state)
        one = optax.apply_updates(one, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert not np.allclose(state.params["words"]["table"][:9], start()["words"]["table"][:9], atol=1e-3)
    for gradients, expected, first in zip(*map(jax.tree.leaves, (state.params, one, start())), strict=True):
        np.testing.assert_allclose(gradients, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(gradients[9:], first[9:])  # rows that no batch touched
    old_params = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, batch_of(9) | {"y": np.full(B, np.nan, np.float32)})
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, old_params)
    _, metrics = step(state, batch_of(5))
    assert metrics["skipped"] == 0


@pytest.mark.parametrize("way", ["by the step", "by the loss"])
@pytest.mark.parametrize("outside", [-1, -ROWS, -ROWS - 1, ROWS, 2**31 - 1])
def test_an_id_outside_the_table(outside, way):
    batch = batch_of(0)
    batch["words"][::2, -1], batch["place"][-1] = outside, max(-10, min(outside, 2**20))

    def whole(params, batch):
        rows = params["words"]["table"][batch["words"]], params["places"][batch["place"]]
        return loss_of(*rows, params["w"], batch["y"])

    def by_the_loss(params, batch):
        words = jc.layers.sharded_lookup(params["words"]["table"], batch["words"], by="rows")
        places = jc.layers.sharded_lookup(params["places"], batch["place"], by="columns")
        return loss_of(words, places, params["w"], batch["y"])

    tx, mesh = jc.chain(jc.plump_dp(), optax.sgd(1.0)), jc.make_mesh(data=2)
    step = make(2, tx) if way == "by the step" else jc.make_train_step(by_the_loss, tx, mesh, specs=SPECS)
    state, metrics = step(step.init(start()), batch)
    value, right = jax.value_and_grad(whole)(start(), batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    change = jax.tree.map(lambda old, new: old - np.asarray(new), start(), state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), change, right)


def test_bytes():
    """Each of two workers receives half of all ids, vectors and changes (by columns half of D); and 16 bytes more.

    In addition, there are the all-reduces of w, of the loss, and of the four counts.
    """
    step = make(2)
    state, batch = step.init(start()), batch_of(0)
    words, places = B * F, B
    expected = 4 * (words + places + 2 * D * words + 2 * D / 2 * places) / 2 + 4 * (D + 1 + 4)
    assert step.report(state, batch).received == expected
    assert step.verify(state, batch).received == expected
    large = start() | {"places": jnp.zeros((1000, D))}
    assert step.report(make(2).init(large), batch).received == expected


@pytest.mark.slow
def test_lookups_by_loss_and_step():
    """Its gradient is then dense, with the same result."""

    def loss(params, batch):
        places = jc.layers.sharded_lookup(params["places"], batch["place"], by="columns")
        return loss_of(params["words"]["table"], places, params["w"], batch["y"])

    tx = jc.chain(jc.plump_dp(), optax.sgd(RATE))
    lookups = {"words/table": LOOKUPS["words/table"]}
    mixture = jc.make_train_step(loss, tx, jc.make_mesh(data=2), specs=SPECS, lookups=lookups)
    pair = make(2)
    states = [step.init(start()) for step in (mixture, pair)]
    for number in range(3):
        states = [step(state, batch_of(number))[0] for step, state in zip((mixture, pair), states, strict=True)]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), states[0].params, states[1].params
    )


@pytest.mark.parametrize(
    "after",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.sgd(0.1, momentum=0.0),  # which still has state for every row
        optax.adam(0.1),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(RATE)),
        optax.chain(optax.clip(0.1), optax.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    ],
)
def test_other_optimizers(after):
    with pytest.raises(ValueError, match=r"lookups must be with an optimizer whose update of a row is the sum"):
        make(2, jc.chain(jc.plump_dp(), after)).init(start())


def test_decay_before_the_exchange():
    with pytest.raises(ValueError, match=r"lookups must be with an optimizer whose update of a row is the sum"):
        make(2, jc.chain(optax.add_decayed_weights(0.1), jc.plump_dp(), optax.sgd(0.1))).init(start())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookups": {"word": LOOKUPS["places"]}}, "lookups must be of parameters, by their paths; got 'word'"),
        ({"lookups": {"w": LOOKUPS["places"]}}, r"sharded over the workers, by rows or by columns; got 'w' \(4,\)"),
        ({"specs": SPECS | {"places": P()}}, r"got 'places' \(10, 4\) with the spec \(\)"),
        ({"specs": None}, "lookups must go with specs="),
    ],
)
def test_other_tables(options, message):
    with pytest.raises(ValueError, match=message):
        make(2, **options).init(start())


def test_auto_axes():
    tx, mesh = jc.chain(jc.plump_dp(), optax.sgd(0.1)), jc.make_mesh(data=2, model=2)
    with pytest.raises(ValueError, match=r"lookups must be on a mesh of Auto axes, all of them manual; got auto"):
        jc.make_train_step(loss_fn, tx, mesh, specs=SPECS, auto=("model",), lookups=LOOKUPS)


def test_ids_are_integers():
    lookups = LOOKUPS | {"places": lambda batch: batch["y"]}
    step = make(2, lookups=lookups)
    with pytest.raises(ValueError, match="ids of lookups must be of int32; got float32"):
        step.report(step.init(start()), batch_of(0))


def test_a_sum_over_vectors_is_refused():
    def loss(params, batch):
        return jnp.sum((params["words"]["table"].sum((1, 2)) - batch["y"]) ** 2)

    tx, mesh = jc.chain(jc.plump_dp(), optax.sgd(RATE)), jc.make_mesh(data=2)
    step = jc.make_train_step(loss, tx, mesh, specs=SPECS, lookups=LOOKUPS)
    with pytest.raises(ValueError, match="got a sum"):
        step(step.init(start()), batch_of(0))
