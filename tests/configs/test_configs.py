import dataclasses

import pytest

from configs import CONFIGS
from configs.experiment import DctDp, Experiment, Method, PlumpDp, TopK, check
from train.data import DATASETS
from train.methods import make_exchange, method_name


@pytest.mark.parametrize("name", CONFIGS)
def test_an_experiment_is_found_by_its_name_and_can_run(name):
    config = CONFIGS[name]
    assert isinstance(config, Experiment)
    assert config.name == name
    assert config.dataset in DATASETS
    assert config.warmup_steps < config.steps
    check(config, 1)
    make_exchange(config.method)


def test_only_the_end_decides_where_an_experiment_runs():
    """What belongs to one machine or one moment has no place in a config."""
    names = ("stop_after", "resume", "out", "data_dir", "json", "coordinator", "process_id", "num_processes")
    defaults = {field.name: field.default for field in dataclasses.fields(Experiment)}
    for config in CONFIGS.values():
        assert [getattr(config, name) for name in names] == [defaults[name] for name in names]


@pytest.mark.parametrize(
    ("method", "name"), [(PlumpDp(), "plump_dp"), (TopK(), "topk"), (DctDp(drain_every=5), "dct_dp")]
)
def test_every_method_has_a_name_and_a_transformation(method, name):
    assert isinstance(method, Method)
    assert method_name(method) == name
    make_exchange(method)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (DctDp(sparsity=1.0), "sparsity must be"),
        (DctDp(life_span=0), "life_span"),
        (DctDp(slack=0.5), "slack"),
        (DctDp(drain_every=0), "drain_every"),
        (TopK(sparsity=-0.1), "sparsity"),
        (TopK(dense_below=-1), "dense_below"),
    ],
)
def test_the_transformation_checks_the_fields(method, said):
    with pytest.raises(ValueError, match=said):
        make_exchange(method)
