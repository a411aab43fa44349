"""The small convolutional network on Fashion-MNIST, prepared by `python -m train.data.fashion prepare`.

python -m train fashion --data-dir FOLDER
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="fashion",
    dataset="fashion",
    architecture=Architecture("cnn", {"channels": (8, 16), "hidden": 64}),
    method=DctDp(sparsity=0.99, life_span=100),
    steps=1000,
    global_batch=128,
    learning_rate=0.05,
    warmup_steps=50,
    eval_every=500,
    checkpoint_every=500,
)
