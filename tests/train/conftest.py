"""Datasets and whole runs that the tests of this folder share."""

import matplotlib.figure
import numpy as np
import pytest

import train.__main__
from tests.train.runs import METHODS, run
from train.data.click_store import prepare_log
from train.data.click_tables import Hashed


@pytest.fixture
def started(monkeypatch):
    """Keeps JAX's devices: it has started with those of the tests."""
    monkeypatch.setattr(train.__main__, "prepare_jax", lambda devices: None)
    for name in ("JAXCOMM_COORDINATOR", "JAXCOMM_PROCESS_ID", "JAXCOMM_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A function from a case of METHODS to its folder and its run, which is made once."""
    runs = {}

    def get(case):
        if case not in runs:
            out = tmp_path_factory.mktemp("uninterrupted")
            runs[case] = out, run(out, METHODS[case])
        return runs[case]

    return get


@pytest.fixture(scope="session")
def logged(tmp_path_factory):
    """A folder with a log of 140 random rows as the dataset "criteo": 120 to train on, 20 to test on."""
    folder, rng = tmp_path_factory.mktemp("clicks"), np.random.default_rng(0)
    fields = [
        [rng.integers(2), *rng.integers(0, 500, 13), *(f"{value:x}" for value in rng.integers(0, 99, 26))]
        for _ in range(140)
    ]
    log = folder / "train.txt"
    log.write_text("".join("\t".join(map(str, row)) + "\n" for row in fields))
    prepare_log("criteo", log, folder, Hashed(20), say=lambda line: None)
    return folder


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written to files."""
    drawings, savefig = [], matplotlib.figure.Figure.savefig

    def save(figure, *args, **options):
        drawings.append(figure)
        savefig(figure, *args, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", save)
    return drawings
