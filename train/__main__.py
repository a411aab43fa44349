"""Train a model with compressed gradients: `python -m train [NAME] [options]`; `python -m train compare [NAME]`.

NAME is an experiment of `configs`, "digits" if it is left out; `python -m train NAME --help` explains every field.
`compare` trains every method with several seeds: `python -m train compare --help`.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from configs import CONFIGS, take_config
from configs.experiment import BoundaryFields, Experiment, check
from configs.methods import PlumpDp
from train.processes import Processes, connect, prepare_jax


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 0, or 2 for input that cannot be used."""
    try:
        if argv and argv[0] == "compare":
            from train.compare import main as compare

            return compare(argv[1:])
        experiment = parse(argv)
        processes = connect(
            experiment.coordinator,
            experiment.process_id,
            experiment.num_processes,
            check=lambda count: check(experiment, count),
        )
        devices = experiment.workers * experiment.stages * experiment.model_parallel // processes.count
        prepare_jax(None if processes.has_devices else devices)
        return run(experiment, processes)
    except (ValueError, OSError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> Experiment:
    """Reads an experiment's name and the options that change its fields.

    Raises:
      ValueError: if there is no experiment of that name.
    """
    default, args = take_config(argv)
    name = default.name
    return tyro.cli(
        Experiment,
        default=default,
        args=args,
        prog=f"python -m train {name}",
        description=f"Experiments: {', '.join(CONFIGS)}. The defaults below are those of {name!r}.",
    )


def run(experiment: Experiment, processes: Processes) -> int:
    """Trains the baseline and the method, prints the table, and draws the figure; or advises."""
    if experiment.advise:
        return advise(experiment, processes)
    # Not at the top: Flax, Orbax and TFDS take seconds to import, which --help and a typo need not wait for.
    from train.figures import draw_accuracy
    from train.folders import run_folder
    from train.job import make_job
    from train.loop import train
    from train.methods import run_name
    from train.plans import Planned
    from train.processes import wait_for_all
    from train.progress import Bar
    from train.tables import check_file, print_table, write_records

    check_file("--json", experiment.json)
    planned = None if experiment.plan is None else Planned(experiment.plan)
    runs: list[tuple[Experiment, Any]] = [(experiment, planned or experiment.method)]
    # The baseline's activations are all sent, and the gradients of its dense layers are exchanged.
    whole = dataclasses.replace(experiment, boundary=BoundaryFields(), dense_layers="exchange")
    if experiment.baseline and (runs[0][1] != PlumpDp() or experiment != whole):
        runs.insert(0, (whole, PlumpDp()))
    jobs = [make_job(each, method) for each, method in runs]  # errors of the last come before the first is trained
    out = run_folder(experiment.out, experiment.name, resume=experiment.resume)
    wait_for_all(processes)  # before one of them makes the folder that another still looks for
    shows = processes.index == 0
    rows: list[dict[str, Any]] = []
    curves = {}
    for (each, method), job in zip(runs, jobs, strict=True):
        each = dataclasses.replace(each, out=out)
        name = run_name(method, each.boundary, each.dense_layers)
        if job.late is not None and shows:
            print(job.late)
        with Bar(name, experiment.steps, shows=shows) as bar:
            ended = train(each, method, processes, bar, job)
        rows.append(ended.summary.record())
        curves[name] = ended.evaluations
        if not ended.finished:
            if shows:
                print(f"Stopped and saved after step {ended.summary.steps}; go on with --resume.")
            return 0
    if shows:
        print_table(f"{experiment.name}: accuracy, and bytes received per worker and step", rows)
        write_records(experiment.json, rows)
        figure = out / "accuracy_against_bytes.png"
        draw_accuracy(figure, curves)
        print(f"Metrics, checkpoints and {figure.name} are in {out}")
    return 0


def advise(experiment: Experiment, processes: Processes) -> int:
    """Prints which method would be fastest; returns 0, or 3 if that is a dense one."""
    from train.advice import advise_experiment
    from train.tables import check_file

    check_file("--json", experiment.json)
    advice, plan = advise_experiment(experiment)
    if processes.index == 0:
        print(advice)
        if experiment.json is not None:
            experiment.json.write_text(advice.json() + "\n")
        if plan is not None and experiment.plan is not None:
            plan.write(experiment.plan)
            print(f"{plan}\nwritten to {experiment.plan}; train with it: --plan {experiment.plan}")
    return 3 if advice.keeps_dense else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
