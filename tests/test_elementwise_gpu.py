"""What of calls with a convolution and a norm around the rule only a GPU can show: graphs, and that nothing waits."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

from prefill_truth import OPS, WITH_GATES, bounds
from prompt_truth import as_in_vllm, make_prompts
from serving_truth import KINDS, slots
from test_serving_step import make_step

from flash_delta.ops.serving import Convolution

HEADS = {"H": 2, "HV": 4, "K": 128, "V": 128, "dtype": torch.bfloat16, "device": "cuda"}
kinds = pytest.mark.parametrize("kind", ["gdn-raw", "kda-bounded"])


def tensors(x):
    """Yields the tensors of a call, also those of what is around the rule."""
    for value in x.values():
        yield from (t for t in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(t))


def check_graph(op, static, other, want_x):
    """Captured once, replayed with the values of another call; nothing waits. ``want_x``: that call again."""
    want = op(**want_x)
    op(**static)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(**static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = op(**static)
    for before, now in zip(tensors(static), tensors(other), strict=True):
        before.copy_(now)
    graph.replay()
    assert torch.equal(o, want)
    assert want.any()
    for found, expected in zip(tensors(static), tensors(want_x), strict=True):
        assert torch.equal(found, expected)


def step(kind, T, shift):
    """Makes a step of eight rows, two of which are padding. Windows lie as in vLLM."""
    x, conv = make_step(kind, B=8, T=T, L=3, slots=48, **HEADS)
    x |= {name: x[name].roll(shift, 0) for name in WITH_GATES if name in x}
    table = torch.arange(8 * T, dtype=torch.int32, device="cuda").view(8, T).roll(shift, 0)
    table[[1 + shift, 4]] = 47
    read = torch.arange(8, dtype=torch.int32, device="cuda").roll(shift) + 36
    return x | {
        "read_indices": read, "write_indices": table, "null_slot": 47,
        "convolution": Convolution(as_in_vllm(conv[0]), *conv[1:]),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("T", [1, 4])
@kinds
def test_graph_of_steps(kind, T):
    check_graph(KINDS[kind][0], *(step(kind, T, shift) for shift in (0, 1, 1)))


def prompts(kind, lengths, shift):
    x = make_prompts(kind, (1000,), **HEADS, slots=24)
    x |= {name: x[name].roll(shift, 1) for name in WITH_GATES if name in x} | {"cu_seqlens": bounds(lengths, x)}
    x |= {"has_initial_state": slots([1, 0, 1, 1, 1, 1], x).bool()}
    for i, name in enumerate(("read_indices", "write_indices", "checkpoint_indices")):
        x[name] = torch.arange(6, device="cuda").roll(shift) + 6 * i
    return x | {"checkpoint_offsets": slots([64, 1, 0, 65, -1, 100], x)}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@kinds
def test_graph_of_prompts(kind):
    first, second = (700, 1, 5, 130, 16, 100), (3, 0, 300, 500, 2, 150)
    check_graph(OPS[kind], *(prompts(kind, *call) for call in ((first, 0), (second, 1), (second, 1))))
