"""Train a model with compressed gradients: `python -m train [NAME] [options]`.

NAME is an experiment in `configs` ("digits" if omitted); `python -m train NAME --help` explains every field.
`python -m train compare [NAME]` trains every method with several seeds, and `python -m train report RUN` draws figures
of runs on an HTML page; both have a `--help` too.
"""

import _thread
import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax
import tyro

from configs import CONFIGS, take_config
from configs.experiment import BoundaryFields, Experiment, check, check_alone, check_options, with_fewer
from configs.methods import Method, PlumpDp
from train.goodput import Goodput
from train.processes import Processes, connect, is_addressed, prepare_jax
from train.restarts import LONG_PAUSE, end_with_supervisor, is_supervised, note_begun, previous_run_folder, supervise

if TYPE_CHECKING:
    import jaxcomm as jc
    from train.metrics import Summary


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns its exit code.

    The code is 0; 1 if not all processes came; 2 for input that cannot be used; 3 if `--advise` advises a dense method;
    130 if a signal ended it before it could save; or, with `--restarts`, that of the last start.
    """
    begin = time.monotonic()
    try:
        if argv and argv[0] == "compare":
            from train.compare import main as compare

            return compare(argv[1:])
        if argv and argv[0] == "report":
            from train.report import main as report

            return report(argv[1:])
        experiment = parse(argv)
        if experiment.restarts > 0 and not is_supervised():
            pause = None if is_addressed(experiment.coordinator) else LONG_PAUSE
            return supervise(argv, experiment.restarts, pause=pause)
        end_with_supervisor()
        experiment, processes = come_together(experiment)
        devices = (experiment.devices if experiment.rounds is None else experiment.fsdp) // processes.count
        prepare_jax(None if processes.has_devices else devices)
        if experiment.rounds is not None:
            return run_in_rounds(experiment, processes)
        if processes.count == 1:
            return run(experiment, processes, begin=begin)
        return run_together(experiment, processes, begin)
    except (ValueError, OSError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1 if isinstance(error, TimeoutError) else 2
    except KeyboardInterrupt:
        print("train: interrupted; what was saved is kept", file=sys.stderr)
        return 130


def come_together(experiment: Experiment) -> tuple[Experiment, Processes]:
    """Joins the run's other processes. If some do not come back, --min-workers lets it go on with fewer workers.

    Raises:
      ValueError, TimeoutError: see `connect`.
    """
    process_count = 1

    def check_all(count: int) -> None:
        nonlocal process_count
        process_count = count
        check(experiment, count)
        if count == 1:
            check_alone(experiment)

    may_shrink = experiment.min_workers is not None and previous_run_folder() is not None
    processes = connect(
        experiment.coordinator,
        experiment.process_id,
        experiment.num_processes,
        check=check_all,
        seconds=experiment.connect_timeout,
        fits=(lambda count: with_fewer(experiment, count, process_count) is not None) if may_shrink else None,
        patience=experiment.peer_timeout,
    )
    agreed = with_fewer(experiment, processes.count, process_count) if processes.missing else experiment
    if agreed is None:  # process 0 has found otherwise
        raise ValueError(
            f"--min-workers must be the same in all processes; got {experiment.min_workers} in process "
            f"{processes.index}, and process 0 goes on with fewer workers. Give it to every process."
        )
    if processes.missing and processes.index == 0:
        numbers = ", ".join(map(str, processes.missing))
        per_process = experiment.workers // process_count
        workers = ", ".join(
            str(index * per_process + worker) for index in processes.missing for worker in range(per_process)
        )
        print(
            f"train: process {numbers} did not come back within {experiment.peer_timeout:g} s; the run goes on with "
            f"{agreed.workers} of {experiment.workers} workers. The checkpoint's residual of worker {workers} is kept, "
            "averaged with the others' (what was added since is lost, and so are the steps since).",
            file=sys.stderr,
            flush=True,
        )
    return agreed, processes


def parse(argv: Sequence[str]) -> Experiment:
    """Reads an experiment's name and the options that change its fields.

    A method's subcommand may also have the library's name: "method:topk" is "method:top-k".

    Raises:
      ValueError: if there is no experiment of that name; see `configs.experiment.check_options`.
    """
    default, args = take_config(argv)
    subcommands = {
        f"method:{kind.name}": "method:" + re.sub("(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower()
        for kind in get_args(Method)
    }
    args, name = [subcommands.get(argument, argument) for argument in args], default.name
    experiment = tyro.cli(
        Experiment,
        default=default,
        args=args,
        prog=f"python -m train {name}",
        description=f"Experiments: {', '.join(CONFIGS)}. The defaults below are those of {name!r}.",
    )
    check_options(experiment, default)
    return experiment


def run_in_rounds(experiment: Experiment, processes: Processes) -> int:
    """Is one worker of a run whose workers are separate programs; see `train.rounds`."""
    from train.folders import run_folder
    from train.progress import Bar
    from train.rounds import train
    from train.tables import check_file, display_name

    check_file("--json", experiment.json)
    name = experiment.method.name
    with (
        run_folder(experiment.out, experiment.name, resume=False, runs=[name]) as out,
        Bar(display_name(name), experiment.steps, shows=True) as bar,
    ):
        ending = train(dataclasses.replace(experiment, out=out), processes, bar)
    print(ending)
    return 0


def run_together(experiment: Experiment, processes: Processes, begin: float) -> int:
    """Does this process's part of `run`, if the settings of all agree. If one fails, all end; see `Liveness`."""
    from train.liveness import JaxStore, Liveness, is_of_jax
    from train.start import DisagreementError, agree, check_shared, facts_of

    store, seconds = JaxStore(), experiment.connect_timeout
    with Liveness(store, processes, experiment.peer_timeout, experiment.step_timeout) as liveness:
        try:
            agree(store, processes, "settings", facts_of(experiment), seconds)
            check_shared(store, processes, experiment.out, seconds)
            return run(experiment, processes, liveness.doing, begin)
        except DisagreementError:
            raise
        except BaseException as error:
            code = 1
            if isinstance(error, KeyboardInterrupt):
                code = 130
            elif isinstance(error, ValueError | OSError) and not (is_of_jax(error) or isinstance(error, TimeoutError)):
                code = 2
            liveness.fail(error, code)
            raise


def run(
    experiment: Experiment,
    processes: Processes,
    doing: Callable[..., None] = lambda *what: None,
    begin: float | None = None,
) -> int:
    """Trains the baseline and the method, prints the table, and draws the figure; or advises.

    Args:
      experiment: the fields.
      processes: this process among the others.
      doing: see `train.loop.train`.
      begin: `time.monotonic()` at the start of this process; now if not given.
    """
    if experiment.advise:
        return advise(experiment, processes)
    # Not at the top: Flax, Orbax and TFDS take seconds to import, for which --help or a typo should not have to wait.
    from train.folders import run_folder
    from train.job import make_job
    from train.loop import check_resumable
    from train.methods import run_name
    from train.plans import Planned
    from train.tables import check_file

    check_file("--json", experiment.json)
    planned = None if experiment.plan is None else Planned(experiment.plan)
    runs: list[tuple[Experiment, Any]] = [(experiment, planned or experiment.method)]
    # The baseline sends all activations and exchanges the gradients of its dense layers. Its tables are trained as the
    # method's are: unsharded, they may be too large for a worker.
    dense_experiment = dataclasses.replace(experiment, boundary=BoundaryFields(), dense_layers="exchange")
    if experiment.baseline and (runs[0][1] != PlumpDp() or experiment != dense_experiment):
        runs.insert(0, (dense_experiment, PlumpDp()))
    jobs = [make_job(setting, method) for setting, method in runs]  # an error in the last is raised before any training
    names = [run_name(method, setting.boundary, setting.dense_layers, setting.embeddings) for setting, method in runs]
    resume = experiment.resume if (before := previous_run_folder()) is None else before
    with run_folder(experiment.out, experiment.name, resume=resume, runs=names) as out:
        note_begun(out)
        ordered = [
            (dataclasses.replace(setting, out=out), method, job, name)
            for (setting, method), job, name in zip(runs, jobs, names, strict=True)
        ]
        for setting, method, _, _ in ordered:
            check_resumable(setting, method)
        goodput = Goodput(out if processes.index == 0 else None, begin=begin, restarted=before is not None)
        return train_each(experiment, ordered, out, processes, doing, goodput)


def train_each(
    experiment: Experiment,
    runs: Sequence[tuple[Experiment, Any, Any, str]],
    out: Path,
    processes: Processes,
    doing: Callable[..., None],
    goodput: Goodput,
) -> int:
    """Trains one run after another in the folder `out`, and shows the results; see `run`."""
    from train.figures import draw_accuracy
    from train.loop import train
    from train.progress import Bar
    from train.results import print_results
    from train.tables import display_name, write_records

    shows = processes.index == 0
    ends: list[tuple[Summary, jc.accounting.WireReport]] = []
    curves = {}
    for setting, method, job, name in runs:
        if job.late is not None and shows:
            print(job.late)
        with Bar(display_name(name), experiment.steps, shows=shows) as bar:
            outcome = train(setting, method, processes, bar, job, doing, goodput)
        ends.append((outcome.summary, outcome.report))
        curves[display_name(name)] = outcome.evaluations
        if not outcome.finished:
            if shows:
                print(f"Stopped and saved after step {outcome.summary.steps}; go on with --resume.")
                say_goodput(goodput)
            return 0
    if shows:
        print_results(experiment, ends, on_a_link=processes.count > 1)
        write_records(experiment.json, [summary.record() for summary, _ in ends])
        figure = out / "accuracy_against_bytes.png"
        draw_accuracy(figure, curves)
        print(f"Metrics, checkpoints and {figure.name} are in {out}")
        say_goodput(goodput)
    return 0


def say_goodput(goodput: Goodput) -> None:
    """Prints where the time of a run went, if that says anything."""
    if line := goodput.line():
        print(line)


def advise(experiment: Experiment, processes: Processes) -> int:
    """Prints which method would be fastest; returns 0, or 3 if that is a dense one."""
    from train.advice import advise_experiment
    from train.tables import check_file, write_whole

    for option, path in (("--json", experiment.json), ("--plan", experiment.plan)):
        check_file(option, path)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    advice, plan = advise_experiment(experiment)
    if processes.index == 0:
        print(advice)
        if experiment.json is not None:
            write_whole(experiment.json, advice.json() + "\n")
        if plan is not None and experiment.plan is not None:
            plan.write(experiment.plan)
            layers = "" if plan.dense_layers == "exchange" else f" --dense-layers {plan.dense_layers}"
            print(f"{plan}\nwritten to {experiment.plan}; train with it: --plan {experiment.plan}{layers}")
    return 3 if advice.keeps_dense else 0


def interrupt_again(lost: "sys.UnraisableHookArgs") -> None:
    """Repeats an interrupt that was raised where Python ignores exceptions, as in JAX's callback of garbage collection.

    It comes from another thread and a moment later: here it would be ignored too.
    """
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    number = next(sig for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(sig)))
    timer = threading.Timer(0.05, _thread.interrupt_main, [number])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.unraisablehook = interrupt_again
    for number in (signal.SIGTERM, signal.SIGHUP):  # end this process as Ctrl-C does, until training handles them
        if signal.getsignal(number) == signal.SIG_DFL:  # and not ignored, as by nohup
            signal.signal(number, signal.default_int_handler)
    code = main(sys.argv[1:])
    # The error has been printed in one line; the threads of a failed write would print their stacks below it.
    # With several processes, the others may be communicating through this one: it then ends in the ordinary way.
    if code in (1, 2, 130) and not jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
