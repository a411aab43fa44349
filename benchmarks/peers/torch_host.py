"""A host that trains with PyTorch's DistributedDataParallel: `TORCH_PYTHON -m benchmarks.peers.torch_host JOB`.

PyTorch is not a dependency of this project: it has an environment of its own. PowerSGD's hook has its defaults (error
feedback, warm start), compresses from the third step on, and has one bucket: with several it aborts on Gloo. The other
methods have DDP's default buckets.
"""
# pyright: reportMissingImports=false

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.peers.job import MOMENTUM, Job, train


def parallel(model: torch.nn.Module, method: str) -> torch.nn.parallel.DistributedDataParallel:
    """Returns the model in DDP, with gradients exchanged by a method."""
    one_bucket = {"bucket_cap_mb": 1000} if method.startswith("powersgd") else {}
    ddp = torch.nn.parallel.DistributedDataParallel(model, **one_bucket)
    if method == "fp16":  # DDP has no bfloat16 between CPUs
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method.startswith("powersgd"):
        rank = int(method.removeprefix("powersgd_"))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def main(path: Path) -> None:
    """Trains this host's part of a job."""
    host, hosts = int(os.environ["JAXCOMM_PROCESS_ID"]), int(os.environ["JAXCOMM_NUM_PROCESSES"])
    coordinator = os.environ["JAXCOMM_COORDINATOR"]
    distributed.init_process_group("gloo", init_method=f"tcp://{coordinator}", rank=host, world_size=hosts)
    job = Job.load(path)
    layers: list[torch.nn.Module] = []
    for kernel, bias in zip(job.weights[::2], job.weights[1::2], strict=True):
        layer = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(kernel.T))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    ddp = parallel(model, job.method)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=MOMENTUM)

    def step(x: np.ndarray, labels: np.ndarray) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(torch.from_numpy(x)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def mean_loss(loss: torch.Tensor) -> float:
        distributed.all_reduce(loss)
        return float(loss) / hosts

    def weights() -> list[np.ndarray]:
        return [parameter.detach().numpy().T for parameter in model.parameters()]

    train(job, host, hosts, step=step, loss_of=mean_loss, weights=weights, barrier=distributed.barrier)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
