"""The small convolutional network on MNIST, prepared by TFDS.

python -m train mnist --data-dir FOLDER
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="mnist",
    dataset="mnist",
    architecture=Architecture("cnn"),
    method=DctDp(sparsity=0.99, life_span=100),
    steps=2000,
    global_batch=256,
    learning_rate=0.1,
    warmup_steps=100,
    eval_every=500,
    checkpoint_every=500,
)
