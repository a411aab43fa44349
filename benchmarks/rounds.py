"""Workers that come and go, on a lab's hosts with slow links and a real S3 server.

    python -m benchmarks.rounds --json docs/data/rounds.json

Host 0 has an S3 server (moto's, from `pip install 'moto[server]'`). Hosts 1 to 4 have a worker each, on links of --rate
with --delay in each direction, and train a network on scikit-learn's digits by `jaxcomm.rounds`: once undisturbed, and
once with worker b 3 times slower, c killed and started again, and d joining in the middle. A local step is computed and
then waits until its --step seconds are over, so that workers that share this machine's cores do not slow each other
down. As root, hosts are network namespaces; the lab refuses to run without.

Goodput is the part of a worker's time, from its first step to the end, for which its local steps counted: rows in
manifests, divided by the rows of as many seconds. Bytes are the kernel's, of the worker's interface, compared with
those of the objects that it reads. "one program" is `local_sgd` under the same faults, by its rules and not by a run:
every step takes as long as the slowest worker's; from the kill until c is back, and while all start again with d,
nobody trains; its loss is that of a simulated run of as many rounds as fit.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxcomm as jc
from benchmarks import harness
from benchmarks.conditions import heading
from benchmarks.netlab import ADDRESSES, Lab
from benchmarks.trace import received_bytes, transmitted_bytes
from train.tables import print_table, write_records

NAMES, PORT = "abcd", 5000
FOLDER, WORKER = "JAXCOMM_BENCHMARK_FOLDER", "JAXCOMM_BENCHMARK_WORKER"  # set in a host's process
TRAINED, ROWS, HIDDEN = 1400, 32, 1024


@dataclass(frozen=True)
class Config(harness.Options):
    """Train with workers that come and go, and without."""

    rate: str = "100mbit"  # Rate of every worker's link.
    delay: str = "25ms"  # What the lab adds in each direction.
    step: float = 0.1  # Seconds of a local step.
    rounds: int = 40  # Rounds of a run.
    steps: int = 10  # Local steps of a round.
    overlap: int = 5  # Local steps that a worker may take while its round is under way.
    python: str = sys.executable  # The Python that has moto.
    kind: str = ""  # Of a host's process: "faults" or "undisturbed".


def params0() -> dict[str, jax.Array]:
    """Returns the first parameters."""
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(64, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 10)]
    return {
        f"w{i}": jax.random.normal(key, size) * size[0] ** -0.5
        for i, (key, size) in enumerate(zip(keys, sizes, strict=True))
    }


def logits(params: Any, x: Any) -> jax.Array:
    """Returns the network's output."""
    return jax.nn.relu(jax.nn.relu(x @ params["w0"]) @ params["w1"]) @ params["w2"]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Returns the mean loss of rows."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["x"]), batch["y"])
    return losses.mean()


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns images and labels."""
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int32)


def test_scores(params: Any) -> dict[str, float]:
    """Returns loss and accuracy on the images that are not trained on."""
    x, y = digits()
    out = logits(params, x[TRAINED:])
    loss = optax.softmax_cross_entropy_with_integer_labels(out, y[TRAINED:]).mean()
    return {"loss": float(loss), "accuracy": float((np.asarray(out).argmax(-1) == y[TRAINED:]).mean())}


def exchange() -> Any:
    """Returns SparseLoCo's exchange."""
    return jc.topk(1 - 64 / 4096, chunk=4096, value_dtype="2bit", decay=0.95)


def store(port: int, address: str = "127.0.0.1") -> Any:
    """Returns the bucket, as obstore opens it."""
    from obstore.store import S3Store

    options: dict[str, Any] = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
    url, keys = f"http://{address}:{port}", {"access_key_id": "x", "secret_access_key": "x"}
    return S3Store("bucket", endpoint=url, region="us-east-1", virtual_hosted_style_request=False, **keys, **options)


# What runs on the hosts.


def serve(config: Config, folder: Path) -> None:
    """Runs the S3 server until all workers have ended, and keeps the manifests."""
    command = [config.python, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder / "moto.log").open("w")) as server:
        try:
            bucket = f"http://127.0.0.1:{PORT}/bucket"
            while subprocess.run(["curl", "-sfX", "PUT", bucket], stdout=subprocess.DEVNULL, check=False).returncode:
                if server.poll() is not None:
                    raise ValueError(
                        f"--python must have moto's server; got {(folder / 'moto.log').read_text()[-200:]}"
                    )
                time.sleep(0.2)
            (folder / "serves").touch()
            while not all((folder / f"{name}.json").exists() for name in NAMES):
                time.sleep(0.2)
            objects, manifests = store(PORT), []
            for number in range(config.rounds):
                manifests.append(json.loads(bytes(objects.get(f"manifests/{number:08}").bytes())))
            (folder / "manifests.json").write_text(json.dumps(manifests))
        finally:
            server.kill()


def supervise(folder: Path, name: str, command: Sequence[str], seconds: float | None) -> None:
    """Starts a worker, and kills it and starts it again where that is the fault.

    Args:
      folder: of the run, where the workers write when they begin.
      name: the worker's.
      command: it is run with the name in JAXCOMM_BENCHMARK_WORKER.
      seconds: of the undisturbed run's local steps, from which the times of the faults follow; None without faults.
    """
    while not (folder / "serves").exists():
        time.sleep(0.1)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=os.environ | {WORKER: name})

    while seconds is not None and name == "d" and not _is_past(folder, 0.4 * seconds):
        time.sleep(0.1)
    process = start()
    if seconds is not None and name == "c":
        while not _is_past(folder, 0.3 * seconds):
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        (folder / "killed").write_text(str(time.time()))
        time.sleep(0.1 * seconds)
        process = start()
    if process.wait():
        raise SystemExit(process.returncode)


def _is_past(folder: Path, seconds: float) -> bool:
    """Returns whether so many seconds have passed since worker a took its first step."""
    begun = folder / "begun-a"
    return begun.exists() and time.time() - float(begun.read_text()) > seconds


def work(config: Config, folder: Path, name: str) -> None:
    """Is a worker: trains until the run is over, and writes what it has measured."""
    interface = os.environ["NETLAB_INTERFACE"]
    seconds = config.step * (3 if config.kind == "faults" and name == "b" else 1)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def compiled(params: Any, local: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, local = optimizer.update(gradients, local, params)
        return optax.apply_updates(params, updates), local, {"loss": loss}

    def step(params: Any, local: Any, batch: Any) -> Any:
        begun = time.monotonic()
        params, local, metrics = jax.block_until_ready(compiled(params, local, batch))
        time.sleep(max(0.0, seconds - (time.monotonic() - begun)))
        return params, local, metrics

    rows = batches(name)
    params = params0()
    jax.block_until_ready(compiled(params, optimizer.init(params), next(rows)))
    before = received_bytes(interface), transmitted_bytes(interface)
    options = {"steps": config.steps, "overlap": config.overlap, "total": config.rounds, "quorum": 2, "every": 10}
    options |= {"exchange": exchange(), "outer": optax.sgd(1.0), "local": optimizer.init(params), "worker": name}
    worker = jc.rounds(store(PORT, ADDRESSES[0]), step, params, **options)
    begun, joined, taken, held = time.time(), worker.round, 0, []
    (folder / f"begun-{name}{'-again' if (folder / f'begun-{name}').exists() else ''}").write_text(str(begun))
    while not worker.done:
        start = time.monotonic()
        worker(next(rows))
        held.append(time.monotonic() - start - seconds)
        taken += 1
    ended = time.time()
    worker.leave(keep=False)
    row = {"worker": name, "begun": begun, "ended": ended, "joined": joined, "steps": taken, "counted": worker.counted}
    row |= {"late": worker.late, "digest": worker.digest(), "seconds_beyond_steps": sum(held), **worker.traffic}
    row |= {
        "bytes_kernel": received_bytes(interface) - before[0],
        "bytes_kernel_sent": transmitted_bytes(interface) - before[1],
    }
    (folder / f"{name}.json").write_text(json.dumps(row | test_scores(worker.params)))


def batches(name: str) -> Iterator[dict[str, np.ndarray]]:
    """Yields a worker's batches, the same whenever it starts."""
    x, y = digits()
    rng = np.random.default_rng(list(name.encode()))
    while True:
        rows = rng.integers(0, TRAINED, ROWS)
        yield {"x": x[rows], "y": y[rows]}


# What the first process does.


def run_lab(config: Config, kind: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs all hosts once; returns a row for each worker, and what the run was."""
    rates = f"none/{config.rate}"
    with tempfile.TemporaryDirectory() as folder, Lab(1 + len(NAMES), rates, delay=config.delay) as lab:
        if not lab.isolated:
            raise ValueError("The lab must be run as root, for links of its own; got loopback alone.")
        conditions = lab.conditions()
        command = [sys.executable, "-m", "benchmarks.rounds", *sys.argv[1:], "--kind", kind]
        results = lab.run(command, env={FOLDER: folder, "JAX_NUM_CPU_DEVICES": "1"}, timeout=540)
        if failed := [result for result in results if result.returncode]:
            raise SystemExit("\n".join(f"host {result.host} failed: {result.stderr[-2000:]}" for result in failed))
        path = Path(folder)
        rows = [json.loads((path / f"{name}.json").read_text()) for name in NAMES]
        manifests = json.loads((path / "manifests.json").read_text())
        first = {name: float((path / f"begun-{name}").read_text()) for name in NAMES}
        killed = float((path / "killed").read_text()) if kind == "faults" else None
    assert len({row["digest"] for row in rows}) == 1, "the workers' global models differ"
    end = max(row["ended"] for row in rows)
    outage = 0.0 if killed is None else rows[2]["begun"] - killed
    for row in rows:
        name = row["worker"]
        members = [m["header"] for manifest in manifests for m in manifest["members"] if m["header"]["worker"] == name]
        alive = end - first[name] - (outage if name == "c" else 0.0)
        usual = config.step * (3 if kind == "faults" and name == "b" else 1)
        row |= {"run": kind, "rounds": len(members), "seconds": alive}
        row["goodput"] = sum(member["rows"] for member in members) / ROWS * usual / alive
        row["bytes_overhead"] = row["bytes_kernel"] / row["received"] - 1
    facts = {"kind": kind, "seconds": end - min(first.values()), "outage": outage, "killed": killed}
    return [row | conditions for row in rows], facts


def one_program(config: Config, seconds: float, outage: float, startup: float, kind: str) -> dict[str, Any]:
    """Returns what `local_sgd` in one program would come to in the same time; see the top."""
    slowest = config.step * (3 if kind == "faults" else 1)
    lost = outage + startup if kind == "faults" else 0.0
    count = int((seconds - lost) / (config.steps * slowest))
    tx = jc.chain(optax.adam(3e-3), jc.local_sgd(config.steps, exchange=exchange(), outer=optax.sgd(1.0)))
    step, names = jc.simulate(loss_fn, tx, workers=len(NAMES)), [batches(name) for name in NAMES]
    state = step.init(params0())
    for _ in range(count * config.steps):
        parts = [next(rows) for rows in names]
        state, _ = step(state, {key: np.concatenate([part[key] for part in parts]) for key in ("x", "y")})
    scores = test_scores(step.params(state))
    good = count * config.steps * config.step / seconds
    return {"run": kind, "worker": "one program", "rounds": count, "seconds": seconds, "goodput": good, **scores}


SHOWN = ("run", "worker", "rounds", "late", "seconds", "goodput", "loss", "accuracy", "bytes_kernel", "received")


def main(config: Config) -> None:
    """Runs the lab twice, and prints a table."""
    if folder := os.environ.get(FOLDER):
        index = int(os.environ["JAXCOMM_PROCESS_ID"])
        if name := os.environ.get(WORKER):
            work(config, Path(folder), name)
        elif index == 0:
            serve(config, Path(folder))
        else:
            command = [sys.executable, "-m", "benchmarks.rounds", *sys.argv[1:]]
            seconds = config.rounds * config.steps * config.step if config.kind == "faults" else None
            supervise(Path(folder), NAMES[index - 1], command, seconds)
        return
    table: list[dict[str, Any]] = []
    for kind in ("undisturbed", "faults"):
        rows, facts = run_lab(config, kind)
        startup = facts["outage"] - 0.1 * config.rounds * config.steps * config.step  # of a worker that begins again
        table += [*rows, one_program(config, facts["seconds"], facts["outage"], startup, kind)]
    print_table(heading("", table), [{key: row.get(key) for key in SHOWN} for row in table])
    write_records(config.json, table)


if __name__ == "__main__":
    harness.run(Config, __doc__, main)
