"""The small convolutional network on CIFAR-10, prepared by TFDS.

python -m train cifar10 --data-dir FOLDER
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="cifar10",
    dataset="cifar10",
    architecture=Architecture("cnn"),
    method=DctDp(sparsity=0.99, life_span=100),
    steps=10_000,
    global_batch=256,
    learning_rate=0.05,
    warmup_steps=200,
    weight_decay=5e-4,
    decay="l2",
    eval_every=1000,
    checkpoint_every=1000,
)
