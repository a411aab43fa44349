"""The task of each kind of data: the loss of a batch, and the scores of a test split."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.googlenet import mean_loss
from models.transformer import smoothed_losses
from train import scores
from train.data import ClickInfo, DatasetInfo, ImageInfo, TextInfo, TranslationInfo

Scalars = dict[str, jax.Array]


class Task(Protocol):
    """A loss, and scores."""

    def loss(self, output: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Scalars]:
        """Returns the mean loss of the rows, and at least their "accuracy"; `output` is of a model in training."""
        ...

    def rows(self, output: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the values that scores are computed from, one entry a row; `output` is of a model in evaluation."""
        ...

    def scores(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns "loss", "accuracy" and the task's other scores of a whole split."""
        ...


class Classification:
    """One class per image: cross entropy, with the auxiliary heads where a model has them."""

    def __init__(self, info: ImageInfo, label_smoothing: float):
        """Takes the number of classes from the dataset."""
        self.num_classes, self.label_smoothing = info.num_classes, label_smoothing

    def loss(self, output: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Scalars]:
        """Returns the mean cross entropy and the accuracy.

        Raises:
          ValueError: for auxiliary heads with smoothing.
        """
        logits = output[0] if isinstance(output, tuple) else output
        if isinstance(output, tuple) and self.label_smoothing:
            raise ValueError(
                f"--label-smoothing must be 0 for a model with auxiliary heads; got {self.label_smoothing} for "
                f"{len(output) - 1} of them. Leave it at 0, or make the model without."
            )
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        if isinstance(output, tuple):
            return mean_loss(output, batch["label"]), {"accuracy": right.mean()}
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        if self.label_smoothing:
            uniform_loss = jax.nn.logsumexp(logits, axis=-1) - logits.mean(axis=-1)
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * uniform_loss
        return losses.mean(), {"accuracy": right.mean()}

    def rows(self, output: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns every row's loss, whether it is right, and, of more than 10 classes, whether it is in the top 5."""
        columns = {
            "loss": optax.softmax_cross_entropy_with_integer_labels(output, batch["label"]),
            "right": jnp.argmax(output, axis=-1) == batch["label"],
        }
        if self.num_classes > 10:
            # As in scikit-learn, ties go to the highest class. Comparisons with NaN are false, so NaN is never right.
            label = batch["label"][:, None]
            label_score = jnp.take_along_axis(output, label, axis=-1)
            tied = (output == label_score) & (jnp.arange(output.shape[-1]) > label)
            columns["in_top5"] = jnp.sum(~(output <= label_score) | tied, axis=-1) < 5
        return columns

    def scores(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns loss, accuracy (top-1), and top-5 accuracy where there are more than 10 classes."""
        means = {"loss": float(np.mean(rows["loss"])), "accuracy": float(np.mean(rows["right"]))}
        return means | ({"top5": float(np.mean(rows["in_top5"]))} if "in_top5" in rows else {})


class Clicks:
    """Clicked or not: binary cross entropy of the logit."""

    def loss(self, output: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Scalars]:
        """Returns the mean log loss and the accuracy."""
        losses = optax.sigmoid_binary_cross_entropy(output, batch["label"])
        return losses.mean(), {"accuracy": jnp.mean((output > 0) == (batch["label"] > 0.5))}

    def rows(self, output: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns every row's logit and label."""
        return {"logit": output, "label": batch["label"]}

    def scores(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns log loss, accuracy and AUC; the first and the last are NaN if a logit is not finite."""
        labels, logits = rows["label"], rows["logit"]
        diverged = not np.isfinite(logits).all()
        return {
            "loss": math.nan if diverged else scores.log_loss(labels, logits),
            "accuracy": float(np.mean((logits > 0) == (labels > 0.5))),
            "auc": math.nan if diverged else scores.auc(labels, logits),
        }


class Translation:
    """The next subword of the target: smoothed cross entropy.

    The loss of a batch is the sum over its tokens, divided by its number of positions, padding included: so the mean
    over workers or micro-batches is the loss of all their rows, however much padding each has.
    """

    def __init__(self, label_smoothing: float):
        """Takes the probability that is spread over all tokens."""
        self.label_smoothing = label_smoothing

    def loss(self, output: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Scalars]:
        """Returns the mean loss per position, and the mean over the rows of their accuracies."""
        losses, _, _ = smoothed_losses(output, batch["target"], self.label_smoothing)
        labels = batch["target"][:, 1:]
        right, real = self._right(output, labels)
        accuracies = right.sum(axis=1) / jnp.maximum(real.sum(axis=1), 1)
        return losses.sum() / labels.size, {"accuracy": accuracies.mean()}

    def rows(self, output: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns every row's cross entropy, number of right tokens, and number of tokens."""
        _, entropies, tokens = smoothed_losses(output, batch["target"], 0.0)
        right, _ = self._right(output, batch["target"][:, 1:])
        return {"loss": entropies, "right": right.sum(axis=1), "tokens": tokens}

    def scores(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the cross entropy and the accuracy per token."""
        tokens = float(np.sum(rows["tokens"]))
        return {"loss": float(np.sum(rows["loss"])) / tokens, "accuracy": float(np.sum(rows["right"])) / tokens}

    @staticmethod
    def _right(output: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        real = labels != 0
        return (jnp.argmax(output, axis=-1) == labels) & real, real


class NextByte:
    """The next byte of a text: cross entropy."""

    def loss(self, output: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Scalars]:
        """Returns the mean loss per byte, in nats, and the accuracy."""
        losses, right = self._bytes(output, batch)
        return losses.mean(), {"accuracy": right.mean()}

    def rows(self, output: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns every row's mean loss, and the fraction of its bytes that are right."""
        losses, right = self._bytes(output, batch)
        return {"loss": losses.mean(axis=1), "right": right.mean(axis=1)}

    def scores(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the loss and the accuracy per byte, and the loss in bits."""
        loss = float(np.mean(rows["loss"]))
        return {"loss": loss, "accuracy": float(np.mean(rows["right"])), "bits_per_byte": loss / math.log(2)}

    @staticmethod
    def _bytes(output: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        labels = batch["text"][:, 1:].astype(jnp.int32)
        losses = optax.softmax_cross_entropy_with_integer_labels(output, labels)
        return losses, jnp.argmax(output, axis=-1) == labels


def make_task(info: DatasetInfo, label_smoothing: float) -> Task:
    """Makes the task of a dataset.

    Raises:
      ValueError: for label smoothing with clicks or text.
    """
    match info:
        case ImageInfo():
            return Classification(info, label_smoothing)
        case TranslationInfo():
            return Translation(label_smoothing)
        case ClickInfo() if not label_smoothing:
            return Clicks()
        case TextInfo() if not label_smoothing:
            return NextByte()
    raise ValueError(f"--label-smoothing must be 0 for clicks and text; got {label_smoothing}. Leave it at 0.")
