"""Scalar options: any number will do for a number, what reaches a backend is Python's own, and no word is a flag.

The options are found in the signatures: one that is new fails here until it is said what it may be.
"""

import typing
from inspect import Parameter, signature

import numpy as np
import pytest
import torch
from torch import Tensor

import flash_delta
from flash_delta import layers, modules, ops
from flash_delta.ops import _known_calls
from flash_delta.ops.serving import Convolution, OutputNorm

B, T, H, D, SLOTS = 2, 18, 2, 8, 3  # K = V = D, so that states fit either layout
LEGAL = {  # by the option's name: numbers that every call below takes, whole ones first
    "scale": (2, 0.5),
    "lower_bound": (-5, -0.5),
    "eps": (1, 1e-5),
    "norm_eps": (1, 1e-5),
    "expand_k": (2, 0.5),
    "expand_v": (2, 0.5),
    "correction_factor": (2, 0.5),
    "gate_logit_normalizer": (2, 0.5),
    "rope_theta": (10, 10000.0),
    "chunk_size": (64, 16),
    "checkpoint_every": (64, 128),
    "max_prompts": (2, 0),
    "null_slot": (0, 3),
    "max_num_seqs": (2,),
    "hidden_size": (8, 16),
    "num_householder": (2, 1),
    "head_dim": (2, 4),
    "num_heads": (1, 2),
    "num_v_heads": (2, 4),
    "num_kv_heads": (1, 2),
    "kernel_size": (3, 1),
    "conv_size": (3, 1),
    "layer_idx": (0, 3),
}
UNREAD = {"use_graph", "layer_idx"}  # kept or taken for the caller's sake, and nothing depends on them
DEFINITIONS = {"naive_gdn_gate", "naive_kda_gate", "naive_kda_lowerbound_gate"}  # plain PyTorch, for the reader
UNLIKE = (torch.tensor(2.0), "2", float("nan"), float("inf"), -float("inf"), True, [2.0], 2j, 1e39, 10**400)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def delta_rule(op, **changes):
    """One of the ops, with whatever tensors it names, in a call that lets every flag be either."""
    parameters = signature(op).parameters
    serving, kda = "state_pool" in parameters, op.__name__.endswith(("kda", "gdn2"))
    decode = op.__name__.startswith("decode")
    b, t = (B, 2) if decode else (1, T) if serving else (B, T)
    n = 2 if "num_householder" in parameters and changes.get("num_householder") != 1 else 1
    given = {
        "q": rand(b, t, H, D), "k": rand(b, n * t, H, D), "v": rand(b, n * t, H, D), "p": rand(b, t, H, D),
        "g": -rand(b, t, H, D) if kda else -rand(b, t, H), "beta": rand(b, n * t, H), "A_log": rand(H),
        "b": rand(b, t, H, D), "w": rand(b, t, H, D),
        "dt_bias": rand(H * D) if kda else rand(H), "initial_state": rand(B, H, D, D),
        "state_pool": rand(SLOTS, H, D, D), "cu_seqlens": torch.tensor([0, 1, T]) if serving and not decode else None,
        "read_indices": torch.arange(B), "state_v_first": False, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True, "lower_bound": -5.0, "num_householder": n,
    }  # fmt: skip
    if changes.get("checkpoint_every") is not None:
        given["checkpoint_indices"] = torch.full((B, 1), -1)
    given = {name: value for name, value in given.items() if name in parameters} | changes
    if not given.get("use_gate_in_kernel", True):
        given |= dict.fromkeys(given.keys() & {"A_log", "dt_bias"})
    return op(**given)


def output_norm(**changes):
    norm = OutputNorm(rand(B, 2, H, D), rand(D), **changes)
    return delta_rule(flash_delta.decode_kda, output_norm=norm)


def convolution(**changes):
    before = Convolution(rand(SLOTS, 3 * H * D, 4), rand(3 * H * D, 4), **changes)
    return delta_rule(flash_delta.decode_kda, convolution=before)


def layer(cls, **changes):
    heads = 2 if "num_kv_heads" in signature(cls).parameters else 1
    sizes = {"hidden_size": 8, "num_heads": heads, "head_dim": 4, "num_v_heads": 4, "lower_bound": -5.0}
    given = {name: value for name, value in sizes.items() if name in signature(cls).parameters} | changes
    made = cls(**given)
    return made(torch.ones(1, 3, made.hidden_size))


OTHERS = {
    "fused_gdn_gate": lambda **o: ops.fused_gdn_gate(-rand(B, T, H), rand(H), **o),
    "fused_kda_gate": lambda **o: ops.fused_kda_gate(-rand(B, T, H, D), rand(H), **o),
    "mix": lambda **o: ops.mix(
        (rand(B, T, H, D), rand(B, T, H, D), rand(B, T, H, D), -rand(B, T, H, D), rand(B, T, H), rand(B, T, H, D)),
        [rand(H * D, 4) for _ in range(3)],
        rand(H),
        rand(H * D),
        rand(D),
        **({"gate": "channel", "lower_bound": -5.0} | o),
    ),
    "rms_norm": lambda **o: modules.rms_norm(rand(T, D), rand(D), **({"eps": 1e-5} | o)),
    "gated_rms_norm": lambda **o: modules.gated_rms_norm(
        rand(T, D), rand(T, D), rand(D), **({"eps": 1e-5, "activation": "silu"} | o)
    ),
    "causal_conv1d": lambda **o: modules.causal_conv1d(rand(B, T, D), rand(D, 4), **o),
    "causal_conv1d_update": lambda **o: modules.causal_conv1d_update(rand(B, D), rand(B, D, 4), rand(D, 4), **o),
    "RMSNorm": lambda **o: made(modules.RMSNorm, **o),
    "GatedRMSNorm": lambda **o: made(modules.GatedRMSNorm, **o),
    "ShortConvolution": lambda **o: made(modules.ShortConvolution, **({"kernel_size": 4} | o)),
    "OutputNorm": output_norm,
    "Convolution": convolution,
}


def made(cls, **changes):
    it = cls(**({"hidden_size": 8} | changes))
    x = torch.ones(1, 3, it.weight.shape[0])
    return it(x, x) if cls is modules.GatedRMSNorm else it(x)


def callables():
    """All that the packages export, with the way to call it here."""
    for name in (n for n in ops.__all__ if n not in DEFINITIONS):
        public = getattr(ops, name)
        if isinstance(public, type) or name in ("explain", "forbid_compilation"):
            continue
        yield public, OTHERS.get(name) or (lambda op=public, **o: delta_rule(op, **o))
    for public in (*(getattr(modules, name) for name in modules.__all__), OutputNorm, Convolution):
        yield public, OTHERS[public.__name__]
    for cls in (getattr(layers, name) for name in layers.__all__ if not name.endswith("State")):
        yield cls, lambda cls=cls, **o: layer(cls, **o)


def options():
    """``(name of the callable, way to call it, option, its types)`` of all that are numbers or flags."""
    for public, call in callables():
        of = public.__init__ if isinstance(public, type) and not issubclass(public, tuple) else public
        hints = typing.get_type_hints(of)
        for name, parameter in signature(public).parameters.items():
            assert parameter.kind is not Parameter.VAR_KEYWORD
            types = set(typing.get_args(hints[name]) or (hints[name],))
            if types & {int, float, bool} and Tensor not in types:
                yield public.__name__, call, name, types


OPTIONS = list(options())
NUMBERS = [row for row in OPTIONS if bool not in row[3]]
FLAGS = [row for row in OPTIONS if bool in row[3]]


def ids(rows):
    return [f"{row[0]}-{row[2]}" for row in rows]


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    """A call is known again by values: True after 1 would be the call of before."""
    monkeypatch.setattr(_known_calls, "calls", _known_calls.Remembered())


def assert_own_numbers(problems):
    """Every field that is a number is Python's own, of the type that the field has; also in a problem's parts."""
    for p in problems:
        assert_own_numbers([part for part in p if hasattr(part, "_fields")])
        hints = typing.get_type_hints(type(p))
        for name, value in p._asdict().items():
            types = [t for t in typing.get_args(hints[name]) or (hints[name],) if t in (int, float, bool)]
            assert not types or value is None or type(value) in types, (name, value)


def test_what_is_an_option_is_found():
    found = {(name, option) for name, _, option, _ in OPTIONS}
    assert {("chunk_kda", "scale"), ("rms_norm", "eps"), ("OutputNorm", "eps"), ("decode_kda", "lower_bound")} <= found
    assert {("prefill_kda", "max_prompts"), ("GatedDeltaNet", "norm_eps"), ("chunk_comba", "state_v_first")} <= found
    assert {option for _, _, option, types in OPTIONS if bool not in types} <= LEGAL.keys(), "what may the new one be?"


@pytest.mark.parametrize(("name", "call", "option", "types"), NUMBERS, ids=ids(NUMBERS))
def test_any_number_will_do(name, call, option, types, problems):
    if None in types or type(None) in types:
        call(**{option: None})
    for value in LEGAL[option]:
        kinds = [int, np.int32, np.int64] if value == int(value) else []
        kinds += [float, np.float32, np.float64] if float in types else []
        for kind in kinds:
            call(**{option: kind(value)})
    assert_own_numbers(problems)


@pytest.mark.parametrize(("name", "call", "option", "types"), NUMBERS, ids=ids(NUMBERS))
def test_what_is_no_such_number_is_refused(name, call, option, types):
    if option in UNREAD:
        return
    wrong = UNLIKE if float in types else (*UNLIKE, 2.0, 2.5, -1)
    for value in wrong:
        with pytest.raises(ValueError, match=rf"{'eps' if 'eps' in option else option}: expected .*, got "):
            call(**{option: value})
    if type(None) not in types:
        with pytest.raises(ValueError, match=rf"{'eps' if 'eps' in option else option}: expected .*, got None"):
            call(**{option: None})


@pytest.mark.filterwarnings("ignore:.* is the old name of state_v_first:DeprecationWarning")
@pytest.mark.parametrize(("name", "call", "option", "types"), FLAGS, ids=ids(FLAGS))
def test_flags(name, call, option, types, problems):
    for value in (False, np.False_, 0):
        call(**{option: value})
    if option != "head_first":
        call(**{option: np.True_})
    assert_own_numbers(problems)
    if option in UNREAD:
        return
    for value in ("False", 2, torch.tensor(True), 0.5):
        with pytest.raises(ValueError, match=rf"{option}: expected "):
            call(**{option: value})


@pytest.mark.parametrize("values", [(1, 1e-5), (1e-5, 1)], ids=["int-first", "float-first"])
def test_norms_of_one_kind_have_floats(values):
    """What a kernel is compiled for: the type of what the problem holds."""
    from flash_delta.ops._check.elementwise import describe_norm
    from flash_delta.problem import Normalized

    found = [describe_norm(Normalized(rand(T, D), rand(D)), "rms_norm", None, eps) for eps in values]
    assert [p.eps for p in found] == list(values)
    assert all(type(p.eps) is float for p in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_int_and_then_a_float_on_a_gpu():
    """In one process: the first one's type is what the kernel was compiled for."""
    x = torch.randn(5, 64, device="cuda", requires_grad=True)
    for eps in (1, 1e-5):
        norm = modules.RMSNorm(64, eps=eps).cuda()
        y = norm(x)
        y.sum().backward()
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), norm.weight, eps))
    q, g, beta = (torch.rand(shape, device="cuda") for shape in ((1, 70, 2, 64), (1, 70, 2, 64), (1, 70, 2)))
    q = q.requires_grad_()
    raw = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    for bound in (-5, -4.5):
        o, _ = ops.chunk_kda(q, q, q, g, beta, lower_bound=bound, **raw)
        want, _ = ops.chunk_kda(q, q, q, g, beta, lower_bound=bound, **raw, backend="torch")
        o.sum().backward()
        torch.testing.assert_close(o, want, rtol=1e-2, atol=1e-3)
        pool, slots = torch.zeros(1, 2, 64, 64, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
        tokens = (t[:, :1].detach() for t in (q, q, q, g, beta))
        ops.decode_kda(*tokens, pool, slots, slots, lower_bound=bound, state_v_first=True, **raw)
