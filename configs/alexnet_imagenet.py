"""AlexNet on ImageNet, where TFDS has prepared it: the model of the papers on pruning and on hybrid parallelism.

    python -m train alexnet_imagenet --data-dir FOLDER

SGD as in Krizhevsky's "One weird trick" (2014): momentum 0.9, weight decay 5e-4, batches of 256, 90 epochs, the
learning rate 0.01 dropped by 10 every 30 epochs. Importance weighted pruning (96 workers, fixed threshold) reports a
top-1 accuracy of 57.98%, at 58.17% dense.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import Iwp

EPOCH = 1_281_167 // 256

CONFIG = Experiment(
    name="alexnet_imagenet",
    dataset="imagenet2012",
    architecture=Architecture("alexnet"),
    method=Iwp(alpha=0.01, density=0.02, warmup_steps=4 * EPOCH),
    steps=90 * EPOCH,
    global_batch=256,
    learning_rate=0.01,
    schedule="drops",
    drop_every=30 * EPOCH,
    weight_decay=5e-4,
    eval_every=EPOCH,
    checkpoint_every=EPOCH,
)
