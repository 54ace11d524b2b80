"""A call like an earlier one is not looked at again: what is launched from memory, what makes a call another one."""

import threading
import weakref
from itertools import chain, pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from flash_delta.kernels.runtime import calls, launch
from flash_delta.kernels.runtime.calls import Call, Shape
from flash_delta.kernels.runtime.fastcall import signature
from flash_delta.modules.convolution import causal_conv1d, causal_conv1d_update
from flash_delta.modules.norm import gated_rms_norm, rms_norm
from flash_delta.ops import _backend, _known_calls
from flash_delta.ops import _elementwise as _modules
from flash_delta.problem import KnownCall, Normalized, NormProblem, addresses

KIND = ("test",)


class Launched(list):
    """Stands for a call's launches."""

    def launch(self, device, *groups, own=False):
        self.append(addresses(chain(*groups)))


@pytest.fixture
def known(monkeypatch):
    """A call on tensors of the CPU that was launched."""
    monkeypatch.setattr(launch, "several_devices", lambda: False)
    p = NormProblem("rms_norm", 8, torch.float32, torch.device("cpu"), eps=1e-5, activation=None)
    return KnownCall(p, None, False, {KIND: Shape(0, None, Launched())})


@pytest.fixture
def call(known):
    x = Normalized(torch.randn(4, 8), torch.randn(8))
    return Call(known.problem, x, (), known.launches[KIND], True)


def test_the_next_call_gets_its_own_addresses(call, known):
    launch.remember(call, call.x)
    other, y = Normalized(torch.randn(4, 8), call.x.weight, torch.randn(4, 8)), torch.empty(4, 8)
    assert launch.again(known, KIND, other, made=(y,)) == (y,)
    assert call.shape.replay == [[t.data_ptr() for t in (*other, y)]]
    assert launch.again(known, ("another",), other, made=(y,)) is None
    assert launch.again(None, KIND, other, made=(y,)) is None


def test_c_is_compiled_beside_the_first_calls_kernels(call, monkeypatch):
    loaded = []
    monkeypatch.setattr(launch.fastcall, "load", lambda: loaded.append(threading.current_thread()))
    monkeypatch.setattr(launch, "_ready", set())
    for _ in range(2):
        launch.run(call, lambda c: None)
    assert len(loaded) == 1
    assert loaded[0] is not threading.current_thread()
    assert len(call.shape.replay) == 2


def test_an_older_torch_has_no_c(call, monkeypatch):
    """Without the interface by which C reads tensors nothing loads it, and Triton's launcher launches."""
    assert calls.is_direct(torch.device("cuda"))
    monkeypatch.setattr(calls.fastcall, "API", None)
    monkeypatch.setattr(calls.fastcall, "load", lambda: pytest.fail("C cannot be loaded"))
    monkeypatch.setattr(launch, "_ready", set())
    assert not calls.is_direct(torch.device("cuda"))
    launch._compile((call, lambda c: None))


def test_copies_are_made_again(call, known):
    """Kernels that got a copy of an input must not get the input."""
    given = call.x._replace(weight=call.x.weight.clone())
    launch.remember(call, given)
    assert launch.again(known, KIND, given) is None
    launch.remember(call, call.x._replace(x=call.x.x.view(2, 2, 8)))
    assert launch.again(known, KIND, given) is not None, "the same memory in another shape is no copy"


def test_profilers_see_launches(call, known, monkeypatch):
    """By Triton's hooks, or in what kernels write down: both need Triton's launcher."""
    launch.remember(call, call.x)
    with monkeypatch.context() as m:
        m.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
        assert launch.again(known, KIND, call.x) is None
    with knobs.compilation.scope():
        knobs.compilation.instrumentation_mode = "consan"
        assert launch.again(known, KIND, call.x) is None
    assert launch.again(known, KIND, call.x) is not None


def test_other_devices_are_made_current(call, known, monkeypatch):
    entered = []
    monkeypatch.setattr(launch, "several_devices", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or torch.no_grad())
    launch.remember(call, call.x)
    known.problem = known.problem._replace(device=torch.device("cuda", 0))
    assert launch.again(known, KIND) is not None
    assert entered == [known.problem.device]


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
