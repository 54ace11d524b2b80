"""Sequences scanned in segments, against the recurrence in float64, in Triton's interpreter; who is split, and how."""

import os
from dataclasses import replace
from random import Random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: `flash-delta-dev bench gdn-long` judges the compiled kernels", allow_module_level=True)

import flash_delta
from flash_delta.kernels.runtime.chip import Chip, Tile
from flash_delta.kernels.triton import backend
from flash_delta.kernels.triton.backward import segments as back_segments
from flash_delta.kernels.triton.forward import segments
from flash_delta.kernels.triton.tiles import Segments, plan_endless, plan_segments
from flash_delta.problem import Pools
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import TENSORS, products_in, recurrence, run, truth
from flash_delta.testing.cases import Case

# One, several and no segments of a sequence, a last one of one token, and guard rows; values before keys in a block.
PACKED = Case("", "", B=1, T=370, H=1, HV=2, lengths=(0, 1, 200, 0, 64, 65, 0, 33))
ROWS = Case("", "", B=2, T=200, H=1, HV=2)
ROW = replace(ROWS, B=1, HV=1)  # the interpreter takes seconds for each head
CELLS = {
    "gdn-packed": ("gdn", PACKED, 1, torch.float32),
    **{f"{member}-packed": (member, replace(PACKED, HV=1), 1, torch.float32) for member in ("kda", "comba", "gdn2")},
    "delta-rule-rows": ("delta-rule", ROWS, 2, torch.float32),
    "simple-gla-rows": ("simple-gla", ROWS, 2, torch.float32),
    "strong-decay": ("gdn", replace(ROW, decay="strong"), 1, torch.float32),
    "no-decay": ("kda", replace(ROW, decay="zero"), 1, torch.float32),
    "v-first": ("gdn", replace(ROW, options={"state_v_first": True}), 1, torch.float32),
    "no-initial-state": ("kda", replace(ROW, initial_state=False), 1, torch.float32),
    "bfloat16": ("gdn", replace(PACKED, K=32, V=16), 1, torch.bfloat16),
}


GRADIENTS = {
    "gdn-packed": ("gdn", replace(PACKED, HV=1), 1, torch.float32),
    "kda-packed": ("kda", replace(PACKED, HV=1), 1, torch.float32),
    "gdn2-packed": ("gdn2", replace(PACKED, HV=1), 1, torch.float32),
    "gdn2-left-by-forward": ("gdn2", replace(ROW, T=130, options={"disable_recompute": True}), 1, torch.float32),
    "comba-rows": ("comba", replace(ROW, T=130), 1, torch.float32),
    "two-chunks": ("gdn", replace(ROW, T=330), 2, torch.float32),
    "v-first": ("simple-gla", replace(ROW, T=130, options={"state_v_first": True}), 1, torch.float32),
    "left-by-forward": ("gdn", replace(ROW, options={"disable_recompute": True}), 1, torch.bfloat16),
    "no-initial-state": ("delta-rule", replace(ROW, initial_state=False), 1, torch.bfloat16),
}


def split(monkeypatch, chunks, tma=False):
    """Sequences, into segments of so many chunks each."""
    tile = Tile(4, 1, 16, tma=tma)
    found = Segments(64 * chunks, tile, tile, tile)
    monkeypatch.setattr(backend, "plan_segments", lambda p, chip: None if p.writes_states else found)
    monkeypatch.setattr(backend, "plan_back", lambda p, chip: found)


def results(member, x, name="triton"):
    with torch.no_grad():
        return dict(zip(("o", "final_state"), member.op(**x, backend=name), strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_against_the_recurrence(cell, monkeypatch):
    name, case, chunks, dtype = CELLS[cell]
    split(monkeypatch, chunks)
    member = MEMBERS[name]
    x = make_inputs(case, member, dtype)
    wide = {n: x[n].detach().double() for n in TENSORS if n in x}
    want = dict(zip(("o", "final_state"), recurrence(member, wide, x), strict=True))
    got = results(member, x)
    with products_in(dtype):
        reference = results(member, x, "torch")
    for tensor, value in want.items():
        limit = allowed(relative_error(reference[tensor], value), dtype)
        assert relative_error(got[tensor], value) <= limit, tensor


@pytest.mark.parametrize("decay", ["mild", "strong"])
def test_how_a_map_is_walked_changes_no_bit(decay, monkeypatch):
    """Left where it has become zero, or not; and by descriptors, which a CPU does not choose."""
    member = MEMBERS["gdn"]
    x = make_inputs(replace(ROW, T=330, decay=decay), member, torch.bfloat16)
    outputs = []
    for part, tma in ((1000, False), (1, False), (1, True)):
        split(monkeypatch, 2, tma)
        monkeypatch.setattr(segments, "PART", part)
        outputs.append(results(member, x))
    for other in outputs[1:]:
        assert all(torch.equal(t, other[tensor]) for tensor, t in outputs[0].items())


@pytest.mark.parametrize("cell", GRADIENTS)
def test_gradients_against_the_recurrence(cell, monkeypatch):
    """The gradients of whole sequences are in test_triton_kernels.py and test_triton_kda.py."""
    name, case, chunks, dtype = GRADIENTS[cell]
    split(monkeypatch, chunks)
    launched, run_ends = [], back_segments.run_ends
    monkeypatch.setattr(back_segments, "run_ends", lambda *given: launched.append(run_ends(*given)))
    member = MEMBERS[name]
    x = make_inputs(case, member, dtype)
    wanted = truth(member, x)
    with products_in(dtype):
        reference = run(member, x, backend="torch")
    got = run(member, x, backend="triton")
    assert len(launched) == 1
    assert got.keys() == wanted.keys()
    for tensor, value in wanted.items():
        limit = allowed(relative_error(reference[tensor], value), dtype)
        assert relative_error(got[tensor], value) <= limit, tensor


def problem(T=32768, HV=8, N=1, **changes):
    x = make_inputs(Case("", "", B=1, T=4, lengths=(4,)), MEMBERS["gdn"], torch.bfloat16)
    p = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **x, backend="torch").problem
    lengths = {"lengths": changes.pop("lengths", (T // N,) * N if N else ())}
    return p._replace(T=T, N=N, HV=HV, K=128, V=128, needs_grad=False, **lengths, **changes)


H200 = Chip("sm_90", 132)


def test_who_is_split():
    """Long sequences on few heads; as many tokens in many sequences, or on many heads, fill the chip anyway."""
    assert plan_segments(problem(), H200)[0] == 4096
    for p in (problem(T=512), problem(HV=64), problem(N=16), problem(T=0), problem(N=0, T=3), problem(N=1, T=1)):
        assert plan_segments(p, H200) is None
    assert plan_segments(problem(), Chip("sm_90", 8)) is None
    rows = problem(T=16384, N=2)._replace(packed=False, B=2)
    assert plan_segments(rows, H200) == plan_segments(problem(T=16384 * 2, N=2, lengths=None), H200)


def test_known_lengths_decide():
    """A long sequence is split beside short ones as if it were alone, and equal ones as if nobody knew; without the
    lengths, as if all were equal."""
    for HV in (1, 8, 16, 64):
        for longest, short in ((2**17, 31), (32768, 3), (8192, 20), (10001, 20)):
            lengths = (64,) * short + (longest,)
            mixed = problem(sum(lengths), HV, len(lengths), lengths=lengths)
            alone, unknown = problem(longest, HV), problem(sum(lengths), HV, len(lengths), lengths=None)
            found, wanted = plan_segments(mixed, H200), plan_segments(alone, H200)
            assert (found is None) == (wanted is None)
            assert found is None or abs(found.length - wanted.length) <= 0.05 * wanted.length
            assert longest < 2**17 or plan_segments(unknown, H200) != wanted or wanted is None
        equal = problem(4 * 16384, HV, 4, lengths=(16384,) * 4)
        assert plan_segments(equal, H200) == plan_segments(equal._replace(lengths=None), H200)
        for lengths in ((0, 0), (0,), (0, 1)):
            assert plan_segments(problem(1, HV, len(lengths), lengths=lengths), H200) is None


def test_lengths_that_change_with_every_batch_ask_for_few_plans():
    """What is launched is remembered for every plan."""
    random = Random(0)
    plans = set()
    for _ in range(1000):
        longest = random.randrange(16384, 65536)
        lengths = (longest, 65536 - longest)
        plans.add(plan_segments(problem(65536, 8, 2, lengths=lengths), H200))
    assert len(plans) < 64


def test_what_is_split_was_compiled():
    """At the first call of other sizes."""
    for HV in range(1, 80):
        if plan_endless(problem(HV=HV), H200) is None:
            assert not any(plan_segments(problem(T, HV, N), H200) for T in (2048, 8192, 2**17) for N in (1, 2))


@pytest.mark.parametrize("T", [1000, 8192, 10001, 2**17, 2**19, 2**30])
@pytest.mark.parametrize("HV", [1, 8, 16, 32])
def test_segments_are_whole_chunks(T, HV):
    split = plan_segments(problem(T, HV), H200)
    assert split is None or (split.length % 64 == 0 and 64 <= split.length < T)


def test_what_is_never_split():
    """Where bits are promised, where states are saved, and what is there to be compared with."""
    for changes in (
        {"pools": Pools()},
        {"batch_invariant": True},
        {"needs_grad": True, "disable_recompute": True},
        {"dtype": torch.float32},
    ):
        assert plan_segments(problem()._replace(**changes), H200) is None, changes
    assert plan_segments(problem()._replace(K=256), H200) is None
    assert plan_segments(problem()._replace(needs_grad=True), H200) is not None


def test_explain_says_so(monkeypatch):
    x = {
        n: t.detach() if torch.is_tensor(t) else t for n, t in make_inputs(ROWS, MEMBERS["gdn"], torch.float32).items()
    }
    split(monkeypatch, 1)
    explained = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **x, backend="triton")
    assert "it scans sequences in segments of 64 tokens, up to 4 of them side by side" in str(explained)
