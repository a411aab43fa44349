"""Scores: against values by hand and other definitions, and refused where they mean nothing."""

import numpy as np
import pytest
import sacrebleu
from scipy.special import expit
from sklearn import metrics

from train.scores import auc, bleu, log_loss

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 200)
LOGITS = (RNG.standard_normal(200) + LABELS).round(1)  # rounded, so that there are ties


def test_auc():
    positive, negative = LOGITS[LABELS == 1][:, None], LOGITS[LABELS == 0][None]
    expected = np.mean((positive > negative) + 0.5 * (positive == negative))
    assert auc(LABELS, LOGITS) == pytest.approx(expected, rel=1e-12)
    assert auc(LABELS, expit(LOGITS)) == pytest.approx(expected, rel=1e-12)
    assert auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) == 0.75  # of scikit-learn's documentation


def test_log_loss():
    assert log_loss(LABELS, LOGITS) == pytest.approx(metrics.log_loss(LABELS, expit(LOGITS)), rel=1e-12)
    assert log_loss([0, 1], [0.0, 0.0]) == pytest.approx(np.log(2))
    assert log_loss([0, 1], [1000.0, 3.0]) == pytest.approx((1000 + np.log1p(np.exp(-3))) / 2)  # not clipped


def test_bleu_by_hand():
    # 5 of 6 words, 3 of 5 pairs, 1 of 4 triples and none of 3 quadruples are in the reference, which is as long.
    scored = bleu(["the cat sat on the mat"], ["the cat sits on the mat"])
    counts = [5 / 6, 3 / 5, 1 / 4, (1 / 2) / 3]  # none counts as a half
    assert scored.score == pytest.approx(100 * np.prod(counts) ** 0.25)
    assert bleu(["Das ist gut, nicht?"] * 2, ["Das ist gut, nicht?"] * 2).score == pytest.approx(100)


def test_signature_of_bleu():
    assert bleu(["a b c d"], ["a b c d"]).signature.split("|") == [
        "nrefs:1",
        "case:mixed",
        "eff:no",
        "tok:13a",
        "smooth:exp",
        f"version:{sacrebleu.__version__}",
    ]


def test_punctuation_and_case():
    assert bleu(["Yes , he saw it ."], ["Yes, he saw it."]).score == pytest.approx(100)
    assert bleu(["yes, he saw it."], ["Yes, he saw it."]).score < 90
    lower = bleu(["yes, he saw it."], ["Yes, he saw it."], lowercase=True)
    assert lower.score == pytest.approx(100)
    assert "case:lc" in lower.signature


@pytest.mark.parametrize(
    ("score", "arguments", "message"),
    [
        (auc, ([1, 1], [0.1, 0.2]), "both labels; got 2 rows of label 1 alone"),
        (auc, ([0, 1], [0.1, np.nan]), "must be finite; got 1 of 2 that are not"),
        (auc, ([0, 2], [0.1, 0.2]), "labels must be 0 or 1; got 2 among them"),
        (auc, ([0, 1], [[0.1], [0.2]]), r"got \(2,\) and \(2, 1\)"),
        (log_loss, ([], []), r"n > 0; got \(0,\)"),
        (log_loss, ([0, 1], [0, np.inf]), "must be finite; got 1 of 2 that are not"),
        (bleu, (["a"], ["a", "b"]), "got 1 translations and 2 references"),
        (bleu, ([], []), "got 0 translations"),
    ],
)
def test_errors(score, arguments, message):
    with pytest.raises(ValueError, match=message):
        score(*arguments)
