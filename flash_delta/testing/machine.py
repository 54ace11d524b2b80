"""The machine that results are of."""

import platform
from importlib import import_module

import torch


def machine(device: torch.device) -> dict[str, str]:
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        facts["triton"] = import_module("triton").__version__  # of the module that runs: another may be installed
    except ModuleNotFoundError:
        facts["triton"] = "not installed"
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        facts |= {"cpu": f"{platform.machine()}, {capability}", "threads": str(torch.get_num_threads())}
    return facts
