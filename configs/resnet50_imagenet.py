r"""ResNet-50 on ImageNet, prepared by TFDS: the large model of the paper on importance weighted pruning.

    python -m train resnet50_imagenet --data-dir FOLDER
    python -m train resnet50_imagenet --data-dir FOLDER --workers 96 --global-batch 288    # the paper's 96 nodes

SGD as in Goyal et al., "Accurate, Large Minibatch SGD" (2017): batches of 256, 90 epochs, learning rate 0.1 after a
warm-up of 5 epochs, divided by 10 after 30, 60 and 80; momentum 0.9, L2 of 1e-4. The momentum is heavy-ball, as in the
pruning paper (equation 1) and inside its method; Goyal et al. use Nesterov's, and found no difference. All parameters
decay here, including those of batch normalisation. With 96 workers its statistics are over 3 rows, and the number of
steps stays the same.

The pruning paper reports a top-1 accuracy of 76.09% dense, 76.26% with a fixed threshold at a compression ratio of 58.8
(density 0.017 here), and 76.31% with a layer-wise threshold at 47.6. This is the layer-wise one, with the paper's four
thresholds, changed at every drop of the learning rate, and a density of 0.021:

    python -m train resnet50_imagenet --data-dir FOLDER method:iwp --method.alpha 0.005 0.01 0.05 0.1 \
        --method.change-at 150120 300240 400320 --method.beta 0.01 --method.density 0.021

The paper does not say when a threshold changes, nor give beta, C or the norm for clipping: these are ours.
"""

from configs.experiment import Architecture, Experiment
from configs.methods import Iwp

EPOCH = 1_281_167 // 256

CONFIG = Experiment(
    name="resnet50_imagenet",
    dataset="imagenet2012",
    architecture=Architecture("resnet", {"layers": (3, 4, 6, 3)}),
    method=Iwp(alpha=0.01, density=0.017, clip=5.0, warmup_steps=4 * EPOCH),
    steps=90 * EPOCH,
    global_batch=256,
    learning_rate=0.1,
    nesterov=False,
    schedule="drops",
    drop_at=(30 * EPOCH, 60 * EPOCH, 80 * EPOCH),
    warmup_steps=5 * EPOCH,
    weight_decay=1e-4,
    decay="l2",
    eval_every=EPOCH,
    checkpoint_every=EPOCH,
)
