"""Runs of a few steps in this process, and how they are read; shared by the tests of the trainer."""

import dataclasses
import json

import jax
import numpy as np

import train.loop
from configs.experiment import Architecture, BoundaryFields, Experiment
from configs.methods import DctDp, Dgc, LocalSgd, PlumpDp, SlimDp, TopK
from train.data import ClickInfo, ImageInfo, TextInfo, TranslationInfo
from train.methods import run_name
from train.processes import Processes

# 12 steps with refreshes after 0, 5 and 10: in between, a run depends on thresholds and residuals of earlier steps. The
# batch is divisible by 2, 3 and 4 workers. Some of the tensors are smaller than dense_below.
EXPERIMENT = Experiment(
    name="few",
    dataset="digits",
    architecture=Architecture("cnn"),
    steps=12,
    learning_rate=0.1,
    warmup_steps=2,
    weight_decay=1e-3,
    global_batch=24,
    eval_every=6,
    checkpoint_every=100,
)
DCT_DP = DctDp(sparsity=0.9, life_span=5, dense_below=512)
METHODS = {
    "dct_dp": DCT_DP,
    "dct_dp, drained": dataclasses.replace(DCT_DP, drain_every=3),
    "dct_dp, all dense": dataclasses.replace(DCT_DP, dense_below=10**6),  # its residual and thresholds are empty
    "topk": TopK(sparsity=0.9),
    "plump_dp": PlumpDp(),
    "dgc": Dgc(sparsity=0.9, warmup_steps=3),
    # Exchanges after steps 2, 4, ..., a new core after 4, 8 and 12.
    "slim_dp": SlimDp(p=2, q=2, unsent="carry"),
    # Exchanges after steps 4, 8 and 12.
    "local_sgd": LocalSgd(steps=4, exchange_sparsity=0.9),
    # A fragment after steps 2, 6 and 10, merged one step later, and the other after 4, 8 and 12.
    "local_sgd, streaming": LocalSgd(steps=4, fragments=2, overlap=1, mix=0.5, exchange_sparsity=0.9),
}

# What a model needs to know about every kind of data.
IMAGES = ImageInfo("digits", 1347, 450, (8, 8, 1), 10)
CLICKS = ClickInfo("clicks", 60, 10, tuple(range(3, 29)))
TRANSLATIONS = TranslationInfo("catalogs", 60, 10, 10, ("de", "en"), 40, 12, 14)
TEXT = TextInfo("linux", 60, 10, 7)

# An mlp of 3 layers, 64 - 32 - 16 - 10, with dropout; cut, its last layer is the second stage.
MLP = Architecture("mlp", {"hidden": (32, 16), "dropout": 0.2})
PIPELINE = {"architecture": MLP, "workers": 2, "stages": 2, "micro_batches": 2}
HALF = BoundaryFields(sparsity=0.5)

# A DLRM for the dataset of the fixture `logged`, 26 tables of 20 rows.
DLRM = Architecture("dlrm", {"dim": 4, "bottom": (8,), "top": (8,)})
LOGGED = {"dataset": "criteo", "architecture": DLRM, "workers": 2, "momentum": 0.0, "steps": 8, "eval_every": 4}


class Told:
    """A `Progress` that keeps its messages; those about verified bytes are kept apart."""

    def __init__(self):
        self.messages, self.proved, self.updates = [], [], []

    def say(self, message):
        (self.proved if "the compiled program sends them" in message else self.messages).append(message)

    def update(self, step, loss, accuracy, bytes_per_step):
        self.updates.append((step, loss, accuracy, bytes_per_step))


def run(out, method=DCT_DP, told=None, **changes):
    experiment = dataclasses.replace(EXPERIMENT, out=out, **changes)
    return train.loop.train(experiment, method, Processes(), told or Told())


def metrics(out, method=DCT_DP, *split):
    return timeless(out / run_name(method, *split) / "metrics.jsonl")


def timeless(path):
    """The lines of a run without their times, which differ in every run."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = [line.pop("seconds") for line in lines]
    assert times == sorted(times)
    return lines


def assert_same_bits(state, expected):
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True)
    for (path, leaf), two in pairs:
        leaf, two = np.asarray(leaf), np.asarray(two)
        name = jax.tree_util.keystr(path)
        assert (leaf.shape, leaf.dtype) == (two.shape, two.dtype), name
        assert leaf.tobytes() == two.tobytes(), name


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
