"""GoogLeNet on ImageNet, where TFDS has prepared it, with the settings of the Slim-DP paper.

    python -m train googlenet_imagenet --data-dir FOLDER

Communication set 30%, core 15%, a new core every 50,000 communications (Sun et al., "Slim-DP", AAAI 2018): top-5
88.29% on 4 workers, where Plump-DP has 88.06%. SGD as in Caffe's quick solver: batches of 32 a worker, learning rate
0.01 falling as a square root, weight decay 2e-4.
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
    schedule="polynomial",
    weight_decay=2e-4,
    eval_every=EPOCH,
    checkpoint_every=EPOCH,
)
