"""Batches: one order for any number of processes, exact continuation, each test example once."""

import itertools
import json
import threading
import time

import numpy as np
import pytest

from train.data import digits, eval_batches, loader, sources, train_batches
from train.data.seeds import row_seeds

N = 1347  # training examples of digits


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tfds")


@pytest.fixture
def batches(data_dir):
    """Makes training batches of the digits and stops their threads after the test."""
    steps = []

    def make(global_batch=500, seed=0, **kwargs):
        steps.append(train_batches("digits", global_batch=global_batch, seed=seed, data_dir=data_dir, **kwargs))
        return steps[-1]

    yield make
    for iterator in steps:
        iterator.close()


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def together(parts):
    """Joins the rows that the processes have of each batch."""
    return [
        {key: np.concatenate([part[key] for part in batch]) for key in batch[0]} for batch in zip(*parts, strict=True)
    ]


def assert_equal_batches(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype
            np.testing.assert_array_equal(a[key], b[key])


def rows(some_batches):
    """The examples as bytes: label, then pixels."""
    return [
        label.tobytes() + image.tobytes()
        for batch in some_batches
        for image, label in zip(batch["image"], batch["label"], strict=True)
    ]


def test_epochs(batches, data_dir):
    assert batches().num_examples == N
    stored = eval_batches("digits", "train", global_batch=N, data_dir=data_dir)
    first, second = (rows(batch) for batch in np.array_split(take(batches(449), 6), 2))  # N = 3 * 449
    assert sorted(first) == sorted(second) == sorted(rows(stored))
    assert first != second


def test_orders_of_seeds(batches):
    # grain adds the epoch to the seed of a shuffle: neighbouring seeds would have the same orders.
    epochs = [tuple(rows(take(batches(449, seed), 6))[i * N :][:N]) for seed in (0, 1) for i in (0, 1)]
    assert len(set(epochs)) == 4


def test_seeds_of_rows(batches):
    runs = [np.concatenate([batch["seed"] for batch in take(batches(449, seed), 6)]) for seed in (0, 1)]
    assert len(set(np.concatenate(runs).tolist())) == 2 * 6 * 449  # of 2**32: one run in a thousand has two alike
    positions = np.arange(6 * 449)
    np.testing.assert_array_equal(runs[1], row_seeds(1, positions))


def test_rows_of_a_process(batches, monkeypatch):
    read = []

    class Recording(sources.CachedSource):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    monkeypatch.setattr(sources, "CachedSource", Recording)
    sources.cached_source.cache_clear()
    take(batches(400, process_index=1, process_count=4), 2)
    assert 200 <= len(read) <= 100 * (2 + 3)  # at most three batches ahead


@pytest.mark.parametrize("global_batch", [1, N])
def test_smallest_and_largest_batch(batches, global_batch):
    assert [len(batch["label"]) for batch in take(batches(global_batch), 3)] == [global_batch] * 3


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])  # the third batch holds the end of the epoch
def test_a_restored_run(batches, step):
    uninterrupted = take(batches(), 8)
    interrupted = batches()
    take(interrupted, step)
    state = json.loads(json.dumps(interrupted.state()))
    restored = batches()
    take(restored, 2)  # whatever it delivered before
    restored.restore(state)
    assert restored.step == step
    assert_equal_batches(take(restored, 8 - step), uninterrupted[step:])
    assert restored.state() == {**state, "step": 8}


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
def test_restored_with_other_processes(batches, before, after):
    saved = batches(process_index=before - 1, process_count=before)
    take(saved, 2)
    parts = []
    for p in range(after):
        restored = batches(process_index=p, process_count=after)
        restored.restore(saved.state())
        parts.append(take(restored, 3))
    assert_equal_batches(together(parts), take(batches(), 5)[2:])


def test_state_of_processes(batches):
    states = []
    for p in range(2):
        iterator = batches(process_index=p, process_count=2)
        take(iterator, 3)
        states.append(iterator.state())
    assert states[0] == states[1]


def test_numpy_arguments(batches):
    state = batches(np.int64(500), np.int64(3)).state()
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "mnist"}, "dataset: 'mnist' in the state, 'digits' here"),
        ({"version": "0.9.0"}, "version: '0.9.0' in the state, '1.0.0' here"),
        ({"seed": 1}, "seed: 1 in the state, 0 here"),
        ({"global_batch": 64}, "global_batch: 64 in the state, 500 here"),
        ({"num_examples": 10}, "num_examples: 10 in the state, 1347 here"),
        ({"step": -1}, "integer of at least 0; got -1"),
        ({"step": 1.5}, "integer of at least 0; got 1.5"),
        ({"epoch": 1}, "must have the keys"),
    ],
)
def test_another_state(batches, change, message):
    iterator = batches()
    with pytest.raises(ValueError, match=message):
        iterator.restore({**iterator.state(), **change})


def test_differences_are_named(batches):
    with pytest.raises(ValueError, match=r"seed: 1 .*") as error:
        batches().restore(batches(64, 1).state())
    assert "global_batch: 64 in the state" in str(error.value)
    assert "dataset:" not in str(error.value)


@pytest.mark.parametrize("process_count", [1, 2, 5])
@pytest.mark.parametrize("global_batch", [130, 450, 1000])
def test_evaluation(data_dir, process_count, global_batch):
    passes = [
        eval_batches(
            "digits",
            global_batch=global_batch,
            process_index=p,
            process_count=process_count,
            data_dir=data_dir,
        )
        for p in range(process_count)
    ]
    assert {len(one) for one in passes} == {-(-450 // global_batch)}
    assert passes[0].num_examples == 450
    parts = [list(one) for one in passes]
    local = global_batch // process_count
    assert {batch["image"].shape for part in parts for batch in part} == {(local, 8, 8, 1)}
    whole = together(parts)
    mask = np.concatenate([batch["mask"] for batch in whole])
    assert mask.dtype == np.float32
    np.testing.assert_array_equal(mask, np.arange(len(mask)) < 450)
    stored = digits.prepare_digits(data_dir).as_data_source("test")
    images = np.concatenate([batch["image"] for batch in whole])
    labels = np.concatenate([batch["label"] for batch in whole])
    assert labels.dtype == np.int32
    for i in range(450):
        np.testing.assert_array_equal(images[i] * 16, stored[i]["image"])
        assert labels[i] == stored[i]["label"]


def test_equal_evaluations(data_dir):
    batches = eval_batches("digits", global_batch=128, data_dir=data_dir)
    whole = list(batches)
    for _ in batches:
        break  # a pass that is left early does not disturb the next
    assert_equal_batches(list(batches), whole)


def test_rows_past_the_end(data_dir):
    batches = list(eval_batches("digits", global_batch=400, data_dir=data_dir))
    assert batches[1]["mask"].tolist() == [1] * 50 + [0] * 350
    for row in range(50, 400):
        np.testing.assert_array_equal(batches[1]["image"][row], batches[0]["image"][0])
        assert batches[1]["label"][row] == batches[0]["label"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch": 0}, "global_batch must be at least 1; got 0"),
        ({"global_batch": 6, "process_count": 4}, "divisible .* got 6 and 4. Take a multiple of 4"),
        ({"global_batch": 4, "process_count": 0}, "process_count must be at least 1; got 0"),
        ({"global_batch": 4, "process_count": 2, "process_index": 2}, "got 2 of 2"),
        ({"global_batch": 4, "process_count": 2, "process_index": -1}, "got -1 of 2"),
    ],
)
def test_bad_layouts(data_dir, arguments, message):
    for make in (train_batches, eval_batches):
        seed = {"seed": 0} if make is train_batches else {}
        with pytest.raises(ValueError, match=message):
            make("digits", **arguments, **seed, data_dir=data_dir)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, r"seed must be in \[0, 2\*\*32\); got -1"),
        ({"seed": 2**32}, r"seed must be in \[0, 2\*\*32\); got 4294967296"),
        ({"global_batch": 1348}, r"at most the 1347 training examples .* got 1348. Lower it"),
    ],
)
def test_bad_arguments(batches, arguments, message):
    with pytest.raises(ValueError, match=message):
        batches(**arguments)


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]


def test_threads_end(data_dir):
    before = set(prefetch_threads())
    iterator = train_batches("digits", global_batch=64, seed=0, data_dir=data_dir)
    take(iterator, 2)
    for _ in eval_batches("digits", global_batch=64, data_dir=data_dir):
        break
    assert set(prefetch_threads()) - before  # otherwise the test would see nothing
    iterator.close()
    deadline = time.monotonic() + 10
    while set(prefetch_threads()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(prefetch_threads()) - before


def test_batches_after_close(batches):
    iterator = batches()
    first = take(iterator, 2)
    iterator.close()
    assert_equal_batches(first + take(iterator, 2), take(batches(), 4))


@pytest.mark.parametrize("threads", [0, 3])
def test_threads_and_order(batches, monkeypatch, threads):
    expected = take(batches(), 4)
    monkeypatch.setattr(loader, "_threads", lambda name: threads)
    assert_equal_batches(take(batches(), 4), expected)
