"""The fields of an experiment. Each is an option of `python -m train NAME`, except `architecture`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import tyro

from configs.methods import DctDp, LocalSgd, Method, SparseLoco


@dataclass(frozen=True)
class Architecture:
    """A model of `models/`, and its arguments that do not depend on the dataset.

    Attributes:
      name: one of `train.architectures.MODELS`.
      options: the keyword arguments.
      cuts: where it has bottlenecks (`models.bottleneck`): the first block of every stage but the first, without them.
      rank: the numbers of a token that cross there; 0 without bottlenecks.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cuts: tuple[int, ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class BoundaryFields:
    """The boundaries between the stages of a pipeline: DCT-MP, a few bits, or a few learned numbers."""

    sparsity: float = 0.0
    """Fraction of a sample's activations that is not sent; 0 sends all of them."""
    value_dtype: Literal["float32", "bfloat16", "int8", "int4", "int3"] | None = None
    """Type of a value on the wire; None for that of the activations. For transformers, use int4 with sparsity 0."""
    rank: int = 0
    """Numbers of a token that cross, made by an encoder and read by a decoder that are trained with the model; 0 sends
    the model's own activations."""


@dataclass(frozen=True)
class Experiment:
    """Train a model with data-parallel workers that exchange compressed gradients."""

    name: str
    """Name of the experiment, and of its folder under --out."""
    dataset: str
    """Dataset: digits, clicks, catalogs and stdlib need no preparation; prepare the others, see docs/data.md."""
    architecture: tyro.conf.Suppress[Architecture]
    """The model; set in the experiment's module of configs/."""
    steps: int
    """Training steps."""
    learning_rate: float
    """Peak learning rate."""
    method: Method = field(default_factory=DctDp)
    """How the workers exchange gradients."""
    baseline: bool = True
    """Train with the dense exchange first, and compare."""
    workers: int = 4
    """Data-parallel workers, over all processes. On a CPU they are simulated."""
    global_batch: int = 128
    """Rows of a step over all workers, a multiple of their number."""
    optimizer: Literal["sgd", "adam", "muon"] = "sgd"
    """SGD with momentum; Adam with b2 of 0.98; or Muon for matrices, its updates scaled to the size of Adam's, and Adam
    for the other parameters."""
    momentum: float = 0.9
    """Momentum of SGD and of Muon, or b1 of Adam."""
    nesterov: bool = True
    """Nesterov's momentum in SGD and Muon; heavy-ball without it. The momentum inside dgc and iwp is always
    heavy-ball."""
    schedule: Literal["cosine", "drops", "polynomial", "inverse_sqrt", "constant"] = "cosine"
    """How the learning rate falls: to zero by a cosine; by 10 at every step of drop_at; to zero as the square root of
    the remaining steps; as one over the square root of the steps; or not at all."""
    drop_at: tuple[int, ...] = ()
    """Steps, from the start of the run, at which the schedule "drops" divides the learning rate by 10."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from zero."""
    weight_decay: float = 0.0
    """Fraction of a parameter that is subtracted in a step, divided by the learning rate."""
    decay: Literal["decoupled", "l2"] = "decoupled"
    """How weight_decay is applied: decoupled, to the update, after momentum and Adam; or l2, to each worker's gradient
    before the exchange, where momentum makes it 1 / (1 - momentum) times as strong. Papers on images use l2."""
    label_smoothing: float = 0.0
    """Probability that is spread evenly over all classes or tokens."""
    augment: bool = True
    """Crop and flip training images at random, if the dataset supports it; otherwise they are used as in tests."""
    mean: Literal["channel", "pixel"] = "channel"
    """The mean that is subtracted from an image: of each channel, or of each pixel, over the training images."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the model computes in; parameters are float32."""
    rows_per_group: int | None = None
    """Rows over which batch normalisation computes its statistics; all rows of a worker (or micro-batch) if not given.
    A number that divides these makes the result independent of the number of workers."""
    stages: int = 1
    """Stages of a pipeline into which the model is cut; workers * stages devices."""
    cuts: tuple[int, ...] | None = None
    """First block of every stage but the first; the paper's cuts, or equal numbers of blocks, if not given."""
    micro_batches: int = 1
    """Micro-batches of a pipeline, into which each worker's rows are divided."""
    pipeline_schedule: Literal["gpipe", "1f1b"] = "gpipe"
    """Order of the micro-batches; 1f1b starts each backward pass as early as possible, and keeps fewer in memory."""
    boundary: BoundaryFields = field(default_factory=BoundaryFields)
    """The boundaries between the stages."""
    dense_layers: Literal["exchange", "late", "split"] = "exchange"
    """What is sent for dense layers: their gradients, as for all others; inputs and errors, where they are smaller
    (late multiplication); or features and errors of layers that are sharded over the workers (hybrid parallelism). The
    method exchanges all other gradients."""
    embeddings: Literal["exchange", "late", "columns", "rows"] = "exchange"
    """What is sent for the tables of a DLRM: their gradients, as for all others; ids and gradients of the rows that the
    batch touched; or ids, vectors and their errors, with tables that are sharded over the workers by columns or by
    rows. The method exchanges all other gradients."""
    delay: int = 0
    """Steps from a gradient to its exchange. With 1, the gradients of the previous step are exchanged while those of
    this step are computed: a step takes as long as the slower of the two."""
    slices: int = 1
    """Groups of workers with fast links inside (TPU slices): dense inside a group, the method between groups."""
    model_parallel: int = 1
    """Devices of each worker, over which the outputs of its matrices are sharded (tensor parallelism, by XLA)."""
    fsdp: int = 1
    """Devices of each worker, over which its parameters, its optimizer's state and its rows are sharded (fully sharded
    data parallelism, by XLA)."""
    compress: str = ""
    """Parameters whose gradients the method exchanges, by a regular expression of their paths; others are exchanged
    densely. Empty for all."""
    rounds: str | None = None
    """Object store (s3://, gs://, az://) or shared folder. This process is then one worker of a run whose workers are
    separate programs and exchange in rounds, by local-sgd or sparse-loco. Each reads 1/--workers of the global batch in
    an order of its own, and keeps running statistics to itself."""
    worker: str | None = None
    """With --rounds: the name of this worker; a worker that comes back under its name goes on with what it left."""
    quorum: int = 2
    """With --rounds: workers without which no round ends."""
    beam: int = 5
    """Hypotheses of the beam search for BLEU, at the end of a translation run."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""
    eval_every: int = 50
    """Steps between two evaluations on the test split."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; one more is written at the end, on SIGTERM and on Ctrl-C. A checkpoint that is due
    at a skipped step is written at the next step that is not skipped."""
    max_skipped: int = 50
    """Skipped steps in a row after which a run stops with an error."""
    stop_after: int | None = None
    """Save and stop once this step is reached, as on SIGTERM; continue with --resume."""
    advise: bool = False
    """Do not train: measure the machines and the link, and print which method would be fastest. The exit code is 0 if a
    method is faster than dense, 3 if none is."""
    plan: Path | None = None
    """File of a plan, which gives the exchange of every tensor, in place of the method; --advise writes it."""
    error_budget: float | None = None
    """With --advise and --plan: the largest part of the gradient's squared norm that one step may leave out."""
    resume: bool = False
    """Continue the run of this name under --out that was written last, from its last checkpoint."""
    restarts: int = 0
    """How often the run is restarted from its last checkpoint after a fault, such as a killed process or a broken link.
    Give it to every process."""
    min_workers: int | None = None
    """With --restarts: continue with as few workers as this if processes do not return within --peer-timeout. Process 0
    must always return, and all processes if this is not given."""
    out: Path = Path("runs")
    """Folder of all runs; a run makes a new folder in it for its checkpoints, metrics and figure."""
    data_dir: Path | None = None
    """Folder of prepared datasets; $TFDS_DATA_DIR or ~/tensorflow_datasets if not given."""
    json: Path | None = None
    """File for the final table, as a list of records."""
    tensorboard: bool = False
    """Also write the metrics of every step for TensorBoard, into the run's folder."""
    coordinator: str | None = None
    """HOST:PORT of process 0, for a run of several processes; or $JAXCOMM_COORDINATOR."""
    process_id: int | None = None
    """Index of this process, from 0; or $JAXCOMM_PROCESS_ID."""
    num_processes: int | None = None
    """Number of processes; or $JAXCOMM_NUM_PROCESSES."""
    connect_timeout: int = 300
    """Seconds within which all processes must connect."""
    peer_timeout: float = 60.0
    """Seconds without a sign of life after which a process counts as gone, and the others end. One process alone is not
    watched."""
    step_timeout: float = 1800.0
    """Seconds within which some process of several must make progress: a step and its compilation, an evaluation, a
    checkpoint. With --rounds: seconds for which a request to the store is tried again."""

    @property
    def devices(self) -> int:
        """Devices of all workers."""
        return self.workers * self.stages * self.fsdp * self.model_parallel

    @property
    def layout(self) -> dict[str, Any]:
        """The fields of `LAYOUTS` that are not at their defaults: what a device holds, and what travels."""
        names = (field.name for field in fields(self) if any(field.name in together for together in LAYOUTS))
        return {
            name: value
            for name in names
            if (value := getattr(self, name)) != getattr(Experiment, name, BoundaryFields())  # which has a factory
        }


# What may be changed together: every worker holds the whole model, or it is split in one of the ways after that. XLA
# aborts where it partitions the loss's gather of labels along the axes of both "fsdp" and "model_parallel".
WHOLE = frozenset({"compress", "delay"})
PIPELINE = frozenset({"stages", "cuts", "micro_batches", "pipeline_schedule", "boundary"})
LAYOUTS = (
    WHOLE,
    PIPELINE,
    *({"slices", name} for name in ("delay", "fsdp", "model_parallel")),
    {"dense_layers"},
    {"embeddings"},
)


def check(experiment: Experiment, num_processes: int) -> None:
    """Refuses settings that cannot work, before anything is started.

    Args:
      experiment: the fields.
      num_processes: the number of processes that share the workers.

    Raises:
      ValueError: with the rule, the value and the remedy.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", experiment.name):
        raise ValueError(
            "--name must be letters, digits, '.', '_' and '-', at most 100, the first a letter or a digit, since it "
            f"names a folder; got {experiment.name!r}. Choose another."
        )
    _check_numbers(experiment)
    _check_min_workers(experiment)
    if experiment.warmup_steps >= experiment.steps:
        raise ValueError(
            f"--warmup-steps must be less than --steps; got {experiment.warmup_steps} of {experiment.steps}. Warm up "
            "for fewer steps, or train for more."
        )
    drops = (0, *experiment.drop_at, 2**31)
    rises = all(before < after for before, after in pairwise(drops))
    if (experiment.schedule == "drops") != bool(experiment.drop_at) or not rises:
        raise ValueError(
            "--drop-at must be rising positive steps with --schedule drops, and empty with another schedule; got "
            f"{experiment.drop_at} with {experiment.schedule}. Give --schedule drops --drop-at 300 600, say."
        )
    if experiment.drop_at and experiment.drop_at[0] <= experiment.warmup_steps:
        raise ValueError(
            f"The first drop must come after the warm-up; got --drop-at {experiment.drop_at[0]} with --warmup-steps "
            f"{experiment.warmup_steps}. Drop later, or warm up for fewer steps."
        )
    if experiment.error_budget is not None and not (experiment.advise and experiment.plan):
        raise ValueError(
            f"--error-budget must go with --advise and --plan; got {experiment.error_budget:g} without both. Give "
            "them, or leave it out."
        )
    _check_layout(experiment)
    _check_rounds(experiment, num_processes)
    try:
        re.compile(experiment.compress)
    except re.error as error:
        raise ValueError(f"--compress must be a regular expression; got {experiment.compress!r}: {error}.") from None
    if experiment.workers % experiment.slices:
        raise ValueError(
            "--workers must be a multiple of --slices, since every slice has the same number of workers; got "
            f"{experiment.workers} in {experiment.slices} slices."
        )
    parts = {name: getattr(experiment, name) for name in ("workers", "micro_batches", "fsdp")}
    parts = {name: count for name, count in parts.items() if count > 1 or name == "workers"}
    if experiment.global_batch % (rows := math.prod(parts.values())):
        raise ValueError(
            f"--global-batch must be a multiple of {' times '.join(map(_option, parts))}; got "
            f"{experiment.global_batch} for {' * '.join(map(str, parts.values()))}. Try "
            f"{-(-experiment.global_batch // rows) * rows}."
        )
    if experiment.devices == experiment.workers and experiment.workers % num_processes:
        raise ValueError(
            "--workers must be a multiple of the number of processes, since every process runs the same number of "
            f"workers; got {experiment.workers} for {num_processes}."
        )
    rows, devices = experiment.workers * experiment.fsdp, experiment.devices
    if devices % num_processes or (rows % num_processes and num_processes % rows):
        raise ValueError(
            f"The number of processes must divide the number of devices, {devices}, and divide --workers times --fsdp "
            f"or be a multiple of it; got {num_processes} processes for --workers {experiment.workers} --stages "
            f"{experiment.stages} --fsdp {experiment.fsdp} --model-parallel {experiment.model_parallel}. Give every "
            "process the same number of workers, or of parts of one worker."
        )


def check_alone(experiment: Experiment) -> None:
    """Refuses, in a run that begins with one process, what only several look at: one has nobody to watch.

    Raises:
      ValueError: with the rule, the options and the remedy.
    """
    names = ("connect_timeout", "peer_timeout", "step_timeout", "min_workers")
    options = {name: value for name in names if (value := getattr(experiment, name)) != getattr(Experiment, name)}
    if options and experiment.rounds is None:
        raise ValueError(
            f"{', '.join(map(_option, options))} must go with several processes, which watch each other; got "
            f"{shown(options)} with one. Leave these out."
        )


def check_options(experiment: Experiment, default: Experiment) -> None:
    """Refuses what a user gave to a run that would ignore it: in rounds, a worker evaluates once, at its end.

    Args:
      experiment: the fields.
      default: those of the named experiment; a field that differs was given.

    Raises:
      ValueError: with the rule, the options and the remedy.
    """
    names = ("eval_every", "checkpoint_every", "connect_timeout", "peer_timeout", "baseline", "beam")
    options = {name: value for name in names if (value := getattr(experiment, name)) != getattr(default, name)}
    if options and experiment.rounds is not None:
        raise ValueError(
            "--rounds must go without options of checkpoints, processes, baselines and evaluations, of which a worker "
            f"has one, at its end, without BLEU; got {shown(options)}. Leave these out."
        )
    if experiment.plan is not None and not experiment.advise and experiment.method != default.method:
        raise ValueError(
            f"--plan must go without a method, whose place it takes; got method:{experiment.method.name} with --plan "
            f"{experiment.plan}. Leave one of them out."
        )


def _check_numbers(experiment: Experiment) -> None:
    """Refuses numbers that are out of range; NaN always is."""
    counts = ("steps", "workers", "global_batch", "eval_every", "checkpoint_every", "stages", "micro_batches", "slices")
    counts = (*counts, "model_parallel", "fsdp", "beam", "max_skipped", "stop_after", "rows_per_group")
    ranges = {
        **dict.fromkeys(counts, (1, 2**31, "Give such a number")),
        "learning_rate": (0, 1e38, "0.1 is usual for SGD, and 0.0005 for Adam"),
        "momentum": (0, 1, "0.9 is usual, 0 is none"),
        "weight_decay": (0, 1e38, "0.0001 is usual, 0 is none"),
        "label_smoothing": (0, 1, "0.1 is usual, 0 is none"),
        "warmup_steps": (0, 2**31, "0 is no warm-up"),
        "delay": (0, 2, "1 exchanges the gradients of the previous step"),
        "seed": (0, 2**32, "Any such number will do"),
        "error_budget": (0, 1e38, "0.1 is a tenth of the gradient's squared norm"),
        "restarts": (0, 2**31, "0 is none"),
        "connect_timeout": (1, 10**7, "300 s are usual"),
        "peer_timeout": (2, 10**7, "60 s are usual; signs of life come once a second"),
        "step_timeout": (1, 10**7, "1800 s are usual"),
    }
    limits = {2**31: "2**31", 2**32: "2**32", 10**7: "10**7"}
    for name, (low, limit, remedy) in ranges.items():
        value = getattr(experiment, name)
        if value is not None and not low <= value < limit:
            raise ValueError(
                f"{_option(name)} must be at least {low} and below {limits.get(limit, limit)}; got {value}. {remedy}."
            )


def _check_layout(experiment: Experiment) -> None:
    layout = experiment.layout
    if not any(layout.keys() <= together for together in LAYOUTS):
        raise ValueError(
            f"A model must be split in one way; got {shown(layout)}. --slices goes with one of --fsdp, "
            "--model-parallel and --delay, and --compress with --delay: leave the others out (--dense-layers and "
            "--embeddings take exchange, --compress an empty text)."
        )
    if layout.keys() & PIPELINE and experiment.stages == 1:
        raise ValueError(
            "--micro-batches, --cuts, --pipeline-schedule and --boundary must go with a pipeline; got "
            f"{shown(layout)} with --stages 1. Give --stages as well."
        )


def _check_rounds(experiment: Experiment, num_processes: int) -> None:
    if experiment.rounds is None:
        for name in ("worker", "quorum"):
            if (value := getattr(experiment, name)) != getattr(Experiment, name):
                raise ValueError(f"{_option(name)} must go with --rounds; got {value!r} alone. Give --rounds URL too.")
        return
    others = {name: value for name, value in experiment.layout.items() if name != "fsdp"}
    for name in ("plan", "advise", "resume", "restarts", "min_workers", "tensorboard"):
        if value := getattr(experiment, name):
            others[name] = value
    if others or num_processes > 1:
        raise ValueError(
            "--rounds must go with one process a worker, that holds the whole model or shards it by --fsdp, and starts "
            f"again by itself; got {shown(others) or f'{num_processes} processes'}. Leave the others out."
        )
    if isinstance(experiment.method, LocalSgd | SparseLoco):
        method = experiment.method
        if method.fragments > 1 or method.mix or experiment.steps % method.steps:
            raise ValueError(
                "--rounds must exchange whole models after every --method.steps, which divide --steps; got "
                f"--method.fragments {method.fragments} --method.mix {method.mix:g} --method.steps {method.steps} with "
                f"--steps {experiment.steps}. Leave --method.fragments and --method.mix out."
            )
        return
    raise ValueError(
        f"--rounds must have local steps; got method:{experiment.method.name}. Give method:sparse-loco, or "
        "method:local-sgd."
    )


def _check_min_workers(experiment: Experiment) -> None:
    fewest = experiment.min_workers
    if fewest is None:
        return
    if not 1 <= fewest <= experiment.workers or not experiment.restarts:
        raise ValueError(
            f"--min-workers must be at least 1 and at most --workers, and go with --restarts; got {fewest} of "
            f"{experiment.workers} with --restarts {experiment.restarts}. Give --restarts 10, say, or leave "
            "--min-workers out."
        )
    parts = {name: way for name, way in experiment.layout.items() if name not in WHOLE and way != "late"}
    if parts:
        raise ValueError(
            "--min-workers must go with workers that each hold the whole model, since a worker that is gone takes its "
            f"part along; got {shown(parts)}. Leave --min-workers out."
        )


def with_fewer(experiment: Experiment, processes: int, total: int) -> Experiment | None:
    """Returns the experiment for fewer processes; None if it cannot continue with so few.

    That is, if there are fewer workers than --min-workers, or the global batch is not a multiple of them, or a worker's
    rows not one of --rows-per-group.

    Args:
      experiment: the experiment for all processes.
      processes: the number of processes that are left.
      total: the number of processes before.
    """
    workers = experiment.workers // total * processes
    fewest = experiment.workers if experiment.min_workers is None else experiment.min_workers
    if workers < fewest or experiment.global_batch % (workers * (experiment.rows_per_group or 1)):
        return None
    return replace(experiment, workers=workers)


def shown(layout: Mapping[str, Any]) -> str:
    """Returns fields as options of the command line."""
    return ", ".join("--no-baseline" if name == "baseline" else f"{_option(name)} {layout[name]}" for name in layout)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
