"""What of warm-up and memory only a GPU can show."""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from serving_truth import KINDS, make_call

import flash_delta
from flash_delta.bench.entry import triton_compilations
from flash_delta.ops.serving import DecodeCalls, PrefillCalls, Serving, Slice, warmup, workspace_bytes
from flash_delta.ops.serving.warmup import PREFILL, decode_call, prefill_call

DEVICE = torch.device("cuda")
RAW = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
RULES = {
    "gdn-raw": Serving("gated_delta_rule", 2, 4, 128, 128, True, **RAW),
    "kda-bounded": Serving("kda", 4, 4, 128, 128, True, **RAW, lower_bound=-5.0),
    "gdn-raw-many": Serving("gated_delta_rule", 16, 32, 128, 128, True, **RAW),  # heads enough for backend "hopper"
}


@pytest.mark.parametrize(("kind", "K", "V"), [("gdn-raw", 96, 112), ("kda-bounded", 96, 112), ("gdn-raw-many", 64, 64)])
def test_after_warmup_nothing_compiles(kind, K, V):
    """Decoding rows, drafts, trees and prefill of any lengths, in widths that no other test has."""
    every = (DecodeCalls(), DecodeCalls(True, True), DecodeCalls(True, True, True), DecodeCalls(False))
    prefills = (PrefillCalls(True, True), PrefillCalls(True, True, True, True), PrefillCalls(checkpoint_offsets=True))
    spec = replace(RULES[kind], K=K, V=V, decode=every, prefill=prefills)
    seconds = warmup(spec)
    with triton_compilations() as compiled, flash_delta.forbid_compilation():
        assert len(seconds) == len(warmup(spec)) == 7
        for B, T in ((1, 1), (7, 1), (300, 1), (5, 4), (33, 16)):
            heads = {"H": spec.H, "HV": spec.HV, "K": K, "V": V, "slots": B * T + 3}
            x = make_call(kind.removesuffix("-many"), B=B, T=T, dtype=spec.dtype, device="cuda", **heads)
            table = torch.arange(B * T, dtype=torch.int32, device="cuda").view(B, T)
            count = torch.ones(B, dtype=torch.int32, device="cuda")
            for changes in (
                {"read_indices": table[:, 0], "write_indices": table[:, 0]},
                {"read_indices": table, "write_indices": table, "num_accepted_tokens": count},
                {"read_indices": table, "write_indices": table, "num_accepted_tokens": count, "parent_idx": table - 1},
                {"read_indices": table[:, 0]},
            ):
                KINDS[kind.removesuffix("-many")][0](**(x | changes))
        for form in prefills:
            for T, N in ((1, 1), (1000, 3), (4096, 1), (333, 40)):
                op, x = prefill_call(spec, form, T, N, DEVICE)
                op(**x)
        with pytest.raises(RuntimeError, match=r"kernel decode would have to be compiled, which forbid_"):
            warmup(replace(spec, dtype=torch.float16))
    assert compiled == [0]
    warmup(replace(spec, dtype=torch.float16, prefill=()))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["own", "slices"])
@pytest.mark.parametrize("kind", RULES)
def test_workspace(kind, layout, dtype, batch_invariant):
    """What torch is asked for, to the byte; what it hands out is at most 1 MB more for each of two allocations."""
    spec = replace(RULES[kind], dtype=dtype, prefill=(PrefillCalls(batch_invariant=batch_invariant),))
    if layout == "slices":  # no multiples of 16 bytes: no descriptors
        spec = replace(spec, q=Slice(8196), k=Slice(8196, 516), v=Slice(8196, 1028))
    for T, N in ((1, 1), (64, 1), (5000, 1), (5000, 70)):
        op, x = prefill_call(spec, spec.prefill[0], T, N, DEVICE)
        assert op is PREFILL[spec.rule]
        op(**x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        o = op(**x)
        after = torch.cuda.memory_stats()
        planned = o.nbytes + workspace_bytes(spec, T, N)
        asked, handed_out = (
            after[f"{name}.all.peak"] - before[f"{name}.all.current"] for name in ("requested_bytes", "allocated_bytes")
        )
        assert asked == planned
        assert planned <= handed_out <= planned + 3 * 2**20
        del o


def test_decoding_needs_no_workspace():
    assert workspace_bytes(replace(RULES["gdn-raw"], prefill=()), 16, 256) == 0


@pytest.mark.parametrize("kind", ["gdn-raw", "kda-bounded"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (33, 1), (7, 16)])
def test_workspace_of_a_decoding_step(kind, B, T):
    """With a convolution it is asked for in one piece by every call but the first."""
    form = DecodeCalls(convolution=True, output_norm=True)
    spec = replace(RULES[kind], decode=(form,), prefill=())
    op, x = decode_call(spec, form, T, DEVICE)
    for name in ("q", "k", "v", "g", "beta", "read_indices", "write_indices"):
        x[name] = x[name].repeat(B, *(1,) * (x[name].dim() - 1))
    gate = x["output_norm"].gate.repeat(B, 1, 1, 1)
    x["output_norm"] = x["output_norm"]._replace(gate=gate)
    op(**x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    o = op(**x)
    asked = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before["requested_bytes.all.current"]
    assert asked == o.nbytes + workspace_bytes(spec, B * T, B)
