"""A GPT of 6.5 million parameters on the sources of Linux, prepared by `python -m train.data.corpus prepare`.

    python -m train gpt_linux --data-dir FOLDER

A step of 32 rows of 256 bytes is 330 Gflop.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="gpt_linux",
    dataset="linux",
    architecture=Architecture("gpt", {"layers": 8, "width": 256, "heads": 4}),
    method=DctDp(sparsity=0.99, life_span=100),
    steps=2000,
    global_batch=32,
    learning_rate=1e-3,
    optimizer="adam",
    warmup_steps=100,
    eval_every=200,
    checkpoint_every=500,
)
