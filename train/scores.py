"""How good predictions are, by the libraries that papers use: AUC, log loss, BLEU."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_expit


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the area under the ROC curve: how often a positive row has a higher score than a negative one.

    By scikit-learn's `roc_auc_score`; ties count half.

    Args:
      labels: (n,) of 0 and 1.
      scores: (n,), logits or probabilities.

    Raises:
      ValueError: if there are no rows of one of the labels, or a score is not finite.
    """
    from sklearn.metrics import roc_auc_score  # here, as its import takes a second

    labels, scores = _check_clicks(labels, scores)
    if labels.min() == labels.max():
        raise ValueError(f"AUC must be of rows of both labels; got {len(labels)} rows of label {labels[0]:g} alone.")
    return float(roc_auc_score(labels, scores))


def log_loss(labels: np.ndarray, logits: np.ndarray) -> float:
    """Returns the mean negative log-likelihood in nats, as scikit-learn's `log_loss` does of probabilities.

    From logits, by SciPy's `log_expit`: probabilities round to 0 and 1, where the loss would have to be clipped.

    Args:
      labels: (n,) of 0 and 1.
      logits: (n,), of label 1.

    Raises:
      ValueError: if there are no rows, or a logit is not finite.
    """
    labels, logits = _check_clicks(labels, logits)
    return float(-np.mean(labels * log_expit(logits) + (1 - labels) * log_expit(-logits)))


@dataclass(frozen=True)
class Bleu:
    """A BLEU score, and how it was computed.

    Attributes:
      score: 0 to 100.
      signature: sacreBLEU's, without which two scores cannot be compared.
    """

    score: float
    signature: str


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Bleu:
    """Returns BLEU of a corpus by sacreBLEU, with its own tokenizer (13a) on plain text.

    With case kept, it is the number that sacreBLEU asks papers to report (Post, "A Call for Clarity in Reporting BLEU
    Scores", 2018). fairseq's number for IWSLT'14, such as the 35.17 of the DCT paper, is a different one: it is for
    lower-cased text that Moses tokenized, with subwords joined. The lower-cased score here is the nearest to it that
    plain text allows, but the two tokenizers split some words differently. No two of the three can be compared.

    Args:
      hypotheses: translations, as plain text: without subwords or separated punctuation.
      references: one for each, as plain text.
      lowercase: whether case is dropped first.

    Raises:
      ValueError: if there are none, or not equally many.
    """
    from sacrebleu.metrics.bleu import BLEU

    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"BLEU must have one reference for each translation, at least one; got {len(hypotheses)} translations and "
            f"{len(references)} references."
        )
    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return Bleu(float(score.score), str(metric.get_signature()))


def _check_clicks(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    labels, scores = np.asarray(labels, np.float64), np.asarray(scores, np.float64)
    if labels.ndim != 1 or labels.shape != scores.shape or not len(labels):
        raise ValueError(f"labels and scores must be (n,), n > 0; got {labels.shape} and {scores.shape}.")
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(f"labels must be 0 or 1; got {labels[~np.isin(labels, (0, 1))][0]:g} among them.")
    _check_finite(scores)
    return labels, scores


def _check_finite(scores: np.ndarray) -> None:
    if not np.isfinite(scores).all():
        raise ValueError(f"scores must be finite; got {np.sum(~np.isfinite(scores))} of {scores.size} that are not.")
