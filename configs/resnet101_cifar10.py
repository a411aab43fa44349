"""ResNet-101 on CIFAR-10, prepared by TFDS: the second image model of the pruning paper.

    python -m train resnet101_cifar10 --data-dir FOLDER

Deep Gradient Compression's recipe for CIFAR-10 (Lin et al., ICLR 2018): momentum 0.9, batches of 128, 164 epochs,
learning rate 0.1 divided by 10 after 81 and 122, L2 of 1e-4, four epochs of warm-up in sparsity. The pruning paper
gives neither threshold nor ratio for this model: those of its ResNet-50 are used. The clip (see alexnet_imagenet) and
the epoch of learning-rate warm-up, which He et al. (2016) use for deep models, are ours.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import Iwp

EPOCH = 50_000 // 128

CONFIG = Experiment(
    name="resnet101_cifar10",
    dataset="cifar10",
    architecture=Architecture("resnet", {"layers": (3, 4, 23, 3), "stem": "cifar"}),
    method=Iwp(alpha=0.01, density=0.017, clip=5.0, warmup_steps=4 * EPOCH),
    steps=164 * EPOCH,
    global_batch=128,
    learning_rate=0.1,
    nesterov=False,
    schedule="drops",
    drop_at=(81 * EPOCH, 122 * EPOCH),
    warmup_steps=EPOCH,
    weight_decay=1e-4,
    decay="l2",
    eval_every=EPOCH,
    checkpoint_every=5 * EPOCH,
)
