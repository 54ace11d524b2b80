"""Bounds that are none, on 200 tokens. No host can check those on a device, so kernels have to bear them."""

import torch

T = 200
HOSTILE = {
    "first-above-0": ([70, 130, 200], torch.int32),
    "negative": ([0, -5, 200], torch.int32),
    "above-T": ([0, 300, 500], torch.int32),
    "down-and-up": ([0, 200, 0, 200], torch.int32),
    "beyond-32-bits": ([0, 2**31 + 5, -(2**32) + 70, 200], torch.int64),
    "all": ([2**40, 199, -(2**31), 66, 2**31 - 1, 3, 0, 130], torch.int64),
}


def hostile(name, device):
    values, dtype = HOSTILE[name]
    return torch.tensor(values, dtype=dtype, device=device)


def leave_unread(monkeypatch):
    """Bounds on a CPU, which a GPU's stand for in Triton's interpreter, go to the kernels as a GPU's do."""
    from flash_delta.ops._check import elementwise as around
    from flash_delta.ops._check import rule
    from flash_delta.ops.serving import _run

    for module in (rule, around, _run):
        monkeypatch.setattr(module, "read_lengths", lambda *arguments: None)
