"""A click log in Criteo's format, drawn from a known model, so that the best reachable score is known as well.

The teacher is a logistic model of a row: an effect of every category and every number, squares of some numbers, and
for some pairs of columns the inner product of two vectors of four numbers, one for each category. The vectors have mean
zero over a column, so that the product adds nothing to the effects of single categories: a logistic regression cannot
learn it, and a model that multiplies embeddings can.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import expit

from train.data.click_parser import first_test_row
from train.data.info import NUM_CATEGORIES, NUM_DENSE
from train.data.seeds import mix
from train.scores import auc, log_loss

VERSION = 1  # of the log: changing any number below changes the rows, and needs another version
ROWS_AT_ONCE = 16_384
POSITIVE_RATE = 0.256  # of Criteo's log

# How many categories a column has. Frequencies fall as 1 / rank^1.1.
SIZES = (30, 20, 400, 300, 10, 6, 100, 15, 3, 200, 100, 400, 80, 8, 100, 300, 5, 60, 40, 4, 300, 4, 6, 200, 10, 150)
EXPONENT = 1.1
PAIRS = ((1, 4), (4, 7), (0, 5), (5, 24), (7, 13), (13, 16), (1, 24), (16, 19))  # of columns of up to 30 categories
SQUARED = (0, 4, 9)  # numbers whose squares count
VECTOR = 4

# Shares of the variance of the logit.
CATEGORY_VARIANCE, NUMBER_VARIANCE, SQUARE_VARIANCE, PAIR_VARIANCE = 0.5, 0.3, 0.4, 1.2


@dataclass(frozen=True)
class Teacher:
    """The model.

    Attributes:
      frequencies: of the categories of each column; the sums are 1.
      bits: of the categories of each column, as in the file, where the first category is an empty field instead.
      effects: of the categories of each column.
      vectors: of the categories of the columns in `PAIRS`, (categories, 4) each.
      location: mean of log(x) of the 13 numbers.
      scale: its deviation.
      missing: how often each number is empty.
      slopes: effect of each number.
      curves: effect of the square of each number.
      offset: of the logit.
    """

    frequencies: list[np.ndarray]
    bits: list[np.ndarray]
    effects: list[np.ndarray]
    vectors: dict[int, np.ndarray]
    location: np.ndarray
    scale: np.ndarray
    missing: np.ndarray
    slopes: np.ndarray
    curves: np.ndarray
    offset: float

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Draws 16,384 rows.

        Returns:
          Numbers (n, 13) int64, at least -1, or `EMPTY`; categories (n, 26) as ranks from 0; the logit (n,); and the
          label (n,) bool.
        """
        normal = rng.standard_normal((ROWS_AT_ONCE, NUM_DENSE))
        numbers = np.floor(np.exp(self.location + self.scale * normal)).astype(np.int64) - 1  # (n, 13), from -1
        numbers = np.where(rng.random(numbers.shape) < self.missing, EMPTY, numbers)
        uniform = rng.random((ROWS_AT_ONCE, NUM_CATEGORIES))
        ranks = np.stack(
            [
                np.minimum(np.searchsorted(np.cumsum(frequency), uniform[:, column]), len(frequency) - 1)
                for column, frequency in enumerate(self.frequencies)
            ],
            axis=1,
        )  # (n, 26)
        logit = self.logit(numbers, ranks)
        return numbers, ranks, logit, rng.random(ROWS_AT_ONCE) < expit(logit)

    def logit(self, numbers: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Returns the logit (n,) of numbers (n, 13) and categories (n, 26); an empty number counts as 0."""
        # What a model sees of a number, on the scale of its own distribution.
        z = (np.log1p(np.maximum(numbers, 0)) - self.location) / self.scale  # (n, 13)
        logit = self.offset + z @ self.slopes + (z * z - 1) @ self.curves
        for column, effect in enumerate(self.effects):
            logit = logit + effect[ranks[:, column]]
        for first, second in PAIRS:
            logit = logit + np.sum(
                self.vectors[first][ranks[:, first]] * self.vectors[second][ranks[:, second]], axis=1
            )
        return logit


EMPTY = -2  # stands for an empty number


def make_teacher(seed: int) -> Teacher:
    """Draws the teacher of a seed."""
    rng = np.random.default_rng([seed, VERSION, 0])
    frequencies, bits, effects, vectors = [], [], [], {}
    for column, size in enumerate(SIZES):
        frequency = np.arange(1, size + 1) ** -EXPONENT
        frequency /= frequency.sum()
        frequencies.append(frequency)
        # Different words stay different in 64 bits, but two may have the same upper 32 bits: duplicates are skipped.
        words = mix(np.arange(4 * size, dtype=np.uint64) | np.uint64(column + 1) << np.uint64(32)) >> np.uint64(32)
        _, firsts = np.unique(words, return_index=True)
        bits.append(words[np.sort(firsts)[:size]])
        effects.append(_centred(rng.standard_normal((size, 1)), frequency)[:, 0] * np.sqrt(CATEGORY_VARIANCE / 26))
        if any(column in pair for pair in PAIRS):
            share = np.sqrt(PAIR_VARIANCE / len(PAIRS) / VECTOR)  # variance of one product of two numbers
            vectors[column] = _centred(rng.standard_normal((size, VECTOR)), frequency) * np.sqrt(share)
    slopes = rng.standard_normal(NUM_DENSE)
    curves = np.where(np.isin(np.arange(NUM_DENSE), SQUARED), rng.choice([-1.0, 1.0], NUM_DENSE), 0)
    teacher = Teacher(
        frequencies,
        bits,
        effects,
        vectors,
        location=rng.uniform(1, 5, NUM_DENSE),
        scale=rng.uniform(0.7, 1.5, NUM_DENSE),
        missing=np.where(np.arange(NUM_DENSE) % 3 == 2, 0.2, 0.02),
        slopes=slopes * np.sqrt(NUMBER_VARIANCE / np.sum(slopes**2)),
        curves=curves * np.sqrt(SQUARE_VARIANCE / len(SQUARED) / 2),  # a squared normal has variance 2
        offset=0.0,
    )
    logit = teacher.draw(np.random.default_rng([seed, VERSION, 1]))[2]
    low, high = -10.0, 10.0
    for _ in range(40):  # finds the offset at which the mean probability is Criteo's positive rate
        middle = (low + high) / 2
        low, high = (middle, high) if expit(logit + middle).mean() < POSITIVE_RATE else (low, middle)
    return Teacher(**{**vars(teacher), "offset": (low + high) / 2})


def generate(rows: int, seed: int, out: Path) -> dict[str, object]:
    """Writes a log of `rows` rows, and the scores of the teacher itself to `out` + ".teacher.json".

    A longer log of the same seed begins with the rows of a shorter one.

    Args:
      rows: at least 7, a row for each day.
      seed: of the teacher and of the rows.
      out: the file, which must not exist.

    Returns:
      What is in the JSON file: log loss and AUC of the teacher's own probabilities over all rows, and over those of the
      last of seven days, which is the test split. No model can be expected to do better.

    Raises:
      ValueError: for an argument that breaks the rules above.
    """
    if rows < 7:
        raise ValueError(f"A log must have at least 7 rows, one for each day; got {rows}. Ask for more.")
    if out.exists():
        raise ValueError(f"A log must be written to a new file; got {out}, which exists. Remove it, or pass another.")
    if seed < 0:
        raise ValueError(f"seed must be at least 0; got {seed}.")
    teacher = make_teacher(seed)
    texts = [[b"", *(b"%08x" % bits for bits in column[1:])] for column in teacher.bits]
    logits, labels = [], []
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(out.name + ".draft")
    with draft.open("wb", 1 << 20) as file:
        for start in range(0, rows, ROWS_AT_ONCE):
            numbers, ranks, logit, label = teacher.draw(np.random.default_rng([seed, VERSION, 2, start]))
            count = min(ROWS_AT_ONCE, rows - start)
            logits.append(logit[:count])
            labels.append(label[:count])
            columns = [
                [b"1" if is_click else b"0" for is_click in label[:count]],
                *([b"" if x == EMPTY else b"%d" % x for x in column] for column in numbers[:count].T.tolist()),
                *([text[r] for r in column] for text, column in zip(texts, ranks[:count].T.tolist(), strict=True)),
            ]
            file.writelines(b"\t".join(fields) + b"\n" for fields in zip(*columns, strict=True))
    logit, label = np.concatenate(logits), np.concatenate(labels)
    last_day = slice(first_test_row(rows), None)
    facts = {
        "rows": rows,
        "seed": seed,
        "version": VERSION,
        "positive_rate": float(label.mean()),
        "all": _scores(label, logit),
        "test": _scores(label[last_day], logit[last_day]),
    }
    out.with_name(out.name + ".teacher.json").write_text(json.dumps(facts, indent=2) + "\n")
    draft.replace(out)
    return facts


def _scores(label: np.ndarray, logit: np.ndarray) -> dict[str, float | None]:
    is_mixed = label.any() and not label.all()  # a handful of rows may hold one of the labels alone
    return {"log_loss": log_loss(label, logit), "auc": auc(label, logit) if is_mixed else None}


def _centred(vectors: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """Shifts and scales vectors (categories, d) to mean 0 and variance 1 over the rows of a log."""
    vectors = vectors - frequency @ vectors
    return vectors / np.sqrt(frequency @ vectors**2)
