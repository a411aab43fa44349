"""Input pipelines: real data by name, in an order that only the seed decides."""

from train.data.datasets import DATASETS, dataset_info, open_text
from train.data.info import ClickInfo, DatasetInfo, ImageInfo, TextInfo, TranslationInfo
from train.data.loader import EvalBatches, TrainBatches, eval_batches, train_batches

__all__ = [
    "DATASETS",
    "ClickInfo",
    "DatasetInfo",
    "EvalBatches",
    "ImageInfo",
    "TextInfo",
    "TrainBatches",
    "TranslationInfo",
    "dataset_info",
    "eval_batches",
    "open_text",
    "train_batches",
]
