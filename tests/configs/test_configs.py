import dataclasses
from functools import partial
from typing import get_args

import jax
import numpy as np
import pytest
from flax import nnx

import jaxcomm as jc
from configs import CONFIGS, take_config
from configs.comparison import DENSE, SETTINGS
from configs.experiment import Experiment, check
from configs.methods import Dgc, Iwp, Method
from models.functional import apply, cut
from tests.jaxcomm.train_steps import warnings_of
from tests.refusals import refused
from train.architectures import choose_cuts, make_model
from train.data import DATASETS, ClickInfo, TextInfo, TranslationInfo, dataset_info
from train.methods import make_chain
from train.tasks import make_task

# Datasets that the user prepares, of about the published size, as no array is made.
PREPARED = {
    "clicks": ClickInfo("clicks", 60_000, 10_000, (500,) * 26),
    "flights": ClickInfo("flights", 280_583, 46_763, (17, 4, 104, 3_800, 4_800, 20, 8), 9),
    "movielens": ClickInfo("movielens", 85_718, 14_286, (581, 4_400, 700, 90), 5),
    "criteo": ClickInfo("criteo", 39_291_958, 6_548_659, (100_000,) * 26),
    "iwslt14": TranslationInfo("iwslt14", 160_239, 6_750, 7_283, ("de", "en"), 10_000, 128, 128),
    "catalogs": TranslationInfo("catalogs", 2000, 100, 100, ("de", "en"), 1000, 24, 24),
    "linux": TextInfo("linux", 250_000, 512, 256),
    "stdlib": TextInfo("stdlib", 80_000, 512, 128),
}
LARGE = ("alexnet_imagenet", "vgg16_imagenet", "googlenet_imagenet", "resnet50_imagenet", "resnet101_cifar10")


def model_of(config):
    """The model of an experiment, as shapes only, and the info of its data."""
    info = PREPARED.get(config.dataset) or dataset_info(config.dataset)
    return nnx.eval_shape(partial(make_model, config.architecture, info, config.dtype, config.seed)), info


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_runs(name):
    config = CONFIGS[name]
    assert isinstance(config, Experiment)
    assert config.name == name
    assert config.dataset in DATASETS
    assert config.warmup_steps < config.steps
    check(config, 1)
    tx = make_chain(config, config.method)
    params = {name: jax.ShapeDtypeStruct((40, 50), "float32") for name in ("linear", "table")}
    sizes, axes = ((2, 2), ("slice", "data")) if config.slices > 1 else (4, "data")
    warnings = warnings_of(tx, params, sizes, axis_name=axes)
    is_weak = config.decay == "decoupled" and bool(config.weight_decay) and isinstance(config.method, Dgc | Iwp)
    assert [("none of its momentum" in message) for message in warnings] == [True] * is_weak


@pytest.mark.parametrize("name", CONFIGS)
def test_models_fit_their_data(name):
    model, info = model_of(CONFIGS[name])
    params = cut(model)[0].params
    report = jc.wire_report(make_chain(CONFIGS[name], CONFIGS[name].method), params, CONFIGS[name].workers)
    assert report.received < report.dense
    assert info.name == CONFIGS[name].dataset


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in LARGE])
def test_small_models_train(name):
    """Its images are large enough for its poolings, its loss takes what it returns, and its rows make groups."""
    config = CONFIGS[name]
    model, info = model_of(config)
    (stage,) = cut(model)
    task, rows = make_task(info, config.label_smoothing), config.global_batch // config.workers
    types = info.row_types() | {"seed": ((), np.dtype(np.uint32))}
    batch = {key: jax.ShapeDtypeStruct((rows, *shape), dtype) for key, (shape, dtype) in types.items()}

    def loss(params, stats, batch):
        output, stats = apply(stage.graph, params, stats, batch, training=True, rows_per_group=config.rows_per_group)
        return *task.loss(output, batch), stats

    value, scalars, stats = jax.eval_shape(loss, stage.params, stage.stats, batch)
    assert value.shape == scalars["accuracy"].shape == ()
    assert jax.tree.map(lambda leaf: leaf.shape, stats) == jax.tree.map(lambda leaf: leaf.shape, stage.stats)

    def score(params, stats, batch):
        return task.rows(apply(stage.graph, params, stats, batch, training=False)[0], batch)

    scores = jax.eval_shape(score, stage.params, stage.stats, batch)
    assert {leaf.shape for leaf in scores.values()} == {(rows,)}


@pytest.mark.parametrize(("name", "stages"), [("dlrm_criteo", 4), ("dlrm_clicks", 3), ("transformer_iwslt14", 5)])
def test_cuts_of_the_dct_paper(name, stages):
    model, _ = model_of(CONFIGS[name])
    for count in range(1, stages + 1):
        assert len(cut(model, choose_cuts(model, count, None))) == count


def test_the_end_decides_the_place():
    """What belongs to one machine or one moment has no place in a config."""
    names = ("stop_after", "resume", "out", "data_dir", "json", "coordinator", "process_id", "num_processes")
    defaults = {field.name: field.default for field in dataclasses.fields(Experiment)}
    for config in CONFIGS.values():
        assert [getattr(config, name) for name in names] == [defaults[name] for name in names]


def test_names_of_arguments():
    assert take_config(["mnist", "--steps", "3"]) == (CONFIGS["mnist"], ["--steps", "3"])
    for args in ([], ["--steps", "3"], ["method:top-k"]):
        assert take_config(args) == (CONFIGS["digits"], args)
    refused(lambda: take_config(["mnits"]), "An experiment", "got 'mnits' (did you mean 'mnist'?)")


def test_methods_of_a_comparison():
    methods = [method for _, method in SETTINGS]
    assert {type(method) for method in methods} == set(get_args(Method))
    assert len(set(methods)) == len(methods)
    assert len({(type(method), label) for label, method in SETTINGS}) == len(SETTINGS)
    assert methods[0] == DENSE
