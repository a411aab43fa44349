"""The papers' settings, typed by hand from their texts and from the recipes that they name; nothing here is imported.

Epochs of ImageNet are 1,281,167 images, 5,004 steps of 256 rows or 10,009 of 128; of CIFAR-10 390 steps of 128 rows; of
IWSLT'14 160,239 pairs. A number that no text has is marked "ours".
"""

import dataclasses
from functools import partial

import pytest
from flax import nnx

from configs import CONFIGS
from configs.comparison import SETTINGS
from configs.experiment import BoundaryFields, check
from configs.methods import DctDp, Iwp, PlumpDp, QuantDp, SlimDp, TernGrad
from train.architectures import choose_cuts, make_model
from train.data import ClickInfo, TranslationInfo

NO_DROPS = {"drop_at": (), "warmup_steps": 0}
HEAVY_BALL = {"optimizer": "sgd", "momentum": 0.9, "nesterov": False}
ALL_IMAGES = {"label_smoothing": 0.0, "rows_per_group": None, "dtype": "float32"}
# "no data augmentation is used", "normalized by subtracting the per-pixel mean" (Slim-DP, 4.1).
SLIM_DP_IMAGES = ALL_IMAGES | {"augment": False, "mean": "pixel"}
USUAL_IMAGES = ALL_IMAGES | {"augment": True, "mean": "channel"}

# Workers are given only where a paper gives them: Slim-DP's 4.
PAPERS = {
    # Krizhevsky et al. (2012); batches and drops as PyTorch's and Caffe's examples.
    "alexnet_imagenet": {
        "dataset": "imagenet2012",
        "global_batch": 256,
        "steps": 450_360,  # 90 epochs
        "learning_rate": 0.01,
        "schedule": "drops",
        "drop_at": (150_120, 300_240),  # 30, 60
        "warmup_steps": 0,
        "weight_decay": 5e-4,
        "decay": "l2",
        **HEAVY_BALL,
        **USUAL_IMAGES,
    },
    # Caffe's model zoo, as Slim-DP says; Simonyan and Zisserman (2015), 3.1.
    "vgg16_imagenet": {
        "dataset": "imagenet2012",
        "workers": 4,
        "global_batch": 256,
        "steps": 370_296,  # 74 epochs
        "learning_rate": 0.01,
        "schedule": "drops",
        "drop_at": (100_080, 200_160, 300_240),  # three times; 20, 40 and 60 are ours
        "warmup_steps": 0,
        "weight_decay": 5e-4,
        "decay": "l2",
        **HEAVY_BALL,
        **SLIM_DP_IMAGES,
    },
    # Caffe's quick solver: 2.4M iterations of 32 rows, on 4 workers 600,000.
    "googlenet_imagenet": {
        "dataset": "imagenet2012",
        "workers": 4,
        "global_batch": 128,
        "steps": 600_540,  # 60 epochs
        "learning_rate": 0.01,
        "schedule": "polynomial",  # power 0.5
        "weight_decay": 2e-4,
        "decay": "l2",
        **NO_DROPS,
        **HEAVY_BALL,
        **SLIM_DP_IMAGES,
    },
    # Goyal et al. (2017), 5.1.
    "resnet50_imagenet": {
        "dataset": "imagenet2012",
        "global_batch": 256,
        "steps": 450_360,  # 90 epochs
        "learning_rate": 0.1,
        "schedule": "drops",
        "drop_at": (150_120, 300_240, 400_320),  # 30, 60, 80
        "warmup_steps": 25_020,  # 5
        "weight_decay": 1e-4,
        "decay": "l2",
        **HEAVY_BALL,
        **USUAL_IMAGES,
    },
    # Deep Gradient Compression, which trains as fb.resnet.torch does.
    "resnet101_cifar10": {
        "dataset": "cifar10",
        "global_batch": 128,
        "steps": 63_960,  # 164 epochs
        "learning_rate": 0.1,
        "schedule": "drops",
        "drop_at": (31_590, 47_580),  # 81, 122
        "warmup_steps": 390,  # an epoch: He et al. (2016), 4.2, have some 400 steps for 110 layers
        "weight_decay": 1e-4,
        "decay": "l2",
        **HEAVY_BALL,
        **USUAL_IMAGES,
    },
    # facebookresearch/dlrm: one epoch of six days of seven, 39,291,958 rows.
    "dlrm_criteo": {
        "dataset": "criteo",
        "global_batch": 128,
        "steps": 306_969,
        "learning_rate": 0.1,
        "optimizer": "sgd",
        "momentum": 0.0,
        "schedule": "constant",
        "weight_decay": 0.0,
        "label_smoothing": 0.0,
        **NO_DROPS,
    },
    # fairseq's examples/translation; 50 epochs in the DCT paper.
    "transformer_iwslt14": {
        "dataset": "iwslt14",
        "global_batch": 160,  # of about 25 tokens: 4,096
        "steps": 50_075,  # 50 epochs
        "learning_rate": 5e-4,
        "optimizer": "adam",
        "momentum": 0.9,
        "schedule": "inverse_sqrt",
        "drop_at": (),
        "warmup_steps": 4000,
        "weight_decay": 1e-4,
        "decay": "decoupled",  # fairseq's Adam
        "label_smoothing": 0.1,
    },
}

# "warm-up training and local gradient clip"; four epochs are Deep Gradient Compression's, the norm is ours.
PRUNING = {"beta": 0.0, "change_at": (), "publishers": 1, "random_selection": True, "factor_masking": True, "clip": 5.0}
METHODS = {
    "alexnet_imagenet": (Iwp, PRUNING | {"alpha": 0.01, "density": 1 / 64, "warmup_steps": 20_016}),  # 64x
    "vgg16_imagenet": (SlimDp, {"alpha": 0.2, "beta": 0.1, "q": 20_000, "p": 1, "server_rate": None}),
    "googlenet_imagenet": (SlimDp, {"alpha": 0.3, "beta": 0.15, "q": 50_000, "p": 1, "server_rate": None}),
    "resnet50_imagenet": (Iwp, PRUNING | {"alpha": 0.01, "density": 0.017, "warmup_steps": 20_016}),  # 58.8x
    "resnet101_cifar10": (Iwp, PRUNING | {"alpha": 0.01, "density": 0.017, "warmup_steps": 1_560}),
    "dlrm_criteo": (DctDp, {"sparsity": 0.98, "life_span": 1000, "drain_every": None}),
    "transformer_iwslt14": (DctDp, {"sparsity": 0.98, "life_span": 1000, "drain_every": None}),  # ours
}

MODELS = {
    "alexnet_imagenet": ("alexnet", {}),
    "vgg16_imagenet": ("vgg", {}),
    "googlenet_imagenet": ("googlenet", {}),
    "resnet50_imagenet": ("resnet", {"layers": (3, 4, 6, 3)}),
    "resnet101_cifar10": ("resnet", {"layers": (3, 4, 23, 3), "stem": "cifar"}),
    "dlrm_criteo": ("dlrm", {}),
    "transformer_iwslt14": ("transformer", {"tied": False}),
}


def test_every_experiment_is_in_the_table():
    small = ("digits", "mnist", "fashion", "cifar10", "dlrm_clicks", "dlrm_flights", "dlrm_movielens")
    small = (*small, "transformer_catalogs", "gpt_stdlib", "gpt_linux")
    papers = {name for name in CONFIGS if not name.endswith("_digits") and name not in small}
    assert papers == set(PAPERS) == set(METHODS) == set(MODELS)


@pytest.mark.parametrize("name", PAPERS)
def test_settings(name):
    config = CONFIGS[name]
    assert {field: getattr(config, field) for field in PAPERS[name]} == PAPERS[name]
    kind, fields = METHODS[name]
    assert type(config.method) is kind
    assert {field: getattr(config.method, field) for field in fields} == fields
    model, options = MODELS[name]
    assert (config.architecture.name, dict(config.architecture.options)) == (model, options)
    # Nothing is split unless it is asked for.
    assert (config.stages, config.cuts, config.micro_batches, config.slices) == (1, None, 1, 1)
    assert (config.dense_layers, config.boundary) == ("exchange", BoundaryFields())


@pytest.mark.parametrize("name", ["alexnet_imagenet", "resnet50_imagenet"])
def test_nodes_of_the_pruning_paper(name):
    """`--workers 96 --global-batch 288`: 3 rows each, as 256 is no multiple of 96."""
    check(dataclasses.replace(CONFIGS[name], workers=96, global_batch=288), 96)
    with pytest.raises(ValueError, match=r"got 256 for 96\. Try 288"):
        check(dataclasses.replace(CONFIGS[name], workers=96), 96)


def test_cuts_of_the_dct_paper():
    """After two layers of the bottom MLP, and after two of the top one, which begins after the interaction."""
    config, info = CONFIGS["dlrm_criteo"], ClickInfo("criteo", 6, 1, (10,) * 26)
    model = nnx.eval_shape(partial(make_model, config.architecture, info, "float32", 0))
    assert [choose_cuts(model, stages, None) for stages in (2, 3)] == [(2,), (2, 7)]
    config = CONFIGS["transformer_iwslt14"]
    info = TranslationInfo("iwslt14", 160_239, 6_750, 7_283, ("de", "en"), 10_000, 128, 128)
    model = nnx.eval_shape(partial(make_model, config.architecture, info, "float32", 0))
    assert (model.layers, [len(choose_cuts(model, stages, None)) for stages in (2, 3, 5)]) == (6, [1, 2, 4])


def test_comparisons():
    compared = [method for _, method in SETTINGS]
    assert PlumpDp(p=1) in compared
    assert QuantDp(bits=8, bucket=512) in compared
    assert TernGrad(clip=2.5) in compared
    for beta in (0.0, 0.15, 0.3):  # Slim-DP's figure 4
        assert SlimDp(alpha=0.3, beta=beta) in compared
    assert any(type(method) is Iwp and method.alpha == 0.01 and method.beta == 0 for method in compared)
    assert any(type(method) is Iwp and method.beta != 0 for method in compared)
