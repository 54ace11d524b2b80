"""Backward scans on the tape: no bit of a gradient depends on how many programs share the sequences."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper.plans.tape import new_tape
from flash_delta.kernels.hopper.plans.tiles import Pace
from flash_delta.kernels.hopper.scalar.backward import run as scalar_backward
from flash_delta.kernels.hopper.scalar.backward.memory import Tapes, new_tapes
from flash_delta.kernels.runtime import calls
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.testing import MEMBERS, make_inputs
from flash_delta.testing.accuracy import run
from tests.hostile_bounds import HOSTILE, T, hostile, leave_unread
from tests.test_hopper_backward import by_hand_in  # noqa: F401
from tests.test_hopper_segments import PACKED, RAW, ROWS

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
LONG = replace(PACKED, T=445, lengths=(190, 180, 0, 70), options=RAW)
CELLS = {  # a case, and the number of programs
    "packed": (replace(LONG, options=RAW | {"allow_neg_eigval": True}), 3),
    "rows": (replace(ROWS, B=3, options={"state_v_first": True, "disable_recompute": True}), 4),
    "64": (replace(LONG, K=64, V=64, initial_state=False), 3),
}


@pytest.mark.parametrize("cell", CELLS)
def test_no_bit_depends_on_borders(by_hand_in, monkeypatch, cell):  # noqa: F811
    """Programs run in the order of their numbers, and if one waited for a later one, that would be an error here."""
    case, programs = CELLS[cell]
    x, tapes = make_inputs(case, MEMBERS["gdn"], torch.bfloat16), []
    by_hand_in(None)
    run_backward = scalar_backward.run_backward

    def laid(p, chip):
        made = [tape and new_tape(p, programs, Pace(10, 1, 0)) for tape in new_tapes(p, chip)]
        assert [tape is None for tape in made] == [p.disable_recompute, False]
        tapes.extend(made[p.disable_recompute :])
        for tape in tapes:
            tape.handed.fill_(float("nan"))
        return Tapes(*made)

    def compared(*given):
        wanted = run_backward(*given)
        monkeypatch.setattr(scalar_backward, "new_tapes", laid)
        monkeypatch.setattr(scalar_backward, "chip_of", lambda device: Chip("interpreter", programs))
        monkeypatch.setattr(calls, "chip_of", scalar_backward.chip_of)
        for got, want in zip(run_backward(*given), wanted, strict=True):
            assert (got is None and want is None) or torch.equal(got, want)
        return wanted

    monkeypatch.setattr(scalar_backward, "run_backward", compared)
    run(MEMBERS["gdn"], x)
    for tape in tapes:
        assert tape.table[0] == programs
        assert tape.table[5 + 2 * programs : 5 + 4 * programs].any()  # states were handed over


@pytest.mark.parametrize("name", HOSTILE)
def test_wrong_bounds(by_hand_in, monkeypatch, name):  # noqa: F811
    """No program waits for a later one, or leaves its tensors. Either would be an error here."""
    leave_unread(monkeypatch)
    bounds, laid = hostile(name, "cpu"), []
    case = replace(LONG, T=T, K=64, V=64, lengths=(T, *(0 for _ in bounds[2:])))
    x = make_inputs(case, MEMBERS["gdn"], torch.bfloat16) | {"cu_seqlens": bounds}
    by_hand_in(None)

    def lay(p, chip):
        laid.append(Tapes(new_tape(p, 3, Pace(10, 1, 0)), new_tape(p, 3, Pace(10, 1, 0))))
        return laid[-1]

    monkeypatch.setattr(scalar_backward, "new_tapes", lay)
    monkeypatch.setattr(scalar_backward, "chip_of", lambda device: Chip("interpreter", 3))
    monkeypatch.setattr(calls, "chip_of", scalar_backward.chip_of)
    MEMBERS["gdn"].op(**x)[0].nan_to_num().sum().backward()
    assert [tape.table[0] for tape in laid[0]] == [3, 3], "all programs came"
