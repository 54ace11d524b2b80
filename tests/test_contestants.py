"""The adapters of the benchmark: those that run on a CPU compute the same function, the others say why they cannot."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flash_delta import (
    chunk_gated_delta_rule,
    chunk_kda,
    decode_gated_delta_rule,
    decode_kda,
    fused_recurrent_gated_delta_rule,
)
from flash_delta.testing import (
    Workload,
    assert_accurate,
    judge,
    make_tensors,
    output_gradient,
)
from flash_delta.testing.large import run_workload
from workshop.bench.contestants import NAMES, load
from workshop.bench.contestants.call import NO_CHOICE
from workshop.bench.floor import floor
from workshop.bench.runner import PEERS_ALLOWED
from workshop.bench.workloads import WORKLOADS
from workshop.check.elementwise import judge_elementwise, make_elementwise

ROOT = Path(__file__).parent.parent
TINY = {"dtype": "float32", "K": 16, "V": 24}
ROWS = {
    "gdn forward": Workload("t", "forward", "gdn", 2, 4, 2, 100, packed=False, l2norm=True, **TINY),
    "gdn forward, one packed sequence": Workload("t", "forward", "gdn", 2, 4, 1, 100, **TINY),
    "gdn training": Workload("t", "training", "gdn", 2, 4, 1, 100, packed=False, states=False, **TINY),
    "gdn decode": Workload("t", "decode", "gdn", 2, 4, 3, 1, packed=False, l2norm=True, raw=True, **TINY),
    "kda forward": Workload("t", "forward", "kda", 2, 2, 1, 100, l2norm=True, raw=True, **TINY),
    "kda forward, unbounded": Workload("t", "forward", "kda", 2, 2, 1, 100, raw=True, gates="unbounded", **TINY),
    "kda training": Workload("t", "training", "kda", 2, 2, 1, 100, states=False, **TINY),
    "kda decode": Workload("t", "decode", "kda", 2, 2, 3, 1, packed=False, l2norm=True, raw=True, **TINY),
}


def results(name: str, workload: Workload) -> dict[str, torch.Tensor]:
    x = make_tensors(workload, "cpu")
    call = load(name).prepare(workload, x)
    o, state = call.run()
    found = {"o": o}
    if workload.states:
        found["final_state"] = state.mT if call.state_v_first else state
    if workload.kind == "training":
        wanted = {n: t for n, t in call.inputs.items() if t.requires_grad}
        assert wanted.keys() == {"q", "k", "v", "g", "beta"}
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(o, list(wanted.values()), do)
        found |= {f"d{n}": d for n, d in zip(wanted, gradients, strict=True)}
    assert not any(t.requires_grad for t in x.values())
    return found


@pytest.mark.parametrize("row", ROWS)
def test_ours_and_the_fallback_of_transformers_agree(row):
    ours, theirs = (results(name, ROWS[row]) for name in ("flash_delta", "transformers"))
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        assert_accurate(name, t, theirs[name].double(), torch.float32)


def test_a_row_of_gated_delta_product():
    row = Workload("t", "training", "gdp", 2, 4, 2, 50, states=False, l2norm=True, updates=2, **TINY)
    assert row.name == "2/4 2x50, 2 updates a token, K = 16, V = 24 float32"
    x = make_tensors(row, "cpu")
    call = load("flash_delta").prepare(row, x)
    wanted = {n: t for n, t in call.inputs.items() if t.requires_grad}
    o, _ = call.run()
    assert o.shape == output_gradient(x).shape == (1, 100, 4, 24)
    gradients = torch.autograd.grad(o, list(wanted.values()), output_gradient(x))
    found = {"o": o} | {f"d{n}": d for n, d in zip(wanted, gradients, strict=True)}
    assert found["dk"].shape[1] == 2 * found["dq"].shape[1]
    assert all(error < 1e-5 for error, _ in judge(row, x, found).values())
    once = replace(row, updates=1)
    assert floor(once).flops < floor(row).flops < 2 * floor(once).flops
    assert floor(once) == floor(replace(once, member="gdn"))


@pytest.mark.parametrize("raw", [False, True])
def test_a_row_of_gated_delta_net_2(raw):
    """On the backend that the call chooses and by name, with strengths that are given."""
    row = Workload("t", "training", "gdn2", 2, 2, 1, 100, states=False, l2norm=True, raw=raw, **TINY)
    x = make_tensors(row, "cpu")
    assert 0 < float(x["b"].min()) < float(x["b"].max()) < 1
    assert ("A_log" in x) == raw
    for name, backend in (("flash_delta", None), ("flash_delta", "torch")):
        call = load(name).prepare(row, x, backend)
        wanted = {n: t for n, t in call.inputs.items() if t.requires_grad}
        assert wanted.keys() >= {"q", "k", "v", "g", "b", "w"}
        assert "beta" not in wanted
        o, _ = call.run()
        gradients = torch.autograd.grad(o, list(wanted.values()), output_gradient(x))
        found = {"o": o} | {f"d{n}": d for n, d in zip(wanted, gradients, strict=True)}
        assert all(error < 1e-5 for error, _ in judge(row, x, found).values())
    assert judge(row, x, found | {"dw": 1.01 * found["dw"]})["dw"][0] > 1e-3


def test_decoding_moves_a_pool_on_in_place():
    """States stay in their dtype, rounded once, and what the clock runs over does not copy them."""
    row = replace(ROWS["gdn decode"], state_dtype="bfloat16")
    x = make_tensors(row, "cpu")
    assert x["initial_state"].dtype == torch.bfloat16
    call = load("flash_delta").prepare(row, x)
    o, pool = call.run()
    assert pool is call.inputs["initial_state"]
    assert pool.dtype == torch.bfloat16
    theirs = results("transformers", row)
    assert_accurate("o", o, theirs["o"].double(), torch.float32)
    assert_accurate("final_state", pool.mT, theirs["final_state"].double(), torch.bfloat16)
    assert not torch.equal(call.run()[0], o), "the second token goes on from where the first one left the states"


SERVING = [
    Workload("t", "prefill", "gdn", 2, 4, 2, 200, l2norm=True, raw=True, batch_invariant=True, **TINY),
    Workload("t", "prefill", "gdn", 2, 4, 2, 200, l2norm=True, raw=True, checkpoint_every=64, **TINY),
    Workload("t", "prefill", "gdn", 2, 4, 5, 70, l2norm=True, raw=True, lengths=(1, 1, 1, 70, 20), **TINY),
    Workload("t", "decode", "gdn", 2, 4, 3, 4, packed=False, l2norm=True, raw=True, **TINY),
    Workload("t", "decode", "gdn", 2, 4, 3, 4, lengths=(2, 4, 1), l2norm=True, raw=True, **TINY),
    Workload("t", "decode", "gdn", 2, 4, 3, 5, packed=False, tree=True, l2norm=True, raw=True, **TINY),
]


@pytest.mark.parametrize("row", SERVING, ids=lambda row: row.name)
def test_plain_calls_of_serving_do_the_same_again_and_again(row):
    """From slots that no call writes, so that every call that is timed finds the same."""
    x = make_tensors(row, "cpu")
    given = {name: t.clone() for name, t in x.items()}
    ours, plain = (load(name).prepare(row, x) for name in ("flash_delta", "plain"))
    for call in (ours, plain):
        first, (o, states) = call.joined(call.run()[0]).clone(), call.run()
        assert torch.equal(call.joined(o), first)
        assert states.shape == (row.N, 4, 24, 16)
    want = run_workload(row, given, output_gradient(given), "torch")
    for call in (ours, plain):
        o, states = call.run()
        assert_accurate("o", call.joined(o), want["o"].double(), torch.float32)
        assert_accurate("final_state", states.mT, want["final_state"].double(), torch.float32)


def test_a_tree_is_not_a_chain():
    row = SERVING[-1]
    assert row.parents == [-1, 0, 0, 1, 1]
    x = make_tensors(row, "cpu")
    tree, chain = (run_workload(r, x, output_gradient(x), "torch") for r in (row, replace(row, tree=False)))
    path = {name: x[name][:, [0, 1, 4]] for name in ("q", "k", "v", "g", "beta")}  # to the last token
    alone = run_workload(replace(row, tree=False, T=3), x | path, output_gradient(path), "torch")
    assert torch.equal(tree["o"][:, [0, 1, 4]], alone["o"])
    assert torch.equal(tree["final_state"], alone["final_state"])
    assert not torch.equal(tree["o"][:, 2:], chain["o"][:, 2:])


def test_prompts_in_one_call_and_in_several():
    """With convolution and norm, again and again."""
    row = Workload("t", "prefill", "gdn", 2, 4, 4, 70, lengths=(1, 70, 1, 3), l2norm=True, around=True, **TINY)
    x = make_elementwise(row, "cpu")
    assert x["q"].data_ptr() == x["mixed"].data_ptr()
    for name in ("flash_delta", "plain"):
        call = load(name).prepare(row, x)
        first, (o, states) = call.run()[0].clone(), call.run()
        assert torch.equal(o, first)
        results = {"o": o, "final_state": states.mT if call.state_v_first else states}
        assert all(error < 1e-5 for error, _ in judge_elementwise(row, x, results).values()), name
        assert judge_elementwise(row, x, results | {"o": o * 1.01})["o"][0] > 1e-3


STEPS = [
    Workload("t", "decode", "gdn", 2, 4, 3, 1, packed=False, l2norm=True, raw=True, around=True, **TINY),
    Workload("t", "decode", "kda", 2, 2, 3, 1, packed=False, l2norm=True, raw=True, around=True, **TINY),
]


def judged_steps(name: str, row: Workload) -> None:
    """A step is right, and so is the next one, which goes on from its states and its windows."""
    x = make_elementwise(row, "cpu")
    assert x["q"].data_ptr() == x["mixed"].data_ptr()
    call = load(name).prepare(row, x)
    o, pool = call.run()
    results = {"o": o.clone(), "final_state": pool.mT.clone()}
    errors = judge_elementwise(row, x, results)
    assert all(error < 1e-5 for error, _ in errors.values()), name
    assert judge_elementwise(row, x, results | {"o": o * 1.01})["o"][0] > 1e-3
    shifted = torch.cat([x["windows"][..., 1:], x["mixed"].mT], 2)
    again = x | {"initial_state": results["final_state"], "windows": shifted}
    o, pool = call.run()
    errors = judge_elementwise(row, again, {"o": o, "final_state": pool.mT})
    assert all(error < 1e-5 for error, _ in errors.values()), f"the second step of {name}"


@pytest.mark.parametrize("name", ["flash_delta", "plain"])
@pytest.mark.parametrize("row", STEPS, ids=lambda row: row.member)
def test_steps_in_one_call_and_in_several(row, name):
    judged_steps(name, row)


def test_ours_takes_packed_sequences():
    packed = replace(ROWS["gdn forward"], packed=True)
    for name, t in results("flash_delta", packed).items():
        assert_accurate(name, t.flatten(), results("flash_delta", ROWS["gdn forward"])[name].flatten(), torch.float32)


KDA = Workload("t", "forward", "kda", 2, 2, 2, 70, l2norm=True, raw=True, K=16, V=16)
GIVEN = replace(KDA, raw=False, gates="log decays")
IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def library(monkeypatch, module: str, function: str, stand_in) -> None:
    """A module with one function, which takes what that of the real one documents."""
    parts = module.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(parts[i]))
    setattr(sys.modules[module], function, stand_in)


def judged(name: str, row: Workload) -> float:
    """The worst error."""
    x = make_tensors(row, "cpu")
    call = load(name).prepare(row, x)
    call.run()
    o, state = call.run()
    results = {"o": o.view(x["v"].shape), "final_state": state.mT if call.state_v_first else state}
    return max(error for error, _ in judge(row, x, results).values())


def test_flash_kda_gets_what_it_documents(monkeypatch):
    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens):
        assert (g.dtype, beta.dtype, cu_seqlens.dtype) == (torch.bfloat16, torch.bfloat16, torch.int64)
        assert (A_log.dtype, dt_bias.dtype, dt_bias.shape) == (torch.float32, torch.float32, (2, 16))
        chosen = {"scale": scale, "lower_bound": lower_bound, "A_log": A_log, "dt_bias": dt_bias.flatten(), **IN_KERNEL}
        chosen |= {"initial_state": initial_state, "output_final_state": True, "cu_seqlens": cu_seqlens}
        o, state = chunk_kda(q, k, v, g, beta, state_v_first=True, **chosen)
        out.copy_(o)
        final_state.copy_(state)

    library(monkeypatch, "flash_kda", "fwd", fwd)
    for row in (KDA, replace(KDA, gates="dt_bias = 0")):
        assert judged("flash_kda", row) < PEERS_ALLOWED


def on_pool(op, q, k, v, g, beta, pool, slots, out, **chosen):
    """Stands for a peer's function that decodes on a pool, which takes tensors without gaps."""
    assert all(t.is_contiguous() for t in (q, k, v))
    slots = {"read_indices": slots, "write_indices": slots, "state_v_first": True, "out": out}
    return op(q, k, v, g, beta, pool, **slots, **chosen), pool


def test_flashinfer_decodes_steps(monkeypatch):
    def pretranspose(
        q, k, v, state, initial_state, initial_state_indices, A_log, a, dt_bias, b, output, use_qk_l2norm
    ):  # fmt: skip
        assert state is None
        chosen = {"A_log": A_log, "dt_bias": dt_bias, **IN_KERNEL}
        return on_pool(
            decode_gated_delta_rule, q, k, v, a, b, initial_state, initial_state_indices, output, **chosen
        )  # fmt: skip

    library(monkeypatch, "flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose", pretranspose)
    judged_steps("flashinfer", STEPS[0])


def test_fla_decodes_steps(monkeypatch):
    """Its op for Gated DeltaNet makes new states, which are scattered; that for KDA moves the pool on."""

    def kda(q, k, v, g, beta, initial_state, ssm_state_indices, inplace_final_state, state_v_first, out, **chosen):
        assert inplace_final_state
        assert state_v_first
        return on_pool(decode_kda, q, k, v, g, beta, initial_state, ssm_state_indices, out, **chosen)

    library(monkeypatch, "fla.ops.kda.fused_recurrent", "fused_recurrent_kda_fwd", kda)
    judged_steps("fla", STEPS[1])
    library(monkeypatch, "fla.ops", "fused_recurrent_gated_delta_rule", fused_recurrent_gated_delta_rule)
    judged_steps("fla", STEPS[0])


def test_flashinfer_gets_decays_and_strengths(monkeypatch):
    """Those of raw activations, too, and no length that only the device knows."""
    seen = []

    def chunk(q, k, v, g, beta, cu_seqlens, max_seqlen, **chosen):
        seen.append(max_seqlen)
        assert g.dtype == beta.dtype == torch.float32
        x = (t.unsqueeze(0) for t in (q, k, v, g.log(), beta))
        o, state = chunk_gated_delta_rule(*x, cu_seqlens=cu_seqlens, state_v_first=True, **chosen)
        return o.squeeze(0), state

    library(monkeypatch, "flashinfer.gdn_prefill", "chunk_gated_delta_rule", chunk)
    row = Workload("t", "prefill", "gdn", 2, 4, 2, 70, l2norm=True, raw=True, K=16, V=16)
    for given in (row, replace(row, kind="forward", raw=False, on_device=True)):
        assert judged("flashinfer", given) < PEERS_ALLOWED
    assert seen == [70, 70, None, None]


def test_cula_gets_what_it_documents(monkeypatch):
    monkeypatch.setenv("FLA_USE_FAST_OPS", "1")  # which the adapter would set for good
    prefill = partial(chunk_kda, state_v_first=True)
    library(monkeypatch, "cula.kda.hopper_fused_fwd", "cula_kda_prefill", prefill)
    for row in (KDA, GIVEN):
        assert judged("cula", row) < PEERS_ALLOWED


@pytest.mark.parametrize(("name", "dtype"), [("cudnn", torch.float32), ("cudnn_bfloat16", torch.bfloat16)])
def test_cudnn_gets_gates_in_both_forms(name, dtype, monkeypatch):
    def kimi_delta_attention(
        q, k, v, g, beta, cu_seqlens, safe_gate, gate_lower_bound, a_log, dt_bias, plan_name, **chosen
    ):
        assert g.dtype == beta.dtype == dtype
        if safe_gate:
            gate = {"lower_bound": gate_lower_bound, "A_log": a_log, "dt_bias": dt_bias.flatten()}
            chosen |= {"use_gate_in_kernel": True, **gate}
        x = (t.unsqueeze(0) for t in (q, k, v, g, beta))
        o, state = chunk_kda(*x, cu_seqlens=cu_seqlens, state_v_first=True, **chosen)
        return o.squeeze(0), state

    monkeypatch.setenv("CUDA_HOME", "as it was")
    library(monkeypatch, "cudnn.linear_attention.ops", "kimi_delta_attention", kimi_delta_attention)
    for row in (KDA, GIVEN)[: 2 if dtype == torch.float32 else 1]:
        assert judged(name, row) < PEERS_ALLOWED


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_on_a_cpu(name):
    module = load(name)
    assert isinstance(module.PACKAGE, str)
    assert all(variable.isupper() for variable in module.CACHES)
    for workload in WORKLOADS:
        reason = module.unsupported(workload, torch.device("cpu"))
        if name == "transformers" and workload.disable_recompute:
            assert reason == NO_CHOICE
        elif name in ("transformers", "flash_delta") and workload.of_fla and find_spec("fla") is None:
            assert reason is None if name == "flash_delta" and workload.form else "of fla" in reason
        elif name == "transformers" and workload.group in RELATIVES:
            assert "only its" in reason
        elif name == "flash_delta" or (name == "transformers" and (not workload.packed or workload.N == 1)):
            assert reason is None
        else:
            assert ("packed" if name == "transformers" else "GPU") in reason


WIDTHS = {"gdn-widths", "kda-widths"}
RELATIVES = {"comba", "delta-rule", "simple-gla", "family-gdn2", "family-gdp"}
ALONE = {"cpu", "serving", "drafts", "kda-drafts", "prompts", "family-kda"}  # others could run them, but take no part
STEPS_OF_LAYERS = {"step", "step-transformers"}
OF_FLA = {f"fla-{member}-{kind}" for member in ("gdn", "kda") for kind in ("forward", "training")}
GATES = {  # which rows of kda-gates each runs on such a GPU
    "flash_delta": {"dt_bias = 0", "unbounded", "log decays"},
    "fla": {"dt_bias = 0", "unbounded", "log decays"},
    "cudnn": {"dt_bias = 0", "log decays"},
    "cudnn_bfloat16": {"dt_bias = 0"},
    "flash_kda": {"dt_bias = 0"},
    "cula": {"dt_bias = 0", "log decays"},
}
OF_128 = {  # of these groups' rows, those that peers without other widths run
    ("flash_qla", "gdn", "forward"),
    ("flash_qla", "gdn", "training"),
    ("flashinfer", "gdn", "forward"),
    ("cudnn", "kda", "training"),
}
UNEQUAL = {  # rows of the groups -packed and -pools that each runs; ours and fla run all
    *(("flashinfer", "gdn", kind) for kind in ("forward", "prefill", "decode")),
    *(("flash_qla", "gdn", kind) for kind in ("forward", "prefill", "training")),
    *((name, "kda", "forward") for name in ("cudnn", "cudnn_bfloat16", "flash_kda", "cula")),
}
# Who leaves no choice of what is kept.
KEPT = {("gdn", "fla"), ("gdn", "flash_qla"), ("kda", "cudnn"), ("kda", "cudnn_bfloat16")}
OF_GDN = ("flash_delta", "fla", "flash_qla", "flashinfer")
OF_BOTH = {
    *(f"gdn-{kind}" for kind in ("prefill", "long", "mixed", "training")),
    *(f"kda-{kind}" for kind in ("forward", "training", "decode", "steps", "models")),
    "family-kda",
    *("decode", "layer", "prompts", "steps"),
    *(WIDTHS | OF_FLA | RELATIVES | STEPS_OF_LAYERS),
}
HOPPER = {  # the groups of rows that each runs on such a GPU
    "flash_delta": OF_BOTH | {"serving"},
    "fla": OF_BOTH,
    "flash_qla": {"gdn-prefill", "gdn-long", "gdn-mixed", "gdn-training"},
    "flashinfer": {"gdn-prefill", "gdn-long", "gdn-mixed", "decode", "prompts", "steps"},
    "cudnn": {"kda-forward", "kda-training"},
    "cudnn_bfloat16": {"kda-forward"},
    "flash_kda": {"kda-forward"},
    "cula": {"kda-forward"},
}


@pytest.mark.parametrize("name", HOPPER)
def test_what_runs_on_hopper(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("workshop.bench.contestants.fla_layer.find_spec", lambda name: "as if it were there")
    unsupported, device = load(name).unsupported, torch.device("cuda")
    for workload in WORKLOADS:
        reason = unsupported(workload, device)
        if workload.disable_recompute and (workload.member, name) in KEPT:
            assert reason == NO_CHOICE
        elif workload.group in WIDTHS and name not in ("flash_delta", "fla"):
            assert (reason is None) == (workload.K == 128 and (name, workload.member, workload.kind) in OF_128)
        elif workload.group == "kda-gates":
            assert (reason is None) == (workload.gates in GATES.get(name, ()))
        elif workload.group == "gdn-models":
            assert (reason is None) == (name != "flashinfer" or workload.kind == "forward") * (name in OF_GDN)
        elif workload.group.endswith(("-packed", "-pools")):
            runs = name in ("flash_delta", "fla") or (name, workload.member, workload.kind) in UNEQUAL
            assert (reason is None) == runs
        elif workload.group in HOPPER[name]:
            assert reason is None
            small = unsupported(replace(workload, K=64), device)
            assert small is None if name in ("flash_delta", "fla") else "K = V = 128" in small
        elif workload.group not in ALONE:
            assert isinstance(reason, str)


def test_adapters_import_no_library():
    code = f"""
import sys
from workshop.bench.contestants import load
before = set(sys.modules)
for name in {NAMES!r}:
    load(name)
heavy = {{"fla", "flash_qla", "flashinfer", "cudnn", "flash_kda", "cula", "transformers", "tilelang", "cutlass"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not {{"triton"}} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
