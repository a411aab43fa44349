"""The small twin of dlrm_criteo: the paper's MLPs on generated clicks with a known teacher. A few minutes.

    python -m train dlrm_clicks
    python -m train dlrm_clicks --workers 2 --stages 2 --boundary.sparsity 0.9 --no-baseline

The teacher's own log loss and AUC, which no model can be expected to beat, are written next to the data.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="dlrm_clicks",
    dataset="clicks",
    architecture=Architecture("dlrm"),
    method=DctDp(sparsity=0.98, life_span=10),
    workers=2,
    steps=2000,
    global_batch=128,
    learning_rate=1.0,
    momentum=0.0,
    schedule="cosine",
    eval_every=500,
    checkpoint_every=500,
)
