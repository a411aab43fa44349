"""DLRM on Criteo's Kaggle log, prepared by `python -m train.data.clicks prepare`: the model of the DCT paper.

    python -m train dlrm_criteo --data-dir FOLDER
    python -m train dlrm_criteo --compress "" --stages 2 --boundary.sparsity 0.9 method:dct-dp --method.sparsity 0.9

SGD with learning rate 0.1 and batches of 128, one epoch over six days, tested on the seventh, as facebookresearch/dlrm
has it. Gupta et al. (KDD 2021): test loss 0.4538 and accuracy 78.78% dense; DCT-DP at 98% 0.4537; DCT-MP on two
workers at 90% 0.4530.

DCT-DP compresses the 8 dense layers alone, as the paper does; the embedding tables are exchanged densely. With stages,
give `--compress ""`: a pipeline exchanges all of a stage.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="dlrm_criteo",
    dataset="criteo",
    architecture=Architecture("dlrm"),
    compress="linear",
    method=DctDp(sparsity=0.98, life_span=1000),
    steps=306_969,
    global_batch=128,
    learning_rate=0.1,
    momentum=0.0,
    schedule="constant",
    eval_every=30_000,
    checkpoint_every=30_000,
)
