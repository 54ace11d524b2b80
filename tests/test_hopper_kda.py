"""Kimi Delta Attention on the Hopper backend, on a CPU: kernels in Gluon are emulated, Triton's interpreter runs
`scan`."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper import backend
from flash_delta.kernels.hopper.channel import forget, loop, plan, prepare, scan
from flash_delta.kernels.hopper.channel.backward import gradients
from flash_delta.kernels.hopper.channel.plan import Scan, choose_forward, plan_forward
from flash_delta.kernels.hopper.plans.tiles import CHANNEL_HALF, CHANNEL_WHOLE
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import EVERY, layouts_of
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence, truth
from flash_delta.testing.accuracy import run as run_op
from flash_delta.testing.cases import Case
from tests.gluon_emulator import emulate, launch, take_every_call
from tests.hostile_bounds import T, hostile, leave_unread
from workshop.tune.stages_hopper import STAGES

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
KDA = MEMBERS["kda"]
RAW = {
    "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True,
    "lower_bound": -5.0,
}  # fmt: skip
# Empty sequences, whole and partial chunks, one of one token, and guard rows.
PACKED = Case("", "", B=1, T=290, H=1, HV=2, K=128, V=128, lengths=(0, 1, 150, 0, 64, 65, 0), options=RAW)
ROWS = replace(PACKED, B=2, T=100, lengths=None)
ROW = replace(ROWS, B=1, HV=1)
FREE = {name: value for name, value in RAW.items() if name != "lower_bound"}
CELLS = {
    "packed": PACKED,
    "rows": ROWS,
    "three-heads": replace(ROWS, H=2, HV=6, T=70),
    "strong-decay": replace(ROW, T=130, decay="strong"),
    "bare": replace(ROWS, options={"use_gate_in_kernel": True, "lower_bound": -5.0}),
    "v-first": replace(ROW, options=RAW | {"state_v_first": True}),
    "no-initial-state": replace(ROW, initial_state=False),
    "correlated-keys": replace(ROW, keys="correlated", options=RAW | {"allow_neg_eigval": True}),
    "zero-keys": replace(ROW, keys="some zero"),
    "all-empty": replace(PACKED, T=4, lengths=(0, 0)),
    "free": replace(PACKED, options=FREE),
    "free-strong": replace(ROW, options=FREE, decay="strong"),
    "logs": replace(PACKED, options={}),
    "logs-strong": replace(ROW, options={"use_qk_l2norm_in_kernel": True}, decay="strong"),
    "logs-extreme": replace(ROWS, options={}, decay="extreme"),
    "logs-rising": replace(ROW, options={}, decay="rising"),
    "logs-zero": replace(ROW, options={}, decay="zero"),
    "promised": replace(ROW, options={"safe_gate": True, "lower_bound": -5.0}, decay="strong"),
}
WIDE = [name for name in CELLS if name.startswith(("free", "logs", "promised", "packed"))]  # with g in float32, too
TRAINING = {
    "logs": (replace(ROW, T=100, options={"use_qk_l2norm_in_kernel": True}), torch.float32),
    "logs-extreme": (replace(ROW, T=70, H=1, HV=2, options={}, decay="extreme"), torch.float32),
    "packed": (replace(PACKED, T=80, lengths=(0, 5, 0, 70, 0), options={}), torch.bfloat16),
    "free-strong": (replace(ROW, T=24, HV=3, options=FREE, decay="strong"), torch.bfloat16),
    "bounded": (replace(ROW, T=70, options=RAW), torch.bfloat16),
    "saved": (replace(ROW, T=70, options=RAW | {"disable_recompute": True}), torch.bfloat16),
}


def inputs_of(case, g_dtype=torch.bfloat16, device="cpu"):
    """In bfloat16; float32 gates are not those that bfloat16 holds."""
    x = make_inputs(case, KDA, torch.bfloat16, device)
    if g_dtype == torch.float32:
        x["g"] = (x["g"].detach().float() * 1.001).requires_grad_()
    return x


SCANS = {
    "loop": Scan(CHANNEL_WHOLE),
    "half": Scan(CHANNEL_HALF),
    "scan_channels": Scan(None),
    "scan": Scan(None),
    "parts": Scan(None, parts=3),
}


@pytest.fixture
def on_cpu(monkeypatch):
    """The backend with its kernels emulated, as the choice of every call. `channel_loop` does it all, with whole states
    or with halves, or `scan_channels` scans, or `scan`. Returns the problem, inputs and outputs of each call."""
    emulate(
        monkeypatch, (loop, "channel_loop"), (prepare, "prepare"), (scan, "scan_channels"), (gradients, "chunk_back"),
        (forget, "find_forgetting"),
    )  # fmt: skip

    def chosen(how):
        seen = []

        def forward(p, x):
            seen.append((p, x, backend.forward(p._replace(batch_invariant=how == "scan"), x)))
            return seen[-1][2]

        monkeypatch.setattr(plan, "choose_forward", lambda p, chip: SCANS[how])
        take_every_call(monkeypatch, forward, backend.backward)
        return seen

    return chosen


@pytest.mark.parametrize(
    ("cell", "g_dtype", "how"),
    [
        *((cell, torch.bfloat16, "scan_channels") for cell in CELLS),
        *((cell, torch.float32, "scan") for cell in WIDE),
        *((cell, torch.bfloat16, "loop") for cell in CELLS),
        *((cell, torch.float32, "loop") for cell in WIDE),
        *((cell, torch.bfloat16, "half") for cell in ("packed", "rows", "v-first", "no-initial-state", "free-strong")),
    ],
)
@torch.no_grad()
def test_against_the_recurrence(on_cpu, cell, g_dtype, how):
    dtype = torch.bfloat16
    x = inputs_of(CELLS[cell], g_dtype)
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    wanted = recurrence(KDA, wide, x)
    with products_in(dtype):
        reference = KDA.op(**x, backend="torch")
    on_cpu(how)
    for got, want, rounded in zip(KDA.op(**x), wanted, reference, strict=True):
        assert relative_error(got, want) <= allowed(relative_error(rounded, want), dtype)


@pytest.mark.parametrize("how", ["scan_channels", "loop", "parts"])
@pytest.mark.parametrize("name", ["first-above-0", "down-and-up", "all"])
@torch.no_grad()
def test_wrong_bounds_leave_no_tensor(on_cpu, monkeypatch, name, how):
    """An address that is beyond a tensor is an error of the emulator or of the bounds' watch."""
    leave_unread(monkeypatch)
    bounds = hostile(name, "cpu")
    x = make_inputs(replace(PACKED, T=T, HV=1, lengths=(T, *(0 for _ in bounds[2:]))), KDA, torch.bfloat16)
    on_cpu(how)
    KDA.op(**(x | {"cu_seqlens": bounds}))


@pytest.mark.parametrize(
    ("form", "decay", "how"),
    [
        ("bounded", "mild", "scan_channels"),
        ("steep", "mild", "scan_channels"),
        ("bounded", "mild", "loop"),
        ("bounded", "strong", "loop"),
        ("steep", "mild", "loop"),
        ("steep", "strong", "loop"),
        ("steep", "extreme", "loop"),
    ],
)
@torch.no_grad()
def test_no_token_changes_one_before_it(on_cpu, form, decay, how):
    """Not by a bit, though its block's scores are made with the others', and though it makes a chunk steep, or moves
    the point where decays are taken apart."""
    logs = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    options = RAW if form == "bounded" else logs
    x = make_inputs(replace(ROW, T=100, options=options, decay=decay), KDA, torch.bfloat16)
    on_cpu(how)
    o, _ = KDA.op(**x)
    for t in (99, 70, 52, 45, 33, 17, 9):
        for name in ("q", "k", "v", "g", "beta"):
            x[name].data[:, t:] = torch.randn_like(x[name][:, t:]) * 3
        if form == "steep":
            x["g"].data[:, t:] = -100 * x["g"][:, t:].abs()
        assert torch.equal(KDA.op(**x)[0][:, :t], o[:, :t])


@pytest.mark.parametrize("falling", ["all", "a channel", "a token"])
@torch.no_grad()
def test_pieces(on_cpu, falling):
    """Where some channel falls too far 32 tokens go through `channel_loop` in pieces, 8 tokens or more in each."""
    x = inputs_of(replace(ROWS, T=100, options={}), torch.float32)
    where = {"all": (), "a channel": (..., 5), "a token": (0, slice(30, 100, 25))}[falling]
    x["g"].data[where] = -1000.0
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    want = recurrence(KDA, wide, x)
    with products_in(torch.bfloat16):
        reference = KDA.op(**x, backend="torch")
    on_cpu("loop")
    role = loop.channel_loop.fn.__globals__["gate_role"].__globals__
    ends, store = [], role["store_piece"]
    role["store_piece"] = lambda *given: ends.append(store(*given)) or ends[-1]
    got = KDA.op(**x)
    assert set(ends) == (set() if falling == "a token" else {8, 16, 24, 32})
    for o, exact, rounded in zip(got, want, reference, strict=True):
        assert relative_error(o, exact) <= allowed(relative_error(rounded, exact), torch.bfloat16)


@pytest.mark.parametrize(("options", "decay"), [(RAW, "mild"), (FREE, "strong")])
@torch.no_grad()
def test_no_bit_depends_on_borders(on_cpu, options, decay):
    """Programs of the loop hand states over (plans/tape.py)."""
    case = replace(PACKED, T=730, lengths=(330, 0, 130, 70, 200), options=options, decay=decay)
    seen, x = on_cpu("loop"), inputs_of(case)
    want = KDA.op(**x)
    p, x, _ = seen[0]
    taped = plan_forward(p, Chip("interpreter", 3), layouts_of(x), choice=Scan(CHANNEL_WHOLE, taped=True))
    (*got, _), memory = launch(taped, x)
    programs = taped.steps[-1].grid[0]
    assert memory["table of tape"][5 + 2 * programs : 5 + 4 * programs].sum() > 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("options", [RAW, {}])
@pytest.mark.parametrize("lengths", [None, (0, 500, 1, 20)])
@torch.no_grad()
def test_parts(on_cpu, lengths, options):
    """Where gates forget, sequences are scanned in parts, to the bits of a scan of the whole. In the second call one
    channel of one head does not forget, and `prepare` and `scan_channels` do it all."""
    case = replace(ROW, T=521, H=1, HV=2, lengths=lengths, options=options)
    x = inputs_of(case, torch.float32)
    raw = "use_gate_in_kernel" in options
    x["g"].data += 8.0 if raw else -3.0
    seen = on_cpu("loop")
    whole = KDA.op(**x)
    p, given, _ = seen[0]
    in_parts = plan_forward(p, Chip("interpreter", 1), layouts_of(given), choice=SCANS["parts"])
    programs = 2 * 2 * (1 if lengths is None else 4)
    (*parts, _), memory = launch(in_parts, given)
    assert all(map(torch.equal, parts, whole))
    assert memory["forgets"][:programs].tolist() == [1] * programs
    x["g"].data[..., 1, 77] = -30.0 if raw else -0.01
    (*parts, _), memory = launch(in_parts, given)
    assert 0 in memory["forgets"][:programs]
    on_cpu("scan_channels")
    assert all(map(torch.equal, KDA.op(**x), parts))


@pytest.mark.parametrize(("options", "parts"), [(RAW, 4), ({}, 4), (FREE, 1)])
@torch.no_grad()
def test_no_parts_without_a_bound(on_cpu, options, parts):
    """With raw gates without a bound nothing looks whether gates forget."""
    seen, chip = on_cpu("loop"), Chip("sm_90", 132)
    KDA.op(**inputs_of(replace(ROW, T=70, options=options), torch.float32))
    p, x, _ = seen[0]
    assert choose_forward(p._replace(T=2100, lengths=(2100,)), chip) == Scan(None, parts=parts)
    kernels = [step.kernel for step in plan_forward(p, chip, layouts_of(x), choice=EVERY).steps]
    assert (forget.find_forgetting in kernels) == (parts > 1)


@pytest.mark.parametrize("how", ["scan_channels", "loop"])
@torch.no_grad()
def test_parameters_may_be_missing(on_cpu, how):
    x = make_inputs(replace(ROWS, T=70, options={"use_gate_in_kernel": True, "lower_bound": -4.0}), KDA, torch.bfloat16)
    x["beta"] = torch.ones_like(x["beta"])
    x["A_log"], x["dt_bias"] = torch.zeros_like(x["A_log"]), torch.zeros_like(x["dt_bias"])
    on_cpu(how)
    want = KDA.op(**x)
    del x["A_log"], x["dt_bias"]
    assert all(map(torch.equal, KDA.op(**x), want))


@pytest.mark.parametrize("how", ["scan_channels", "loop"])
@torch.no_grad()
def test_tensors_that_no_descriptor_can_describe_are_copied(on_cpu, how):
    x = make_inputs(ROWS, KDA, torch.bfloat16)
    on_cpu(how)
    want = KDA.op(**x)
    for name in ("q", "k", "v", "g", "beta"):
        x[name] = x[name].data.mT.contiguous().mT
    assert all(map(torch.equal, KDA.op(**x), want))


@pytest.mark.parametrize(
    ("cell", "how"),
    [*((cell, "scan") for cell in TRAINING), *((cell, "loop") for cell in ("bounded", "logs", "free-strong"))],
)
def test_gradients(on_cpu, cell, how):
    """What `prepare` leaves for the backward pass, or makes for it where nothing has been saved; `chunk_back` or
    ``triton`` finds the gradients."""
    case, g_dtype = TRAINING[cell]
    want = truth(KDA, inputs_of(case, g_dtype))
    with products_in(torch.bfloat16):
        reference = run_op(KDA, inputs_of(case, g_dtype), "torch")
    on_cpu(how)
    got = run_op(KDA, inputs_of(case, g_dtype), "hopper")
    for tensor, value in want.items():
        limit = allowed(relative_error(reference[tensor], value), torch.bfloat16)
        assert relative_error(got[tensor], value) <= limit, tensor


@pytest.mark.parametrize("name", ["channel_loop", "channel_loop-half"])
def test_stages_of_the_tuner(on_cpu, name):
    on_cpu("loop")
    stage = STAGES[name]
    made = stage.make("cpu", B=1, T=70, H=1, HV=2)
    got, want = stage.launch(made, stage.tiles("sm_90a")[0]), stage.truth(made)
    assert all(relative_error(got[output], want[output]) < 1e-2 for output in ("o", "final_state"))
    with pytest.raises(ValueError, match="got gfx942"):
        stage.tiles("gfx942")


@pytest.mark.parametrize("cell", TRAINING)
def test_compiled_code_is_told_what_forward_saves(on_cpu, cell):
    case, g_dtype = TRAINING[cell]
    seen = on_cpu("scan")
    KDA.op(**inputs_of(case, g_dtype))
    p, x, made = seen[0]
    told, saved = ([(t.shape, t.dtype) for t in tensors] for tensors in (backend.empty_saved(p, x), made.saved))
    assert told == saved
    assert p.needs_grad
