"""ResNet-101 on CIFAR-10, where TFDS has prepared it: the second image model of the pruning paper.

    python -m train resnet101_cifar10 --data-dir FOLDER

Deep Gradient Compression's recipe for CIFAR-10 (Lin et al., ICLR 2018): momentum 0.9, batches of 128, 164 epochs,
learning rate 0.1, weight decay 1e-4, four epochs of warm-up in sparsity.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import Dgc

EPOCH = 50_000 // 128

CONFIG = Experiment(
    name="resnet101_cifar10",
    dataset="cifar10",
    architecture=Architecture("resnet", {"layers": (3, 4, 23, 3), "stem": "cifar"}),
    method=Dgc(sparsity=0.999, warmup_steps=4 * EPOCH),
    steps=164 * EPOCH,
    global_batch=128,
    learning_rate=0.1,
    warmup_steps=EPOCH,
    weight_decay=1e-4,
    eval_every=EPOCH,
    checkpoint_every=5 * EPOCH,
)
