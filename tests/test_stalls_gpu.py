"""What calls of new lengths take of a GPU's host; what they leave for Python's collector: test_stalls.py."""

from statistics import median

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from new_lengths import MOST, Calls, host_us, lengths, told

MEDIAN_US, WORST_US = 150, 5000


@pytest.fixture(scope="module")
def calls():
    return Calls(device="cuda")


@pytest.mark.parametrize("kind", ["forward", "prefill"])
def test_new_lengths(calls, kind):
    """A thousand of them, with the collector at work; known ones besides."""
    call = getattr(calls, kind)
    for T in (1, 2000, MOST):  # all compiles
        call(T)()
    us = host_us(map(call, lengths(1000)), torch.cuda.synchronize)
    again = call(5000)
    known = host_us([again] * 1000, torch.cuda.synchronize)
    print(told(f"{kind} of new lengths", us), told("known", known), sep="; ")
    assert median(us) < MEDIAN_US
    assert max(us) < WORST_US


def test_decoding_is_known_among_new_prompts(calls):
    step = calls.decode(64)
    for prompt in map(calls.prefill, lengths(2000, seed=1)):
        prompt()
        step()
    us = host_us([step] * 100, torch.cuda.synchronize)
    torch.cuda.synchronize()
    mixed = []
    for prompt in map(calls.prefill, lengths(200, seed=2)):
        prompt()
        torch.cuda.synchronize()
        mixed += host_us([step])
    print(told("decoding alone", us), told("decoding after a new prompt", mixed), sep="; ")
    assert median(mixed) < 2 * median(us) + 10
