"""A GPT whose learning rates carry from one width to another, and its runs with simulated workers.

Maximal-update parametrization (muP): Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot
Hyperparameter Transfer", 2022, table 3. At `BASE` features all factors are 1. With m = width / `BASE`:

| parameters | first values, standard deviation | Adam, signs | Muon |
| --- | --- | --- | --- |
| the table of bytes | 0.5 | 1 | 1, by Adam |
| places, if attention does not begin near | sines of several wavelengths, 0.5 | 1 | 1, by Adam |
| matrices of the layers | 1 / sqrt(inputs) | 1 / m | 1 / sqrt(m) |
| of these, the queries' | 1 / sqrt(m inputs) | 1 / (m sqrt(m)) | 1 / m |
| logits | 1 / (m sqrt(BASE)) | 1 / m | 1 / m, by Adam |
| biases and normalisations, token shifts | 0 and 1 | 1 | 1, by Adam |
| encoders of bottlenecks | see `models.bottleneck` | 1 / m | 1 / sqrt(m) |
| decoders | the encoder, transposed | 1 | 1 / sqrt(m) |
| anchors | 0 | 1 | 1, by Adam |

Adam's update of a matrix has elements of size 1, and its norm grows as m. Muon's, which is orthogonal and scaled to the
same size of elements, has a norm that grows as sqrt(m). The number of heads is fixed, and queries shrink with width so
that the products of queries and keys are divided by the features of a head, not by their root. The last matrices of
attention and feed-forward parts start smaller by sqrt(2 layers), as in GPT-2. GPT-2's own first values (0.02) are too
small for a narrow model: attention is uniform at first, and how long it stays so depends on the seed. With attention
that begins near (`models.gpt`), a head sees the byte before from the first step on, and one layer is enough to copy
what came after an earlier byte like this one. With embeddings of places it has to find these. A linear map shifts sines
to the place before, which it cannot with random places: with them, 553 steps of 16 rows at 48 features end at 2.73 nats
instead of 2.45, and seeds differ more.
"""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm as jc
from configs.experiment import Architecture, BoundaryFields
from configs.methods import Method
from jaxcomm.kernels import noise
from jaxcomm.layers.boundary import Boundary
from models.attention import positions
from models.bottleneck import decoders
from models.functional import Graph, Stage, apply, cut, split
from train.architectures import even_cuts, make_model
from train.data import dataset_info, eval_batches, train_batches
from train.methods import make_exchange
from train.records import Record
from train.tasks import make_task

BASE = 48  # features at which learning rates are given
HEADS = 2
GPT2 = 0.02  # standard deviation of the first values in `models.gpt`
UPDATE = 0.2  # root mean square of Muon's updates of matrices, and of signs: about that of Adam's
EVALUATION_ROWS = 64
Optimizer = Literal["adam", "muon", "sign"]
WHOLE = BoundaryFields()


MATRICES = ("matrix", "query", "encoder", "decoder")  # that Muon trains
Kind = Literal["table", "places", "matrix", "query", "logits", "vector", "encoder", "decoder", "anchors"]
OWN_KINDS: dict[str, Kind] = {  # of parameters whose name tells
    "table": "table",
    "places": "places",
    "encoder": "encoder",
    "decoder": "decoder",
    "anchors": "anchors",
}


def kind(path: Any) -> Kind:
    """Returns what a parameter of `models.gpt`, or of a bottleneck in it, is, by its path."""
    *_, parent, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if name in OWN_KINDS:
        return OWN_KINDS[name]
    if name != "kernel":
        return "vector"
    return {"dense": "logits", "query": "query"}.get(parent, "matrix")


def first_values(params: Any, width: int) -> Any:
    """Returns GPT-2's first values, scaled to those of the table above."""
    m = width / BASE

    def scaled(path: Any, leaf: jax.Array) -> jax.Array:
        if kind(path) == "places":
            return jnp.asarray(math.sqrt(0.5) * positions(*leaf.shape))  # sines have a root mean square of sqrt(0.5)
        fan_in = leaf.shape[0]
        deviation = {
            "table": 0.5,
            "matrix": fan_in**-0.5,
            "query": (m * fan_in) ** -0.5,
            "logits": BASE**-0.5 / m,
        } | dict.fromkeys(("vector", "encoder", "decoder", "anchors"), GPT2)  # these stay
        return leaf * (deviation[kind(path)] / GPT2)

    return jax.tree_util.tree_map_with_path(scaled, params)


def rate_factors(params: Any, width: int, optimizer: Optimizer) -> Any:
    """Returns the factor of every parameter's learning rate."""
    m = width / BASE
    matrix = m**-0.5 if optimizer == "muon" else 1 / m
    factors = {"matrix": matrix, "query": matrix * m**-0.5, "logits": 1 / m, "encoder": matrix}
    factors |= {"decoder": matrix if optimizer == "muon" else 1.0}
    factors |= dict.fromkeys(("table", "places", "vector", "anchors"), 1.0)
    return jax.tree_util.tree_map_with_path(lambda path, _: factors[kind(path)], params)


def make_chain(
    method: Method, optimizer: Optimizer, schedule: optax.Schedule, width: int
) -> optax.GradientTransformation:
    """Makes the optimizer around an exchange: before it for a local method, otherwise after it."""

    def scale(updates: Any, _: Any) -> Any:
        return jax.tree.map(jnp.multiply, updates, rate_factors(updates, width, optimizer))

    def matrices(params: Any) -> Any:
        numbers = optax.contrib.MuonDimensionNumbers()
        return jax.tree_util.tree_map_with_path(lambda path, _: numbers if kind(path) in MATRICES else None, params)

    rule = {
        "adam": lambda: optax.scale_by_adam(b1=0.9, b2=0.98),
        "muon": lambda: optax.contrib.muon(
            -1.0, beta=0.9, adam_b1=0.9, adam_b2=0.98, consistent_rms=UPDATE, muon_weight_dimension_numbers=matrices
        ),
        "sign": lambda: optax.chain(optax.scale_by_sign(), optax.scale(UPDATE)),
    }[optimizer]()
    links = (rule, optax.stateless(scale), optax.scale_by_learning_rate(schedule))
    exchange = make_exchange(method, momentum=0.9)
    return jc.chain(*links, exchange) if method.period is not None else jc.chain(exchange, *links)


@dataclass(frozen=True)
class Text:
    """The text, and how a step reads it."""

    dataset: str
    data_dir: Path | None
    batch: int  # rows of a step, over all workers

    @cached_property
    def info(self) -> Any:
        """Its vocabulary, and the length of a row."""
        return dataset_info(self.dataset, self.data_dir)

    def rows(self, seed: int) -> Iterator[Any]:
        """Returns the batches of a run."""
        return train_batches(self.dataset, global_batch=self.batch, seed=seed, data_dir=self.data_dir)

    @cached_property
    def tests(self) -> list[Any]:
        """The batches of the test split."""
        return list(eval_batches(self.dataset, global_batch=EVALUATION_ROWS, data_dir=self.data_dir))


def model_of(
    text: Text,
    layers: int,
    width: int,
    seed: int = 0,
    *,
    near: bool = True,
    cuts: tuple[int, ...] = (),
    rank: int = 0,
) -> Stage:
    """Returns a GPT with the first values of a seed, and with bottlenecks at `cuts` if they have a rank."""
    options = {"layers": layers, "width": width, "heads": HEADS, "near": near}
    architecture = Architecture("gpt", options, cuts, rank)
    model = split(make_model(architecture, text.info, "float32", seed))
    return model._replace(params=first_values(model.params, width))


def body_size(layers: int, width: int, near: bool) -> int:
    """Returns the number of parameters without tables and logits."""
    matrices, vectors = 12 * width**2, 13 * width  # of a layer: attention 4, feed-forward 8; biases 9, normalisations 4
    vectors += near * width  # a token shift
    return layers * (matrices + vectors) + 2 * width


def crossed(x: jax.Array, boundary: Boundary, seed: jax.Array) -> jax.Array:
    """Returns what the next stage reads of activations; back comes what a `Pipeline` would send back."""
    travels = boundary.plan(x)
    encoded = travels.encode(x)
    return travels.decode(encoded._replace(values=_sent(travels, encoded.values, noise.make_key(seed))))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sent(travels: Any, values: jax.Array, key: jax.Array) -> jax.Array:
    del key
    return _coded(travels.values_as, values)


def _sent_forward(travels: Any, values: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _sent(travels, values, key), key


def _sent_backward(travels: Any, key: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    return _coded(travels.gradients_as(key), gradient), None


_sent.defvjp(_sent_forward, _sent_backward)


def _coded(codec: Any, values: jax.Array) -> jax.Array:
    return codec.decode(codec.encode(values), values.size).astype(values.dtype)


class Trainer:
    """A method at one width: compiled once for all learning rates and seeds."""

    def __init__(
        self,
        text: Text,
        layers: int,
        width: int,
        method: Method,
        optimizer: Optimizer,
        *,
        workers: int,
        steps: int,
        warm_up: int,
        start: int = 0,
        near: bool = True,
        boundary: BoundaryFields = WHOLE,
        stages: int = 1,
    ):
        """Traces nothing yet.

        Args:
          text: the text.
          layers: of the model.
          width: features of a token.
          method: how gradients are exchanged.
          optimizer: of the matrices.
          workers: K.
          steps: of a run.
          warm_up: the number of steps in which the rate rises, before it falls by a cosine.
          start: the number of steps at the beginning that exchange dense.
          near: of `models.gpt`; if not, places are sines.
          boundary: between the stages.
          stages: into which the model would be cut: here they run one after another.
        """
        self.text, self.steps, self.start, cuts = text, steps, start, even_cuts(layers + 2, stages)
        method = replace(method, start=start) if start else method
        self._model = partial(model_of, text, layers, width, near=near, cuts=cuts, rank=boundary.rank)
        model, task = self._model(), make_task(text.info, 0.0)
        parts = cut(model, decoders(cuts) if boundary.rank else cuts)
        sends = jc.dct_mp(boundary.sparsity, value_dtype=boundary.value_dtype)
        shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, warm_up, steps)

        def loss_fn(params: Any, batch: Any) -> Any:
            x: Any = None
            for number, part in enumerate(parts):
                x = x if number == 0 else crossed(x, sends, batch["seed"][0] + number)
                own = {block: params[block] for block in part.params}
                x, _ = apply(part.graph, own, part.stats, batch, x, training=True)
            return task.loss(x, batch)[0]

        def step_of(rate: Any) -> jc.steps.TrainStep:
            chain = make_chain(method, optimizer, lambda count: rate * shape(count), width)
            return jc.simulate(loss_fn, chain, workers)

        def evaluate(params: Any, batch: Any) -> Any:
            return task.rows(apply(model.graph, params, model.stats, batch, training=False)[0], batch)["loss"]

        def run(graph: Graph, params: Any, x: Any, batch: Any) -> Any:
            return apply(graph, params, {}, batch, x, training=True)[0]

        self._init = jax.jit(lambda params: step_of(0.0).init(params))
        self._step = jax.jit(lambda state, batch, rate: step_of(rate)(state, batch), donate_argnums=0)
        self._params = jax.jit(lambda state: step_of(0.0).params(state))
        self._evaluate = jax.jit(evaluate)
        if stages == 1:
            report = jc.wire_report(make_chain(method, optimizer, shape, width), model.params, workers)
            self.received, self.dense = report.received, report.dense
        else:
            functions, shapes = [partial(run, part.graph) for part in parts], [part.params for part in parts]
            pipeline = jc.Pipeline(functions, lambda *_: (jnp.zeros(()), {}), shapes, boundaries=[sends] * len(cuts))
            batch = {"text": jax.ShapeDtypeStruct((text.batch, text.info.length + 1), jnp.uint8)}
            costs = pipeline.report(jc.chain(jc.plump_dp(), optax.sgd(0.1)), batch, 1).boundaries
            self.received = self.dense = sum(cost.forward + cost.backward for cost in costs) / stages

    def run(self, rate: float, seed: int, evaluations: int) -> Record:
        """Trains, and returns losses of the test split by step, bytes that a device received by then, and seconds."""
        every, begin, used = -(-self.steps // evaluations), time.perf_counter(), time.process_time()
        marks = sorted({*range(every, self.steps, every), self.steps})
        state, rows = self._start(seed), self.text.rows(seed)
        losses, seconds = [], []
        for step in range(1, self.steps + 1):
            start = time.perf_counter()
            state, metrics = self._step(state, next(rows), jnp.float32(rate))
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - start)
            if step in marks:
                losses.append(self._loss(state))
        rows.close()
        received = [self.received * step + (self.dense - self.received) * min(step, self.start) for step in marks]
        return {
            "loss": losses[-1],
            "losses": losses,
            "steps": marks,
            "received": received,
            "bytes_per_step": received[-1] / self.steps,
            "seconds_per_step": statistics.median(seconds),
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": time.process_time() - used,  # of all cores: does not depend on what else runs here
        }

    def time(self, steps: int) -> Record:
        """Times steps: their median, least and most seconds."""
        state, rows, seconds = self._start(0), self.text.rows(0), []
        for _ in range(1 + steps):  # the first compiles
            start = time.perf_counter()
            state, metrics = self._step(state, next(rows), jnp.float32(1e-3))
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - start)
        rows.close()
        return {"seconds": statistics.median(seconds[1:]), "least": min(seconds[1:]), "most": max(seconds[1:])}

    def _start(self, seed: int) -> Any:
        return self._init(self._model(seed=seed).params)

    def _loss(self, state: Any) -> float | None:
        params = self._params(state)
        losses = np.concatenate([np.asarray(self._evaluate(params, batch)) for batch in self.text.tests])
        masks = np.concatenate([batch["mask"] for batch in self.text.tests]) > 0
        loss = float(losses[masks].mean())
        return round(loss, 6) if math.isfinite(loss) else None
