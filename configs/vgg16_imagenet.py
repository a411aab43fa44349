"""VGG-16 on ImageNet, prepared by TFDS, with the settings of the Slim-DP paper.

    python -m train vgg16_imagenet --data-dir FOLDER

Communication set 20%, core 10%, a new core every 20,000 communications (Sun et al., "Slim-DP", AAAI 2018): top-5
87.03% on 4 workers; Plump-DP has 86.53%. SGD as in Simonyan and Zisserman (2015) and Caffe's model zoo: batches of 256,
74 epochs, learning rate 0.01, three drops by 10, heavy-ball momentum 0.9, L2 of 5e-4. Images as in Slim-DP: the mean of
each pixel subtracted, the central 224x224, no augmentation.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import SlimDp

EPOCH = 1_281_167 // 256

CONFIG = Experiment(
    name="vgg16_imagenet",
    dataset="imagenet2012",
    architecture=Architecture("vgg"),
    method=SlimDp(alpha=0.2, beta=0.1, q=20_000),
    steps=74 * EPOCH,
    global_batch=256,
    learning_rate=0.01,
    nesterov=False,
    schedule="drops",
    drop_at=(20 * EPOCH, 40 * EPOCH, 60 * EPOCH),
    weight_decay=5e-4,
    decay="l2",
    augment=False,
    mean="pixel",
    eval_every=EPOCH,
    checkpoint_every=EPOCH,
)
