"""The chips that kernels are compiled for."""

from typing import NamedTuple

import torch

from flash_delta.kernels import TRITON


class Target(NamedTuple):
    backend: str  # Triton's
    arch: int | str
    warp_size: int
    shared_bytes: int  # the most that one program may have


# Shared memory: CUDA C++ Programming Guide, "Maximum amount of shared memory per thread block"; ISA guides of CDNA3 and
# CDNA4, LDS of a compute unit. Triton compiles arch 90 for sm_90a by itself.
TARGETS = {
    "sm_80": Target("cuda", 80, 32, 166_912),
    "sm_89": Target("cuda", 89, 32, 101_376),
    "sm_90a": Target("cuda", 90, 32, 232_448),
    "sm_100": Target("cuda", 100, 32, 232_448),
    "sm_120": Target("cuda", 120, 32, 101_376),
    "gfx942": Target("hip", "gfx942", 64, 65_536),
    "gfx950": Target("hip", "gfx950", 64, 163_840),
}


def target_of(device: torch.device) -> str:
    """The target whose tiles a GPU takes."""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major == 9 else "")


def tested_tritons() -> str:
    """The versions under which kernels are compiled and tested."""
    return " to ".join(".".join(map(str, version)) for version in TRITON)
