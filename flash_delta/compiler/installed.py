"""Where a GPU of this machine gets kernels from, and what launches them."""

import torch

from flash_delta.kernels.runtime import fastcall, pack
from flash_delta.kernels.runtime.chip import chip_of


def sources_of_kernels(device: torch.device) -> list[tuple[str, str]]:
    """What NVIDIA's GPU takes kernels from, and what for."""
    found = []
    for p in pack.packs(chip_of(device).target):
        found.append((str(p.path), f"{len(p.kernels)} kernels" if p.unused is None else f"not used: {p.unused}"))
    launcher = "Triton launches kernels, slowly" if fastcall.load() is None else "the C module launches kernels"
    return [*found, ("Triton", f"compiles all others when a call needs them; {launcher}")]
