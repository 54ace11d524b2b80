"""The Hopper scan in segments on a CPU: Triton's interpreter runs `rates` and `compose_maps`; the rest is emulated."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import flash_delta
from flash_delta.kernels.hopper.plans.splits import split_endless, split_length
from flash_delta.kernels.hopper.scalar.plan import Scan, plan_forward
from flash_delta.kernels.hopper.scalar.segments import factor, maps, scan
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.plan import layouts_of
from flash_delta.problem import Outputs
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence, truth
from flash_delta.testing.cases import Case
from tests.gluon_emulator import emulate, launch, take_every_call
from tests.hostile_bounds import T, hostile, leave_unread
from tests.repeated import repeated

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
# One, several and no segments of a sequence, a last one of one token, and guard rows.
PACKED = Case("", "", B=1, T=370, H=1, HV=2, K=128, V=128, lengths=(0, 1, 200, 0, 64, 65, 0, 33))
ROWS = Case("", "", B=2, T=200, H=1, HV=2, K=128, V=128)
ROW = replace(ROWS, B=1, HV=1)
RAW = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
CELLS = {
    "packed": ("gdn", PACKED, 1, torch.bfloat16),
    "float16": ("gdn", PACKED, 1, torch.float16),
    "two-chunks": ("gdn", replace(ROW, T=330), 2, torch.bfloat16),
    "delta-rule-rows": ("delta-rule", ROWS, 2, torch.bfloat16),
    "three-heads": ("gdn", replace(ROWS, H=2, HV=6, T=130), 1, torch.bfloat16),
    "strong-decay": ("gdn", replace(ROW, decay="strong"), 1, torch.bfloat16),
    "faded": ("gdn", replace(PACKED, T=850, lengths=(1, 400, 0, 449), decay="extreme"), 3, torch.bfloat16),
    "extreme-decay": ("gdn", replace(ROW, decay="extreme"), 1, torch.bfloat16),
    "v-first": ("gdn", replace(ROW, options={"state_v_first": True}), 1, torch.bfloat16),
    "no-initial-state": ("gdn", replace(ROW, initial_state=False), 1, torch.bfloat16),
    "correlated-keys": ("gdn", replace(ROW, keys="correlated", beta="one"), 1, torch.bfloat16),
    "raw": ("gdn", replace(PACKED, options=RAW), 1, torch.bfloat16),
    "64": ("gdn", replace(PACKED, K=64, V=64, options=RAW), 1, torch.bfloat16),
    "64-rows": ("delta-rule", replace(ROWS, T=330, K=64, V=64, options={"state_v_first": True}), 2, torch.float16),
    "whole": ("gdn", replace(PACKED, K=256, V=256), 0, torch.bfloat16),
    "whole-rows": ("gdn", replace(ROWS, T=130, K=256, V=256, options={"state_v_first": True}), 0, torch.float16),
    "whole-fresh": ("gdn", replace(ROW, T=64, K=256, V=256, initial_state=False, options=RAW), 0, torch.bfloat16),
    "negative-eigenvalues": ("gdn", replace(ROW, options=RAW | {"allow_neg_eigval": True}), 1, torch.bfloat16),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """The backend with its kernels emulated, as the choice of every call, in segments of so many chunks."""
    emulate(monkeypatch, (factor, "factor_chunks"), (maps, "find_maps"), (scan, "scan_segments"))

    def chosen(chunks, part=8):
        monkeypatch.setitem(maps.find_maps.fn.__globals__, "PART", part)

        def forward(p, x):
            choice = Scan(64 * chunks or None, None, taped=False)
            plan = plan_forward(p, chip_of(p.device), layouts_of(x), choice=choice)
            return Outputs(*launch(plan, x)[0][:2])

        take_every_call(monkeypatch, forward)

    return chosen


@pytest.mark.parametrize("cell", CELLS)
@torch.no_grad()
def test_against_the_recurrence(on_cpu, cell):
    name, case, chunks, dtype = CELLS[cell]
    member = MEMBERS[name]
    x = make_inputs(case, member, dtype)
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    wanted = recurrence(member, wide, x)
    with products_in(dtype):
        reference = member.op(**x, backend="torch")
    on_cpu(chunks)
    for got, want, rounded in zip(member.op(**x), wanted, reference, strict=True):
        assert relative_error(got, want) <= allowed(relative_error(rounded, want), dtype)


@pytest.mark.parametrize("name", ["first-above-0", "down-and-up", "all"])
@torch.no_grad()
def test_wrong_bounds_leave_no_tensor(on_cpu, monkeypatch, name):
    """An address that is beyond a tensor is an error of the emulator or of the bounds' watch."""
    leave_unread(monkeypatch)
    bounds = hostile(name, "cpu")
    case = replace(PACKED, T=T, HV=1, K=64, V=64, lengths=(T, *(0 for _ in bounds[2:])))
    x = make_inputs(case, MEMBERS["gdn"], torch.bfloat16)
    on_cpu(1)
    MEMBERS["gdn"].op(**(x | {"cu_seqlens": bounds}))


@pytest.mark.parametrize(("width", "chunks"), [(64, 1), (128, 2), (256, 0)])
@torch.no_grad()
def test_repeated_keys(on_cpu, width, chunks):
    """A chunk with a beta above 1 keeps what A loses by rounding, in the scan and in the maps of segments."""
    member, x = MEMBERS["gdn"], repeated(1.999, K=width)
    on_cpu(chunks)
    (o, _), want = member.op(**x), truth(member, x)
    assert relative_error(o, want["o"]) < 0.07


@pytest.mark.parametrize("width", [64, 128])
@torch.no_grad()
def test_a_map_that_has_faded_is_left(on_cpu, width):
    """With the same bits as if it had been scanned to its end; that of the other head does not fade."""
    x = make_inputs(replace(ROW, HV=2, T=500, K=width, V=width), MEMBERS["gdn"], torch.bfloat16)
    x["g"][..., 0] = -1.0
    outputs = []
    for part in (1, 1000):
        on_cpu(4, part)
        outputs.append(MEMBERS["gdn"].op(**x))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def problem(T=32768, HV=8, N=1):
    x = make_inputs(Case("", "", B=1, T=4, lengths=(4,)), MEMBERS["gdn"], torch.bfloat16)
    p = flash_delta.explain(flash_delta.chunk_gated_delta_rule, **x, backend="torch").problem
    return p._replace(T=T, N=N, HV=HV, K=128, V=128, needs_grad=False, lengths=None)


H200 = 132


def test_who_is_split():
    """Long sequences on few heads; as many tokens in many sequences, or on many heads, fill the chip anyway."""
    assert split_length(problem(), H200) == 2048
    for p in (problem(T=512), problem(HV=64), problem(N=32), problem(T=0), problem(T=1)):
        assert split_length(p, H200) is None
    assert split_length(problem(), 8) is None
    narrow, wide = (problem()._replace(K=width, V=width) for width in (64, 256))
    assert split_length(narrow, H200) == 2048
    assert split_length(narrow._replace(HV=32, T=8192), H200) == 2048
    assert split_length(narrow._replace(HV=32, T=2048), H200) is None
    assert split_length(wide, H200) is None
    rows = problem(T=16384, N=2)._replace(packed=False, B=2)
    assert split_length(rows, H200) == split_length(problem(N=2), H200)


def test_both_passes_are_split_alike():
    """A backward pass by hand takes longer, so that more heads are worth segments, and shorter ones."""
    assert split_length(problem(T=8192), H200, back=True) == 512
    assert split_length(problem(T=32768, HV=32), H200, back=True) == 4096
    assert split_length(problem(HV=64), H200) is None
    assert split_length(problem(HV=64), H200, back=True) == 8192
    many = problem(T=20480, HV=32, N=5), problem(T=24576, HV=48, N=3)  # 160 and 144 states, which programs share
    for p in (*many, problem(T=8192, HV=32, N=8), problem(N=0), problem()._replace(batch_invariant=True)):
        assert split_length(p, H200, back=True) is None


@pytest.mark.parametrize("width", [64, 128])
def test_what_is_split_was_compiled(width):
    """At the first call of other sizes."""
    for HV in range(1, 80):
        p = problem(HV=HV)._replace(K=width, V=width)
        if split_endless(p, H200) is None:
            assert not any(split_length(p._replace(T=T, N=N), H200) for T in (2048, 8192, 2**17) for N in (1, 2))


@pytest.mark.parametrize("T", [1000, 8192, 10001, 2**17, 2**19, 2**30])
@pytest.mark.parametrize("HV", [1, 8, 16, 32])
def test_segments_are_whole_chunks(T, HV):
    length = split_length(problem(T, HV), H200)
    assert length is None or (length % 64 == 0 and 64 <= length < T)
