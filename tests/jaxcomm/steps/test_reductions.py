"""Losses that are no mean over rows: a sum is refused or summed, a quotient of local sums warns."""

import contextlib
import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm as jc
from jaxcomm.steps.reductions import scalings
from tests.marks import slow_except

K, ROWS = 4, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
LABELS = np.arange(ROWS) % 3
VALID = (np.arange(ROWS) % 4 < 3).astype(np.float32)
WEIGHTS = RNG.normal(size=(4, 3)).astype(np.float32)


def cross_entropy(x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ WEIGHTS), labels)


def normalized(x):
    z = x @ WEIGHTS
    return jnp.square((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-2) + 1)


def recurrent(x):
    def cell(carry, time):
        carry = jnp.tanh(carry + x @ WEIGHTS + time)
        return carry, carry

    return jnp.square(jax.lax.scan(cell, jnp.zeros((len(x), 3)), jnp.arange(5.0))[1])


def in_chunks(x, labels):
    parts = x.reshape(2, -1, 4), labels.reshape(2, -1)
    return jax.lax.map(lambda part: cross_entropy(*part).mean(), parts).mean()


def both(x):
    return jnp.stack([x, 2 * x])


def halved(number):
    return jax.lax.while_loop(lambda x: jnp.abs(x) > 0.1, lambda x: x / 2, number)


def until(end, body):
    """A loop of three turns, or until an end, of which there is no gradient."""

    def loop(x):
        start = (jax.lax.stop_gradient(x), 0)
        return x * jax.lax.while_loop(lambda c: (c[1] < 3) & end(c[0]), lambda c: (body(c[0]), c[1] + 1), start)[0]

    return loop


FILTERS = np.ones((3, 1, 2), np.float32)


def convolved(x, filters):
    return jnp.tanh(jax.lax.conv(x[:, None], filters, (1,), "SAME"))


def called(function, x, vmap_method):
    x = jax.lax.stop_gradient(x)
    return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method=vmap_method)


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID")


def looped(x, w):
    return jax.lax.scan(lambda total, row: (total + row, jnp.square(row @ w)), jnp.zeros(4), x)[1]


def grouped(values, labels):
    return jax.ops.segment_sum(values, labels, 3)


def noisy(x):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(len(x)))
    return jnp.where(jax.vmap(jax.random.bernoulli)(keys), x[:, 0], 0)


def adapted(x):
    inner = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(WEIGHTS)
    return jnp.mean((x @ (WEIGHTS - 0.1 * inner)) ** 2)


# The loss; by which power of 2 it grows with twice the rows; None if the walk must not say more than it can prove.
LOSSES = {
    "mean": (lambda x, y, v: cross_entropy(x, y).mean(), 0),
    "sum": (lambda x, y, v: cross_entropy(x, y).sum(), 1),
    "sum over the rows of all": (lambda x, y, v: cross_entropy(x, y).sum() / (K * ROWS), 1),
    "sum over len": (lambda x, y, v: cross_entropy(x, y).sum() / len(x), 0),
    "features' mean, rows' sum": (lambda x, y, v: jnp.square(x).mean(-1).sum(), 1),
    "sum and penalty": (lambda x, y, v: cross_entropy(x, y).sum() + 0 * jnp.sum(WEIGHTS**2), 1),
    "dot": (lambda x, y, v: jnp.vdot(cross_entropy(x, y), v), 1),
    "einsum": (lambda x, y, v: jnp.einsum("bi,bi->", x, x) / len(x), 0),
    "one row's function": (lambda x, y, v: jax.vmap(lambda a, b: cross_entropy(a, b))(x, y).mean(), 0),
    "batch normalisation, mean": (lambda x, y, v: normalized(x).mean(), 0),
    "batch normalisation, sum": (lambda x, y, v: normalized(x).sum(), 1),
    "recurrent, mean": (lambda x, y, v: recurrent(x).mean(), 0),
    "recurrent, sum": (lambda x, y, v: recurrent(x).sum(), 1),
    "rematerialised": (lambda x, y, v: jax.checkpoint(lambda x: cross_entropy(x, y).mean())(x), 0),
    "chunks": (lambda x, y, v: in_chunks(x, y), None),  # twice the rows are other chunks
    "inner gradient": (lambda x, y, v: adapted(x), 0),
    "groups": (lambda x, y, v: grouped(cross_entropy(x, y), y).sum(), 1),
    "groups, mean": (lambda x, y, v: jnp.zeros(3).at[y].add(cross_entropy(x, y)).sum() / len(x), 0),
    "integer labels, sum": (lambda x, y, v: -jax.nn.log_softmax(x)[jnp.arange(len(y)), y].sum(), 1),
    "integer labels, constant places": (lambda x, y, v: -jax.nn.log_softmax(x)[np.arange(len(y)), y].mean(), 0),
    "rows with offsets": (lambda x, y, v: x.reshape(-1)[jnp.arange(len(y)) * 4 + y].mean(), 0),
    "by row, along": (lambda x, y, v: jnp.take_along_axis(x, y[:, None], 1).mean(), 0),
    "signs": (lambda x, y, v: (x * jnp.sign(jax.grad(lambda x: cross_entropy(x, y).mean())(x))).mean(), 0),
    "hinge": (lambda x, y, v: jnp.maximum(0, x + 1).at[jnp.arange(len(y)), y].set(0).mean(), 0),
    "views of rows": (lambda x, y, v: jnp.square(jnp.subtract(*jnp.split(jnp.concatenate([x, x**2]), 2))).mean(), 0),
    "every second row": (lambda x, y, v: jnp.square(x[::2] - x[1::2]).mean(), 0),
    "views in turn": (lambda x, y, v: jnp.square(jnp.subtract(*jnp.unstack(x.reshape(-1, 2, 4), axis=1))).mean(), 0),
    "micro-batches": (lambda x, y, v: jax.lax.map(lambda part: (part**2).mean(), x.reshape(2, -1, 4)).mean(), 0),
    "micro-batches, mapped": (lambda x, y, v: jax.vmap(lambda part: (part**2).mean())(x.reshape(2, -1, 4)).mean(), 0),
    "time first, flat and back": (
        lambda x, y, v: jnp.square(jnp.diff((x.T.reshape(-1, 1) @ WEIGHTS[:1]).reshape(4, -1, 3), axis=0)).mean(),
        0,
    ),
    "views, stacked": (lambda x, y, v: jnp.square(jnp.subtract(*both(x).reshape(-1, 4).reshape(2, -1, 4))).mean(), 0),
    "views by an embedding": (
        lambda x, y, v: jnp.subtract(*jnp.split(jnp.asarray(WEIGHTS)[jnp.concatenate([y, y + 1])], 2)).mean(),
        0,
    ),
    "halves of two arrays": (
        lambda x, y, v: (lambda z: jnp.tanh(z[: len(x)] - z[len(x) :]))(jnp.vstack([x, 2 * x])).mean(),
        0,
    ),
    "samples by a tile": (lambda x, y, v: jnp.square(jnp.tile(x, (3, 1)).reshape(3, -1, 4).sum(0)).mean(), 0),
    "labels of two arrays": (
        lambda x, y, v: (jnp.vstack([x, 2 * x])[:, 0] * jnp.repeat(jnp.array([1.0, -1]), len(x))).mean(),
        0,
    ),
    "groups of equal size": (
        lambda x, y, v: jnp.tanh(jax.ops.segment_sum(x.reshape(-1), jnp.repeat(jnp.arange(len(x)), 4), len(x))).mean(),
        0,
    ),
    "every row by its number": (lambda x, y, v: jnp.square(x[jnp.arange(len(x))] - x).mean(), 0),
    "a loop of every row": (lambda x, y, v: jax.vmap(halved)(x[:, 0]).mean(), 0),
    "loop over places": (lambda x, y, v: jax.lax.map(lambda i: x[i] ** 2, jnp.arange(len(x))).mean(), 0),
    "a column by its place": (lambda x, y, v: (x.at[:, 1].set(0)[:, 2] + x.at[:, 1].multiply(2)[:, 1]).mean(), 0),
    "noise of every row": (lambda x, y, v: noisy(x).mean(), None),
    "a loop over blocks, which are reshaped": (
        lambda x, y, v: jax.lax.map(lambda z: jnp.square(z.reshape(-1, 2)).mean(), x.reshape(2, -1, 4)).mean(),
        0,
    ),
    "the mean of an axis by name": (
        lambda x, y, v: jax.vmap(lambda z: z[0] * jax.lax.pmean(z[1], "row"), axis_name="row")(x).sum(),
        1,
    ),
    "the sum of an axis by name": (
        lambda x, y, v: jax.vmap(lambda z: jax.lax.psum(z[0] ** 2, "row"), axis_name="row", out_axes=None)(x),
        1,
    ),
    "running sum": (lambda x, y, v: jnp.cumsum(cross_entropy(x, y))[-1], None),
    "window": (lambda x, y, v: jax.lax.reduce_window(x[:, 0], 0.0, jax.lax.add, (len(x),), (1,), "VALID")[0], 1),
    "loop": (lambda x, y, v: jax.lax.fori_loop(0, len(x), lambda i, c: c + x[i].sum() ** 2, 0.0), 1),
    "loop, mean": (lambda x, y, v: jax.lax.scan(lambda c, row: (c + row @ row, None), 0.0, x)[0] / len(x), 0),
    "loop, largest": (lambda x, y, v: jax.lax.scan(lambda c, row: (jnp.maximum(c, row.sum()), None), 0.0, x)[0], 0),
    "pooled": (lambda x, y, v: pooled(x).mean(), 0),
    "a callback for every row": (lambda x, y, v: jax.vmap(lambda z: called(np.tanh, z, "sequential"))(x).mean(), 0),
    "gradient of a convolution": (lambda x, y, v: jnp.sum(jax.grad(lambda w: convolved(x, w).sum())(FILTERS)), 1),
    "gradient of groups": (lambda x, y, v: jnp.sum(jax.grad(lambda w: w[y].mean())(WEIGHTS)), 0),
    "gradient of pooling": (lambda x, y, v: jax.grad(lambda w: pooled(x * w).sum())(WEIGHTS[:, 0]).sum(), 1),
    "gradient of a loop": (lambda x, y, v: jax.grad(lambda w: looped(x, w).mean())(WEIGHTS).sum(), 0),
    "groups' means": (lambda x, y, v: (grouped(cross_entropy(x, y), y) / grouped(jnp.ones(len(x)), y)).mean(), 0),
    "convolution": (lambda x, y, v: convolved(x, FILTERS).mean(), 0),
    "focal, sum": (lambda x, y, v: optax.sigmoid_focal_loss(x, x > 0).sum(), 1),
    "count": (lambda x, y, v: (x > 0).sum(), 1),
    "accuracy": (lambda x, y, v: (jnp.argmax(x, -1) == y).mean(), 0),
    "root of a mean": (lambda x, y, v: jnp.sqrt(jnp.mean(x**2)), 0),
    "largest": (lambda x, y, v: cross_entropy(x, y).max(), 0),
    "ratio of means": (lambda x, y, v: (cross_entropy(x, y) * v).mean() / v.mean(), 0),
    "weights of an array": (lambda x, y, v: cross_entropy(x, y) @ np.full(len(y), 1 / len(y), np.float32), 0),
    "root of a largest": (lambda x, y, v: jnp.sqrt(cross_entropy(x, y).max()), 0),
    "any": (lambda x, y, v: (x > 0).any(), 0),
    "tokens": (lambda x, y, v: (cross_entropy(x, y) * v).sum() / jnp.maximum(v.sum(), 1), 0),
    "where": (lambda x, y, v: jnp.mean(cross_entropy(x, y), where=v > 0), 0),
    "average": (lambda x, y, v: jnp.average(cross_entropy(x, y), weights=v), 0),
}
QUOTIENTS = {"tokens", "where", "average", "groups' means", "ratio of means"}
EXTREMES = {"largest", "loop, largest", "root of a largest", "any"}


@pytest.mark.parametrize("name", LOSSES)
def test_twice_the_rows(name):
    loss, power = LOSSES[name]
    rows = [jnp.asarray(part) for part in (X, LABELS, VALID)]
    number = scalings(lambda rows: loss(*rows), rows, K)
    assert number.is_own
    if power is not None:
        assert number.power == power
        doubled = [jnp.concatenate([part, part]) for part in rows]
        np.testing.assert_allclose(loss(*doubled), 2.0**power * loss(*rows), rtol=1e-5)
    assert number.is_quotient == (name in QUOTIENTS)
    assert number.is_extreme == (name in EXTREMES)


NEITHER = {
    "logsumexp": jax.nn.logsumexp,
    "norm": jnp.linalg.norm,
    "contrastive": lambda x: -jax.nn.log_softmax(x @ x.T).diagonal().mean(),
    "median": lambda x: jnp.median(x[:, 0]),
    "the largest half": lambda x: jnp.where(x[:, 0] >= jnp.median(x[:, 0]), x[:, 0], 0).mean(),
    "a row by its value": lambda x: x[jnp.argmax(x[:, 0])].mean(),
    "pairs of rows": lambda x: jnp.mean(jnp.maximum(x @ x.T, 0)),
    "mixed with the rows in reverse": lambda x: jnp.square(x + x[::-1]).mean(),
    "weights by place": lambda x: jnp.mean(jnp.arange(len(x)) * x[:, 0]),
    "weights by place, as a constant": lambda x: np.linspace(0, 1, len(x), dtype=np.float32) @ x[:, 0] / len(x),
    "weights by place, from a table": lambda x: jnp.mean(jnp.linspace(0, 1, 99)[jnp.arange(len(x))] * x[:, 0]),
    "rows before a place": lambda x: jnp.where(jnp.arange(len(x)) < 5, x[:, 0], 0).mean(),
    "a mean of rows before a place": lambda x: jnp.mean(x[:, 0], where=np.arange(len(x)) < 2),
    "a largest beside rows": lambda x: x.mean() + x[:, 0].max(),
    "rows over their largest": lambda x: (x[:, 0] / x[:, 0].max()).mean(),
    "a running product": lambda x: jnp.cumprod(jax.nn.sigmoid(x[:, 0])).mean(),
    "a convolution along rows": lambda x: jnp.square(jnp.convolve(x[:, 0], WEIGHTS[:, 0], mode="same")).mean(),
    "views in the halves of a batch": lambda x: jnp.square(x[: len(x) // 2] - x[len(x) // 2 :]).mean(),
    "views that are split": lambda x: jnp.square(jnp.subtract(*jnp.split(x, 2))).mean(),
    "one mask of each block": lambda x: jax.lax.scan(
        lambda _, part: (None, (part[0] * jax.random.bernoulli(part[1], 0.5, (4,))).mean()),
        None,
        (x.reshape(2, -1, 4), jax.random.split(jax.random.key(0), 2)),
    )[1].mean(),
    "what any row has set": lambda x: x.mean() + jnp.zeros(9).at[jnp.int32(x[:, 0] > 0)].set(1.0).sum(),
    "views in blocks": lambda x: jnp.square(jnp.subtract(*x.reshape(2, -1, 4))).mean(),
    "a block by its number": lambda x: x.reshape(2, -1, 4)[jnp.array(1)].mean(),
    "blocks with weights": lambda x: (x.reshape(2, -1, 4) * WEIGHTS[:2, :1, None]).mean(),
    "blocks with weights, a product": lambda x: jnp.einsum(
        "knd,kde->", x.reshape(2, -1, 4) / len(x), np.stack([WEIGHTS, 2 * WEIGHTS])
    ),
    "blocks' means with weights": lambda x: x.reshape(2, -1).mean(1) @ jnp.array([0.3, 0.7]),
    "the largest of blocks": lambda x: x.reshape(2, -1, 4).max(0).mean(),
    "a sum of blocks": lambda x: jnp.square(x.reshape(2, -1, 4).sum(0)).mean(),
    "standardised over blocks": lambda x: (lambda z: (z * z.std(0)).mean())(x.reshape(2, -1)),
    "blocks as time": lambda x: jax.lax.scan(
        lambda h, z: (jnp.tanh(h + z), None), jnp.zeros((len(x) // 2, 4)), x.reshape(2, -1, 4)
    )[0].mean(),
    "blocks in another order": lambda x: (x.reshape(2, -1, 4)[::-1].reshape(-1, 4) * x).mean(),
    "blocks, transposed": lambda x: (x.reshape(2, -1, 4).swapaxes(0, 1).reshape(-1, 4) * x).mean(),
    "half of the rows by number": lambda x: x[jnp.arange(len(x) // 2)].mean(),
    "half of the rows, taken": lambda x: jax.lax.dynamic_slice_in_dim(x, 0, len(x) // 2).mean(),
    "the next row by number": lambda x: (x * x[(jnp.arange(len(x)) + 1) % len(x)]).mean(),
    "half of the rows written over": lambda x: x.at[: len(x) // 2].set(0).mean(),
    "half of the rows weighed": lambda x: x.at[: len(x) // 2].multiply(3).mean(),
    "weights of halves": lambda x: x[:, 0] @ jnp.repeat(jnp.array([0.0, 1.0]), len(x) // 2) / len(x),
    "weights that are joined": lambda x: (x[:, 0] * jnp.concatenate([jnp.ones(3), jnp.zeros(len(x) - 3)])).mean(),
    "weights that are padded": lambda x: (x[:, 0] * jnp.pad(jnp.ones(len(x) // 2), (0, len(x) // 2))).mean(),
    "weights that are summed up": lambda x: (x[:, 0] * jnp.cumsum(jnp.ones(len(x))) / len(x)).mean(),
    "rows of a table": lambda x: (x * np.arange(400, dtype=np.float32).reshape(100, 4)[: len(x)]).mean(),
    "rows of a table, a tracer": lambda x: (x * jnp.sin(jnp.ones((100, 4)))[: len(x)]).mean(),
    "rows that are counted": lambda x: jax.lax.scan(lambda n, z: (n + 1, jnp.where(n < 5, z, 0)), 0, x)[1].mean(),
    "a loop until all rows are small": lambda x: until(lambda c: jnp.abs(c).max() > 0.1, lambda c: c / 2)(x).mean(),
    "a loop with a mean": lambda x: until(lambda c: True, lambda c: jnp.tanh(c - c.mean()))(x).mean(),
    "a loop with neighbours": lambda x: until(lambda c: True, lambda c: c + jnp.roll(c, 1, 0))(x).mean(),
    "a spectrum of rows": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)).mean(),
    "neighbours": lambda x: jnp.square(x[1:] - x[:-1]).mean(),
    "rows by their numbers": lambda x: x[np.array([0, 3])].mean(),
    "rows by a permutation of a fixed length": lambda x: x[jax.random.permutation(jax.random.key(0), ROWS)].mean(),
    "windows along rows": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 1), (1, 1), "SAME").mean(),
    "the largest of windows along rows": lambda x: nn.max_pool(x[None], (2,), (2,)).mean(),
    "rows by a permutation of NumPy's": lambda x: (x * x[np.random.default_rng(0).permutation(len(x))]).mean(),
    "rows from a place": lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.array(1), 3).mean(),
    "all but the first row": lambda x: x.at[0].set(0).mean(),
    "rows that are weighed by number": lambda x: x.at[np.array([0, 3])].multiply(2).mean(),
    "rows that are written over": lambda x: jax.lax.dynamic_update_slice(x, jnp.ones((1, 4)), (0, 0)).mean(),
    "the first row": lambda x: x[0].mean(),
    "a penalty by rows": lambda x: x.mean() + jnp.sum(WEIGHTS**2) / len(x),
    "running average": lambda x: jax.lax.scan(lambda mean, row: (0.9 * mean + 0.1 * row.sum(), None), 0.0, x)[0],
}


@pytest.mark.parametrize("name", NEITHER)
def test_neither_a_mean_nor_a_sum(name):
    """Nobody can tell that it is a mean, so it warns."""
    assert scalings(lambda rows: NEITHER[name](*rows), [jnp.asarray(X)], K).is_unknown
    step = jc.simulate(lambda p, b: NEITHER[name](b["x"] * p["w"]), jc.chain(jc.plump_dp(), TX), K)
    state = step.init(PARAMS)
    with pytest.warns(UserWarning, match="loss: cannot be told to be a mean over rows"):
        step(state, BATCH)


def test_a_callback_for_all_rows():
    """It may be a rank among them."""

    def loss(rows):
        return (rows[0] * called(lambda x: np.float32(np.argsort(x)), rows[0], None)).mean()

    assert scalings(loss, [jnp.asarray(X[:, 0])], K).is_unknown


def both_steps(function):
    """The calls of a step by `data_parallel` and of one by `make_train_step`, with a function of rows as the loss."""

    def loss(params, batch):
        return function(batch["x"] * params["w"])

    train_step, state = foreign(loss)
    step = jc.make_train_step(loss, jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=K))
    return (
        lambda: jc.data_parallel(train_step, jc.make_mesh(data=K))(state, BATCH),
        lambda: step(step.init(PARAMS), BATCH),
    )


MULTIPLES = {
    "a mean": lambda x: jax.lax.psum(x.mean(), "data"),
    "a mean, in part": lambda x: x.mean() + 0.1 * jax.lax.psum(jnp.square(x).mean(), "data"),
    "a part of it": lambda x: jnp.tanh(jax.lax.psum(x.mean(), "data")) * x.mean(),
    "a sum by own rows": lambda x: jax.lax.psum(x.sum(), "data") / x.size,
    "a sum by a factor": lambda x: jax.lax.psum(x.mean(-1).sum(), "data") * (1 / len(x)),
    "a mean of sums of rows": lambda x: jax.lax.psum(x, "data").mean(),
    "a sum by a pmean": lambda x: jax.lax.psum(x.sum(), "data") / jax.lax.pmean(jnp.square(x).sum(), "data"),
    "rows less a sum of means": lambda x: jnp.square(x - jax.lax.psum(x.mean(0), "data")).mean(),
}
ONE_NUMBER = {
    "a mean over all": lambda x: jax.lax.psum(x.mean(), "data") / jax.lax.axis_size("data"),
    "by a count of workers": lambda x: jax.lax.psum(x.mean(), "data") / jax.lax.psum(jnp.ones(()), "data"),
    "a sum": lambda x: jax.lax.psum(x.sum(), "data") / jax.lax.psum(jnp.float32(x.size), "data"),
    "parts of a mean": lambda x: jax.lax.psum(x.sum() / jax.lax.psum(jnp.float32(x.size), "data"), "data"),
    "a sum by all rows": lambda x: jax.lax.psum(x.sum(), "data") / (x.size * jax.lax.axis_size("data")),
    "a sum by rows, then workers": lambda x: jax.lax.psum(x[:, 0].sum(), "data") / len(x) / jax.lax.axis_size("data"),
    "a sum of rows' means": lambda x: jax.lax.psum(x.mean(-1).sum(), "data") / len(x) / jax.lax.axis_size("data"),
    "a sum by workers, then rows": lambda x: jax.lax.psum(x.sum(), "data") / jax.lax.axis_size("data") / x.size,
    "a part by all rows": lambda x: jax.lax.psum(x.sum() / (x.size * jax.lax.axis_size("data")), "data"),
    "a sum of sums of rows": lambda x: jax.lax.psum(x, "data").sum() / (x.size * jax.lax.axis_size("data")),
    "rows less a pmean": lambda x: jnp.abs(x - jax.lax.pmean(x.mean(0), "data")).mean(),
    "a pmean": lambda x: jax.lax.pmean(x.mean(), "data"),
    "a pmean of rows and workers": lambda x: jax.vmap(
        lambda z: jnp.tanh(z[0]) * jax.lax.pmean(z[1], ("row", "data")), axis_name="row"
    )(x).mean(),
}


OF_PARTS = {
    "a mean of norms": lambda x: jax.lax.pmean(jnp.linalg.norm(x), "data"),
    "a mean of roots": lambda x: jax.lax.pmean(jnp.sqrt(jnp.square(x).mean()), "data"),
    "a mean of variances": lambda x: jax.lax.pmean(x.var(0), "data").mean(),
    "a mean of logsumexps": lambda x: jax.lax.pmean(jax.nn.logsumexp(x), "data"),
    "rows by a mean of the largest": lambda x: jnp.square(x / jax.lax.pmean(jnp.abs(x).max(), "data")).mean(),
    "the root of a mean of sums": lambda x: jnp.sqrt(jax.lax.pmean(jnp.square(x).sum(), "data")),
}
OF_ALL = {
    "the root of a mean": lambda x: jnp.sqrt(jax.lax.pmean(jnp.square(x).mean(), "data")),
    "the root of a sum": lambda x: jnp.sqrt(jax.lax.psum(jnp.square(x).sum(), "data")),
    "a variance": lambda x: (lambda m, v: (v - m * m).mean())(
        *jax.lax.pmean(jnp.stack([x.mean(0), (x * x).mean(0)]), "data")
    ),
    "a mean of gathered rows": lambda x: jnp.tanh(jax.lax.all_gather(x, "data", tiled=True)).mean(),
}


@pytest.mark.parametrize("name", OF_PARTS | OF_ALL)
def test_numbers_of_all_workers(name):
    """A mean of what is no mean over a worker's own rows warns; a function of a mean over all rows does not."""
    function = (OF_PARTS | OF_ALL)[name]
    for call in both_steps(function):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [x for x in caught if "cannot be told to be" in str(x.message)] if name in OF_PARTS else not caught


def synchronised(x):
    mean, square = jax.lax.pmean((x.mean(0), jnp.square(x).mean(0)), "data")
    return (x - mean) / jnp.sqrt(square - mean**2 + 1e-2)


def noisy_rows(x):
    return x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)


def gathered(x):
    return jax.lax.all_gather(x, "data", tiled=True)


def by_pmean(x):
    return (x[:, 0] * (x[:, 1] > 0)).sum() / jax.lax.pmean((x[:, 1] > 0).sum().astype(float), "data")


UNKNOWN, OF_MEAN = "cannot be told to be", "computed from a mean over a worker's own rows"
# What comes after a collective, and what the step warns of; "" if it is the number of one device.
AFTER = {
    "a logsumexp": (lambda x: jax.nn.logsumexp(synchronised(x)), UNKNOWN),
    "a root": (lambda x: jnp.sqrt(jnp.square(synchronised(x) - 1).mean()), OF_MEAN),
    "views in halves": (lambda x: jnp.square(jnp.subtract(*jnp.split(synchronised(x), 2))).mean(), UNKNOWN),
    "the largest half": (lambda x: jnp.sort(synchronised(x)[:, 0])[len(x) // 2 :].mean(), UNKNOWN),
    "own negatives": (lambda x: (lambda z: jax.nn.log_softmax(z @ z.T).diagonal().mean())(synchronised(x)), UNKNOWN),
    "a perplexity": (lambda x: jnp.exp(by_pmean(x)), OF_MEAN),
    "a dropout": (lambda x: jnp.square(noisy_rows(synchronised(x))).mean(), "random numbers of rows"),
    "a mean": (lambda x: jnp.tanh(synchronised(x)).mean(), ""),
    "a sum by a pmean": (by_pmean, ""),
    "means by a pmean": (lambda x: (x[:, 0] * (x[:, 1] > 0)).mean() / jax.lax.pmean((x[:, 1] > 0).mean(), "data"), ""),
    "rows by a largest": (
        lambda x: (x / jax.lax.pmax(jax.lax.stop_gradient(jnp.abs(x).max()), "data")).mean(),
        "",
    ),
    "shares by a pmean": (
        lambda x: (jax.lax.pmean((x > 0).mean(0), "data") * jax.nn.softmax(x).mean(0)).sum(),
        "",
    ),
    "the negatives of all": (
        lambda x: (lambda z: jax.nn.log_softmax(z @ z.T).diagonal().mean())(gathered(synchronised(x))),
        "",
    ),
    "rows of all": (lambda x: jax.nn.logsumexp(x @ gathered(synchronised(x)).T, 1).mean(), ""),
    "the negatives of all, by own places": (
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x @ gathered(x).T, jnp.arange(len(x))).mean(),
        UNKNOWN,
    ),
    "the negatives of all, by places of all": (
        lambda x: optax.softmax_cross_entropy_with_integer_labels(
            x @ gathered(x).T, jnp.arange(len(x)) + jax.lax.axis_index("data") * len(x)
        ).mean(),
        "",
    ),
    "the negatives of all, masked": (
        lambda x: jax.nn.logsumexp(
            jnp.where(
                (jnp.arange(len(x)) + jax.lax.axis_index("data") * len(x))[:, None] == jnp.arange(len(x) * K),
                -1e9,
                x @ gathered(x).T,
            ),
            1,
        ).mean(),
        "",
    ),
    "own rows of all": (
        lambda x: jnp.square(
            jax.lax.dynamic_slice_in_dim(gathered(x), jax.lax.axis_index("data") * len(x), len(x)) + gathered(x).mean()
        ).mean(),
        "",
    ),
    "a dropout of the rows of all": (lambda x: jnp.square(noisy_rows(gathered(x))).mean(), ""),
}


@pytest.mark.parametrize("name", AFTER)
def test_numbers_after_a_collective(name):
    """A sum over the workers says nothing of what is computed from a worker's own rows and from it."""
    function, message = AFTER[name]
    for call in both_steps(function):
        with pytest.warns(match=message) if message else contextlib.nullcontext():
            call()


# Functions of numbers of all workers, of one micro-batch: what is said if there are several.
OF_MICRO_BATCHES = {
    "a sum by a pmean": (by_pmean, "divided by a sum over"),
    "a root": (lambda x: jnp.sqrt(jax.lax.pmean(jnp.square(x).mean(), "data")), "computed from a mean"),
    "normalised": (lambda x: jnp.square(synchronised(x) + 1).mean(), "computed from a mean"),
    "a pmean": (lambda x: jax.lax.pmean(jnp.tanh(x).mean(), "data"), ""),
    "rows of all": (lambda x: jnp.tanh(gathered(x)).mean(), ""),
    "rows less a pmean": (lambda x: (x - 2 * jax.lax.pmean(x.mean(0), "data")).mean(), ""),
}


@pytest.mark.parametrize("name", OF_MICRO_BATCHES)
def test_collectives_in_a_micro_batch(name):
    function, message = OF_MICRO_BATCHES[name]
    for accumulate in (1, 2):
        chain, mesh = jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=2)
        step = jc.make_train_step(lambda p, b: function(b["x"] * p["w"]), chain, mesh, accumulate=accumulate)
        with pytest.warns(match=f"loss: {message}") if message and accumulate > 1 else contextlib.nullcontext():
            step(step.init(PARAMS), BATCH)


def test_a_mean_times_the_workers():
    by_data_parallel, by_train_step = both_steps(lambda x: x.mean() * jax.lax.axis_size("data"))
    with pytest.warns(match="^loss: the sum over the workers of what is no sum"):
        by_train_step()
    with pytest.warns(match="cannot be told to be a mean over rows"):
        by_data_parallel()


BY_WORKERS = {
    "a mean": lambda x: x.mean() / jax.lax.psum(1, "data"),
    "a sum by all rows": lambda x: x.sum() / (x.size * jax.lax.axis_size("data")),
}


@pytest.mark.parametrize("name", BY_WORKERS)
def test_a_mean_by_the_workers(name):
    function = BY_WORKERS[name]
    by_data_parallel, by_train_step = both_steps(function)
    with pytest.raises(ValueError, match=r"must be a mean over rows, .* got a sum, .* 1/4 of those on one device"):
        by_train_step()
    with pytest.raises(ValueError, match=r"must be a mean over rows, .* got the gradient of a sum, .* 1/4 of that on"):
        by_data_parallel()


@pytest.mark.parametrize("name", MULTIPLES | ONE_NUMBER)
def test_sum_of_means(name):
    """It is K times the number of one device, and warns; what is the same number does not."""
    function = (MULTIPLES | ONE_NUMBER)[name]
    for call in both_steps(function):
        with (
            pytest.warns(match="the sum over the workers of what is no sum")
            if name in MULTIPLES
            else contextlib.nullcontext()
        ):
            call()


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


def of_worker(key):
    return jax.random.fold_in(key, jax.lax.axis_index("data"))


def with_next(key, row):
    key, own = jax.random.split(key)
    return key, row * jax.random.uniform(own)


ALIKE = {
    "a dropout": dropped,
    "by row": lambda key, x: jax.vmap(dropped)(jax.random.split(key, len(x)), x),
    "by number": lambda key, x: jax.vmap(dropped)(
        jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(x))), x
    ),
    "in a loop": lambda key, x: jax.lax.map(
        lambda p: p[0] * jax.random.uniform(jax.random.fold_in(key, p[1])), (x, jnp.arange(len(x)))
    ),
    "a key that is carried": lambda key, x: jax.lax.scan(with_next, key, x)[1],
    "two words": lambda key, x: dropped(jax.random.key_data(key), x),
}
OWN_NOISE = {
    "a worker's own": lambda key, x: dropped(of_worker(key), x),
    "a worker's own, by row": lambda key, x: jax.vmap(dropped)(jax.random.split(of_worker(key), len(x)), x),
    "by a number of the batch": lambda key, x: jax.vmap(dropped)(
        jax.vmap(jax.random.fold_in, (None, 0))(key, (99 * x[:, 0]).astype(int)), x
    ),
    "of weights": lambda key, x: x * jax.random.normal(key, x.shape[1:]),
}


@pytest.mark.parametrize("name", ALIKE | OWN_NOISE)
def test_noise_of_rows(name):
    """From a key that all workers have, all draw the same for their rows; that of weights is as on one device."""

    def loss(params, batch):
        return jnp.square((ALIKE | OWN_NOISE)[name](batch["key"], batch["x"] * params["w"])).mean()

    batch, mesh, chain = {**BATCH, "key": jax.random.key(0)}, jc.make_mesh(data=K), jc.chain(jc.plump_dp(), TX)
    train_step, state = foreign(loss)
    step = jc.make_train_step(loss, chain, mesh)
    for call in (lambda: jc.data_parallel(train_step, mesh)(state, batch), lambda: step(step.init(PARAMS), batch)):
        with pytest.warns(match="random numbers of rows") if name in ALIKE else contextlib.nullcontext():
            call()


@pytest.mark.parametrize("rng", ["key", None])
def test_noise_by_rng(rng):
    def loss(params, batch, key):
        return jnp.square(dropped(key, batch["x"] * params["w"])).mean()

    chain = jc.chain(jc.plump_dp(), TX)

    def step(params, opt_state, key, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch, key)
        updates, opt_state = chain.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    on_workers = jc.data_parallel(step, jc.make_mesh(data=K), batch=3, rng=rng)
    with contextlib.nullcontext() if rng else pytest.warns(match="random numbers of rows"):
        on_workers(PARAMS, chain.init(PARAMS), jax.random.key(0), BATCH)
    own = jc.make_train_step(loss, chain, jc.make_mesh(data=K), rng=jax.random.key(0))
    own(own.init(PARAMS), BATCH)


POINTED = {
    "neighbours": lambda x, places: jnp.square(x[places] - x).mean(),
    "along rows": lambda x, places: jnp.take_along_axis(x, places[:, None], 0).mean(),
    "sums of edges": lambda x, places: jnp.square(jax.ops.segment_sum(x, places, len(x))).mean(),
    "set": lambda x, places: jnp.square(jnp.zeros_like(x).at[places].set(x)).mean(),
}


@pytest.mark.parametrize("name", POINTED)
def test_indices_of_rows(name):
    """A worker reads them as places among its own rows."""
    assert scalings(lambda rows: POINTED[name](*rows), [jnp.asarray(X), jnp.asarray(LABELS)], K).is_unknown


@pytest.mark.parametrize("count", [ROWS, 4 * ROWS], ids=["rows", "elements"])
def test_a_constant_that_counts_rows(count):
    """On one device, which has more rows, it would be no mean: it may be a number of anything else."""
    assert scalings(lambda rows: jnp.square(rows[0]).sum() / count, [jnp.asarray(X)], K).power == 1


def test_rows_fixed_in_the_code():
    """Nobody can tell what another number of rows would give, so it warns, but not where a worker has one row."""
    assert scalings(lambda rows: rows[0].reshape(ROWS, 2, 2).sum(), [jnp.asarray(X)], K).is_unknown

    def summed(params, batch):
        return (batch["x"].reshape(4, 2, 2) * params["w"].reshape(2, 2)).sum()

    step = jc.simulate(summed, jc.chain(jc.plump_dp(), TX), K)
    with pytest.warns(UserWarning, match="loss: cannot be told to be a mean.* their number is written in the code"):
        step(step.init(PARAMS), BATCH)
    step = jc.simulate(lambda p, b: jnp.vdot(jnp.squeeze(b["x"], 0), p["w"]), jc.chain(jc.plump_dp(), TX), 16)
    step(step.init(PARAMS), BATCH)


def test_a_loop_over_one_row():
    """Its mean over workers is not the sum that one device takes: it warns as a loop over several does."""

    def summed(params, batch):
        return sum(jnp.vdot(batch["x"][place], params["w"]) for place in range(len(batch["x"])))

    step = jc.simulate(summed, jc.chain(jc.plump_dp(), TX), 16)
    with pytest.warns(UserWarning, match="loss: cannot be told to be a mean over rows"):
        step(step.init(PARAMS), BATCH)


PARAMS = {"w": np.ones(4, np.float32), "b": np.float32(0)}
BATCH = {"x": RNG.normal(size=(16, 4)).astype(np.float32), "y": RNG.normal(size=16).astype(np.float32)}
TX = optax.sgd(0.01)


def squares(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def summed(params, batch):
    return squares(params, batch).sum() / 16


def with_metrics(params, batch):
    losses = squares(params, batch)
    return losses.mean(), {"large": jnp.float32(1) * (losses > 1).sum(), "worst": losses.max()}


def after(loss):
    """One device."""
    value, gradients = jax.value_and_grad(loss)(PARAMS, BATCH)
    updates, _ = TX.update(gradients, TX.init(PARAMS), PARAMS)
    return value, optax.apply_updates(PARAMS, updates)


def assert_like_one_device(step, loss):
    """After one step, the loss and the parameters are those of one device with this loss."""
    state, metrics = step(step.init(PARAMS), BATCH)
    value, params = after(loss)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), step.params(state), params)


def steps_of(loss, **options):
    chain = jc.chain(jc.plump_dp(), TX)
    return {
        "mesh": lambda: jc.make_train_step(loss, chain, jc.make_mesh(data=K), **options),
        "simulated": lambda: jc.simulate(loss, chain, K, **options),
        "accumulated": lambda: jc.make_train_step(loss, chain, jc.make_mesh(data=2), accumulate=2, **options),
        "sharded": lambda: jc.make_train_step(
            loss, chain, jc.make_mesh(data=2, fsdp=2), specs=jax.P(), auto=("fsdp",), **options
        ),
    }


@pytest.mark.parametrize("kind", slow_except(["mesh", "simulated", "accumulated", "sharded"], "simulated", "mesh"))
def test_a_sum(kind):
    step = steps_of(summed)[kind]()
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"got a sum, of which loss and gradient would be 1/[24] .* pass sum=\"loss\""):
        step(state, BATCH)
    step = steps_of(summed, sum="^loss$")[kind]()
    assert_like_one_device(step, summed)


def test_a_mean_that_is_named_a_sum():
    step = jc.simulate(lambda p, b: squares(p, b).mean(), jc.chain(jc.plump_dp(), TX), K, sum="loss")
    with pytest.raises(ValueError, match=r"a sum over a worker's own rows.*got 'loss', which finds 'loss', no sum"):
        step(step.init(PARAMS), BATCH)


@pytest.mark.parametrize("axis", [0, 1])
def test_time_first(axis):
    """A recurrent loss whose batch has time first says so; with batch_axis=1 it is that of one device."""

    def loss(params, batch):
        def cell(carry, x):
            return jnp.tanh(x * params["w"] + carry), None

        return jnp.mean(jax.lax.scan(cell, jnp.zeros(batch["x"].shape[1:]), batch["x"])[0] ** 2)

    batch = {"x": RNG.normal(size=(8, 16, 4)).astype(np.float32)}
    step = jc.simulate(loss, jc.chain(jc.plump_dp(), TX), K, batch_axis=axis)
    state = step.init(PARAMS)
    if axis == 0:
        with pytest.warns(UserWarning, match="a recurrence.* Where time comes first, pass batch_axis=1"):
            step(state, batch)
    else:
        np.testing.assert_allclose(step(state, batch)[1]["loss"], loss(PARAMS, batch), rtol=1e-6)


def test_a_largest():
    def gathered(params, batch):
        return jax.lax.all_gather(squares(params, batch), "data", tiled=True).max()

    step = jc.simulate(lambda p, b: squares(p, b).max(), jc.chain(jc.plump_dp(), TX), K)
    with pytest.raises(ValueError, match=r"got an extreme .* jax.lax.all_gather\(losses, axis, tiled=True\).max\(\)"):
        step(step.init(PARAMS), BATCH)
    step = jc.make_train_step(gathered, jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=K))
    assert_like_one_device(step, lambda p, b: squares(p, b).max())


def test_one_worker_takes_any_loss():
    step = jc.simulate(summed, jc.chain(jc.plump_dp(), TX), 1)
    np.testing.assert_allclose(step(step.init(PARAMS), BATCH)[1]["loss"], after(summed)[0], rtol=1e-6)


def test_metrics_of_a_loss():
    def run(**options):
        step = jc.simulate(with_metrics, jc.chain(jc.plump_dp(), TX), K, has_aux=True, **options)
        return step(step.init(PARAMS), BATCH)[1]

    with pytest.raises(ValueError, match=r"got a sum for 'large'.* Pass sum='\^large\$'"):
        run()
    with pytest.raises(ValueError, match=r"got an extreme for 'worst'.* Pass max='\^worst\$'"):
        run(sum="large")
    metrics, (_, expected) = run(sum="large", max="worst"), with_metrics(PARAMS, BATCH)
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(jax.tree.map(float, expected))


def test_a_largest_that_is_no_number():
    """The NaN of one worker's maximum arrives, though it does not reach the gradient."""

    def loss(params, batch):
        return squares(params, batch).mean(), {"worst": batch["z"].max()}

    batch = BATCH | {"z": np.repeat(np.array([1, np.nan, 3, 2], np.float32), 4)}
    for step in steps_of(loss, has_aux=True, max="worst").values():
        made = step()
        metrics = made(made.init(PARAMS), batch)[1]
        assert np.isnan(metrics["worst"])
        assert metrics["skipped"] == 0
    train_step, state = foreign(loss, has_metrics=True)
    _, (_, metrics) = jc.data_parallel(train_step, jc.make_mesh(data=K), max="worst")(state, batch)
    assert np.isnan(metrics["worst"])


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_model_states(reduction):
    """A codebook's counts, a history of maxima: of all workers' rows, by a collective in the loss."""

    def loss(params, model_state, batch, axis=None):
        new = getattr(jnp, reduction)(jnp.round(batch["x"]), 0)
        if axis is not None:
            new = getattr(jax.lax, f"p{reduction}")(new, axis)
        return squares(params, batch).mean(), ({}, 0.9 * model_state + new)

    step = jc.simulate(loss, jc.chain(jc.plump_dp(), TX), K, has_state=True)
    state = step.init(PARAMS, jnp.ones(4))
    with pytest.raises(ValueError, match=rf"A model's state must be of means.* jax.lax.p{reduction}\(x, axis\)"):
        step(state, BATCH)
    step = jc.simulate(functools.partial(loss, axis="data"), jc.chain(jc.plump_dp(), TX), K, has_state=True)
    state, _ = step(step.init(PARAMS, jnp.ones(4)), BATCH)
    np.testing.assert_allclose(step.model_state(state), loss(PARAMS, np.ones(4), BATCH)[1][1], rtol=1e-6)


def test_a_quotient_warns():
    def tokens(params, batch):
        return (squares(params, batch) * batch["valid"]).sum() / batch["valid"].sum()

    batch = BATCH | {"valid": (np.arange(16) % 5 > 0).astype(np.float32)}
    step = jc.simulate(tokens, jc.chain(jc.plump_dp(), TX), K)
    state = step.init(PARAMS)
    with pytest.warns(UserWarning, match="loss: divided by a sum over a worker's own rows"):
        step(state, batch)

    def right(params, batch):
        return (squares(params, batch) * batch["valid"]).sum() / jax.lax.pmean(batch["valid"].sum(), "data")

    step = jc.simulate(right, jc.chain(jc.plump_dp(), TX), K)
    np.testing.assert_allclose(step(step.init(PARAMS), batch)[1]["loss"], tokens(PARAMS, batch), rtol=1e-6)


def foreign(loss, has_metrics=False):
    chain = jc.chain(jc.plump_dp(), TX)

    def train_step(state, batch):
        params, opt_state = state
        out, gradients = jax.value_and_grad(loss, has_aux=has_metrics)(params, batch)
        updates, opt_state = chain.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), out

    return train_step, (PARAMS, chain.init(PARAMS))


def test_a_sum_in_a_foreign_step():
    train_step, state = foreign(summed)
    mesh = jc.make_mesh(data=K)
    with pytest.raises(ValueError, match=r"the gradient of a sum, .* 1/4 .* jax.lax.psum\(losses.sum"):
        jc.data_parallel(train_step, mesh)(state, BATCH)
    train_step, state = foreign(lambda p, b: jax.lax.psum(squares(p, b).sum(), "data") / 16)
    (params, _), value = jc.data_parallel(train_step, mesh)(state, BATCH)
    expected = after(summed)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), params, expected[1])


def test_rows_fixed_in_a_foreign_step_warn():
    train_step, state = foreign(lambda p, b: (b["x"].reshape(4, 2, 2) * p["w"].reshape(2, 2)).sum())
    with pytest.warns(UserWarning, match="gradients, 1: cannot be told to be a mean over rows"):
        jc.data_parallel(train_step, jc.make_mesh(data=K))(state, BATCH)


def with_whole_targets(params, batch):
    return jnp.square(batch["x"] @ params["w"] - batch["y"]).mean()


def by_labels(p, b):
    return -jax.nn.log_softmax(b["x"] * p["w"])[jnp.arange(len(b["x"])), jnp.int32(b["y"] > 0)]


# A loss of one row for each worker; what `data_parallel` says, and what `make_train_step`; "" if it is a mean.
OF_ONE_ROW = {
    "a sum": (lambda p, b: squares(p, b).sum(), "a sum", "a sum"),
    "a sum by labels": (lambda p, b: by_labels(p, b).sum(), "a sum", "a sum"),
    "a root": (lambda p, b: jnp.sqrt(by_labels(p, b).mean()), OF_MEAN, OF_MEAN),
    "pairs": (lambda p, b: jnp.square((x := b["x"] * p["w"])[:, None] - x).mean(), UNKNOWN, UNKNOWN),
    "negatives": (
        lambda p, b: -jax.nn.log_softmax((x := b["x"] * p["w"]) @ x.T).diagonal().mean(),
        UNKNOWN,
        UNKNOWN,
    ),
    "a mean": (lambda p, b: squares(p, b).mean(), "", ""),
    "a mean by labels": (lambda p, b: by_labels(p, b).mean(), "", ""),
    "whole targets": (with_whole_targets, UNKNOWN, UNKNOWN),
    "whole targets of all": (
        lambda p, b: jnp.square(jax.lax.all_gather(b["x"] @ p["w"], "data", tiled=True) - b["y"]).mean(),
        "",
        "",
    ),
}


@pytest.mark.parametrize("name", OF_ONE_ROW)
def test_one_row_for_each_worker(name):
    """It is no other loss than that of several."""
    loss, *messages = OF_ONE_ROW[name]
    batch, axis = jax.tree.map(lambda x: x[:K], BATCH), {"x": 0, "y": None if "whole" in name else 0}
    train_step, state = foreign(loss)
    step = jc.make_train_step(loss, jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=K), batch_axis=axis)
    calls = (
        lambda: jc.data_parallel(train_step, jc.make_mesh(data=K), batch_axis=axis)(state, batch),
        lambda: step(step.init(PARAMS), batch),
    )
    for call, message in zip(calls, messages, strict=True):
        with (
            pytest.raises(ValueError, match="must be a mean over rows")
            if message == "a sum"
            else pytest.warns(match=message)
            if message
            else contextlib.nullcontext()
        ):
            call()


def test_workers_fixed_in_a_foreign_step():
    """A step of no other number of workers is compared with itself for twice as many rows."""

    def loss(params, batch, reduce):
        gathered = jax.lax.all_gather(squares(params, batch), "data").reshape(K * len(batch["x"]))
        return reduce(squares(params, batch) - jax.lax.stop_gradient(gathered.mean()))

    for reduce in (jnp.mean, jnp.sum):
        train_step, state = foreign(functools.partial(loss, reduce=reduce))
        with pytest.warns(match=f"^gradients, 1: {UNKNOWN}") if reduce is jnp.sum else contextlib.nullcontext():
            jc.data_parallel(train_step, jc.make_mesh(data=K))(state, BATCH)


# Functions of rows and of a state that depend on the number of rows, and whether that is a worker's own.
SIZED = {
    "a decay": (lambda x, s: 0.5 ** (len(x) / 40) * s["mean"] + 1, True),
    "a rate": (lambda x, s: s["mean"] * np.sqrt(len(x) / 32), True),
    "an epoch": (lambda x, s: jnp.where(s["step"] // (50 // len(x)) < 1, 1.0, 0.1), True),
    "a curriculum": (lambda x, s: jnp.where(s["step"] * len(x) < 20, (x * x).mean(), jnp.abs(x).mean()), True),
    "a branch": (lambda x, s: jax.lax.cond(s["step"] * len(x) < 20, lambda: 0.1, lambda: 0.2), True),
    "a schedule": (lambda x, s: 1 - jnp.cos(s["step"] * len(x) / 100), True),
    "weights": (lambda x, s: (x.mean(0) * np.arange(1, 5, dtype=np.float32) ** (len(x) / 4)).mean(), True),
    "a decay of all": (lambda x, s: 0.5 ** (of_workers(x) / 40) * s["mean"] + 1, False),
    "an epoch of all": (lambda x, s: jnp.where(s["step"] // (50 // of_workers(x)) < 1, 1.0, 0.1), False),
    "a curriculum of all": (
        lambda x, s: jnp.where(s["step"] * of_workers(x) < 20, (x * x).mean(), jnp.abs(x).mean()),
        False,
    ),
    "rows by number": (lambda x, s: jnp.take(x, jnp.arange(len(x)), axis=0).mean(), False),
    "the same weights": (lambda x, s: (x.mean(0) * np.arange(1, 5, dtype=np.float32)).mean(), False),
}


def of_workers(x):
    return len(x) * jax.lax.axis_size("data")


@pytest.mark.parametrize("name", SIZED)
def test_what_depends_on_the_number_of_rows(name):
    function, warns = SIZED[name]

    def loss(params, model_state, batch):
        new = model_state | {"mean": jnp.float32(function(batch["x"], model_state))}
        return squares(params, batch).mean(), ({}, new)

    def train_step(state, batch):
        params, opt_state, model_state = state
        (_, (_, model_state)), gradients = jax.value_and_grad(loss, has_aux=True)(params, model_state, batch)
        updates, opt_state = chain.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state), None

    chain, model_state = jc.chain(jc.plump_dp(), TX), {"mean": jnp.float32(0), "step": jnp.int32(2)}
    step = jc.make_train_step(loss, chain, jc.make_mesh(data=K), has_state=True)
    on_workers = jc.data_parallel(train_step, jc.make_mesh(data=K), mean="mean")
    for call in (
        lambda: on_workers((PARAMS, chain.init(PARAMS), model_state), BATCH),
        lambda: step(step.init(PARAMS, model_state), BATCH),
    ):
        with pytest.warns(match=f"mean.*: {UNKNOWN}") if warns else contextlib.nullcontext():
            call()


def test_metrics_of_a_foreign_step():
    train_step, state = foreign(with_metrics, has_metrics=True)
    mesh = jc.make_mesh(data=K)
    with pytest.raises(ValueError, match=r"got a sum at '1/1/large'. Pass sum="):
        jc.data_parallel(train_step, mesh)(state, BATCH)
    _, (_, metrics) = jc.data_parallel(train_step, mesh, sum="large", max="worst")(state, BATCH)
    expected = with_metrics(PARAMS, BATCH)[1]
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(jax.tree.map(float, expected))
    with pytest.raises(ValueError, match=r"got an extreme at '1/1/worst'. Pass max="):
        jc.data_parallel(train_step, mesh, sum="large", mean="worst")(state, BATCH)


def test_a_quotient_in_a_foreign_step_warns():
    train_step, state = foreign(lambda p, b: jnp.average(squares(p, b), weights=b["valid"]))
    batch = BATCH | {"valid": (np.arange(16) % 5 > 0).astype(np.float32)}
    with pytest.warns(UserWarning, match="gradients, 1: divided by a sum over a worker's own rows"):
        jc.data_parallel(train_step, jc.make_mesh(data=K))(state, batch)


def of_all(params, batch):
    return jax.lax.psum(squares(params, batch).sum(), "data") / 16


def with_gathered_weights(params, batch):
    w = jax.lax.all_gather(params["w"], "data").mean(0)
    return squares(params | {"w": w}, batch).sum() / 16


def contrastive(params, batch):
    """Losses of own rows, with the negatives of all workers."""
    logits = (batch["x"] * params["w"]) @ jax.lax.all_gather(batch["x"], "data", tiled=True).T
    return jax.nn.logsumexp(logits, 1) - (batch["x"] ** 2 * params["w"]).sum(1)


# A loss, options, and what the message says.
SUMS = {
    "of a micro-batch": (of_all, {"accumulate": 2}, "got a sum"),
    "of all workers": (of_all, {"sum": "loss"}, r"leave out jax\.lax\.psum"),
    "beside gathered weights": (with_gathered_weights, {}, "got a sum"),
    "beside gathered negatives": (lambda params, batch: contrastive(params, batch).sum(), {}, "got a sum"),
    "with a penalty": (
        lambda params, batch: summed(params, batch) + jnp.sum(params["w"] ** 2),
        {"sum": "loss"},
        "a sum with other terms",
    ),
    "times the number of workers": (lambda params, batch: K * summed(params, batch), {}, "got a sum"),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_refused(name):
    loss, options, message = SUMS[name]
    step = jc.simulate(loss, jc.chain(jc.plump_dp(), TX), K, **options)
    with pytest.raises(ValueError, match=message):
        step(step.init(PARAMS), BATCH)


def test_a_sum_of_all_workers():
    step = jc.make_train_step(of_all, jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=K))
    assert_like_one_device(step, lambda p, b: squares(p, b).sum() / 16)


@pytest.mark.parametrize("option", ["sum", "max"])
def test_a_mean_by_another_name(option):
    def loss(params, batch):
        return squares(params, batch).mean(), {
            "entropy": squares(params, batch).mean(),
            "n": squares(params, batch).sum(),
        }

    step = jc.simulate(loss, jc.chain(jc.plump_dp(), TX), K, has_aux=True, **{option: "n"})
    with pytest.raises(ValueError, match=r"'n', which finds '(entropy|n)', no (sum|extreme)"):
        step(step.init(PARAMS), BATCH)


def test_another_batch_is_checked_again():
    def loss(params, batch):
        losses = squares(params, batch)
        return losses.mean() if "mask" not in batch else (losses * batch["mask"]).sum()

    step = jc.simulate(loss, jc.chain(jc.plump_dp(), TX), K)
    state, _ = step(step.init(PARAMS), BATCH)
    with pytest.raises(ValueError, match="got a sum"):
        step(state, BATCH | {"mask": np.ones(16, np.float32)})


def test_states_that_are_neither():
    def loss(params, state, batch):
        return squares(params, batch).mean(), ({}, jnp.linalg.norm(batch["x"]))

    step = jc.simulate(loss, jc.chain(jc.plump_dp(), TX), K, has_state=True)
    state = step.init(PARAMS, jnp.float32(0))
    with pytest.warns(UserWarning, match="cannot be told to be a mean"):
        step(state, BATCH)


def test_arrays_without_items():
    for options in ({}, {"accumulate": 2}):
        step = jc.simulate(lambda p, b: squares(p, b).mean(), jc.chain(jc.plump_dp(), TX), K, **options)
        _, metrics = step(step.init(PARAMS), BATCH | {"none": np.zeros((16, 0), np.float32)})
        np.testing.assert_allclose(metrics["loss"], squares(PARAMS, BATCH).mean(), rtol=1e-6)


def mean_of(x):
    return jnp.square(x).mean()


MIDDLE = 1.0  # of the means of squares of four parts, one is above
# Functions of x (rows, 4), and whether it is the mean over workers that is not the value for all rows.
OF_MEANS = {
    "root": (lambda x: jnp.sqrt(mean_of(x)), True),
    "square": (lambda x: x.mean() ** 2, True),
    "perplexity": (lambda x: jnp.exp(cross_entropy(x, jnp.zeros(len(x), int)).mean()), True),
    "absolute": (lambda x: jnp.abs(jnp.mean(x[:, 0])), True),
    "at least": (lambda x: jnp.maximum(mean_of(x), 0.9), True),
    "shares of experts": (lambda x: jnp.sum((x > 0).mean(0) * jax.nn.softmax(x).mean(0)), True),
    "entropy of a mean": (lambda x: -jnp.sum(jax.scipy.special.xlogy(p := jax.nn.softmax(x).mean(0), p)), True),
    "in a scan": (lambda x: jax.lax.scan(lambda c, t: (c + jnp.sqrt(mean_of(x * t)), None), 0.0, jnp.ones(2))[0], True),
    "left out where large": (lambda x: jnp.where(mean_of(x) < MIDDLE, mean_of(x), 0.0), True),
    "by another branch": (lambda x: jax.lax.cond(mean_of(x) < MIDDLE, jnp.negative, lambda m: 2 * m, mean_of(x)), True),
    "free bits": (lambda x: jnp.where(x.mean(0) > 0.1, x.mean(0), 0.1).sum(), True),
    "mean": (mean_of, False),
    "scaled, and shifted": (lambda x: 3 * mean_of(x) / jnp.exp(WEIGHTS[0, 0]) + WEIGHTS.sum() ** 2, False),
    "several": (lambda x: mean_of(x) + jnp.dot(WEIGHTS[:, 0], x.mean(0)) - x[:, 1].mean(), False),
    "normalised": (lambda x: normalized(x).mean(), True),
    "variance": (lambda x: x[:, 0].var(), True),
    "advantages": (lambda x: (jnp.exp(x[:, 0]) * jax.nn.standardize(x[:, 1])).mean(), True),
    "a baseline": (lambda x: ((x[:, 0] - x[:, 0].mean()) * x[:, 1]).mean(), True),
    "rows above their mean": (lambda x: jnp.where(x > x.mean(0), x, 0.0).mean(), True),
    "a mean beside rows": (lambda x: (x[:, 0] - 2 * x.mean()).mean(), False),
    "guarded": (lambda x: jnp.where(jnp.isfinite(mean_of(x)), mean_of(x), 0.0), False),
    "guarded twice": (lambda x: jnp.where(jnp.isnan(m := mean_of(x)) | ~jnp.isfinite(x.mean(0)).all(), 0.0, m), False),
    "picked by row": (lambda x: jnp.where(x > 0.5, x, 0.0).mean(), False),
    "roots of rows": (lambda x: jnp.sqrt(jnp.square(x).mean(-1)).mean(), False),
    "layer normalisation": (lambda x: jax.nn.standardize(x, axis=-1).max(-1).mean(), False),
}


@pytest.mark.parametrize("name", OF_MEANS)
def test_functions_of_means(name):
    function, differs = OF_MEANS[name]
    parts = np.mean([function(jnp.asarray(part)) for part in np.split(X, K)])
    assert np.allclose(parts, function(jnp.asarray(X)), rtol=1e-5) != differs
    assert scalings(lambda rows: function(*rows), [jnp.asarray(X)], K).is_of_mean == differs


def test_normalisation_by_own_statistics():
    """With a state it is by intention, and so is the variance that it tracks; without one it warns."""

    def loss(params, model_state, batch):
        mean, square = batch["x"].mean(0), jnp.square(batch["x"]).mean(0)
        normal = (batch["x"] - mean) / jnp.sqrt(square - mean**2 + 1e-3)
        return jnp.square(normal @ params["w"]).mean(), ({}, 0.9 * model_state + square - mean**2)

    chain, mesh = jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=K)
    step = jc.make_train_step(loss, chain, mesh, has_state=True)
    step(step.init(PARAMS, np.ones(4, np.float32)), BATCH)
    step = jc.make_train_step(lambda params, batch: loss(params, 0.0, batch)[0], chain, mesh)
    with pytest.warns(UserWarning, match="loss: computed from a mean over a worker's own rows.* a normalisation"):
        step(step.init(PARAMS), BATCH)


@pytest.mark.parametrize("beside", ["nothing", "accumulated gradients", "a sum", "statistics"])
def test_normalisation_in_a_foreign_step(beside):
    """Only statistics that are averaged say that it is by intention."""
    chain = jc.chain(jc.plump_dp(), TX, accumulate=2 if beside == "accumulated gradients" else 1)

    def train_step(state, batch):
        params, opt_state, old = state
        mean = batch["x"].mean(0)

        def loss(params):
            return jnp.square((batch["x"] - mean) * params["w"] + batch["x"][:, :1]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = chain.update(gradients, opt_state, params)
        new = {"statistics": 0.9 * old + 0.1 * mean, "a sum": old + batch["x"].sum(0)}.get(beside, old)
        return (optax.apply_updates(params, updates), opt_state, new), value

    options = {"statistics": {"mean": "^0/2"}, "a sum": {"sum": "^0/2"}}.get(beside, {})
    step = jc.data_parallel(train_step, jc.make_mesh(data=K), **options)
    with contextlib.nullcontext() if beside == "statistics" else pytest.warns(match=OF_MEAN):
        step((PARAMS, chain.init(PARAMS), jnp.zeros(4)), BATCH)


def test_a_root_warns():
    def loss(params, batch):
        mean = squares(params, batch).mean()
        return mean, {"rmse": jnp.sqrt(mean), "mse": mean}

    def root_of_all(params, batch):
        return jnp.sqrt(jax.lax.pmean(squares(params, batch).mean(), "data"))

    step = jc.simulate(loss, jc.chain(jc.plump_dp(), TX), K, has_aux=True)
    state = step.init(PARAMS)
    with pytest.warns(UserWarning, match=r"^rmse: computed from a mean .* Return the mean, and take the function"):
        step(state, BATCH)
    step = jc.make_train_step(root_of_all, jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=K))
    assert_like_one_device(step, lambda p, b: jnp.sqrt(squares(p, b).mean()))


def test_a_root_in_a_foreign_step_warns():
    train_step, state = foreign(lambda p, b: jnp.sqrt(squares(p, b).mean()))
    with pytest.warns(UserWarning, match="^gradients, 1: computed from a mean"):
        jc.data_parallel(train_step, jc.make_mesh(data=K))(state, BATCH)


def with_backward(function):
    """The identity, with a backward pass of its own."""
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, cotangent: (function(cotangent),))
    return identity


# What a backward pass makes of cotangents, of which those of a mean are smaller where there are more rows; whether that
# is another number on several workers.
BACKWARDS = {
    "clipped": (lambda x: jnp.clip(x, -1e-3, 1e-3), True),
    "chosen": (lambda x: jnp.where(jnp.abs(x) > 1e-3, 1e-3, x), True),
    "of length 1": (lambda x: x / jnp.linalg.norm(x), True),
    "signs": (jnp.sign, True),
    "guarded": (lambda x: jnp.nan_to_num(x), False),
    "reversed": (lambda x: -0.5 * x, False),
    "straight through": (lambda x: x, False),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_pass(name, accumulate):
    function, warns = BACKWARDS[name]
    identity = with_backward(function)

    def loss(params, batch):
        return jnp.square(identity(batch["x"] @ params["w"] + params["b"]) - batch["y"]).mean()

    step = jc.make_train_step(
        loss, jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=K // accumulate), accumulate=accumulate
    )
    with pytest.warns(match="^gradients: cannot be told to be") if warns else contextlib.nullcontext():
        step(step.init(PARAMS), BATCH)


@pytest.mark.parametrize("name", ["clipped", "of length 1", "signs", "reversed"])
def test_a_backward_pass_in_a_foreign_step(name):
    function, warns = BACKWARDS[name]
    identity = with_backward(function)
    train_step, state = foreign(lambda p, b: jnp.square(identity(b["x"] @ p["w"] + p["b"]) - b["y"]).mean())
    step = jc.data_parallel(train_step, jc.make_mesh(data=K))
    if name == "signs":  # of which a sum over rows is taken
        with pytest.raises(ValueError, match="got the gradient of a sum"):
            step(state, BATCH)
        return
    with pytest.warns(match="^gradients: cannot be told to be") if warns else contextlib.nullcontext():
        step(state, BATCH)


def by_row(loss):
    """The mean over rows of a gradient by a number that the loss is multiplied with."""
    return lambda p, b: jnp.square(
        jax.vmap(lambda x, y: jax.grad(lambda s: loss(s, p, x, y))(1.0))(b["x"], b["y"])
    ).mean()


def by_scale(s, p, x, y):
    return (s * (x @ p["w"] + p["b"]) - y) ** 2


def by_place_in_time(p, b):  # nothing of the batch is in it
    return squares(p, b).mean() + jax.grad(lambda t: jnp.sin(t * p["w"]).sum())(1.0) ** 2


OF_CONSTANTS = {
    "by row": by_row(by_scale),
    "compiled": by_row(jax.jit(by_scale)),
    "rematerialised": by_row(jax.checkpoint(by_scale)),
    "of parameters": by_place_in_time,
}


@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_a_gradient_by_a_constant(name):
    """JAX sums it over the workers, whose rows are not the same; untracked, or by what varies, it is right."""
    loss = OF_CONSTANTS[name]
    step = jc.make_train_step(loss, jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=K))
    with pytest.raises(ValueError, match="JAX sums that by a constant over the workers; got such a sum in 'loss'"):
        step(step.init(PARAMS), BATCH)
    train_step, state = foreign(loss)
    _, value = jc.data_parallel(train_step, jc.make_mesh(data=K))(state, BATCH)
    np.testing.assert_allclose(value, after(loss)[0], rtol=1e-5)


def test_a_gradient_by_what_varies():
    def loss(params, batch):
        one = jax.lax.pcast(jnp.float32(1), "data", to="varying")
        slopes = jax.vmap(lambda x, y: jax.grad(lambda s: by_scale(s, params, x, y))(one))(batch["x"], batch["y"])
        return jnp.square(slopes).mean()

    step = jc.make_train_step(loss, jc.chain(jc.plump_dp(), TX), jc.make_mesh(data=K))
    state, metrics = step(step.init(PARAMS), BATCH)
    value, params = after(by_row(by_scale))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), step.params(state), params)


# The exchange, whether gradients are of the root of a mean, whether they are clipped before it, and whether it warns:
# before an exchange with error feedback each worker's own gradient is clipped.
UNSEEN = [
    (jc.plump_dp(), False, False, False),
    (jc.plump_dp(), True, False, True),
    (jc.plump_dp(), False, True, True),
    (jc.topk(0.5), True, False, True),
    (jc.topk(0.5), False, True, False),
]


@pytest.mark.parametrize(("exchange", "is_root", "is_clipped", "warns"), UNSEEN)
def test_a_loss_that_is_not_returned(exchange, is_root, is_clipped, warns):
    links = [optax.clip_by_global_norm(1.0)] * is_clipped
    chain = optax.chain(*links, exchange, TX)

    def loss(params, batch):
        return jnp.sqrt(squares(params, batch).mean()) if is_root else squares(params, batch).mean()

    def train_step(state, batch):
        params, opt_state = state
        updates, opt_state = chain.update(jax.grad(loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step, state = jc.data_parallel(train_step, jc.make_mesh(data=K)), (PARAMS, chain.init(PARAMS))
    with pytest.warns(UserWarning, match="^gradients: computed from a mean") if warns else contextlib.nullcontext():
        step(state, BATCH)


def with_noise(params, batch):
    return (squares(params, batch) * jax.random.bernoulli(jax.random.key(0), 0.5, batch["y"].shape)).mean()


# Losses that are not returned, and what is said of their gradients.
HIDDEN = {
    "a mean": (lambda p, b: squares(p, b).mean(), contextlib.nullcontext),
    "a sum": (
        lambda p, b: squares(p, b).sum(),
        lambda: pytest.raises(ValueError, match="got the gradient of a sum"),
    ),
    "noise": (with_noise, lambda: pytest.warns(match="^gradients: computed with random numbers of rows")),
}


@pytest.mark.parametrize("place", ["in its step", "in the next step", "in a loop"])
@pytest.mark.parametrize("name", HIDDEN)
def test_gradients_wherever_they_are_exchanged(name, place):
    (loss, expected), chain = HIDDEN[name], jc.chain(jc.plump_dp(), TX, delay=int(place == "in the next step"))

    def train_step(state, batch):
        def turn(state):
            params, opt_state, turns = state
            updates, opt_state = chain.update(jax.grad(loss)(params, batch), opt_state, params)
            return optax.apply_updates(params, updates), opt_state, turns - 1

        return jax.lax.while_loop(lambda state: state[2] > 0, turn, state) if place == "in a loop" else turn(state)

    with expected():
        jc.data_parallel(train_step, jc.make_mesh(data=K))((PARAMS, chain.init(PARAMS), np.int32(2)), BATCH)
