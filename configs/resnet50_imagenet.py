"""ResNet-50 on ImageNet, where TFDS has prepared it: the large model of the paper on importance weighted pruning.

    python -m train resnet50_imagenet --data-dir FOLDER

SGD as in Goyal et al., "Accurate, Large Minibatch SGD" (2017): batches of 256, 90 epochs, learning rate 0.1 after a
warm-up of 5 epochs, dropped by 10 every 30; weight decay 1e-4. Importance weighted pruning reports a top-1 accuracy of
76.26% with a fixed threshold and 76.31% with a layer-wise one, at 76.09% dense.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import Iwp

EPOCH = 1_281_167 // 256

CONFIG = Experiment(
    name="resnet50_imagenet",
    dataset="imagenet2012",
    architecture=Architecture("resnet", {"layers": (3, 4, 6, 3)}),
    method=Iwp(alpha=0.01, density=0.02, warmup_steps=4 * EPOCH),
    steps=90 * EPOCH,
    global_batch=256,
    learning_rate=0.1,
    schedule="drops",
    drop_every=30 * EPOCH,
    warmup_steps=5 * EPOCH,
    weight_decay=1e-4,
    eval_every=EPOCH,
    checkpoint_every=EPOCH,
)
