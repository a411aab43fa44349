"""The small twin of resnet50_imagenet and resnet101_cifar10: four bottlenecks on scikit-learn's digits.

    python -m train resnet_digits

takes about three minutes on 2 cores. Batch normalisation computes its statistics over groups of 16 rows, so that the
result does not depend on the number of workers.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import Dgc

CONFIG = Experiment(
    name="resnet_digits",
    dataset="digits",
    architecture=Architecture("resnet", {"layers": (2, 2), "width": 16, "stem": "cifar"}),
    method=Dgc(sparsity=0.98),
    steps=300,
    global_batch=128,
    learning_rate=0.02,
    warmup_steps=20,
    weight_decay=1e-4,
    rows_per_group=16,
)
