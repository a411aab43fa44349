"""Input pipelines: real data by name, in an order that only the seed decides."""

from train.data.loader import EvalBatches, TrainBatches, eval_batches, train_batches
from train.data.sources import DATASETS, DatasetInfo, dataset_info

__all__ = [
    "DATASETS",
    "DatasetInfo",
    "EvalBatches",
    "TrainBatches",
    "dataset_info",
    "eval_batches",
    "train_batches",
]
