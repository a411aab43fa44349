"""The transformer on IWSLT'14 German to English, prepared by `python -m train.data.translation prepare`.

    python -m train transformer_iwslt14 --data-dir FOLDER
    python -m train transformer_iwslt14 --workers 1 --stages 2 --boundary.sparsity 0.9 method:plump-dp

fairseq's recipe: Adam, learning rate 5e-4 after 4,000 steps of warm-up, then falling as one over the square root of the
steps, label smoothing 0.1, dropout 0.3, decoupled weight decay 1e-4, about 4,096 tokens a batch (160 rows), 50 epochs.
Gupta et al. (KDD 2021): BLEU 35.17 dense; DCT-MP on two workers 35.23 at 90% and 35.18 at 95%. This is fairseq's BLEU,
of tokenized, lower-cased text: `bleu_lower` is close to it; `bleu` is of cased text, and differs (see train/scores.py).
For this model the paper uses one worker for each stage and no DCT-DP, as in the second command.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import DctDp

CONFIG = Experiment(
    name="transformer_iwslt14",
    dataset="iwslt14",
    architecture=Architecture("transformer", {"tied": False}),
    method=DctDp(sparsity=0.98, life_span=1000),
    steps=50_075,  # 50 epochs of 160,239 pairs
    global_batch=160,
    learning_rate=5e-4,
    optimizer="adam",
    schedule="inverse_sqrt",
    warmup_steps=4000,
    weight_decay=1e-4,
    label_smoothing=0.1,
    eval_every=3000,
    checkpoint_every=3000,
)
