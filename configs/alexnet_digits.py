"""The small twin of alexnet_imagenet: a narrow AlexNet on scikit-learn's digits. About two minutes on 2 cores.

python -m train alexnet_digits
"""

from configs.experiment import Architecture, Experiment
from configs.methods import Iwp

CONFIG = Experiment(
    name="alexnet_digits",
    dataset="digits",
    architecture=Architecture(
        "alexnet",
        {
            "kernel": 3,
            "stride": 1,
            "padding": 1,
            "channels": (16, 32, 32, 32, 32),
            "pool": 2,
            "grid": 1,
            "hidden": (128, 128),
        },
    ),
    method=Iwp(),
    steps=600,
    global_batch=128,
    learning_rate=0.02,
    warmup_steps=30,
    weight_decay=5e-4,
)
