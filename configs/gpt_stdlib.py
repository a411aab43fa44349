"""The small twin of gpt_linux: two narrow layers on this Python's standard library, without a download.

    python -m train gpt_stdlib

takes a few minutes on 2 cores.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="gpt_stdlib",
    dataset="stdlib",
    architecture=Architecture("gpt", {"layers": 2, "width": 64, "heads": 4}),
    method=DctDp(sparsity=0.99, life_span=100),
    steps=400,
    global_batch=32,
    learning_rate=3e-3,
    optimizer="adam",
    warmup_steps=40,
    eval_every=100,
    checkpoint_every=200,
)
