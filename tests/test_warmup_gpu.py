"""What of warm-up and memory only a GPU can show."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from example_calls import example

import flash_delta
from flash_delta.ops.serving import warmup, workspace_bytes
from workshop.bench.entry import triton_compilations

BOUND = {"gdn": {}, "kda": {"lower_bound": -5.0}}
FORMS = (
    "decode raw", "decode raw each counted", "decode raw each counted tree", "decode raw reads",
    "decode raw packed counted each paged rolling conv norm", "prefill raw fresh", "prefill raw fresh stride",
    "prefill raw offset", "prefill raw fresh conv norm",
)  # fmt: skip


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("rule", "sizes"),
    [("gdn", (2, 4, 96, 112)), ("kda", (4, 4, 96, 112)), ("gdn", (16, 32, 64, 64)), ("kda", (4, 4, 128, 128))],
)
def test_after_warmup_nothing_compiles(rule, sizes, batch_invariant):
    """Decoding rows, drafts, trees and prefill of any lengths, from examples on "meta"."""

    def make(form, rows, tokens, slots=3, device="cuda", **options):
        more = {"batch_invariant": batch_invariant} if "prefill" in form else {}
        return example(form, rule, sizes, rows, tokens, slots, device=device, **BOUND[rule], **more, **options)

    calls = [make(form, 2, 3, device="meta") for form in FORMS]
    warmup(calls)
    with triton_compilations() as compiled, flash_delta.forbid_compilation():
        assert len(warmup(calls)) == len(FORMS)
        for form in FORMS:
            later = [(1, 1), (7, 1), (300, 1), (5, 4)]
            for rows, tokens in [*later, (3, 333), (1, 4096), (40, 65)] if "prefill" in form else later:
                op, x = make(form, rows, tokens, slots=rows * tokens + 3)
                o = op(**x)
        torch.cuda.synchronize()
        assert not o.any()
        with pytest.raises(RuntimeError, match=r"kernel decode would have to be compiled, which forbid_"):
            warmup([make("decode raw", 2, 3, dtype=torch.float16)])
    assert compiled == [0]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [None, 4], ids=["own", "slices"])
@pytest.mark.parametrize(("rule", "sizes"), [("gdn", (2, 4)), ("kda", (4, 4)), ("gdn", (16, 32))])
def test_workspace(rule, sizes, wide, dtype, batch_invariant):
    """What torch is asked for, to the byte; what it hands out is at most 1 MB more for each of two allocations. Slices
    are no multiples of 16 bytes: no descriptors."""
    for rows, tokens in ((1, 1), (1, 64), (1, 5000), (70, 71)):
        options = {"dtype": dtype, "wide": wide, "batch_invariant": batch_invariant, **BOUND[rule]}
        op, x = example("prefill raw", rule, (*sizes, 128, 128), rows, tokens, device="cuda", **options)
        asked, handed_out, o = memory_of(op, x)
        planned = o + workspace_bytes(op, **x)
        assert asked == planned
        assert planned <= handed_out <= planned + 3 * 2**20


@pytest.mark.parametrize("form", ["decode raw", "decode raw conv norm"])
@pytest.mark.parametrize("rule", BOUND)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (33, 1), (7, 16)])
def test_workspace_of_a_decoding_step(rule, form, rows, tokens):
    """With a convolution it is asked for in one piece by every call but the first."""
    op, x = example(form, rule, (4, 4, 128, 128), rows, tokens, device="cuda", **BOUND[rule])
    asked, _, o = memory_of(op, x)
    assert asked == o + workspace_bytes(op, **x)
    assert (workspace_bytes(op, **x) > 0) == ("conv" in form)


def memory_of(op, x):
    """The bytes that a known call asks torch for, those that it gets, and those of its output."""
    op(**x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    o = op(**x)
    after = torch.cuda.memory_stats()
    names = ("requested_bytes", "allocated_bytes")
    return *(after[f"{name}.all.peak"] - before[f"{name}.all.current"] for name in names), o.nbytes
