"""GoogLeNet on ImageNet, prepared by TFDS, with the settings of the Slim-DP paper.

    python -m train googlenet_imagenet --data-dir FOLDER

Communication set 30%, core 15%, a new core every 50,000 communications (Sun et al., "Slim-DP", AAAI 2018): top-5
88.29% on 4 workers; Plump-DP has 88.06%. SGD as in Caffe's quick solver: batches of 32 a worker, learning rate 0.01
falling as a square root, heavy-ball momentum 0.9, L2 of 2e-4. Images as in Slim-DP: the mean of each pixel subtracted,
the central 224x224, no augmentation.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import SlimDp

EPOCH = 1_281_167 // 128

CONFIG = Experiment(
    name="googlenet_imagenet",
    dataset="imagenet2012",
    architecture=Architecture("googlenet"),
    method=SlimDp(alpha=0.3, beta=0.15, q=50_000),
    steps=60 * EPOCH,
    global_batch=128,
    learning_rate=0.01,
    nesterov=False,
    schedule="polynomial",
    weight_decay=2e-4,
    decay="l2",
    augment=False,
    mean="pixel",
    eval_every=EPOCH,
    checkpoint_every=EPOCH,
)
