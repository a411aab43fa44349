"""DLRM on Criteo's Kaggle log, prepared by `python -m train.data.clicks prepare`: the model of the DCT paper.

    python -m train dlrm_criteo --data-dir FOLDER
    python -m train dlrm_criteo --embeddings columns --data-dir FOLDER
    python -m train dlrm_criteo --embeddings exchange --stages 2 --boundary.sparsity 0.9

SGD with learning rate 0.1 and batches of 128, one epoch over six days, tested on the seventh, as in
facebookresearch/dlrm. Gupta et al. (KDD 2021): test loss 0.4538 and accuracy 78.78% dense; 0.4537 with DCT-DP at 98%;
0.4530 with DCT-MP at 90% on two workers.

DCT-DP compresses the 8 dense layers alone, as in the paper. For the embedding tables, only the rows that a batch
touched are sent, and a run can resume with any number of workers. With `--embeddings columns` each worker holds some of
the 16 columns, which needs less memory and fewer bytes; `python -m benchmarks.embeddings` prints both for every choice.
With stages, give `--embeddings exchange`: a pipeline exchanges all gradients of a stage.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

# Rows of the log's 26 tables, as facebookresearch/dlrm prints them.
# fmt: off
TABLE_SIZES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
# fmt: on

CONFIG = Experiment(
    name="dlrm_criteo",
    dataset="criteo",
    architecture=Architecture("dlrm"),
    embeddings="late",
    method=DctDp(sparsity=0.98, life_span=1000),
    steps=306_969,
    global_batch=128,
    learning_rate=0.1,
    momentum=0.0,
    schedule="constant",
    eval_every=30_000,
    checkpoint_every=30_000,
)
