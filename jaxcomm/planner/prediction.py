"""An advice: a prediction of every method's step, their table, and the verdict."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from jaxcomm.planner.dense_layers import LayerCost
from jaxcomm.planner.links import Wire

DENSE = "plump_dp(bfloat16)"  # the method that all are compared with
ALL_DENSE: tuple[str, ...] = ("plump_dp", DENSE, "plump_dp(float16)")  # the methods that "keep dense" may mean
AS_DENSE = "as dense"  # the accuracy of an exact exchange
CLOSE = 0.05  # a local method's step is close to its computing if it is at most this much longer, relatively
_WORTHWHILE = 1.05  # times faster than dense; less counts as equally fast


@dataclass(frozen=True)
class Prediction:
    """The predicted time, bytes and memory of one method on this mesh.

    Attributes:
      method: its name in the table: "dct_dp(0.99)".
      bytes: bytes that each worker receives a step, on average.
      step: predicted seconds of a step: computing, coding and wire one after another.
      delayed: seconds of a step with `chain(delay=1)` at best: the larger of computing, and coding plus wire. None for
        methods without a delay: local methods, "late" and "split".
      low: the lower end of the range of `step`.
      high: the upper end.
      wire: seconds on the wire.
      latency: the part of `wire` that does not depend on the bytes.
      messages: the messages that follow one another in a step, on average; each takes the latency of a link.
      coding: seconds of selecting, coding and decoding.
      measured: whether `coding` was timed here instead of taken from the table of costs.
      every: steps in which all parameters are exchanged once; 1 except for local methods, which train differently.
      shortest_period: for a local method, the fewest steps between exchanges with which a step takes at most 5% longer
        than its computing; None if no number does, if the computing is not known, and for other methods.
      memory: bytes that the method keeps on each worker.
      faster: how many times faster than dense in bfloat16.
      break_even: the link's bits a second above which dense in bfloat16 is as fast; 0 if it always is, infinite if
        never. If links differ, this is the rate of the slowest, with the others in proportion.
      accuracy: what was measured of its accuracy: nats of loss, or points of accuracy, above dense, with their 95%
        interval, and on which model and data; `AS_DENSE` if it computes what dense does; a dash if nothing is known.
      loss: the nats that it loses at least, by that interval; None if they are not known.
    """

    method: str
    bytes: float
    step: float
    delayed: float | None
    low: float
    high: float
    wire: float
    latency: float
    messages: float
    coding: float
    measured: bool
    every: int
    shortest_period: int | None
    memory: int
    faster: float
    break_even: float
    accuracy: str
    loss: float | None


@dataclass(frozen=True)
class Advice:
    """Predictions, and the verdict.

    Attributes:
      mode: "thorough" (measured here) or "rapid" (from shapes, a given link and a table of costs).
      workers: K.
      parameters: n.
      compute: seconds of a step without an exchange; 0 if that is not known.
      link: bits a second that a worker receives in a dense all-reduce.
      latency: seconds of an all-reduce that moves nothing.
      memory: bytes that a worker's loss and gradient take: parameters, rows of the batch, and temporaries of the
        compiled program, without the gradient itself; 0 if nothing was compiled.
      seconds: the time that measuring took.
      predictions: one for every method, the fastest first.
      layers: the costs of the dense layers in question, one for each of the `WAYS` that is possible.
      latency_assumed: whether the latency was not given, and is assumed to be 0.
      best: the exchange of gradients to use; one of `ALL_DENSE` for "keep dense". Never a local method, as these train
        differently; the verdict mentions one that is faster.
      verdict: the reason, in a few sentences.
    """

    mode: str
    workers: int
    parameters: int
    compute: float
    link: float
    latency: float
    memory: int
    seconds: float
    predictions: list[Prediction]
    best: str
    verdict: str
    layers: list[LayerCost] = dataclasses.field(default_factory=list)
    latency_assumed: bool = False

    @property
    def keeps_dense(self) -> bool:
        """Whether the advice is not to compress."""
        return self.best.startswith("plump_dp")

    def __getitem__(self, method: str) -> Prediction:
        for prediction in self.predictions:
            if prediction.method == method:
                return prediction
        raise KeyError(method)

    def json(self) -> str:
        """Returns everything as JSON; infinite numbers are null."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        record = dataclasses.asdict(self)
        record["predictions"] = [{key: plain(value) for key, value in row.items()} for row in record["predictions"]]
        return json.dumps({key: plain(value) for key, value in record.items()} | {"keeps_dense": self.keeps_dense})

    def __str__(self) -> str:
        dense = self["plump_dp"]
        took = f"measured here in {self.seconds:.0f} s" if self.mode == "thorough" else "not measured: a rapid estimate"
        memory_text = f"{1e-6 * self.memory:,.1f} MB a worker" if self.memory else "not known"
        lines = [
            f"{took}: K = {self.workers}, {self.parameters:,} parameters ({4e-6 * self.parameters:,.1f} MB of "
            f"gradient), link {_rate(self.link)} and {1e3 * self.latency:.2f} ms an all-reduce"
            + (" (assumed)" if self.latency_assumed else ""),
            f"dense in float32: {_ms(self.compute)} computing + {_ms(dense.wire + dense.coding)} exchange = "
            f"{_ms(dense.step)} ms a step; {self.compute / dense.step:.0%} of it computing",
            f"memory of loss and gradient: {memory_text}; beside it each method keeps what the table says",
            "",
            f"{'method':<28}{'MB/step':>9}{'messages':>9}{'wire ms':>9}{'coding ms':>11}{'step ms':>9}{'delayed':>9}"
            f"{'range':>16}{'faster':>8}{'memory MB':>11}{'break-even':>12}  accuracy",
        ]
        for row in self.predictions:
            mark = "" if row.measured else "~"
            lines.append(
                f"{row.method:<28}{1e-6 * row.bytes:>9.3f}{row.messages:>9.3g}{_ms(row.wire):>9}"
                f"{mark + _ms(row.coding):>11}{_ms(row.step):>9}{'-' if row.delayed is None else _ms(row.delayed):>9}"
                f"{_ms(row.low) + '-' + _ms(row.high):>16}{row.faster:>7.2f}x"
                f"{1e-6 * row.memory:>11.1f}{_rate(row.break_even):>12}  {row.accuracy}"
            )
        if not all(row.measured for row in self.predictions):
            lines.append("~ from the table of costs, not timed here.")
        lines.append("step: computing and then the exchange, of which nothing overlaps.")
        lines.append("delayed: the step with jaxcomm.chain(..., delay=1), at best; see the guide.")
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def _rate(bits: float) -> str:
    if not math.isfinite(bits):
        return "any"
    if bits <= 0:
        return "none"
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def break_even(fixed: float, wire: Wire, dense_fixed: float, dense: Wire, rate: float) -> float:
    """Returns the bits a second from which dense is as fast; transfers are inversely proportional to the rate."""
    gain, loss = dense.transfer - wire.transfer, fixed - dense_fixed
    if gain <= 0:
        return math.inf if loss < 0 else 0.0
    return math.inf if loss <= 0 else rate * gain / loss


def without_latency(advice: Advice) -> Advice:
    """Returns an advice whose verdict says that no latency was given, and what one would cost."""
    best, dense = advice[advice.best], advice[DENSE]
    costs = " and ".join(f"{row.method} {row.messages:.3g} ms" for row in (best, dense)[: 1 if best == dense else 2])
    note = f"The latency was not given, and is assumed to be 0: a step takes {costs} longer for every ms of it."
    return dataclasses.replace(advice, verdict=f"{advice.verdict} {note}", latency_assumed=True)


def verdict_of(rows: list[Prediction]) -> tuple[str, str]:
    """Returns the exchange to use, and the reason; `rows` must be sorted, the fastest first."""
    if not any(row.bytes for row in rows):
        return ALL_DENSE[0], f"keep dense: {ALL_DENSE[0]}. One worker receives nothing from others, by any method."
    best, verdict = _verdict_of_exchanges([row for row in rows if row.every == 1])
    local = rows[0]
    if local.every > 1:
        step = next(row.step for row in rows if row.method == best)
        verdict += f" {local.method} would be {step / local.step:.2f}x faster than that, but trains in another way."
        if local.shortest_period is not None:
            verdict += f" From H = {local.shortest_period:,} on, its step is within {CLOSE:.0%} of computing alone."
    return best, verdict


def _verdict_of_exchanges(rows: list[Prediction]) -> tuple[str, str]:
    """Does `verdict_of`: of the methods that may be the fastest, takes one that loses least."""
    dense = min((row for row in rows if row.method in ALL_DENSE), key=lambda row: row.step)
    fastest = rows[0]
    if fastest.method == dense.method:
        return dense.method, f"keep dense: {dense.method}. No compressor is predicted to be faster on this link."
    gains = [row for row in rows if dense.step / row.step >= _WORTHWHILE and row.step <= dense.low]
    if not gains:
        return dense.method, (
            f"keep dense: {dense.method}. The fastest, {fastest.method}, is predicted to take "
            f"{fastest.step / dense.step:.0%} of its step, and the range of dense reaches down to "
            f"{dense.low / dense.step:.0%}: too little to gain, or too uncertain."
        )
    near = [row for row in gains if row.low <= fastest.high]
    best = min(near, key=lambda row: (math.inf if row.loss is None else row.loss, row.step))
    limit = f"Above {_rate(best.break_even)} a worker, dense in bfloat16 is as fast."
    limit = limit if math.isfinite(best.break_even) else "It is on any link."
    return best.method, (
        f"{best.method}: {dense.step / best.step:.2f}x faster than {dense.method} (between "
        f"{dense.low / best.high:.2f}x and {dense.high / max(best.low, 1e-9):.2f}x). {limit}"
        + ("" if best.accuracy in ("-", AS_DENSE) else f" Its accuracy against dense: {best.accuracy}.")
        + ("" if best == fastest else f" {fastest.method} may be faster; its loss is larger or not known.")
    )
