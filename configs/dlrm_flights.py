"""A small DLRM on flights, prepared by `python -m train.data.tables prepare`: is a flight over 15 minutes late?

python -m train dlrm_flights --data-dir FOLDER
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="dlrm_flights",
    dataset="flights",
    architecture=Architecture("dlrm", {"dim": 8, "bottom": (64, 32), "top": (64, 32)}),
    method=DctDp(sparsity=0.98, life_span=10),
    steps=2000,
    global_batch=128,
    learning_rate=0.1,
    momentum=0.0,
    eval_every=500,
    checkpoint_every=500,
)
