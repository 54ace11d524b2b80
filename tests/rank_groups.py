"""How the processes of a test join each other: by gloo on CPUs, or by nccl with a GPU for each."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only


def join(backend: str, rank: int, size: int, folder: object) -> torch.device:
    """Joins the group of ``size`` processes. Returns this process's own device."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    options = {"timeout": timedelta(minutes=5)}  # for a process whose partner has failed
    if backend == "nccl":
        options["device_id"] = device
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, **options)
    return device


def leave(results: object, path: object) -> None:
    """Writes ``results`` as tensors of the host, and waits for the other processes."""
    torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, results), path)
    dist.barrier()
    dist.destroy_process_group()
