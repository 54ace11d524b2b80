"""Segments planned from lengths that the host knows: graphs, and calls whose lengths change."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

import flash_delta
from flash_delta.testing import MEMBERS, make_inputs, relative_error
from flash_delta.testing.cases import Case

HOPPER = torch.cuda.get_device_capability()[0] == 9
CALLS = [("gdn", "triton"), ("kda", "triton"), *([("gdn", "hopper")] if HOPPER else [])]
MIXED = (64,) * 15 + (32768 - 64 * 15,)
OTHERS = [(32768 - 64 * 15,) + (64,) * 15, (2048,) * 16, (0,) * 7 + (5, 30000, 100, 0, 2000, 1, 62, 64, 65)]


def inputs(name):
    x = make_inputs(
        Case("", "", B=1, T=32768, H=4, HV=8, K=128, V=128, lengths=MIXED), MEMBERS[name], torch.bfloat16, "cuda"
    )
    return {n: t.detach() if torch.is_tensor(t) else t for n, t in x.items()}


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def close(got, x, op, lengths):
    """To whole sequences, that is: which tests of other files hold against the definition."""
    cu_seqlens = bounds(lengths).to("cuda")
    want = op(**(x | {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": None}), batch_invariant=True)
    return all(relative_error(a, b.double()) < 5e-3 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("name", "backend"), CALLS)
def test_a_graph_serves_other_lengths(name, backend):
    op, x = MEMBERS[name].op, inputs(name) | {"backend": backend}
    said = str(flash_delta.explain(op, **x))
    assert "scans sequences in segments" in said
    op(**x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = op(**x)
    for lengths in (MIXED, *OTHERS):
        x["cu_seqlens"].copy_(bounds(lengths))
        graph.replay()
        assert close(got, x, op, lengths), lengths


@pytest.mark.parametrize(("name", "backend"), CALLS)
def test_lengths_that_change(name, backend):
    """Every plan has launches of its own, and the first one's are not forgotten."""
    op, x = MEMBERS[name].op, inputs(name) | {"backend": backend}
    first = op(**x)
    for lengths in OTHERS:
        x |= {"cu_seqlens": bounds(lengths).to("cuda"), "cu_seqlens_cpu": bounds(lengths)}
        assert close(op(**x), x, op, lengths), lengths
    x |= {"cu_seqlens": bounds(MIXED).to("cuda"), "cu_seqlens_cpu": bounds(MIXED)}
    assert all(map(torch.equal, first, op(**x)))
