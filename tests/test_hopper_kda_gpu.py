"""Kimi Delta Attention on the Hopper backend, on a GPU of that kind."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("there is no Hopper GPU", allow_module_level=True)

from dataclasses import replace

import flash_delta
from flash_delta.kernels.hopper.channel import plan
from flash_delta.kernels.hopper.channel.plan import Scan
from flash_delta.kernels.hopper.plans.tiles import CHANNEL_HALF, CHANNEL_WHOLE
from flash_delta.ops import _known_calls
from flash_delta.testing import allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence, truth
from flash_delta.testing.accuracy import run as run_op
from tests.hostile_bounds import HOSTILE, T, hostile
from tests.test_hopper_kda import CELLS, FREE, KDA, PACKED, RAW, ROWS, TRAINING, WIDE, inputs_of

LOGS = {"use_qk_l2norm_in_kernel": True}
LONG = {
    "long": replace(ROWS, B=1, H=2, HV=4, T=4000),
    "many": replace(ROWS, B=5, H=16, HV=32, T=130),
    "many-steep": replace(ROWS, B=5, H=16, HV=32, T=130, options=LOGS, decay="strong"),
}
LONG_TRAINING = TRAINING | {
    "long": (replace(ROWS, B=1, H=2, HV=4, T=1500, options=LOGS), torch.float32),
    "many-steep": (replace(ROWS, B=2, H=8, HV=16, T=130, options=LOGS, decay="strong"), torch.float32),
    "three": (replace(PACKED, H=1, HV=3, options=FREE), torch.bfloat16),
}


@pytest.fixture(autouse=True)
def no_known_calls():
    """No call is launched as one before it, for which a test has chosen."""
    _known_calls.calls.clear()
    yield
    _known_calls.calls.clear()


@pytest.fixture(params=["loop", "half", "scan_channels", "scan"])
def walking(request, monkeypatch):
    """`channel_loop` does it all, with whole states or with halves, or `scan_channels` scans, or `scan`."""
    tile = {"loop": CHANNEL_WHOLE, "half": CHANNEL_HALF}.get(request.param)
    monkeypatch.setattr(plan, "channel_tile", lambda p, chip: tile)
    monkeypatch.setattr(plan, "_scans", lambda p: p.writes_states or request.param == "scan")


@pytest.mark.parametrize(
    ("cell", "g_dtype"),
    [*((cell, torch.bfloat16) for cell in (*CELLS, *LONG)), *((cell, torch.float32) for cell in (*WIDE, *LONG))],
)
@torch.no_grad()
def test_against_the_recurrence(walking, cell, g_dtype):
    case, dtype = (CELLS | LONG)[cell], torch.bfloat16
    x = inputs_of(case, g_dtype)
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    wanted = recurrence(KDA, wide, x)
    with products_in(dtype):
        reference = KDA.op(**x, backend="torch")
    on_gpu = inputs_of(case, g_dtype, "cuda")
    assert flash_delta.explain(KDA.op, **on_gpu).backend == "hopper"
    results = KDA.op(**on_gpu)
    for got, want, rounded in zip(results, wanted, reference, strict=True):
        assert relative_error(got.cpu(), want) <= allowed(relative_error(rounded, want), dtype)
    for _ in range(100 if cell in LONG else 20):
        assert all(map(torch.equal, KDA.op(**on_gpu), results))


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("options", [RAW, LOGS])
@pytest.mark.parametrize("lengths", [None, (1700, 0, 800)])
@torch.no_grad()
def test_parts(monkeypatch, lengths, options, forgets):
    """Where gates forget, the loop scans parts, to the bits of its scan of the whole. If one channel of one head does
    not, `prepare` and `scan_channels` do it all, to the bits that they have without parts."""
    case = replace(ROWS, B=1, T=2600, H=8, HV=8, lengths=lengths, options=options)
    x = make_inputs(case, KDA, torch.bfloat16, "cuda")
    raw = "use_gate_in_kernel" in options
    x["g"] += 8.0 if raw else -3.0
    if not forgets:
        x["g"][..., 5, 77] = -30.0 if raw else -0.01

    def choose(scan):
        monkeypatch.setattr(plan, "choose_forward", lambda p, chip: scan)
        _known_calls.calls.clear()

    choose(Scan(CHANNEL_WHOLE if forgets else None))
    want = KDA.op(**x)
    choose(Scan(None, parts=4))
    for _ in range(20):
        assert all(map(torch.equal, KDA.op(**x), want))


@pytest.mark.parametrize("decay", ["mild", "strong"])
@pytest.mark.parametrize("options", [RAW, FREE, LOGS])
@torch.no_grad()
def test_no_token_changes_one_before_it(walking, options, decay):
    """Not by a bit, though it makes a chunk steep, has 32 tokens go in pieces, or moves the place where decays are
    taken apart."""
    x = make_inputs(replace(ROWS, B=1, HV=1, T=100, options=options, decay=decay), KDA, torch.bfloat16, "cuda")
    o, _ = KDA.op(**x)
    for t in range(99, 0, -1):
        for name in ("q", "k", "v", "g", "beta"):
            x[name].data[:, t:] = torch.randn_like(x[name][:, t:]) * 3
        x["beta"].data[:, t:] = x["beta"][:, t:].sigmoid()
        x["g"].data[:, t:] = x["g"][:, t:].abs() * (100 if "use_gate_in_kernel" in options else -100)
        assert torch.equal(KDA.op(**x)[0][:, :t], o[:, :t])


@pytest.mark.parametrize("cell", LONG_TRAINING)
def test_gradients(cell):
    case, g_dtype = LONG_TRAINING[cell]
    want = truth(KDA, inputs_of(case, g_dtype))
    with products_in(torch.bfloat16):
        reference = run_op(KDA, inputs_of(case, g_dtype), "torch")
    on_gpu = inputs_of(case, g_dtype, "cuda")
    got, like = run_op(KDA, on_gpu, "hopper"), run_op(KDA, on_gpu, "triton")
    for tensor, value in want.items():
        limit = allowed(relative_error(reference[tensor], value), torch.bfloat16)
        limit = max(limit, 1.2 * relative_error(like[tensor].cpu(), value))  # sums of one number a head scatter
        assert relative_error(got[tensor].cpu(), value) <= limit, tensor
    for _ in range(20 if cell in TRAINING else 100):
        assert all(map(torch.equal, run_op(KDA, on_gpu, "hopper").values(), got.values()))


@pytest.mark.parametrize("name", HOSTILE)
@torch.no_grad()
def test_wrong_bounds_touch_no_memory_but_the_calls(walking, name):
    """A call after it is right."""
    bounds = hostile(name, "cuda")
    case = replace(PACKED, T=T, lengths=(T, *(0 for _ in bounds[2:])))
    x = make_inputs(case, KDA, torch.bfloat16, "cuda")
    KDA.op(**x | {"cu_seqlens": bounds})
    torch.cuda.synchronize()
    wide = {n: t.double().cpu() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    want, _ = recurrence(KDA, wide, {n: t.cpu() if torch.is_tensor(t) else t for n, t in x.items()})
    assert relative_error(KDA.op(**x)[0].cpu(), want) < 2e-2


@torch.no_grad()
def test_no_number_of_states_compiles_anything():
    def inputs(B):
        return make_inputs(replace(ROWS, B=B, H=32, HV=32), KDA, torch.bfloat16, "cuda")

    KDA.op(**inputs(1))
    with flash_delta.forbid_compilation():
        for B in (2, 5, 3):
            KDA.op(**inputs(B))
