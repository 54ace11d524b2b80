"""What a report says of a machine beside the check and the times. It is asked in a process of its own."""

import platform

import torch

import flash_delta
from flash_delta.cli.info import backends
from flash_delta.compiler.targets import target_of
from flash_delta.testing.machine import machine
from workshop.bench import ceilings
from workshop.bench.floor import Ceilings

PROPERTIES = ("total_memory", "multi_processor_count", "shared_memory_per_block_optin", "L2_cache_size", "warp_size")


class Probe:
    """Answers questions about a device."""

    def __init__(self, device: torch.device):
        self.device = device

    def machine(self) -> dict[str, str | int]:
        """Versions, and facts of the hardware. None of them says whose machine it is."""
        facts = {"flash_delta": flash_delta.__version__, "system": f"{platform.system()} {platform.machine()}"}
        facts |= machine(self.device)
        if self.device.type == "cuda":
            of_gpu = torch.cuda.get_device_properties(self.device)
            facts |= {"chip": target_of(self.device)} | ({"hip": torch.version.hip} if torch.version.hip else {})
            facts |= {name: getattr(of_gpu, name) for name in PROPERTIES if hasattr(of_gpu, name)}  # of newer torch
        return facts

    def backends(self) -> dict[str, dict]:
        """The backend that two ops take here, and what is said of every backend."""
        return {op: {"backend": backend, "reasons": reasons} for op, backend, reasons in backends(self.device)}

    def ceilings(self) -> Ceilings | None:
        """The rates of a GPU, which floors are made of."""
        return ceilings(self.device) if self.device.type == "cuda" else None
