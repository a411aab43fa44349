"""The generated log: the same everywhere, in Criteo's format, and best predicted by its teacher."""

import json
import zlib

import numpy as np
import pytest
from scipy import sparse
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from train.data import click_store, click_teacher, clicks
from train.data.click_parser import Counts, parse, read_log
from train.data.click_teacher import EMPTY, PAIRS, ROWS_AT_ONCE, SIZES, generate, make_teacher
from train.scores import auc, log_loss


@pytest.fixture(scope="module")
def teacher():
    return make_teacher(0)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    return path, generate(40_000, 0, path)


@pytest.fixture(scope="module")
def rows(log):
    """The rows of the log with the ranks of their categories: what the parser reads, and nothing else."""
    counts = Counts()
    read = np.concatenate([rows for rows, _ in read_log(log[0], counts)])
    assert (counts.lines, counts.malformed.total()) == (40_000, 0)
    bits = [np.concatenate([[0], column[1:]]).astype(np.uint32) for column in make_teacher(0).bits]
    ranks = []
    for column, values in enumerate(bits):
        order = np.argsort(values)
        ranks.append(order[np.searchsorted(values, read["categories"][:, column].view(np.uint32), sorter=order)])
    return read, np.stack(ranks, axis=1)


def test_the_log_never_changes(log):
    # Results on another log are not comparable: a change needs a new version, also of the dataset.
    assert (click_teacher.VERSION, click_store.VERSION) == (1, "1.0.0")
    assert zlib.crc32(log[0].read_bytes()) == 3_581_166_740


def test_more_rows(log, tmp_path):
    generate(100, 0, tmp_path / "few.tsv")
    few = (tmp_path / "few.tsv").read_bytes()
    assert few.count(b"\n") == 100
    assert log[0].read_bytes().startswith(few)
    generate(100, 1, tmp_path / "other.tsv")
    assert (tmp_path / "other.tsv").read_bytes() != few


def test_scores(log, rows, teacher):
    """Its scores can be computed from the log alone: a model sees all that the teacher sees."""
    read, ranks = rows
    numbers = np.rint(np.expm1(read["dense"].astype(np.float64))).astype(np.int64)
    logit = teacher.logit(numbers, ranks)
    facts = json.loads(log[0].with_name("log.tsv.teacher.json").read_text())
    assert facts == log[1]
    for part, of in (("all", slice(None)), ("test", slice(40_000 - 40_000 // 7, None))):
        assert facts[part]["log_loss"] == pytest.approx(log_loss(read["label"][of], logit[of]), rel=1e-9)
        assert facts[part]["auc"] == pytest.approx(auc(read["label"][of], logit[of]), rel=1e-9)


def test_probabilities_of_labels(teacher):
    _, _, logit, label = teacher.draw(np.random.default_rng(5))
    p = expit(logit)
    bins = np.digitize(p, [0.05, 0.1, 0.2, 0.4, 0.6, 0.8])
    for column in range(7):
        of = bins == column
        deviation = np.sqrt(np.sum(p[of] * (1 - p[of])))
        assert abs(label[of].sum() - p[of].sum()) < 5 * deviation
    assert abs(p.mean() - 0.256) < 5 * p.std() / np.sqrt(len(p)) * 2**0.5  # the offset was fitted to equally many rows
    # The loss of the labels is the entropy of the probabilities: no model can expect a lower one.
    entropy = -(p * np.log(p) + (1 - p) * np.log1p(-p))
    spread = np.sqrt(np.sum(p * (1 - p) * logit**2)) / len(p)
    assert abs(log_loss(label, logit) - entropy.mean()) < 5 * spread


def test_interactions_add_nothing(teacher):
    for first, second in PAIRS:
        for column, partner in ((first, second), (second, first)):
            mean = teacher.vectors[column] @ (teacher.frequencies[partner] @ teacher.vectors[partner])  # (categories,)
            np.testing.assert_allclose(mean, 0, atol=1e-12)


def test_variance_of_interactions(teacher):
    variance = 0.0
    for pair in PAIRS:  # of independent columns, so that their variances add up
        first, second = ((teacher.vectors[c].T * teacher.frequencies[c]) @ teacher.vectors[c] for c in pair)  # (4, 4)
        variance += np.trace(first @ second)
    # The four numbers of a category are independent, but over a few frequent categories they correlate by chance.
    assert variance == pytest.approx(click_teacher.PAIR_VARIANCE, rel=0.3)


def test_categories(rows):
    _, ranks = rows
    for column, size in enumerate(SIZES):
        counts = np.bincount(ranks[:, column], minlength=size)
        frequency = np.arange(1, size + 1) ** -click_teacher.EXPONENT
        expected = len(ranks) * frequency / frequency.sum()
        assert len(counts) == size
        chi_squared = np.sum((counts - expected) ** 2 / expected)
        assert abs(chi_squared - (size - 1)) < 6 * np.sqrt(2 * (size - 1)) + 6
    assert all(len(set(column.tolist())) == size for column, size in zip(make_teacher(0).bits, SIZES, strict=True))


def test_numbers(teacher):
    numbers, _, _, _ = teacher.draw(np.random.default_rng(6))
    assert numbers.min() == EMPTY
    empty = (numbers == EMPTY).mean(axis=0)
    np.testing.assert_allclose(empty, teacher.missing, atol=5 * np.sqrt(0.25 / ROWS_AT_ONCE))
    assert (numbers == -1).any()
    # An empty number and a negative one count as 0, to the teacher as to the parser.
    zero = np.zeros((1, 13), np.int64)
    ranks = np.zeros((1, 26), np.int64)
    assert teacher.logit(zero, ranks) == teacher.logit(zero + EMPTY, ranks) == teacher.logit(zero - 1, ranks)


def test_products_of_categories(rows, log, teacher):
    """A logistic regression of single columns stays far below the teacher; with the products, it comes close."""
    read, ranks = rows
    numbers = read["dense"].astype(np.float64)
    singles = sparse.hstack([*(_one_hot(ranks[:, column]) for column in range(26)), numbers / 5])
    z = (numbers - teacher.location) / teacher.scale
    products = [np.sum(teacher.vectors[i][ranks[:, i]] * teacher.vectors[j][ranks[:, j]], axis=1) for i, j in PAIRS]
    features = sparse.hstack([singles, z**2 @ teacher.curves[:, None], np.sum(products, axis=0)[:, None]])
    scores = []
    first_test = log[1]["rows"] - log[1]["rows"] // 7
    for x in (singles.tocsr(), features.tocsr()):
        model = LogisticRegression(C=0.1, tol=1e-2, solver="newton-cg").fit(x[:first_test], read["label"][:first_test])
        scores.append(log_loss(read["label"][first_test:], model.decision_function(x[first_test:])))
    bound = log[1]["test"]["log_loss"]
    assert bound < scores[1] < bound + 0.03
    assert scores[0] > bound + 0.1


def _one_hot(ids):
    return sparse.csr_matrix((np.ones(len(ids)), (np.arange(len(ids)), ids)))


def test_equal_labels(tmp_path):
    facts = generate(7, 0, tmp_path / "log.tsv")
    assert facts["test"]["auc"] is None  # of one row
    assert len(parse((tmp_path / "log.tsv").read_bytes().splitlines())[0]) == 7


@pytest.mark.parametrize(
    ("rows", "seed", "name", "message"),
    [
        (6, 0, "a", "at least 7 rows, .*; got 6"),
        (7, -1, "a", "at least 0; got -1"),
        (7, 0, "there", "there, which exists"),
    ],
)
def test_errors(tmp_path, rows, seed, name, message):
    (tmp_path / "there").touch()
    with pytest.raises(ValueError, match=message):
        generate(rows, seed, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_command_generates(tmp_path, capsys):
    assert clicks.main(["generate", "--rows", "20", "--seed", "3", "--out", str(tmp_path / "log")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["seed"]) == (20, 3)
    assert json.loads((tmp_path / "log.teacher.json").read_text()) == facts
