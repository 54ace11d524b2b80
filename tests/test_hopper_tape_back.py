"""Backward scans on the tape: no bit of a gradient depends on how many programs share the sequences."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper.plans.tiles import RETRACE_PACE, SAVING, SCAN_GRADIENTS_PACE, SLIM, WIDE, Pace
from flash_delta.kernels.hopper.scalar.backward.memory import Taped
from flash_delta.testing import MEMBERS, make_inputs
from flash_delta.testing.accuracy import run
from tests.hostile_bounds import HOSTILE, T, hostile, leave_unread
from tests.test_hopper_backward import by_hand_in  # noqa: F401
from tests.test_hopper_segments import PACKED, RAW, ROWS
from tests.test_hopper_tape import handed_over

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
LONG = replace(PACKED, T=445, lengths=(190, 180, 0, 70), options=RAW)
CELLS = {  # a case, the number of programs, and the loop's tile forward
    "packed": (replace(LONG, options=RAW | {"allow_neg_eigval": True}), 3, WIDE),
    "rows": (replace(ROWS, B=3, options={"state_v_first": True, "disable_recompute": True}), 4, SAVING[128]),
    "64": (replace(LONG, K=64, V=64, initial_state=False), 3, SLIM),
}


@pytest.fixture(autouse=True)
def cut_anywhere(monkeypatch):
    """Short sequences are cut, too, as if a cut took no time."""
    for paces in (RETRACE_PACE, SCAN_GRADIENTS_PACE):
        for width in paces:
            monkeypatch.setitem(paces, width, Pace(10, 1, 0))


def tables_of(memory):
    """The tables of tapes, by what is scanned on them."""
    start = "table of tape of "
    return {name.removeprefix(start): t for name, t in memory.items() if name.startswith(start)}


@pytest.mark.parametrize("cell", CELLS)
def test_no_bit_depends_on_borders(by_hand_in, cell):  # noqa: F811
    """Programs run in the order of their numbers, and if one waited for a later one, that would be an error here."""
    case, programs, tile = CELLS[cell]
    x, keeps = make_inputs(case, MEMBERS["gdn"], torch.bfloat16), "disable_recompute" in case.options
    by_hand_in(tile)
    wanted = run(MEMBERS["gdn"], x)
    plans = by_hand_in(tile, taped=Taped(trace=not keeps, gradients=True), processors=programs)
    got = run(MEMBERS["gdn"], x)
    assert all(torch.equal(got[name], t) for name, t in wanted.items())
    ((_, memory),) = plans
    tables = tables_of(memory)
    assert [*tables] == ["trace", "gradients"][keeps:]
    for table in tables.values():
        assert table[0] == programs
        assert handed_over(table).any()


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_bounds(by_hand_in, monkeypatch, name):  # noqa: F811
    """No program waits for a later one, or leaves its tensors. Either would be an error here."""
    leave_unread(monkeypatch)
    bounds = hostile(name, "cpu")
    case = replace(LONG, T=T, K=64, V=64, lengths=(T, *(0 for _ in bounds[2:])))
    x = make_inputs(case, MEMBERS["gdn"], torch.bfloat16) | {"cu_seqlens": bounds}
    plans = by_hand_in(SLIM, taped=Taped(trace=True, gradients=True), processors=3)
    MEMBERS["gdn"].op(**x)[0].nan_to_num().sum().backward()
    ((_, memory),) = plans
    assert [table[0] for table in tables_of(memory).values()] == [3, 3], "all programs came"
