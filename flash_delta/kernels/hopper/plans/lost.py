"""A word of the host for each device. A program that has waited in vain for a state sets it. The next call of this
backend, a forward pass or a prefill, reads it.

This cannot happen (tape.py). If it does happen, that program's outputs are NaN, and no program waits for ever."""

from ctypes import c_int

import torch
from torch import Tensor

_words: dict[torch.device, tuple[Tensor, c_int]] = {}  # with the word as Python reads it, in 60 ns


def word_of(device: torch.device) -> int:
    """The address of the device's word, in memory that the device can write."""
    if device not in _words:
        word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=torch.cuda.is_available())
        _words.setdefault(device, (word, c_int.from_address(word.data_ptr())))  # another thread may have made one
    return _words[device][0].data_ptr()


def check_states(op: str) -> None:
    """Raises an error if a program of an earlier call has given up. It does not wait for the device."""
    for device, (_, word) in tuple(_words.items()):
        if word.value:
            word.value = 0
            raise RuntimeError(
                f"{op}: an earlier call on {device} lost a state between two programs of a kernel. "
                "Outputs and states of that call are NaN. Please report this"
            )
