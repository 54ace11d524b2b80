"""What a call promises or may not do: it is computed as said, refused by name, or warned of."""

import inspect
import warnings

import pytest
import torch
from prefill_truth import make_prefill
from prefill_truth import run as run_prefill
from serving_truth import DEVICES, make_call, needs_triton, run, slots

import flash_delta
from flash_delta import explain, ops
from flash_delta.modules import rms_norm
from flash_delta.ops import _backend, _known_calls
from flash_delta.ops.serving import Convolution, OutputNorm
from flash_delta.testing import MEMBERS, make_inputs
from flash_delta.testing.cases import Case

backends = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
TINY = {"H": 1, "HV": 2, "K": 8, "V": 8}
z = torch.zeros


def chunks(dtype=torch.float32, **sizes):
    """Arguments of `chunk_kda`, whose log decays are above and below -1."""
    x = make_inputs(Case("", "", B=1, **({"T": 20} | TINY | sizes)), MEMBERS["kda"], dtype)
    return {name: t.detach() if torch.is_tensor(t) else t for name, t in x.items()} | {"g": 10 * x["g"].detach()}


def results(op, x, backend):
    """o and the states that the op returns or leaves."""
    if "state_pool" in x:
        return (run if "decode" in op else run_prefill)("kda", x, backend)
    return getattr(flash_delta, op)(**x, backend=backend)


@backends
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda", "decode_kda", "prefill_kda"])
@torch.no_grad()
def test_a_bound_of_given_log_decays_means_the_same_in_every_op(op, backend):
    """Bitwise: a log decay below it counts as the bound. In decode and prefill `make_call` draws mild log decays."""
    made = {"decode_kda": make_call, "prefill_kda": make_prefill}.get(op)
    x = chunks() if made is None else made("kda", device=DEVICES[backend], **TINY)
    x = {name: t.to(DEVICES[backend]) if torch.is_tensor(t) else t for name, t in x.items()}
    bound = float(x["g"].mean())
    if op == "decode_kda":
        x["write_indices"] = slots([5, 6], x)
    got = results(op, x | {"lower_bound": bound}, backend)
    want = results(op, x | {"lower_bound": bound, "g": x["g"].clamp(min=bound)}, backend)
    unbounded = results(op, x, backend)
    for a, b, c in zip(got, want, unbounded, strict=True):
        assert torch.equal(a, b)
        assert not torch.allclose(a, c, rtol=1e-3)


def test_a_promise_without_a_bound_is_that_of_fla():
    x = chunks()
    assert explain(ops.chunk_kda, **x).problem.gate.bound is None
    assert explain(ops.chunk_kda, **x, safe_gate=True).problem.gate.bound == -5.0
    assert explain(ops.chunk_kda, **x, safe_gate=True, lower_bound=-2).problem.gate.bound == -2.0


def takes(op, name):
    return inspect.isfunction(op) and name in inspect.signature(op).parameters


GATED = [op for op in vars(ops).values() if takes(op, "use_gate_in_kernel")]


@pytest.mark.parametrize("op", GATED, ids=lambda op: op.__name__)
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_parameters_of_a_gate_that_does_not_run_are_refused(op, name):
    kind = op.__name__.split("_")[-1].replace("rule", "gdn")
    if takes(op, "state_pool"):
        x = (make_call if "decode" in op.__name__ else make_prefill)(kind, **TINY)
    else:
        member = next(member for member in MEMBERS.values() if member.name == op.__name__)
        x = make_inputs(Case("", "", T=3), member, torch.float32)
    with pytest.raises(
        ValueError, match=f"{op.__name__}: {name}: expected None .*use_gate_in_kernel=True.*, got Tensor"
    ):
        op(**x, **{name: z(2)})


def test_ops_with_a_gate_are_found():
    assert len(GATED) == 13


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"write_indices": [5, 5]}, "expected different slots, got slot 5 twice"),
        ({"write_indices": [[5, 6, 5], [7, 8, 4]]}, "expected different slots, got slot 5 twice"),
        ({"write_indices": [[5, 6, -1], [7, 5, 4]]}, "expected different slots, got slot 5 twice"),
        (
            {"write_indices": [1, 5]},
            "expected slots that no other row reads, got slot 1, which row 1 reads and row 0 writes",
        ),
        ({"write_indices": [4, 4], "write_pool": z(5, 3, 2, 8, 8)}, "expected different slots, got slot 4 twice"),
    ],
)
def test_rows_that_share_a_slot_are_refused_on_a_cpu(changes, said):
    x = make_call(**TINY)
    changes = {name: slots(value, x) if isinstance(value, list) else value for name, value in changes.items()}
    before = x["state_pool"].clone()
    with pytest.raises(ValueError, match=f"decode_gated_delta_rule: write_indices: {said}"):
        flash_delta.decode_gated_delta_rule(**x | changes)
    assert torch.equal(x["state_pool"], before)


@pytest.mark.parametrize("write", [[0, 1], [-1, 9], [5, -1]])
def test_rows_may_write_what_they_read_and_share_padding(write):
    x = make_call(**TINY)
    flash_delta.decode_gated_delta_rule(**x | {"write_indices": slots(write, x)})
    rows = x | {"write_indices": slots([1, 0], x), "write_pool": z(2, 3, 2, 8, 8)}
    flash_delta.decode_gated_delta_rule(**rows)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"write_indices": [3, 3]}, "write_indices: expected .*slot 3 twice"),
        ({"write_indices": [1, 5]}, "write_indices: expected .*slot 1, which row 1 reads and row 0 writes"),
        ({"checkpoint_indices": [[5], [0]], "checkpoint_every": 64}, None),  # the second sequence is too short
        ({"checkpoint_indices": [[3], [-1]], "checkpoint_every": 64}, "write_indices: .*slot 3 twice"),
        ({"checkpoint_indices": [3, 5], "checkpoint_offsets": [2, 4]}, None),  # beyond the second sequence
        ({"checkpoint_indices": [5, 5], "checkpoint_offsets": [2, 1]}, "checkpoint_indices: .*slot 5 twice"),
    ],
)
def test_sequences_that_share_a_slot_are_refused_on_a_cpu(changes, said):
    x = make_prefill(lengths=(70, 3), **TINY) | {"write_indices": torch.tensor([2, 3])}
    x |= {name: torch.tensor(value) if isinstance(value, list) else value for name, value in changes.items()}
    if said is None:
        x["write_indices"] = torch.tensor([2, 4])
        flash_delta.prefill_gated_delta_rule(**x)
        return
    with pytest.raises(ValueError, match=f"prefill_gated_delta_rule: {said}"):
        flash_delta.prefill_gated_delta_rule(**x)


@pytest.mark.parametrize("name", ["q", "v", "state_pool", "output_norm.gate"])
def test_an_output_over_another_argument_is_refused(name, monkeypatch):
    monkeypatch.setattr(_known_calls, "calls", _known_calls.Remembered())  # known calls are not checked again
    x = make_call(**TINY)
    x["output_norm"] = OutputNorm(torch.randn(2, 3, 2, 8), torch.ones(8))
    memory = torch.zeros(4096)
    out = memory[16 : 16 + 96].view(2, 3, 2, 8)
    old = x["output_norm"].gate if "." in name else x[name]
    shared = memory[64 : 64 + old.numel()].view(old.shape)
    changes = {"output_norm": x["output_norm"]._replace(gate=shared)} if "." in name else {name: shared}
    with pytest.raises(ValueError, match=f"out: expected memory that no other argument has, got memory of {name}"):
        flash_delta.decode_gated_delta_rule(**x | changes, out=out)
    apart = torch.zeros(4096)[64 : 64 + old.numel()].view(old.shape)
    changes = {"output_norm": x["output_norm"]._replace(gate=apart)} if "." in name else {name: apart}
    assert flash_delta.decode_gated_delta_rule(**x | changes, out=out) is out


@pytest.mark.parametrize("name", ["k", "A_log", "convolution.weight", "state_pool"])
def test_serving_has_no_gradients_to_give(name):
    x = make_call("gdn-raw", **TINY)
    weight = torch.randn(32, 4)
    x["convolution"] = Convolution(z(9, 32, 4), weight)
    (weight if "." in name else x[name]).requires_grad_()
    call = flash_delta.decode_gated_delta_rule
    with pytest.raises(ValueError, match=rf"{name}: expected a tensor without gradient .*torch.no_grad\(\)"):
        call(**x)
    with torch.no_grad():
        assert not call(**x).requires_grad
    with pytest.raises(ValueError, match=f"{name}: expected a tensor without gradient"):  # though the call is known
        call(**x)


class Kernels:
    """A backend that refuses everything."""

    @staticmethod
    def preference(problem):
        return 1, None

    @staticmethod
    def unsupported(problem):
        return "K is too wide"


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The problem of a call as if it were on a GPU, whose kernels refuse it."""
    load = _backend._find
    monkeypatch.setattr(_backend, "_find", lambda name, *more: load(name, *more) if name == "torch" else Kernels)
    problem = explain(ops.chunk_kda, **chunks()).problem
    return problem._replace(device=torch.device("cuda", 0))


def test_pytorch_on_a_gpu_is_warned_of(on_a_gpu):
    said = "chunk_kda: no kernel can run this, so it runs on 'torch', which is slow on a GPU; 'triton': K is too wide"
    with pytest.warns(UserWarning, match=said):
        assert _backend.choose_backend(on_a_gpu, None) == "torch"


def test_pytorch_is_not_warned_of_elsewhere(on_a_gpu):
    warnings.simplefilter("error")  # pytest restores the filters
    cpu, wide = on_a_gpu._replace(device=torch.device("cpu")), on_a_gpu._replace(dtype=torch.float64)
    assert [_backend.choose_backend(p, None) for p in (cpu, wide)] == ["torch", "torch"]
    assert _backend.choose_backend(on_a_gpu, "torch") == "torch"
    assert _backend.choose_backend(on_a_gpu, None, quiet=True) == "torch"
    assert _backend.Explain().of(on_a_gpu).backend == "torch"


def test_a_backend_can_be_turned_off(monkeypatch):
    x = chunks()
    monkeypatch.setenv(_backend.DISABLED, "hopper, triton")
    flash_delta.chunk_kda(**x)
    reasons = explain(ops.chunk_kda, **x).reasons
    assert reasons["hopper"] == reasons["triton"] == "cannot: FLASH_DELTA_DISABLE turns it off"
    with pytest.raises(ValueError, match="backend 'hopper' cannot run this: FLASH_DELTA_DISABLE turns it off"):
        flash_delta.chunk_kda(**x, backend="hopper")
    monkeypatch.setenv(_backend.DISABLED, "torch,triton")
    with pytest.raises(ValueError, match=r"no backend can run this.*'torch': FLASH_DELTA_DISABLE turns it off"):
        flash_delta.chunk_kda(**chunks(T=21))
    for norm in (rms_norm, torch.compile(rms_norm, backend="eager")):
        with pytest.raises(ValueError, match=r"'torch'.*: FLASH_DELTA_DISABLE turns it off"):
            norm(torch.ones(3, 4), torch.ones(4), 1e-5)
    monkeypatch.setenv(_backend.DISABLED, "cutlass")
    with pytest.raises(ValueError, match="FLASH_DELTA_DISABLE: expected some of triton, hopper, torch, got 'cutlass'"):
        flash_delta.chunk_kda(**chunks(T=22))
