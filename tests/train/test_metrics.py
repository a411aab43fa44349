"""What a run writes of its steps: lines with their time, and scalars that TensorBoard reads."""

import itertools
import json
import math
import struct

import jax.numpy as jnp
import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog

import jaxcomm as jc
import train.metrics
from tests.refusals import refused
from train.metrics import Log

REPORT = jc.wire_report(jc.plump_dp(), {"w": jnp.zeros(100)}, 2)  # each of two workers receives 400 bytes


def metrics(loss, bytes_sent=3.0, skipped=0):
    values = {"loss": loss, "accuracy": 0.5, "sent": bytes_sent, "overflow": 1.0, "skipped": skipped, "drained": 0}
    return {name: np.asarray(value) for name, value in values.items()}


def record(folder, steps, after=0, **options):
    log = Log(folder / "metrics.jsonl", REPORT, lambda step: False, after=after, writes=True, **options)
    for step, loss in steps.items():
        log.record(step, metrics(loss), {"loss": 9.0, "accuracy": 0.25} if step == 2 else None)
    log.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_events(path):
    """The events of a file, by the format of its records: length, checksum, bytes, checksum."""
    data, start = path.read_bytes(), 0
    while start < len(data):
        (size,) = struct.unpack_from("<Q", data, start)
        yield Event.FromString(data[start + 12 : start + 12 + size])
        start += 16 + size


def scalars(events):
    return {(value.tag, event.step): value.simple_value for event in events for value in event.summary.value}


def test_seconds_over_resumes(tmp_path, monkeypatch):
    clock = itertools.count(100.0, 1.5)  # at the start, and at every line
    monkeypatch.setattr(train.metrics.time, "perf_counter", lambda: next(clock))
    assert [line["seconds"] for line in record(tmp_path, {1: 1.0, 2: 1.0})] == [1.5, 3.0]
    clock = itertools.count(5000.0, 2.0)  # another process, whose clock begins where it likes
    assert [line["seconds"] for line in record(tmp_path, {2: 1.0, 3: 1.0}, after=1)] == [1.5, 3.5, 5.5]


def test_lines_without_seconds(tmp_path):
    record(tmp_path, {1: 1.0})
    path = tmp_path / "metrics.jsonl"
    line = json.loads(path.read_text())
    del line["seconds"]
    path.write_text(json.dumps(line) + "\n")
    assert [line.get("seconds", -1) >= 0 for line in record(tmp_path, {2: 1.0}, after=1)] == [False, True]


def test_tensorboard(tmp_path):
    record(tmp_path, {1: 4.0, 2: math.nan}, tensorboard=True, schedule=lambda steps: 0.5**steps)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    numbers = scalars(read_events(path))
    expected = {("train/loss", 1): 4.0, ("train/accuracy", 1): 0.5, ("exchange/sent", 1): 3.0}
    expected |= {("exchange/overflow", 1): 1.0, ("exchange/skipped", 1): 0.0, ("exchange/drained", 1): 0.0}
    expected |= {("exchange/bytes_received", 1): 400.0}
    expected |= {("train/learning_rate", 1): 1.0}
    second = {(tag, 2): value for (tag, _), value in expected.items()}
    second |= {("exchange/bytes_received", 2): 800.0, ("test/loss", 2): 9.0, ("test/accuracy", 2): 0.25}
    second |= {("train/learning_rate", 2): 0.5}
    assert numbers.pop(("train/seconds_per_step", 2)) >= 0
    assert math.isnan(numbers.pop(("train/loss", 2)))
    del second["train/loss", 2]
    assert numbers == expected | second


def test_tensorboard_after_a_resume(tmp_path, monkeypatch):
    record(tmp_path, {1: 4.0, 2: 3.0, 3: 2.0}, tensorboard=True)
    before = set(tmp_path.glob("events.*"))
    monkeypatch.setattr("tensorboardX.event_file_writer.time.time", lambda: 2e9)  # files are named by the second
    record(tmp_path, {2: 5.0, 3: 6.0}, after=1, tensorboard=True)
    (later,) = set(tmp_path.glob("events.*")) - before
    events = list(read_events(later))
    starts = [event.step for event in events if event.session_log.status == SessionLog.START]
    assert starts == [2]  # events of this step and later ones, from older files, are dropped
    assert {key: value for key, value in scalars(events).items() if key[0] == "train/loss"} == {
        ("train/loss", 2): 5.0,
        ("train/loss", 3): 6.0,
    }


def test_no_tensorboard(tmp_path):
    record(tmp_path, {1: 4.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_missing_writer(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    refused(lambda: record(tmp_path, {1: 4.0}, tensorboard=True), "tensorboardX", "got none")
