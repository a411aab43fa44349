"""A small convolutional network on scikit-learn's digits: 1,797 real images in its wheel, without a download.

    python -m train digits

trains on 4 simulated workers, dense and then with DCT-DP at 98% sparsity, in about a minute on 2 cores.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="digits",
    dataset="digits",
    architecture=Architecture("cnn"),
    method=DctDp(sparsity=0.98, life_span=10),
    steps=400,
    global_batch=128,
    learning_rate=0.05,
    warmup_steps=20,
)
