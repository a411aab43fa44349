"""AlexNet on ImageNet, where TFDS has prepared it: the model of the papers on pruning and on hybrid parallelism.

    python -m train alexnet_imagenet --data-dir FOLDER
    python -m train alexnet_imagenet --data-dir FOLDER --workers 96 --global-batch 288     # the paper's 96 nodes

SGD as in Krizhevsky et al. (2012): heavy-ball momentum 0.9, L2 of 5e-4, learning rate 0.01, 90 epochs; batches of 256,
and drops by 10 every 30 epochs. Importance weighted pruning on 96 nodes, each a worker, reports a top-1 accuracy of
57.98% with a fixed threshold at a ratio of 64 (the slots here: 1/64), and 58.19% with a layer-wise one at 53, where
dense has 58.17%. It has "warm-up training and local gradient clip", and gives no number for either: four epochs are
Deep Gradient Compression's, whose image models are not clipped; the norm of 5 is ours, to cut outliers alone.
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
