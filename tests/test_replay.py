"""A call like an earlier one is not looked at again: what is launched from memory, what makes a call another one."""

import threading
import weakref
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from flash_delta.kernels.runtime import fastcall, launch
from flash_delta.kernels.runtime import run as runner
from flash_delta.kernels.runtime.chip import Chip, Tile
from flash_delta.kernels.runtime.fastcall import signature
from flash_delta.kernels.runtime.plan import Plan, Step
from flash_delta.kernels.runtime.run import run
from flash_delta.modules.convolution import causal_conv1d, causal_conv1d_update
from flash_delta.modules.norm import gated_rms_norm, rms_norm
from flash_delta.ops import _backend, _known_calls
from flash_delta.ops import _elementwise as _modules
from flash_delta.problem import KnownCall, Normalized, NormProblem

ON_CPU = NormProblem("rms_norm", 8, torch.float32, torch.device("cpu"), None, 1e-5)
ON_GPU = ON_CPU._replace(device=torch.device("cuda", 0))


class Kernel:
    """Stands for one that Triton compiles."""

    params, src = (), ""

    def warmup(self, **options):
        return self


class Planner:
    """Plans one launch. ``asked``: the layouts that it got, call after call."""

    def __init__(self):
        self.asked, self.kernel = [], Kernel()

    def __call__(self, p, chip, x):
        self.asked.append(x)
        return Plan((Step(self.kernel, (1, 1, 1), Tile(4, 1), (), {}),) * (p.device.type == "cuda"), (), ())


class Launches(list):
    """Stands for a call's launches."""

    def __call__(self, device, groups):
        self.append((device, *groups))
        return self


@pytest.fixture
def given():
    return Normalized(torch.randn(4, 8), torch.randn(8))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The launches on a GPU that is none."""
    launched = Launches()
    monkeypatch.setattr(runner, "on", lambda device: nullcontext())
    monkeypatch.setattr(runner, "chip_of", lambda device: Chip("sm_90", 132))
    monkeypatch.setattr(runner, "ensure_context", lambda device: None)
    monkeypatch.setattr(runner, "compiled", {})
    monkeypatch.setattr(runner, "Launched", lambda *_: launched)
    monkeypatch.setattr(runner.ByTriton, "__call__", lambda _, *call: launched(*call))
    return launched


def test_the_next_call_gets_its_own_tensors(given):
    planner, launches = Planner(), Launches()
    other, known = given._replace(x=torch.randn(4, 8)), KnownCall(ON_CPU, None, False, {planner: launches})
    for x in (given, other):
        assert run(planner, ON_CPU, x, known=known) is launches
        assert launches.pop()[1] is x
    assert planner.asked == []
    another = Planner()
    for plan, keeps in ((another, known), (planner, None)):
        assert run(plan, ON_CPU, other, known=keeps) == ()
        assert (launches, len(plan.asked)) == ([], 1)


def test_c_is_compiled_beside_the_first_calls_kernels(given, on_a_gpu, monkeypatch):
    loaded, planner = [], Planner()
    monkeypatch.setattr(fastcall, "loaded", None)
    monkeypatch.setattr(fastcall, "load", lambda: loaded.append(threading.current_thread()))
    for _ in range(2):
        run(planner, ON_GPU, given)
    assert len(loaded) == 1
    assert loaded[0] is not threading.current_thread()
    assert len(on_a_gpu) == 2


def test_an_older_torch_has_no_c(given, on_a_gpu, monkeypatch):
    """Without the interface by which C reads tensors nothing loads it, and Triton's launcher launches."""
    assert launch.is_direct(ON_GPU.device)
    monkeypatch.setattr(fastcall, "API", None)
    monkeypatch.setattr(fastcall, "load", lambda: pytest.fail("C cannot be loaded"))
    monkeypatch.setattr(runner, "Launched", lambda *_: pytest.fail("C cannot launch"))
    assert not launch.is_direct(ON_GPU.device)
    run(Planner(), ON_GPU, given)
    assert len(on_a_gpu) == 1


def test_profilers_see_launches(given, on_a_gpu, monkeypatch):
    """By Triton's hooks, or in what kernels write down: both need Triton's launcher."""
    planner, kept = Planner(), Launches()
    known = KnownCall(ON_GPU, None, False, {planner: kept})
    monkeypatch.setattr(runner, "several_devices", lambda: False)
    with monkeypatch.context() as m:
        m.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
        run(planner, ON_GPU, given, known=known)
    with knobs.compilation.scope():
        knobs.compilation.instrumentation_mode = "consan"
        run(planner, ON_GPU, given, known=known)
    assert (len(on_a_gpu), len(kept), runner.compiled) == (2, 0, {})
    run(planner, ON_GPU, given, known=known)
    assert (len(on_a_gpu), len(kept)) == (2, 1)


def test_other_devices_are_made_current(given, monkeypatch):
    entered, planner, launches = [], Planner(), Launches()
    monkeypatch.setattr(runner, "several_devices", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or torch.no_grad())
    run(planner, ON_GPU, given, known=KnownCall(ON_GPU, None, False, {planner: launches}))
    assert entered == [ON_GPU.device]
    assert launches == [(ON_GPU.device, given)]


def test_signatures_tell_calls_apart():
    x = torch.randn(64, 8)
    views = (x, x[:, :4], x[:32], x.t(), x[1:33], x.half(), x.flatten()[1:257].view(32, 8), x.to("meta"), None)
    assert len({tuple(signature([view])) for view in views}) == len(views) - 1, "x[1:33] is as x[:32]"


BAD = [
    (lambda x, w: causal_conv1d(x, w[:4]), r"weight: expected a tensor \[8, W\]"),
    (lambda x, w: causal_conv1d(x[0], w), r"x: expected a tensor \[B, T, D\]"),
    (lambda x, w: causal_conv1d(x, w, x[0, 0, :4]), r"bias: expected a tensor \[8\]"),
    (lambda x, w: causal_conv1d(x, w, None, "relu"), "activation: expected 'silu' or None"),
    (lambda x, w: causal_conv1d(x, w, initial_state=w), r"initial_state: expected a tensor \[1, 8, 4\]"),
    (
        lambda x, w: causal_conv1d(x, w, cu_seqlens=torch.zeros(2)),
        "cu_seqlens: expected dtype torch.int32 or torch.int64",
    ),
    (lambda x, w: causal_conv1d_update(x[0], w, w), r"state: expected a tensor \[5, 8, 4\]"),
    (lambda x, w: rms_norm(x, w, 1e-5), r"weight: expected a tensor \[D\]"),
    (lambda x, w: gated_rms_norm(x, x[:, :1], w[:, 0], 1e-5, "silu"), r"gate: expected a tensor \[1, 5, 8\]"),
    (lambda x, w: gated_rms_norm(x, x, w[:, 0], 1e-5, "relu"), "activation: expected one of"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_what_is_wrong_is_refused_after_calls_that_were_right(wrong, message):
    x, w = torch.randn(1, 5, 8), torch.randn(8, 4)
    for _ in range(2):
        causal_conv1d(x, w)
        causal_conv1d_update(x[0], torch.zeros(5, 8, 4), w)
        gated_rms_norm(x, x, w[:, 0], 1e-5, "silu")
        with pytest.raises(ValueError, match=message):
            wrong(x, w)


def test_a_call_around_the_rule_is_looked_at_once(monkeypatch):
    """Once more if a gradient, another backend or an option is wanted; never while nothing but values changes."""
    described = []
    choose = _modules.choose_backend
    monkeypatch.setattr(_modules, "choose_backend", lambda *x: described.append(x) or choose(*x))
    monkeypatch.setattr(_known_calls, "calls", _known_calls.Remembered())
    monkeypatch.delenv(_backend.ENVIRONMENT, raising=False)
    x, w = torch.randn(1, 5, 8), torch.randn(8, 4)
    want = causal_conv1d(x, w)[0]
    assert torch.equal(causal_conv1d(x.clone(), w)[0], want)
    assert len(described) == 1
    for number, again in enumerate((lambda: causal_conv1d(x, w, None, "silu"), lambda: causal_conv1d(x[:, :3], w)), 2):
        again()
        assert len(described) == number
    assert causal_conv1d(x, w.requires_grad_())[0].requires_grad
    monkeypatch.setenv(_backend.ENVIRONMENT, "torch")
    causal_conv1d(x, w)
    assert len(described) == 5


class Found:
    def __init__(self, key):
        self.key = key


def test_a_call_that_comes_again_and_again_is_not_forgotten():
    """However many others come; they are, one by one, those that were not asked for."""
    known, kept = _known_calls.Remembered(), weakref.WeakSet()

    def remember(key):
        known[key] = found = Found(key)
        kept.add(found)

    remember("decode")
    decode, sizes = known["decode"], [1]
    for length in range(20 * _known_calls.MOST):
        assert known[length] is None
        remember(length)
        assert known[length].key == length
        if length % (_known_calls.MOST // 4) == 0:
            assert known["decode"] is decode
        sizes.append(len(kept))
    assert max(abs(b - a) for a, b in pairwise(sizes)) == 1
    assert max(sizes) <= 2 * _known_calls.MOST
    assert known[length - _known_calls.MOST] is not None, "of an older generation"
    assert known[0] is None
    known.clear()
    assert known["decode"] is None
