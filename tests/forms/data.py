"""Rows with twenty features in three classes, in batches, for the scripts of `before` and `after`."""

import numpy as np

STEPS, ROWS, FEATURES, CLASSES = 30, 64, 20, 3
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
