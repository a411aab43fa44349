"""Losses and scores of every kind of data, against NumPy, Optax and what was worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import expit, log_softmax
from sklearn.metrics import top_k_accuracy_score

from tests.refusals import refused
from tests.train.runs import CLICKS, IMAGES, TEXT, TRANSLATIONS
from train.data import ImageInfo
from train.tasks import Clicks, make_task

MANY = ImageInfo("many", 60, 10, (8, 8, 1), 12)  # enough classes for a top-5
ROWS = 24
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 12, ROWS).astype(np.int32)
LOGITS = (2 * RNG.standard_normal((ROWS, 12))).astype(np.float32)
BATCH = {"label": jnp.asarray(LABELS)}


def entropies(logits, labels):
    return -np.take_along_axis(log_softmax(logits.astype(np.float64), axis=-1), labels[..., None], axis=-1)[..., 0]


def smoothed(logits, labels, smoothing):
    """Cross entropy with Optax's smoothed labels, one a row."""
    classes = logits.shape[-1]
    targets = optax.smooth_labels(jax.nn.one_hot(labels, classes), smoothing)
    return np.asarray(optax.softmax_cross_entropy(jnp.asarray(logits), targets))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_losses_of_images(smoothing):
    loss, scalars = make_task(MANY, smoothing).loss(jnp.asarray(LOGITS), BATCH)
    np.testing.assert_allclose(loss, smoothed(LOGITS, LABELS, smoothing).mean(), rtol=1e-5)
    if not smoothing:
        np.testing.assert_allclose(loss, entropies(LOGITS, LABELS).mean(), rtol=1e-5)
    assert scalars.keys() == {"accuracy"}
    np.testing.assert_allclose(scalars["accuracy"], np.mean(LOGITS.argmax(axis=1) == LABELS))


def test_auxiliary_heads():
    heads = [LOGITS, *(RNG.standard_normal((ROWS, 12)).astype(np.float32) for _ in range(2))]
    loss, scalars = make_task(MANY, 0.0).loss(tuple(map(jnp.asarray, heads)), BATCH)
    first, second, third = (entropies(head, LABELS).mean() for head in heads)
    np.testing.assert_allclose(loss, first + 0.3 * second + 0.3 * third, rtol=1e-5)
    np.testing.assert_allclose(scalars["accuracy"], np.mean(LOGITS.argmax(axis=1) == LABELS))
    refused(
        lambda: make_task(MANY, 0.1).loss(tuple(map(jnp.asarray, heads)), BATCH),
        "--label-smoothing",
        "got 0.1 for 2 of them",
    )


def test_scores_of_images():
    task = make_task(MANY, 0.3)
    rows = jax.device_get(task.rows(jnp.asarray(LOGITS), BATCH))
    assert {name: value.shape for name, value in rows.items()} == dict.fromkeys(("loss", "right", "in_top5"), (ROWS,))
    scores = task.scores(rows)
    assert scores == pytest.approx(
        {
            "loss": entropies(LOGITS, LABELS).mean(),
            "accuracy": np.mean(LOGITS.argmax(axis=1) == LABELS),
            "top5": top_k_accuracy_score(LABELS, LOGITS, k=5, labels=np.arange(12)),
        },
        rel=1e-5,
    )
    assert 0 < scores["accuracy"] < scores["top5"] < 1


def test_ties_of_the_top_5():
    logits = RNG.integers(0, 4, (ROWS, 12)).astype(np.float32)  # nearly every row has several
    rows = make_task(MANY, 0.0).rows(jnp.asarray(logits), BATCH)
    assert np.mean(rows["in_top5"]) == top_k_accuracy_score(LABELS, logits, k=5, labels=np.arange(12))
    # A model with equal logits for all classes is no better than chance.
    logits_task = make_task(MANY, 0.0).rows(jnp.zeros((12, 12)), {"label": jnp.arange(12)})
    assert np.asarray(logits_task["in_top5"]).tolist() == [False] * 7 + [True] * 5


def test_nan_is_never_right():
    logits = LOGITS.copy()
    logits[3], logits[5, 0], logits[7, LABELS[7]] = np.nan, np.nan, np.nan
    rows = make_task(MANY, 0.0).rows(jnp.asarray(logits), BATCH)
    assert not rows["in_top5"][3]
    assert not rows["in_top5"][7]
    assert np.isnan(rows["loss"][np.array([3, 5, 7])]).all()


def test_ten_classes():
    rows = make_task(IMAGES, 0.0).rows(jnp.asarray(LOGITS[:, :10]), {"label": jnp.asarray(LABELS % 10)})
    assert make_task(IMAGES, 0.0).scores(jax.device_get(rows)).keys() == {"loss", "accuracy"}


def test_clicks():
    task, labels = make_task(CLICKS, 0.0), (LABELS % 2).astype(np.float32)
    logits = LOGITS[:, 0] + labels - 0.5
    batch = {"label": jnp.asarray(labels)}
    loss, scalars = task.loss(jnp.asarray(logits), batch)
    clicked = expit(logits.astype(np.float64))
    expected = -np.mean(labels * np.log(clicked) + (1 - labels) * np.log(1 - clicked))
    accuracy = np.mean((clicked > 0.5) == (labels == 1))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(scalars["accuracy"], accuracy)

    scores = task.scores(jax.device_get(task.rows(jnp.asarray(logits), batch)))
    positive, negative = logits[labels == 1][:, None], logits[labels == 0][None]
    assert scores == pytest.approx(
        {"loss": expected, "accuracy": accuracy, "auc": np.mean(positive > negative)}, rel=1e-5
    )


# Rows of 3, 1, 4 and 2 tokens, END counted; 0 is padding.
TARGETS = np.asarray([[1, 5, 6, 2, 0], [1, 2, 0, 0, 0], [1, 7, 3, 4, 2], [1, 3, 2, 0, 0]], np.int32)
SENTENCES = (2 * RNG.standard_normal((4, 4, 9))).astype(np.float32)


def right_tokens():
    """Logits that are right for the first token of every row, and for padding, which does not count."""
    logits = SENTENCES.copy()
    logits[TARGETS[:, 1:] == 0, 0] = 20
    for row in range(4):
        logits[row, 0, TARGETS[row, 1]] = 20
    return logits


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_of_translations(smoothing):
    logits, labels = right_tokens(), TARGETS[:, 1:]
    real = labels != 0
    batch = {"target": jnp.asarray(TARGETS)}
    loss, scalars = make_task(TRANSLATIONS, smoothing).loss(jnp.asarray(logits), batch)
    losses = smoothed(logits, labels, smoothing)
    np.testing.assert_allclose(loss, losses[real].sum() / 16, rtol=1e-5)  # 4 rows of 4 places
    right = (logits.argmax(axis=-1) == labels) & real
    np.testing.assert_allclose(scalars["accuracy"], np.mean(right.sum(1) / real.sum(1)), rtol=1e-6)
    # Logits of padding are ignored.
    variant = np.where(real[..., None], logits, 100 * RNG.standard_normal(logits.shape).astype(np.float32))
    rerun, _ = make_task(TRANSLATIONS, smoothing).loss(jnp.asarray(variant), batch)
    np.testing.assert_allclose(rerun, loss, rtol=1e-6)


@pytest.mark.slow
def test_translations_on_a_mesh():
    """The mean over workers or micro-batches is the loss of all rows, also for gradients, whatever the padding."""
    task, logits = make_task(TRANSLATIONS, 0.1), jnp.asarray(right_tokens())

    def loss(logits, rows):
        return task.loss(logits, {"target": jnp.asarray(TARGETS[rows])})[0]

    whole, gradient = jax.value_and_grad(loss)(logits, slice(0, 4))
    halves = [slice(0, 2), slice(2, 4)]
    tokens = [int((TARGETS[rows, 1:] != 0).sum()) for rows in halves]
    assert tokens[0] != tokens[1]
    parts = [jax.value_and_grad(loss)(logits[rows], rows) for rows in halves]
    np.testing.assert_allclose(np.mean([part for part, _ in parts]), whole, rtol=1e-6)
    np.testing.assert_allclose(jnp.concatenate([g for _, g in parts]) / 2, gradient, rtol=1e-5, atol=1e-8)


def test_scores_of_translations():
    """They are not means of the rows' means: long sentences count more."""
    logits, labels = right_tokens(), TARGETS[:, 1:]
    real, task = labels != 0, make_task(TRANSLATIONS, 0.1)
    rows = jax.device_get(task.rows(jnp.asarray(logits), {"target": jnp.asarray(TARGETS)}))
    assert rows["tokens"].tolist() == [3, 1, 4, 2]
    right = (logits.argmax(axis=-1) == labels) & real
    assert task.scores(rows) == pytest.approx(
        {"loss": entropies(logits, labels)[real].mean(), "accuracy": right.sum() / 10}, rel=1e-5
    )


def test_diverged_clicks():
    rows = {"logit": np.array([1.0, np.nan, -1.0], np.float32), "label": np.array([1, 0, 0], np.float32)}
    scores = Clicks().scores(rows)
    assert np.isnan(scores["loss"])
    assert np.isnan(scores["auc"])


def test_smoothing_of_clicks():
    assert isinstance(make_task(CLICKS, 0.0), Clicks)
    refused(lambda: make_task(CLICKS, 0.1), "--label-smoothing", "got 0.1")


def test_text():
    text = RNG.integers(0, 256, (5, 8)).astype(np.uint8)
    logits = (2 * RNG.standard_normal((5, 7, 256))).astype(np.float32)
    logits[0, :3, :] = 9 * np.eye(256)[text[0, 1:4]]  # three that are right
    task, batch = make_task(TEXT, 0.0), {"text": jnp.asarray(text)}
    expected, right = entropies(logits, text[:, 1:]), logits.argmax(axis=-1) == text[:, 1:]
    loss, scalars = task.loss(jnp.asarray(logits), batch)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(scalars["accuracy"], right.mean())
    assert right.sum() >= 3
    scores = task.scores(jax.device_get(task.rows(jnp.asarray(logits), batch)))
    assert scores == pytest.approx(
        {"loss": expected.mean(), "accuracy": right.mean(), "bits_per_byte": expected.mean() / np.log(2)}
    )
    with pytest.raises(ValueError, match="--label-smoothing must be 0 for clicks and text"):
        make_task(TEXT, 0.1)
