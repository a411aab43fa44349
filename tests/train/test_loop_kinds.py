"""Runs on clicks and translations: their scores at the end, without padded rows."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import train.loop
from configs.experiment import Architecture
from configs.methods import PlumpDp
from models.beam_search import beam_search
from models.functional import apply, cut, merge
from tests.train.runs import DLRM, EXPERIMENT, LOGGED, metrics, run
from train.architectures import make_model
from train.data import dataset_info, eval_batches, open_text
from train.data.text_pairs import Pair
from train.data.text_store import Lengths, prepare_pairs
from train.scores import auc, bleu, log_loss

TRANSFORMER = Architecture(
    "transformer", {"layers": 1, "width": 16, "hidden": 16, "heads": 2, "dropout": 0.1, "tied": False}
)
TRANSLATIONS = {
    "dataset": "iwslt14",
    "architecture": TRANSFORMER,
    "workers": 2,
    "optimizer": "adam",
    "learning_rate": 0.01,
    "label_smoothing": 0.1,
    "global_batch": 8,
    "steps": 20,
    "eval_every": 12,
    "beam": 2,
}
NUMBERS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "rot": "red", "blau": "blue"}


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    """A folder with sentences of four words as the dataset "iwslt14": 30 to train on, 5 to test on."""
    folder = tmp_path_factory.mktemp("text")
    pairs = [
        Pair(" ".join([first, second] * 2), " ".join([NUMBERS[first], NUMBERS[second]] * 2), f"{first}:{second}")
        for first in NUMBERS
        for second in NUMBERS
    ]
    splits = {"train": pairs[:30], "valid": pairs[30:33], "test": pairs[31:]}
    prepare_pairs("iwslt14", splits, ("de", "en"), Lengths(48, 24, 24), folder)
    return folder


def test_subwords_are_read_before_the_first_step(parallel, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(parallel, folder)
    (folder / "iwslt14" / "1.0.0" / "subwords.model").unlink()
    with pytest.raises(ValueError, match="must hold the subwords of iwslt14"):
        run(tmp_path, PlumpDp(), data_dir=folder, **TRANSLATIONS)
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.slow
def test_clicks(logged, tmp_path):
    result = run(tmp_path, PlumpDp(), data_dir=logged, **LOGGED)
    assert result.losses[-1] < result.losses[0]
    lines = metrics(tmp_path, PlumpDp())
    assert [line["step"] for line in lines if "test_auc" in line] == [4, 8]
    # The 20 rows of the test split are less than a batch of 24, which repeats one of them.
    (batch,) = eval_batches("criteo", global_batch=20, data_dir=logged)
    model = cut(make_model(DLRM, dataset_info("criteo", logged), "float32", 0))[0]
    logits, _ = apply(model.graph, jax.device_get(result.state.params), {}, batch, training=False)
    assert result.summary.scores == pytest.approx(
        {
            "loss": log_loss(batch["label"], logits),
            "accuracy": np.mean((np.asarray(logits) > 0) == batch["label"]),
            "auc": auc(batch["label"], logits),
        },
        rel=1e-4,
    )
    record = result.summary.record()
    assert record["auc"] == result.summary.scores["auc"]
    assert list(record)[:6] == ["method", "workers", "seed", "accuracy", "loss", "auc"]
    assert result.evaluations[-1].scores == result.summary.scores
    json.dumps(record)


@pytest.mark.slow
def test_translations(parallel, tmp_path, monkeypatch):
    """BLEU of the best translation of every test sentence; the loss is smoothed only in training."""
    scored = []

    def keep(hypotheses, references, **how):
        if not how:
            scored.append((hypotheses, references))
        return bleu(hypotheses, references, **how)

    monkeypatch.setattr(train.loop, "bleu", keep)
    result = run(tmp_path, PlumpDp(), data_dir=parallel, **TRANSLATIONS)
    assert result.losses[-1] < 0.8 * result.losses[0]
    lines = metrics(tmp_path, PlumpDp())
    assert [line["step"] for line in lines if "test_loss" in line] == [12, 20]
    assert [line["step"] for line in lines if "test_bleu" in line] == [20]  # a search takes long
    info, text = dataset_info("iwslt14", parallel), open_text("iwslt14", "test", parallel)
    assert info.num_test == 5  # of a batch of 8
    (batch,) = eval_batches("iwslt14", global_batch=5, data_dir=parallel)
    graph = cut(make_model(TRANSFORMER, info, "float32", 0))[0].graph

    @jax.jit
    def evaluate(params, batch):
        blocks = merge(graph, params, {}, training=False)
        tokens, _ = beam_search(blocks, batch["source"], max_length=23, beam=2)
        return tokens[:, 0], jax.nn.log_softmax(apply(graph, params, {}, batch, training=False)[0])

    tokens, translations = jax.device_get(evaluate(jax.device_get(result.state.params), batch))
    ((hypotheses, references),) = scored
    assert hypotheses == text.subwords.decode(tokens)
    assert all(hypotheses)
    assert references == text.references
    assert result.summary.record()["bleu"] == bleu(hypotheses, references).score
    assert result.summary.record()["bleu_lower"] == bleu(hypotheses, references, lowercase=True).score
    labels = batch["target"][:, 1:]
    entropies = -np.take_along_axis(translations, labels[..., None], axis=-1)[..., 0]
    assert result.summary.scores["loss"] == pytest.approx(entropies[labels != 0].mean(), rel=1e-4)


def test_rows_of_bleu(parallel):
    """The references themselves have a BLEU of 100; padded rows are dropped."""
    experiment = dataclasses.replace(EXPERIMENT, **TRANSLATIONS, data_dir=parallel)
    job = SimpleNamespace(task=SimpleNamespace(scores=lambda rows: {"rows": len(rows["right"])}))
    batches = list(eval_batches("iwslt14", global_batch=3, data_dir=parallel))
    rows = [{"right": np.zeros(3), "mask": batch["mask"]} for batch in batches]
    best = [batch["target"][:, 1:] for batch in batches]
    assert sum(len(row) for row in best) == 6
    scores = train.loop.test_scores(experiment, job, rows, best)
    assert scores["rows"] == 5
    assert scores["bleu"] == pytest.approx(100)
    assert train.loop.test_scores(experiment, job, rows, best[::-1])["bleu"] < scores["bleu"]


@pytest.mark.slow
def test_no_translation_of_a_stop(parallel, tmp_path, monkeypatch):
    """SIGTERM gives little time."""
    searched = []
    monkeypatch.setattr(train.loop, "bleu", lambda *_, **__: searched.append(1))
    result = run(tmp_path, PlumpDp(), data_dir=parallel, stop_after=2, **TRANSLATIONS)
    assert "bleu" not in result.summary.scores
    assert searched == []
    assert result.summary.scores.keys() == {"loss", "accuracy"}
