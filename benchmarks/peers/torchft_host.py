"""A worker that trains by torchft's DiLoCo: `TORCH_PYTHON -m benchmarks.peers.torchft_host`, see `torchft_diloco`.

It waits in step's hook, before DiLoCo's, so that a local step takes its time before the workers meet. A worker whose
round begins with another one's state ("healed") sends that one's change a second time, and not its own.
"""
# pyright: reportMissingImports=false

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.trace import received_bytes


class Network(torch.nn.Module):
    """The network of `benchmarks.rounds`: three matrices, and no biases."""

    def __init__(self, job: dict[str, np.ndarray]):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.from_numpy(job[f"w{i}"]) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        w0, w1, w2 = self.weights
        return torch.relu(torch.relu(x @ w0) @ w1) @ w2


def main(folder: Path, name: str, address: str, lighthouse: str) -> None:
    """Trains until the run is over, and writes what this worker did and has."""
    torch.set_num_threads(1)
    # The server of its state tells peers the machine's name, which the hosts of the lab share.
    socket.gethostname = lambda: address
    with np.load(folder / f"{name}.npz") as file:
        job = dict(file)
    interface, seconds = os.environ["NETLAB_INTERFACE"], float(job["step"])
    model = Network(job)
    inner, outer = torch.optim.Adam(model.parameters(), 3e-3), torch.optim.SGD(model.parameters(), 1.0)
    healed, due = False, 0.0

    def load(state: dict[str, Any]) -> None:
        nonlocal healed
        healed = True
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=2,
        use_async_quorum=False,  # DiLoCo demands it
        init_sync=False,  # all begin with the same weights
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{lighthouse}",
        replica_id=name,
        hostname=address,
    )
    inner.register_step_post_hook(lambda *_: time.sleep(max(0.0, due - time.monotonic())))
    before = received_bytes(interface)
    begun, taken = time.time(), 0
    path = folder / f"begun-{name}"
    (folder / f"begun-{name}-again" if path.exists() else path).write_text(str(begun))
    with DiLoCo(manager, [model], inner, outer, sync_every=int(job["steps"])):
        while taken % job["steps"] or not _is_over(folder, float(job["seconds"])):
            due, number, healed = time.monotonic() + seconds, manager.current_step(), False
            row = taken % len(job["y"])
            inner.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(torch.from_numpy(job["x"][row])), torch.from_numpy(job["y"][row]).long()
            )
            loss.backward()
            inner.step()
            taken += 1
            if taken % job["steps"] == 0:
                sync = {"round": manager.current_step(), "workers": manager.num_participants(), "healed": healed}
                sync |= {"committed": healed or manager.current_step() > number, "at": time.time()}
                sync |= {"seconds": time.monotonic() - due}
                with (folder / f"syncs-{name}").open("a") as file:
                    file.write(json.dumps(sync) + "\n")
    ended = time.time()
    np.savez(folder / f"model-{name}.npz", **{f"w{i}": w.detach().numpy() for i, w in enumerate(model.weights)})
    row = {"worker": name, "begun": begun, "ended": ended, "steps": taken}
    row |= {"bytes_kernel": received_bytes(interface) - before}
    (folder / f"{name}.json").write_text(json.dumps(row))
    os._exit(0)  # the threads of its servers would wait


def _is_over(folder: Path, seconds: float) -> bool:
    begun = folder / "begun-a"
    return begun.exists() and time.time() - float(begun.read_text()) > seconds


if __name__ == "__main__":
    main(
        Path(os.environ["JAXCOMM_BENCHMARK_FOLDER"]),
        os.environ["JAXCOMM_BENCHMARK_WORKER"],
        os.environ["TORCHFT_BENCHMARK_ADDRESS"],
        os.environ["TORCHFT_BENCHMARK_LIGHTHOUSE"],
    )
