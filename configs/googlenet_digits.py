"""The small twin of googlenet_imagenet: three narrow modules on scikit-learn's digits. Four minutes on 2 cores.

python -m train googlenet_digits
"""

from configs.experiment import Architecture, Experiment
from configs.methods import SlimDp

MODULE = (16, 16, 24, 4, 8, 8)

CONFIG = Experiment(
    name="googlenet_digits",
    dataset="digits",
    architecture=Architecture(
        "googlenet",
        {
            "stem": (16, 16, 32),
            "stem_strides": (1, 1),
            "stages": ((MODULE,), (MODULE, MODULE)),
            "auxiliary": (1,),
            "auxiliary_channels": 16,
            "auxiliary_grid": 2,
            "hidden": 64,
        },
    ),
    method=SlimDp(alpha=0.3, beta=0.15, q=20),
    steps=800,
    global_batch=128,
    learning_rate=0.03,
    warmup_steps=20,
    weight_decay=2e-4,
)
