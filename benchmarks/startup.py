"""How long the library takes before it does anything: imports, --help, the first step of the main job, and compiling.

    python -m benchmarks.startup --json docs/data/startup.json
    python -m benchmarks.startup --tensors 100,400,1200,llama --repeats 3

A time is that of a whole process, from its start to its end. With `--tensors`, it is the processor time, of all
threads, in which a step with Adam and so many tensors of 64 x 64 is traced and compiled on 4 simulated devices, beside
that of the same step under plain `jax.jit` on one; each in a process of its own, so that nothing is compiled before.
"llama" is Llama 3 8B without the rotation of positions, 291 tensors, by shapes alone. The processes take turns, and a
ratio is the median of those of the turns.
"""

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.conditions import machine
from benchmarks.harness import Options, report, run, spread

COMMANDS = {
    "python": ["-c", ""],
    "import jax": ["-c", "import jax, jax.numpy"],
    "import jax, optax": ["-c", "import jax, jax.numpy, optax"],
    "import jaxcomm": ["-c", "import jaxcomm"],
    "python -m train --help": ["-m", "train", "--help"],
}
EXCHANGES = {
    "plain jit": "",
    "plump_dp": "jc.plump_dp()",
    "topk 99%": "jc.topk(0.99)",
    "powersgd 4": "jc.powersgd(4)",
    "dct_dp 99%": "jc.dct_dp(0.99)",
    "quant_dp 8": "jc.quant_dp(8)",
}
COMPILE = """
import sys, time
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_num_cpu_devices", 4)
import jaxcomm as jc
exchange = eval(sys.argv[1] or "None")
if sys.argv[2] == "llama":
    shapes = {"embed": (128256, 4096), "head": (4096, 128256), "norm": (4096,)}
    layer = {"q": (4096, 4096), "k": (4096, 1024), "v": (4096, 1024), "o": (4096, 4096), "gate": (4096, 14336)}
    layer |= {"up": (4096, 14336), "down": (14336, 4096), "norm1": (4096,), "norm2": (4096,)}
    shapes |= {f"layer{i}": layer for i in range(32)}
    kinds = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, np.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))
    make = jax.eval_shape
else:
    kinds = {f"layer{i}": np.zeros((64, 64), np.float32) for i in range(int(sys.argv[2]))}
    make = lambda function, *args: function(*args)
def attention(layer, x):
    q, k, v = ((x @ layer[name]).reshape(*x.shape[:2], -1, 128) for name in "qkv")
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ layer["o"]
def normed(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale
def llama_loss(params, batch):
    tokens = jnp.abs(batch).astype(jnp.int32)
    x = params["embed"][tokens]
    for i in range(32):
        layer = params[f"layer{i}"]
        x += attention(layer, normed(x, layer["norm1"]))
        inner = normed(x, layer["norm2"])
        x += (jax.nn.silu(inner @ layer["gate"]) * (inner @ layer["up"])) @ layer["down"]
    logits = normed(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()
def loss_fn(params, batch):
    if sys.argv[2] == "llama":
        return llama_loss(params, batch)
    for matrix in params.values():
        batch = jnp.tanh(batch @ matrix)
    return jnp.mean(batch**2)
adam, batch = optax.adam(1e-3), jax.ShapeDtypeStruct((16, 64), np.float32)
def train_step(state, batch):
    loss, gradients = jax.value_and_grad(loss_fn)(state[0], batch)
    updates, new = adam.update(gradients, state[1], state[0])
    return (optax.apply_updates(state[0], updates), new), loss
begin = time.process_time()
if exchange is None:
    step, state = jax.jit(train_step, donate_argnums=0), (kinds, make(adam.init, kinds))
else:
    step = jc.make_train_step(loss_fn, jc.chain(exchange, adam), jc.make_mesh(data=4))
    state = step.shapes(kinds) if make is jax.eval_shape else step.init(kinds)
middle = time.process_time()
step.lower(state, batch).compile()
print(middle - begin, time.process_time() - middle)
"""
JOB = ["-m", "train", "digits", "--no-baseline", "--steps", "1", "--warmup-steps", "0", "--eval-every", "1"]


@dataclass(frozen=True)
class Config(Options):
    """Time processes from their start to their end."""

    repeats: int = 5
    """Processes of each command. Without --tensors the first does not count, as its files are read from disk."""
    tensors: str = ""
    """Compile steps of so many tensors, or of "llama"; several, separated by commas."""


@dataclass(frozen=True)
class Record:
    """One command, milliseconds."""

    command: str
    ms_median: float
    ms_min: float
    ms_max: float


@dataclass(frozen=True)
class Compiled:
    """A step of many tensors: medians, seconds of processor time."""

    exchange: str
    tensors: str
    s_init: float
    s_compile: float
    ratio_to_plain_jit: float
    ratio_min: float
    ratio_max: float


def main(config: Config) -> None:
    """Prints the tables, and writes one where asked."""
    conditions = machine()
    if config.tensors:
        compiled = _compiled(config.tensors.split(","), config.repeats)
        title = "Seconds of processor time to make a state, and to trace and compile a step"
        return report(config.json, (title, [dataclasses.asdict(record) | conditions for record in compiled]))
    if config.repeats < 2:
        raise ValueError(f"--repeats must be at least 2, since the first does not count; got {config.repeats}.")
    records = [Record(name, **spread(_times(command, config.repeats))) for name, command in COMMANDS.items()]
    with tempfile.TemporaryDirectory() as scratch:
        times = [_ms([*JOB, "--out", f"{scratch}/{number}"]) for number in range(config.repeats)]
    records.append(Record("the main job of one step", **spread(times[1:])))
    by_name = {record.command: record.ms_median for record in records}
    rows = [dataclasses.asdict(record) | conditions for record in records]
    report(config.json, ("Milliseconds from the start of a process to its end", rows))
    extra_ms = by_name["import jaxcomm"] - by_name["import jax, optax"]
    print(f"jaxcomm itself takes {extra_ms:.0f} ms to import, beyond those of jax and optax.")


def _compiled(tensors: Sequence[str], repeats: int) -> Iterator[Compiled]:
    for number in tensors:
        turns = [{name: _seconds(exchange, number) for name, exchange in EXCHANGES.items()} for _ in range(repeats)]
        for name in EXCHANGES:
            init, seconds = (statistics.median(turn[name][i] for turn in turns) for i in range(2))
            ratios = [turn[name][1] / turn["plain jit"][1] for turn in turns]
            yield Compiled(name, number, init, seconds, statistics.median(ratios), min(ratios), max(ratios))


def _seconds(exchange: str, tensors: str) -> list[float]:
    """Returns the processor time to make a state, and to trace and compile a step."""
    out = _run(["-c", COMPILE, exchange, tensors], JAX_ENABLE_COMPILATION_CACHE="false")
    return list(map(float, out.split()))


def _times(command: list[str], repeats: int) -> list[float]:
    return [_ms(command) for _ in range(repeats)][1:]


def _ms(command: list[str]) -> float:
    begin = time.perf_counter()
    _run(command)
    return 1e3 * (time.perf_counter() - begin)


def _run(command: list[str], **environment: str) -> str:
    """Runs Python, and returns what it prints."""
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=os.environ | environment)
    if result.returncode:
        raise ValueError(f"{' '.join(command)} must end with code 0; got {result.returncode}: {result.stderr[-500:]}")
    return result.stdout


if __name__ == "__main__":
    run(Config, __doc__, main)
