"""AlexNet on ImageNet, prepared by TFDS: the model of the papers on pruning and on hybrid parallelism.

    python -m train alexnet_imagenet --data-dir FOLDER
    python -m train alexnet_imagenet --data-dir FOLDER --workers 96 --global-batch 288     # the paper's 96 nodes

SGD as in Krizhevsky et al. (2012): heavy-ball momentum 0.9, L2 of 5e-4, learning rate 0.01, 90 epochs; batches of 256,
and drops by 10 every 30 epochs. The paper on importance weighted pruning, with 96 nodes as workers, reports a top-1
accuracy of 58.17% dense, 57.98% with a fixed threshold at a compression ratio of 64 (density 1/64 here), and 58.19%
with a layer-wise threshold at 53. It uses "warm-up training and local gradient clip" but gives no number for either.
Four epochs of warm-up are those of Deep Gradient Compression, which does not clip image models. The norm of 5 is ours,
to clip only outliers.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import Iwp

EPOCH = 1_281_167 // 256

CONFIG = Experiment(
    name="alexnet_imagenet",
    dataset="imagenet2012",
    architecture=Architecture("alexnet"),
    method=Iwp(alpha=0.01, density=1 / 64, clip=5.0, warmup_steps=4 * EPOCH),
    steps=90 * EPOCH,
    global_batch=256,
    learning_rate=0.01,
    nesterov=False,
    schedule="drops",
    drop_at=(30 * EPOCH, 60 * EPOCH),
    weight_decay=5e-4,
    decay="l2",
    eval_every=EPOCH,
    checkpoint_every=EPOCH,
)
