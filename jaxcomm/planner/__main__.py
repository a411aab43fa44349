"""Will compression help me? `python -m jaxcomm.planner MODULE:FUNCTION [options]`.

FUNCTION takes no arguments and returns (loss_fn, params, batch) or (loss_fn, params, batch, optimizer).
loss_fn(params, batch) is the loss on one device; batch is a global batch. With --rate nothing is run: a rapid estimate
is made from shapes, the link and a table of costs, and FUNCTION may return shapes alone. Without --rate the devices of
this process are measured, each as a worker. If the module calls `jax.distributed.initialize`, the devices of all
processes are measured.

Exit code: 0 if a method is faster than dense, 3 if the advice is to keep dense, 2 for invalid input.
"""

import argparse
import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxcomm.planner.advice import Advice, advise, estimate
from jaxcomm.planner.links import bits_per_second
from jaxcomm.steps.mesh import make_mesh

KEEP_DENSE = 3  # exit code


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxcomm.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problem", metavar="MODULE:FUNCTION", help="returns (loss_fn, params, batch[, optimizer])")
    parser.add_argument("--rate", help="links that are given, not measured: 1gbit; 100mbit/1gbit if worker 0's is slow")
    parser.add_argument("--latency-ms", type=float, help="of a message on the given link; 0 is assumed, and said")
    parser.add_argument("--workers", type=int, help="K; with --rate any number, else all devices")
    parser.add_argument("--compute-ms", type=float, default=0.0, help="of a step without an exchange, with --rate")
    parser.add_argument("--copy-gbyte", type=float, help="GB/s of a copy in memory, with --rate; 10 if not given")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further method is timed")
    parser.add_argument("--json", type=Path, help="file for everything")
    args = parser.parse_args(argv)
    try:
        if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
            raise ValueError(f"--json must be a file in a folder that is there; got {args.json}. Make the folder.")
        advice = _advise(args)
        if jax.process_index() == 0:
            print(advice)
            if args.json is not None:
                args.json.write_text(advice.json() + "\n")
    except (ValueError, OSError) as error:
        print(f"jaxcomm.planner: {error}", file=sys.stderr)
        return 2
    return KEEP_DENSE if advice.keeps_dense else 0


def _advise(args: argparse.Namespace) -> Advice:
    if args.rate is None and (args.latency_ms is not None or args.compute_ms or args.copy_gbyte is not None):
        raise ValueError(
            "--latency-ms, --compute-ms and --copy-gbyte must go with --rate; got none. Pass it, or leave them out."
        )
    rates = [] if args.rate is None else [bits_per_second(rate) for rate in args.rate.split("/")]
    problem = _problem(args.problem)
    loss_fn, params, batch = problem[:3]
    if rates:
        if args.workers is None:
            raise ValueError("--workers must be given with --rate; got none. Say how many there would be.")
        if len(rates) > args.workers:
            raise ValueError(
                f"--rate must have at most one a worker; got {args.rate} for {args.workers}. Leave some out."
            )
        rate = rates[0] if len(rates) == 1 else rates + rates[-1:] * (args.workers - len(rates))
        latency = None if args.latency_ms is None else args.latency_ms / 1e3
        compute = args.compute_ms / 1e3
        gbyte = 10.0 if args.copy_gbyte is None else args.copy_gbyte
        copy = 1 / (1e9 * gbyte) if gbyte > 0 else math.inf
        return estimate(params, args.workers, rate, latency=latency, compute=compute, copy=copy)
    mesh = make_mesh(data=args.workers or jax.device_count())
    optimizer = problem[3] if len(problem) == 4 else None
    return advise(loss_fn, params, batch, mesh, optimizer=optimizer, seconds=args.seconds)


def _problem(name: str) -> tuple[Any, ...]:
    """Calls the function that returns the loss, the parameters and the batch."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"The problem must be MODULE:FUNCTION; got {name!r}. Write my_training:problem, say.")
    sys.path.insert(0, os.getcwd())
    try:
        call = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} must be importable from here; got {error}. Look at the names.") from None
    problem = call()
    if not isinstance(problem, tuple) or len(problem) not in (3, 4):
        raise ValueError(
            f"{name} must return (loss_fn, params, batch) or (loss_fn, params, batch, optimizer); got "
            f"{type(problem).__name__}. Change what it returns."
        )
    return problem


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
