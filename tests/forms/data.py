"""Rows with twenty features in three classes, in batches, for the scripts."""

import numpy as np

STEPS, ROWS, FEATURES, CLASSES, TIMES = 30, 64, 20, 3, 6
COPIES = 1  # a test for batch normalisation sets it: the first 1/COPIES of a batch's rows is repeated
POISONED = None  # a test for loss scales sets it: the number of a batch with infinity in it


def batches():
    random = np.random.default_rng(0)
    teacher = random.normal(size=(FEATURES, CLASSES))
    made = []
    for _ in range(STEPS):
        x = random.normal(size=(ROWS // COPIES, FEATURES)).astype(np.float32)
        y = (x @ teacher).argmax(-1)
        x[0, 0] = np.inf if len(made) == POISONED else x[0, 0]
        made.append({"x": np.tile(x, (COPIES, 1)), "y": np.tile(y, COPIES)})
    return made


def sequences():
    """Returns batches of sequences: rows, time, features. A label is the class of the mean of a row's last features."""
    random = np.random.default_rng(1)
    teacher = random.normal(size=(FEATURES, CLASSES))
    made = []
    for _ in range(STEPS):
        x = random.normal(size=(ROWS, TIMES, FEATURES)).astype(np.float32)
        mean = x + np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
        made.append({"x": x, "y": (mean @ teacher).argmax(-1), "lengths": random.integers(1, TIMES + 1, ROWS)})
    return made


def texts(vocabulary):
    """Returns batches of rows of tokens, each of which follows from the one before it."""
    random = np.random.default_rng(2)
    follows = random.permutation(vocabulary)
    made = []
    for _ in range(STEPS):
        tokens = [random.integers(0, vocabulary, ROWS)]
        while len(tokens) <= TIMES:
            tokens.append(follows[tokens[-1]])
        made.append({"tokens": np.stack(tokens, axis=1)})
    return made
