import dataclasses
from typing import get_args

import pytest

from configs import CONFIGS, take_config
from configs.comparison import DENSE, SETTINGS
from configs.experiment import Experiment, check
from configs.methods import Method
from train.data import DATASETS
from train.methods import make_chain


@pytest.mark.parametrize("name", CONFIGS)
def test_an_experiment_is_found_by_its_name_and_can_run(name):
    config = CONFIGS[name]
    assert isinstance(config, Experiment)
    assert config.name == name
    assert config.dataset in DATASETS
    assert config.warmup_steps < config.steps
    check(config, 1)
    make_chain(config, config.method)


def test_only_the_end_decides_where_an_experiment_runs():
    """What belongs to one machine or one moment has no place in a config."""
    names = ("stop_after", "resume", "out", "data_dir", "json", "coordinator", "process_id", "num_processes")
    defaults = {field.name: field.default for field in dataclasses.fields(Experiment)}
    for config in CONFIGS.values():
        assert [getattr(config, name) for name in names] == [defaults[name] for name in names]


def test_a_name_is_taken_from_the_arguments():
    assert take_config(["mnist", "--steps", "3"]) == (CONFIGS["mnist"], ["--steps", "3"])
    for args in ([], ["--steps", "3"], ["method:top-k"]):
        assert take_config(args) == (CONFIGS["digits"], args)
    with pytest.raises(
        ValueError, match=r"An experiment is one of digits, mnist, .*, got 'mnits' \(did you mean 'mnist'\?\)"
    ):
        take_config(["mnits"])


def test_every_method_is_compared_and_no_setting_twice():
    methods = [method for _, method in SETTINGS]
    assert {type(method) for method in methods} == set(get_args(Method))
    assert len(set(methods)) == len(methods)
    assert len({(type(method), label) for label, method in SETTINGS}) == len(SETTINGS)
    assert methods[0] == DENSE
