"""The plans of the benchmark's rows, which were measured, and what a plan may depend on."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper.plans.splits import (
    CHANNEL_TILES,
    channel_tile,
    loop_tile,
    may_scan_channels,
    split_length,
)
from flash_delta.kernels.hopper.plans.tiles import CHANNEL_HALF, CHANNEL_WHOLE, NARROW, SLIM, WIDE
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.problem import Gate, Problem

H200 = Chip("sm_90", 132)
ONE_LONG = (131072, *(64,) * 31)


def problem(HV, *lengths, gate="scalar", width=128):
    sizes = 1, sum(lengths), HV, HV, width, width, len(lengths)
    meta = torch.device("meta")
    return Problem("op", *sizes, torch.bfloat16, meta, Gate(gate), "decayed", 1.0, packed=True, lengths=lengths)


@pytest.mark.parametrize(
    ("HV", "lengths", "plan"),
    [
        (32, (32768,), 8192), (32, (8192,), 2048), (32, (8192,) * 4, WIDE), (32, (1024,) * 8, WIDE),
        (64, (32768,), NARROW), (64, (8192,), NARROW), (64, (131072,), NARROW), (16, (32768,), 4096),
        (16, (8192,), 1024), (16, (8192,) * 4, NARROW), (16, (1024,) * 8, WIDE), (8, (32768,), 2048), (8, (8192,), 960),
        (8, (8192,) * 4, 2048), (8, (1024,) * 8, NARROW), (8, (131072,), 8192), (8, (524288,), 32768),
        (6, (8192,), 704), (8, ONE_LONG, 8192), (16, ONE_LONG, 16384), (32, ONE_LONG, 32768), (24, (4096,) * 3, NARROW),
        (24, (4096,) * 6, WIDE),
    ],
)  # fmt: skip
def test_forward(HV, lengths, plan):
    p = problem(HV, *lengths)
    length = split_length(p, H200.processors)
    assert (loop_tile(p, H200, False) if length is None else length) == plan
    if len(set(lengths)) == 1:
        assert split_length(p._replace(lengths=None), H200.processors) == length, "nobody has to know equal lengths"


@pytest.mark.parametrize(
    ("HV", "lengths", "width", "length"),
    [
        (32, (8192,), 128, 2048), (32, (32768,), 128, 4096), (8, (8192,), 128, 512), (8, (32768,), 128, 2048),
        (32, (1024,) * 8, 128, None), (6, (8192,), 128, 512), (32, (8192,), 64, 2048), (32, (2048,) * 4, 128, None),
    ],
)  # fmt: skip
def test_training(HV, lengths, width, length):
    assert split_length(problem(HV, *lengths, width=width), H200.processors, back=True) == length


@pytest.mark.parametrize(
    ("HV", "lengths", "tile"),
    [
        (32, (8192,), None), (32, (1024,) * 8, CHANNEL_WHOLE), (64, (8192,), CHANNEL_HALF),
        (96, (8192,), CHANNEL_WHOLE), (64, (1024,) * 8, CHANNEL_WHOLE), (16, (2048,) * 9, CHANNEL_WHOLE),
        (16, (8192,), None), (32, (32768, *(64,) * 50), None), (32, (300,), CHANNEL_HALF),
        (19, (1024,) * 4, CHANNEL_WHOLE),
    ],
)  # fmt: skip
def test_a_decay_per_channel(HV, lengths, tile):
    assert channel_tile(problem(HV, *lengths, gate="channel"), H200) == tile


def test_only_so_few_heads_walk():
    """For other heads nothing is compiled for parts."""
    for HV in range(1, 140):
        for lengths in ((64,), (1024,) * 2, (8192,), (2**20,), (65536, *(64,) * 9)):
            tile = channel_tile(problem(HV, *lengths, gate="channel"), H200)
            assert tile in CHANNEL_TILES or may_scan_channels(problem(HV, 64), H200)


def test_a_long_sequence_among_short_ones_has_halves_if_the_host_knows():
    p = problem(32, 8192, *(1024,) * 8)
    assert loop_tile(p, H200, False) == NARROW
    assert loop_tile(p._replace(lengths=None), H200, False) == WIDE
    assert loop_tile(problem(32, 8192, *(1024,) * 8, width=64), H200, False) == SLIM
    assert loop_tile(problem(24, 32768, *(16,) * 200), H200, False) == NARROW
    assert loop_tile(problem(24, 32768, *(16,) * 2000), H200, False) == WIDE, "short ones take time, too"


@pytest.mark.parametrize(("back", "most"), [(False, 44), (True, 99)])
def test_up_to_how_many_heads_a_long_sequence_is_split(back, most):
    """The numbers of docs/how-the-kernels-work.md, section 6."""
    split = [HV for HV in range(1, 133) if split_length(problem(HV, 32768), H200.processors, back=back) is not None]
    assert split == [*range(1, most + 1)]
