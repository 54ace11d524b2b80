"""Gated DeltaProduct on the Triton backend, interpreted: chunks of updates that read q and g once per token."""

import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta import chunk_gated_delta_product, chunk_gated_delta_rule
from flash_delta.kernels.runtime.chip import Tile
from flash_delta.kernels.triton import backend
from flash_delta.kernels.triton.tiles import Segments
from tests.test_gated_delta_product import draw
from tests.test_gdn2 import with_gradients
from tests.test_hopper_steps import BY_FOUR, BY_TWO, call, check, expected, inputs_of

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
SMALL = {"B": 1, "H": 1, "HV": 2, "K": 16, "V": 24, "dtype": torch.float32}
HALF = SMALL | {"dtype": torch.bfloat16}
RAW = {"raw": True, "l2norm": True, "raw_beta": True}
# n, sizes of `draw`, options, and how it runs: in segments of so many chunks, or with the copy engine (True).
CELLS = {
    "one": (1, SMALL | {"T": 130}, {}, None),
    "rows": (2, SMALL | {"T": 70, "B": 2}, {}, None),
    "heads": (2, SMALL | {"T": 33, "H": 2, "HV": 2}, {"l2norm": True}, None),
    "no-gate": (2, SMALL | {"T": 65, "decay": None}, {}, None),
    "packed": (2, SMALL | {"lengths": BY_TWO}, {"l2norm": True}, None),
    "packed-four": (4, SMALL | {"lengths": BY_FOUR}, {}, None),
    "raw": (2, SMALL | {"lengths": BY_TWO}, RAW, None),
    "bfloat16": (2, HALF | {"lengths": BY_TWO}, {"l2norm": True}, None),
    "copy-engine": (4, HALF | {"T": 37}, {}, True),
    "reflecting": (2, HALF | {"T": 70}, {"l2norm": True, "neg_eigval": True}, None),
    "segments": (2, SMALL | {"lengths": BY_TWO}, {"l2norm": True}, 1),
    "segments-four": (4, HALF | {"T": 66}, {}, 1),
    "saving": (2, SMALL | {"T": 70}, {"disable_recompute": True}, None),
    "v-first": (2, SMALL | {"T": 33}, {"state_v_first": True}, None),
    "strong-decay": (2, SMALL | {"lengths": BY_TWO, "decay": 30.0}, {}, None),
    "sixty-four": (64, SMALL | {"T": 3}, {}, None),
    "three": (3, SMALL | {"T": 43}, {}, None),
}


@pytest.mark.parametrize("cell", CELLS)
def test_against_the_equation(cell, monkeypatch):
    n, sizes, options, how = CELLS[cell]
    (x, bounds), wanted = inputs_of(CELLS[cell]), expected(CELLS[cell], sizes["dtype"])
    if how is not None:
        tile = Tile(4, 1, 16, tma=how is True)
        split = Segments(64, tile, tile, tile)
        for name in ("plan_segments", "plan_back"):
            monkeypatch.setattr(backend, name, lambda p, chip: None if p.writes_states else split)
    check(with_gradients(partial(call, n, options, bounds, "triton"), x), wanted)


def test_one_update_is_the_gated_delta_rule_bit_by_bit():
    x, options = draw(1, **SMALL, T=130), {"use_qk_l2norm_in_kernel": True, "backend": "triton"}
    given = options | {"output_final_state": True}
    got = with_gradients(partial(chunk_gated_delta_product, num_householder=1, **given), x)
    for name, t in with_gradients(partial(chunk_gated_delta_rule, **given), x).items():
        assert torch.equal(got[name], t), name


def test_outputs_after_the_last_sequence_are_zeros():
    x, bounds = draw(2, **SMALL, T=90), torch.tensor([0, 40, 77])
    x["initial_state"] = torch.randn(2, 2, 16, 24)
    got = with_gradients(partial(call, 2, {}, bounds, "triton"), x)
    want = with_gradients(partial(call, 2, {}, bounds, "torch"), x)
    assert not any(got[name][:, 77:].any() for name in ("o", "q", "g"))
    assert all(torch.allclose(got[name], t, atol=1e-4) for name, t in want.items())
