"""The small twin of vgg16_imagenet: six narrow layers on scikit-learn's digits. About two minutes on 2 cores.

python -m train vgg_digits
"""

from configs.experiment import Architecture, Experiment
from configs.methods import SlimDp

CONFIG = Experiment(
    name="vgg_digits",
    dataset="digits",
    architecture=Architecture("vgg", {"stages": ((16, 16), (32,)), "grid": 2, "hidden": (128, 128)}),
    method=SlimDp(alpha=0.2, beta=0.1, q=20),
    steps=400,
    global_batch=128,
    learning_rate=0.02,
    warmup_steps=20,
    weight_decay=5e-4,
)
