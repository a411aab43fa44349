"""A small DLRM on MovieLens, prepared by `python -m train.data.tables prepare`: does a user give at least 4 stars?

python -m train dlrm_movielens --data-dir FOLDER
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="dlrm_movielens",
    dataset="movielens",
    architecture=Architecture("dlrm", {"dim": 8, "bottom": (64, 32), "top": (64, 32)}),
    method=DctDp(sparsity=0.98, life_span=10),
    steps=1300,
    global_batch=128,
    learning_rate=0.1,
    momentum=0.0,
    eval_every=500,
    checkpoint_every=500,
)
