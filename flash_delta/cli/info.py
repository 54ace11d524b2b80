"""`flash-delta info`: what is installed, what is in the machine, and which backend would run."""

import platform
from importlib import metadata
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch


def info() -> None:
    """Show versions, devices, and which backend each op takes here and why."""
    import torch

    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    console = Console()
    for table in (_versions(), _machine(devices), _backends(devices)):
        console.print(table)


def _versions() -> Table:
    import flash_delta

    table = Table("installed", "version")
    table.add_row("flash_delta", flash_delta.__version__)
    table.add_row("python", platform.python_version())
    for package in ("torch", "triton", "transformers"):
        table.add_row(package, _version(package))
    return table


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine(devices: list["torch.device"]) -> Table:
    import torch

    table = Table("device", "what it is")
    for device in devices:
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            memory = torch.cuda.get_device_properties(device).total_memory / 2**30
            table.add_row(str(device), f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}, {memory:.0f} GiB")
        else:
            capability = torch.backends.cpu.get_cpu_capability()
            table.add_row(str(device), f"{platform.machine()}, {capability}, {torch.get_num_threads()} threads")
    return table


def _backends(devices: list["torch.device"]) -> Table:
    """For one head of width 128 in bfloat16, which is what models have."""
    import torch

    import flash_delta

    table = Table("device", "op at K = V = 128, bfloat16", "backend", "why")
    gates = {flash_delta.chunk_gated_delta_rule: (), flash_delta.chunk_kda: (128,)}
    for device in devices:
        for op, channels in gates.items():
            qkv = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16, device=device)
            g = torch.zeros(1, 64, 1, *channels, device=device)
            explained = flash_delta.explain(op, qkv, qkv, qkv, g=g, beta=qkv[..., 0])
            why = "\n".join(f"{name}: {reason}" for name, reason in explained.reasons.items())
            table.add_row(str(device), op.__name__, explained.backend or "none", why)
    return table
