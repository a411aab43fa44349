"""The small twin of transformer_iwslt14: two narrow layers on Django's messages, German to English.

    python -m train transformer_catalogs

takes a few minutes on 2 cores. About two thousand short pairs are enough to see the loss fall, not to translate well.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="transformer_catalogs",
    dataset="catalogs",
    architecture=Architecture(
        "transformer", {"layers": 2, "width": 64, "hidden": 128, "heads": 4, "dropout": 0.1, "tied": False}
    ),
    method=DctDp(sparsity=0.95, life_span=20),
    workers=2,
    steps=600,
    global_batch=64,
    learning_rate=3e-3,
    optimizer="adam",
    schedule="inverse_sqrt",
    warmup_steps=100,
    label_smoothing=0.1,
    eval_every=200,
    checkpoint_every=200,
)
