"""GDN-2 on the Hopper backend, on a CPU: kernels in Gluon are emulated, Triton's interpreter runs the others."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from flash_delta.kernels.hopper.channel import forget
from flash_delta.kernels.hopper.channel.plan import choose_forward, plan_forward, plan_usual_backward
from flash_delta.kernels.runtime.chip import Chip
from flash_delta.kernels.runtime.plan import EVERY, layouts_of
from flash_delta.kernels.triton.backward.plan import plan_usual_backward as triton_back
from flash_delta.kernels.triton.forward.plan import plan_forward as triton_forward
from flash_delta.testing import MEMBERS, allowed, make_inputs, relative_error
from flash_delta.testing.accuracy import products_in, recurrence, truth
from flash_delta.testing.accuracy import run as run_op
from tests.test_hopper_kda import FREE, KDA, PACKED, RAW, ROW, ROWS, on_cpu  # noqa: F401 (a fixture)
from tests.test_hopper_kda_backward import CELLS as OF_KDA
from tests.test_hopper_kda_backward import SCATTERS
from workshop.gate.cases.members import RuleCase, problem_of

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
GDN2 = MEMBERS["gdn2"]
LOGS = {"use_qk_l2norm_in_kernel": True}
CELLS = {
    "packed": PACKED,
    "rows": ROWS,
    "three-heads": replace(ROWS, H=2, HV=6, T=70),
    "strong-decay": replace(ROW, T=130, decay="strong"),
    "bare": replace(ROWS, options={"use_gate_in_kernel": True, "lower_bound": -5.0}),
    "v-first": replace(ROW, options=RAW | {"state_v_first": True}),
    "no-initial-state": replace(ROW, initial_state=False),
    "correlated-keys": replace(ROW, keys="correlated", options=RAW | {"allow_neg_eigval": True}),
    "to-2": replace(ROWS, T=70, beta="to 2", options=LOGS),
    "some-zero": replace(ROW, T=70, beta="some zero", keys="some zero", options=LOGS),
    "free": replace(PACKED, options=FREE),
    "free-strong": replace(ROW, options=FREE, decay="strong"),
    "logs-extreme": replace(ROWS, options={}, decay="extreme"),
    "logs-rising": replace(ROW, options={}, decay="rising"),
    "promised": replace(ROW, options={"safe_gate": True, "lower_bound": -5.0}, decay="strong"),
}
WIDE = ["packed", "free", "logs-extreme", "promised"]  # with g in float32, too
# With one head the error of dA_log, one number, is chance: it was from 0.0005 to 0.022 in five seeds.
BACK = OF_KDA | {"v-first": replace(OF_KDA["v-first"], H=3, HV=3)}


def inputs_of(case, g_dtype=torch.bfloat16, member=GDN2, device="cpu"):
    """In bfloat16; float32 gates are not those that bfloat16 holds."""
    x = make_inputs(case, member, torch.bfloat16, device)
    if g_dtype == torch.float32:
        x["g"] = (x["g"].detach().float() * 1.001).requires_grad_()
    return x


@pytest.mark.parametrize(
    ("cell", "g_dtype", "how"),
    [
        *((cell, torch.bfloat16, "scan_channels") for cell in CELLS),
        *((cell, torch.float32, "scan") for cell in WIDE),
        *((cell, torch.bfloat16, "loop") for cell in CELLS),
        *((cell, torch.float32, "loop") for cell in WIDE),
        *((cell, torch.bfloat16, "half") for cell in ("packed", "rows", "free-strong")),
    ],
)
@torch.no_grad()
def test_against_the_recurrence(on_cpu, cell, g_dtype, how):  # noqa: F811
    x = inputs_of(CELLS[cell], g_dtype)
    wide = {n: t.double() for n, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    wanted = recurrence(GDN2, wide, x)
    with products_in(torch.bfloat16):
        reference = GDN2.op(**x, backend="torch")
    on_cpu(how)
    for got, want, rounded in zip(GDN2.op(**x), wanted, reference, strict=True):
        assert relative_error(got, want) <= allowed(relative_error(rounded, want), torch.bfloat16)


@pytest.mark.parametrize("how", ["scan_channels", "scan", "loop"])
@torch.no_grad()
def test_one_number_for_both_gates_is_kda(on_cpu, how):  # noqa: F811
    """To the bit where the number is a power of two, since then no rounding differs."""
    x = inputs_of(replace(ROWS, T=70, options=LOGS), member=KDA)
    on_cpu(how)
    for beta, near in ((0.5, 0.0), (1.0, 0.0), (0.7, 0.01)):
        x["beta"] = torch.full_like(x["beta"], beta)
        want = KDA.op(**x)
        gates = {"b": torch.full_like(x["g"], beta), "w": torch.full_like(x["v"], beta)}
        got = GDN2.op(**{name: t for name, t in x.items() if name != "beta"}, **gates)
        assert all(relative_error(a, b) <= near for a, b in zip(got, want, strict=True)), beta


@pytest.mark.parametrize(
    ("form", "decay", "how"),
    [
        ("bounded", "mild", "scan_channels"),
        ("steep", "mild", "scan_channels"),
        ("bounded", "strong", "loop"),
        ("steep", "mild", "loop"),
    ],
)
@torch.no_grad()
def test_no_token_changes_one_before_it(on_cpu, form, decay, how):  # noqa: F811
    x = inputs_of(replace(ROW, T=100, options=RAW if form == "bounded" else LOGS, decay=decay))
    on_cpu(how)
    o, _ = GDN2.op(**x)
    for t in (99, 52, 33, 17):
        for name in ("q", "k", "v", "g", "b", "w"):
            x[name].data[:, t:] = torch.randn_like(x[name][:, t:]) * 3
        if form == "steep":
            x["g"].data[:, t:] = -100 * x["g"][:, t:].abs()
        assert torch.equal(GDN2.op(**x)[0][:, :t], o[:, :t])


@pytest.mark.parametrize("how", ["scan_channels", "scan", "loop"])
@torch.no_grad()
def test_expanded_gates_are_copied(on_cpu, how):  # noqa: F811
    """And other tensors that no descriptor can describe."""
    x = inputs_of(replace(ROWS, T=70, options=RAW))
    x["b"], x["w"] = x["b"][:, :, :1].expand(x["b"].shape), x["w"][..., :1].expand(x["w"].shape)
    on_cpu(how)
    got = GDN2.op(**x)
    x["b"], x["w"] = x["b"].contiguous(), x["w"].data.mT.contiguous().mT
    assert all(map(torch.equal, GDN2.op(**x), got))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("how", ["scan_channels", "scan", "loop"])
def test_two_keys_in_turn_that_let_the_state_grow(on_cpu, how, norm):  # noqa: F811
    """The inverse of a chunk has entries of 1e6 there, which float16 cannot hold. Nothing becomes NaN or infinite."""
    turn = torch.tensor((116, 26)).deg2rad()
    k = torch.stack([turn.cos(), turn.sin()], 1).repeat(35, 1).view(1, 70, 1, 2)
    b = torch.tensor([[0.0, 2.0], [2.0, 0.0]]).repeat(35, 1).view(1, 70, 1, 2)
    k, b = (torch.nn.functional.pad(t, (0, 126)) for t in (k, b))
    one = torch.ones(1, 70, 1, 128)
    x = {"q": k, "k": k, "v": one, "g": 0 * one, "b": b, "w": one}
    x = {name: t.bfloat16().requires_grad_() for name, t in x.items()}
    on_cpu(how)
    o, _ = GDN2.op(**x, initial_state=torch.eye(128)[None, None] * 1e-3, use_qk_l2norm_in_kernel=norm)
    assert o.isfinite().all()
    assert all(t.isfinite().all() for t in torch.autograd.grad(o.sum(), x.values()))


@torch.no_grad()
def test_no_parts(on_cpu):  # noqa: F811
    """What is before a part may be stretched by erases, however far gates let it fall."""
    seen, chip = on_cpu("loop"), Chip("sm_90", 132)
    GDN2.op(**inputs_of(replace(ROW, T=70, options={}), torch.float32))
    p, x, _ = seen[0]
    assert choose_forward(p._replace(T=2100, lengths=(2100,)), chip).parts == 1
    kernels = [step.kernel for step in plan_forward(p, chip, layouts_of(x), choice=EVERY).steps]
    assert forget.find_forgetting not in kernels


@pytest.mark.parametrize(("forward", "backward"), [(plan_forward, plan_usual_backward), (triton_forward, triton_back)])
def test_only_the_forward_pass_writes_values(forward, backward):
    """The scans of the backward pass multiply by w themselves."""
    p, x = problem_of(RuleCase(gate="channel", strength=True))
    p, x, chip = p._replace(needs_grad=True), layouts_of(x), Chip("sm_90", 132)
    plans = forward(p, chip, x, choice=EVERY), backward(p, chip, x)
    assert ["w . v" in {memory.name for memory in plan.memory} for plan in plans] == [True, False]


TRAINING = {  # and cells of Kimi Delta Attention
    "logs": (replace(ROWS, T=100, options=LOGS), torch.float32),
    "logs-float32": (replace(ROW, T=70, decay="extreme", options={}), torch.float32),
    "shared": (replace(PACKED, T=80, lengths=(0, 5, 0, 70, 0)), torch.bfloat16),
    "shared-strong": (replace(ROW, T=24, HV=3, options=FREE, decay="strong"), torch.bfloat16),
    "to-2": (replace(ROW, T=70, options=RAW | {"allow_neg_eigval": True}), torch.bfloat16),
    "saved": (replace(ROW, T=70, options=RAW | {"disable_recompute": True}), torch.bfloat16),
}


@pytest.mark.parametrize("cell", [*TRAINING, *BACK])
def test_gradients(on_cpu, cell):  # noqa: F811
    """``triton`` finds those of chunks where value heads share keys or g is float32, and `chunk_back` all others."""
    case, g_dtype = TRAINING.get(cell) or (BACK[cell], torch.bfloat16)
    want = truth(GDN2, inputs_of(case, g_dtype))
    with products_in(torch.bfloat16):
        reference = run_op(GDN2, inputs_of(case, g_dtype), "torch")
    on_cpu("scan" if cell in ("saved", "left-by-forward") else "loop")
    got = run_op(GDN2, inputs_of(case, g_dtype), "hopper")
    assert {"db", "dw", "dg"} <= got.keys() == want.keys()
    for tensor, value in want.items():
        limit = allowed(relative_error(reference[tensor], value), torch.bfloat16)
        assert relative_error(got[tensor], value) <= max(limit, SCATTERS.get(tensor, 0.0)), tensor
