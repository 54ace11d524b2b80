"""How large beta can be: what each way to an op says about it, and betas near 2."""

import pytest
import torch
import torch.nn.functional as F
from tiny_layers import DELTA_LAYERS, random

import flash_delta
from flash_delta.integrations.fla import ops as fla
from flash_delta.integrations.fla.takeover.door import Door
from flash_delta.integrations.fla.takeover.table import TABLE
from flash_delta.reference.recurrent import recurrent
from flash_delta.testing import assert_accurate, relative_error

CHUNKS = ("chunk_gated_delta_rule", "chunk_kda", "chunk_delta_rule", "chunk_comba")
TOKENS = ("fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
GATES = ("chunk_gdn2", "fused_recurrent_gdn2")  # of which b is said how large it can be
POOLS = tuple(f"{kind}_{rule}" for kind in ("prefill", "decode") for rule in ("gated_delta_rule", "kda"))
NAMES = (*CHUNKS, *TOKENS, *POOLS)
IN_FLA = (*CHUNKS[:2], *TOKENS)  # fla's functions that have the argument
DOORS = {taken.ours.__name__: Door(taken, taken.ours) for taken in TABLE}
SAID = {  # most_beta of a beta that is given, and of a logit
    "nothing": ({}, 2, 1),
    "None": ({"allow_neg_eigval": None}, 2, 1),
    "False": ({"allow_neg_eigval": False}, 1, 1),
    "True": ({"allow_neg_eigval": True}, 2, 2),
}


def call(name, T=5, H=1, K=8, beta=1.999, dtype=torch.float32, device="cpu"):
    """The op's arguments for one key again and again, without a decay: nothing is ever forgotten."""
    gen = torch.Generator().manual_seed(0)
    q, v = torch.randn(2, 1, T, H, K, generator=gen)
    k = torch.randn(1, 1, H, K, generator=gen).expand(1, T, H, K)
    x = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v, "beta": torch.full((1, T, H), beta)}
    if name == "chunk_comba":
        x["p"] = x["k"]
    if name != "chunk_delta_rule":
        x["g"] = torch.zeros(1, T, H, *([K] if name.endswith(("kda", "gdn2")) else []))
    if name in GATES:
        x["b"], x["w"] = (x["beta"][..., None].expand(1, T, H, K) for _ in range(2))
        del x["beta"]
    x = {n: t.to(device, dtype) for n, t in x.items()}
    if name in POOLS:
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        x |= {"state_pool": torch.zeros(1, H, K, K, device=device), "state_v_first": False}
        x |= {"read_indices": slots, "write_indices": slots}
    if name.startswith("prefill"):
        x["cu_seqlens"] = torch.tensor([0, T], device=device)
    return x


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("name", NAMES + GATES)
def test_ops(name, said, problems):
    option, given, logit = SAID[said]
    op = getattr(flash_delta, name)
    op(**call(name), **option)
    op(**call(name), use_beta_sigmoid_in_kernel=True, **option)
    assert [p.most_beta for p in problems] == [given, logit]
    assert [p.beta_range for p in problems] == [1, logit]


def test_without_beta(problems):
    for name in ("chunk_comba", "fused_recurrent_gated_delta_rule"):
        x = call(name) | {"beta": None}
        getattr(flash_delta, name)(**x, allow_neg_eigval=False)
        getattr(flash_delta, name)(**x)
    flash_delta.chunk_simple_gla(*(x[n] for n in ("q", "k", "v", "g")))
    assert [p.most_beta for p in problems] == [1] * 5


@pytest.mark.parametrize("said", SAID)
def test_compiled(said, problems):
    """The operator that torch.compile calls has it, too."""
    option, given, _ = SAID[said]
    compiled = torch.compile(flash_delta.chunk_delta_rule, backend="eager", fullgraph=True)
    compiled(**call("chunk_delta_rule"), **option)
    assert problems[-1].most_beta == given


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("name", IN_FLA)
def test_names_of_fla(name, said, problems):
    """Their default is False, so it says nothing: by name, by position, and through `register`."""
    option, x = SAID[said][0], call(name)
    getattr(fla, name)(**x, **option)
    DOORS[name].run(**x, **option)
    DOORS[name].run(**x, **option, use_beta_sigmoid_in_kernel=True)
    assert DOORS[name].refusal((), x | option) is None
    before = [None, False, False] if name == "chunk_gated_delta_rule" else []  # the arguments after scale
    if before:
        values = [x[n] for n in ("q", "k", "v", "g", "beta")]
        getattr(fla, name)(*values, None, *before, False, *option.values())
    assert [p.most_beta for p in problems] == [2, 2, SAID[said][2], 2][: len(problems)]


@pytest.mark.parametrize("name", [name for name in DELTA_LAYERS if not name.startswith("gla")])
def test_layers(name, problems):
    """They say it of a beta that is given, too ("delta-bare" has no b_proj)."""
    layer = DELTA_LAYERS[name]().double()
    layer(random(2, 5, layer.hidden_size))
    rules = [p.most_beta for p in problems if hasattr(p, "most_beta")]
    assert rules == [2 if layer.allow_neg_eigval else 1]


def exact(x):
    """o and the final state by the recurrence, of the op's own inputs."""
    tokens = {n: x[n].double().cpu() for n in ("q", "k", "v", "g", "beta", "p") if n in x}
    return recurrent(**tokens, erase="undecayed" if "p" in x else "decayed")


def in_pieces(name, x, **options):
    """o and the final state of three calls, each of which continues the one before."""
    op, outputs, state = getattr(flash_delta, name), [], None
    for some in zip(*(x[n].tensor_split(3, 1) for n in ("q", "k", "v", "beta")), strict=True):
        piece = x | dict(zip(("q", "k", "v", "beta"), some, strict=True))
        piece |= {n: x[n][:, : some[0].shape[1]] for n in ("g", "p") if n in x}
        if name.startswith("prefill"):
            piece["cu_seqlens"] = torch.tensor([0, some[0].shape[1]], device=some[0].device)
        if name in POOLS:
            outputs.append(op(**piece, **options))
            state = x["state_pool"]
        else:
            o, state = op(**piece, **options, initial_state=state, output_final_state=True)
            outputs.append(o)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_one_key_again_and_again(name, dtype):
    """Each token nearly reflects the state. Errors that grow by little in a token show after some chunks."""
    if name in POOLS and dtype == torch.float64:
        pytest.skip("pools have at most float32")
    x = call(name, T=30 if name.startswith("decode") else 300, dtype=dtype)
    got = in_pieces(name, x, allow_neg_eigval=True)
    for what, a, b in zip(("o", "final_state"), got, exact(x), strict=True):
        assert_accurate(what, a, b, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("option", [{}, {"allow_neg_eigval": True}], ids=["None", "True"])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", NAMES)
def test_one_key_again_and_again_on_a_gpu(name, backend, option):
    """0.2 of o and 0.3 of the state are what rounding the keys alone may cost."""
    T, sizes = 48 if name.startswith("decode") else 768, {"H": 4, "K": 128, "dtype": torch.bfloat16, "device": "cuda"}
    piece = call(name, T=T // 3, **sizes)
    if flash_delta.explain(getattr(flash_delta, name), **piece, backend=backend).backend is None:
        pytest.skip(f"{backend} does not run it")
    x = call(name, T=T, **sizes)
    for found, want, most in zip(in_pieces(name, x, **option, backend=backend), exact(x), (0.2, 0.3), strict=True):
        assert relative_error(found.cpu(), want) <= most
