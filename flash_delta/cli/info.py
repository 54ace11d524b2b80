"""`flash-delta info`: what is installed, what is in the machine, and which backend would run."""

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from flash_delta.cli.tables import Table, show

if TYPE_CHECKING:
    import torch


def info() -> None:
    """Show versions, devices, and which backend runs Gated DeltaNet and Kimi Delta Attention here and why."""
    import torch

    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    show([_versions(), _machine(devices), *_kernels(devices), _backends(devices)])


def _versions() -> Table:
    import flash_delta
    from flash_delta.compiler.targets import tested_tritons

    rows = [("flash_delta", flash_delta.__version__), ("python", platform.python_version())]
    rows += [("torch", _version("torch")), ("triton", f"{_version('triton')}; tested: {tested_tritons()}")]
    rows += [("transformers", _version("transformers"))]
    return Table(("installed", "version"), rows)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine(devices: list["torch.device"]) -> Table:
    import torch

    rows = []
    for device in devices:
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            memory = torch.cuda.get_device_properties(device).total_memory / 2**30
            rows.append((str(device), f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}, {memory:.0f} GiB"))
        else:
            capability = torch.backends.cpu.get_cpu_capability()
            rows.append((str(device), f"{platform.machine()}, {capability}, {torch.get_num_threads()} threads"))
    return Table(("device", "what it is"), rows)


def _kernels(devices: list["torch.device"]) -> list[Table]:
    """Where NVIDIA's GPUs get kernels from."""
    import torch

    devices = [] if torch.version.hip else [device for device in devices if device.type == "cuda"]
    if not devices:
        return []
    from flash_delta.compiler.installed import sources_of_kernels

    rows = [(str(device), *row) for device in devices for row in sources_of_kernels(device)]
    return [Table(("device", "kernels from", "what for"), rows)]


def _backends(devices: list["torch.device"]) -> Table:
    rows = []
    for device in devices:
        for op, backend, reasons in backends(device):
            why = "\n".join(f"{name}: {reason}" for name, reason in reasons.items())
            rows.append((str(device), op, backend, why))
    return Table(("device", "op at K = V = 128, bfloat16", "backend", "why"), rows)


def backends(device: "torch.device") -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yields two ops, with a head of width 128 in bfloat16 as models have: name, backend, a reason for each backend."""
    import torch

    import flash_delta

    gates = {flash_delta.chunk_gated_delta_rule: (), flash_delta.chunk_kda: (128,)}
    for op, channels in gates.items():
        qkv = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16, device=device)
        g = torch.zeros(1, 64, 1, *channels, device=device)
        explained = flash_delta.explain(op, qkv, qkv, qkv, g=g, beta=qkv[..., 0])
        yield op.__name__, explained.backend or "none", explained.reasons
