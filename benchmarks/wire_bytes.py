"""Brings the bytes of recorded results up to date, by the library's report; times and accuracies stay as they were.

    python -m benchmarks.wire_bytes docs/data/papers.json docs/data/growth.json docs/data/density.json
    python -m benchmarks.wire_bytes docs/data/dct_flights.json docs/data/dct_movielens.json --data-dir FOLDER

Bytes follow from shapes alone, so that a new code of positions does not need a new run. What a kernel or a compiler
counted is a measurement, and stays. Rows of `benchmarks.dct`, `benchmarks.growth`, `benchmarks.density` and, if they
name their shapes, of `benchmarks.exchange` are known; others stay.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks import dct, density, exchange
from benchmarks.activation_ablations import make_ablation
from benchmarks.harness import run
from benchmarks.shapes import shapes_of
from train.records import Record
from train.tables import write_records


@dataclass(frozen=True)
class Config:
    """Recompute the bytes of records."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files of records, which are rewritten."""
    data_dir: Path | None = None
    """Folder of prepared datasets, for rows of `benchmarks.dct` that were trained on real ones."""


def main(config: Config) -> None:
    """Prepares the devices of pipelines, and rewrites the files."""
    from train.processes import prepare_jax

    prepare_jax(6)
    rewrite(config)


def rewrite(config: Config) -> None:
    """Rewrites the files, and prints every number that changes."""
    for path in config.files:
        text = path.read_text()
        records = json.loads(text)
        fresh = [record | current(record, records, config.data_dir) for record in records]
        for before, after in zip(records, fresh, strict=True):
            for name in before:
                if before[name] != after[name]:
                    print(f"{path.name}: {_title(before)}: {name} {before[name]:,} -> {after[name]:,}", flush=True)
        if fresh != records and text.startswith("[\n{"):  # as `Records` writes it, a record a line
            path.write_text("[\n" + ",\n".join(json.dumps(record) for record in fresh) + "\n]\n")
        elif fresh != records:
            write_records(path, fresh)


def current(record: Record, records: Sequence[Record], data_dir: Path | None = None) -> Record:
    """Returns those fields of a record that are bytes from shapes, or ratios of them, as they are today.

    Args:
      record: one of a file.
      records: all of the file.
      data_dir: folder of prepared datasets.
    """
    if {"system", "stages", "bytes_per_step"} <= record.keys():
        return _of_dct(record, data_dir)
    if "ring_bytes" in record:
        hops = [
            row for row in records if "hop" in row and all(row[name] == record[name] for name in ("workers", "kept"))
        ]
        publishers = [int(name.split("_")[1]) for name in record if name.startswith("shared_")]
        return density.bytes_of(record["workers"], record["kept"], publishers, hops)
    is_of_shapes = "shapes" in record or {"parameters", "density"} <= record.keys()
    if {"bytes_predicted", "hosts"} <= record.keys() and is_of_shapes and record.get("method") in exchange.METHODS:
        return _of_exchange(record)
    return {}


def _of_dct(record: Record, data_dir: Path | None) -> Record:
    from train.job import make_job

    settings = [
        setting
        for setting in dct.SETTINGS
        if (setting.system, setting.sparsity) == (record["system"], record["sparsity"])
    ]
    if not settings or record["system"] == "dense":
        return {}
    setting = replace(settings[0], stages=record["stages"])
    name: Any = record.get("experiment", dct.Config.experiment)
    config = dct.Config(experiment=name, steps=record["steps"], life_span=record["life_span"], data_dir=data_dir)
    experiment, method = dct.experiment_of(setting, config)
    job = make_ablation(experiment, method, setting.scheme) if setting.scheme else make_job(experiment, method)
    received = job.report.received
    return _rounded(record, {"bytes_per_step": received, "ratio_to_dense": job.dense / received})


def _of_exchange(record: Record) -> Record:
    import jax
    import jax.numpy as jnp

    import jaxcomm as jc

    sparsity = 1 - record["density"] if "density" in record else record.get("sparsity", exchange.Config.sparsity)
    shapes = shapes_of(str(record.get("parameters", record.get("shapes"))))
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    tx = exchange.METHODS[record["method"]](round(sparsity, 6))
    return _rounded(record, {"bytes_predicted": jc.wire_report(tx, like, record["hosts"]).received})


def _rounded(record: Record, fields: Record) -> Record:
    """Returns the fields that differ from the record's by more than the rounding of a mean over steps."""
    return {name: value for name, value in fields.items() if abs(value / record[name] - 1) > 1e-9}


def _title(record: Record) -> str:
    names = ("system", "method", "stages", "workers", "hosts", "sparsity", "density", "kept")
    return ", ".join(f"{name} {record[name]}" for name in names if name in record)


if __name__ == "__main__":
    run(Config, __doc__, main)
