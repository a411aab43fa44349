"""Train a model with compressed gradients: `python -m train [NAME] [options]`.

NAME is an experiment of `configs`, "digits" if it is left out; `python -m train NAME --help` explains every field.
"""

import dataclasses
import difflib
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from configs import CONFIGS
from configs.experiment import Experiment, PlumpDp, check
from train.processes import Processes, connect, prepare_jax


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns 0, or 2 for input that cannot be used."""
    try:
        experiment = parse(argv)
        processes = connect(
            experiment.coordinator,
            experiment.process_id,
            experiment.num_processes,
            check=lambda count: check(experiment, count),
        )
        prepare_jax(experiment.workers // processes.count)
        return run(experiment, processes)
    except (ValueError, FileNotFoundError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> Experiment:
    """Reads an experiment's name and the options that change its fields.

    Raises:
      ValueError: if there is no experiment of that name.
    """
    args = list(argv)
    name = args.pop(0) if args and not args[0].startswith("-") and ":" not in args[0] else "digits"
    if name not in CONFIGS:
        close = difflib.get_close_matches(name, CONFIGS, n=1)
        guess = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"An experiment is one of {', '.join(CONFIGS)}, got {name!r}{guess}.")
    return tyro.cli(
        Experiment,
        default=CONFIGS[name],
        args=args,
        prog=f"python -m train {name}",
        description=f"Experiments: {', '.join(CONFIGS)}. The defaults below are those of {name!r}.",
    )


def run(experiment: Experiment, processes: Processes) -> int:
    """Trains the baseline and the method, prints the table, and draws the figure."""
    # Not at the top: JAX and TFDS take seconds to import, which --help and a typo need not wait for.
    from train.folders import run_folder
    from train.loop import train
    from train.methods import make_exchange, method_name
    from train.metrics import draw_accuracy
    from train.processes import wait_for_all
    from train.progress import Bar
    from train.tables import print_table, write_records

    make_exchange(experiment.method)  # its errors come before the baseline is trained
    methods = [experiment.method]
    if experiment.baseline and not isinstance(experiment.method, PlumpDp):
        methods.insert(0, PlumpDp())
    out = run_folder(experiment.out, experiment.name, resume=experiment.resume)
    wait_for_all(processes)  # before one of them makes the folder that another still looks for
    experiment = dataclasses.replace(experiment, out=out)
    shows = processes.index == 0
    rows: list[dict[str, Any]] = []
    curves = {}
    for method in methods:
        with Bar(method_name(method), experiment.steps, shows=shows) as bar:
            ended = train(experiment, method, processes, bar)
        rows.append(dataclasses.asdict(ended.summary))
        curves[method_name(method)] = ended.evaluations
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
