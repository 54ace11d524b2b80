"""Index tensors that are columns of tables: kernels give the same bits as for indices without gaps."""

import pytest
import torch
from prefill_truth import make_prefill
from prompt_truth import OPS, make_prompts
from serving_truth import DEVICES, GPU, KINDS, copied, make_call, needs_triton, slots

from flash_delta.modules import causal_conv1d
from flash_delta.testing import MEMBERS, Case, make_inputs
from flash_delta.testing.accuracy import run

pytestmark = needs_triton
INDICES = (
    "cu_seqlens", "read_indices", "write_indices", "num_accepted_tokens", "parent_idx", "has_initial_state",
    "checkpoint_indices", "checkpoint_offsets",
)  # fmt: skip
DEVICE = DEVICES["triton"]
WIDTH = 128 if GPU else 16
PACKED = Case("packed", "empty sequences, a long one", B=1, T=74, H=1, HV=1, K=WIDTH, V=WIDTH, lengths=(3, 0, 66))
TINY = {"H": 1, "HV": 1, "K": 16, "V": 16, "device": DEVICE}
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9


def column(t):
    """Returns the indices as a column of a wider tensor, each beside a wrong one."""
    wrong = ~t if t.dtype == torch.bool else torch.full_like(t, 1)
    return torch.stack([t, wrong], -1)[..., 0]


def with_columns(x):
    return x | {name: column(x[name]) for name in INDICES if x.get(name) is not None}


@pytest.mark.parametrize("member", ["gdn", "kda", "gdn-recurrent"])
@pytest.mark.parametrize("backend", ["triton", *(["hopper"] if HOPPER else [])])
def test_outputs_and_gradients(member, backend):
    if backend == "hopper" and member == "gdn-recurrent":
        pytest.skip("it runs chunks")
    x = make_inputs(PACKED, MEMBERS[member], torch.bfloat16 if GPU else torch.float16, DEVICE)
    want, got = (run(MEMBERS[member], given, backend) for given in (x, with_columns(x)))
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_convolution():
    x, weight, dy = (torch.randn(shape, device=DEVICE) for shape in ((1, 20, 8), (8, 4), (1, 20, 8)))
    bounds = torch.tensor([0, 3, 3, 16], device=DEVICE)

    def results(cu_seqlens):
        given = [t.clone().requires_grad_() for t in (x, weight)]
        y, final = causal_conv1d(*given, output_final_state=True, cu_seqlens=cu_seqlens, backend="triton")
        return y, final, *torch.autograd.grad((y, final), given, (dy, torch.ones_like(final)))

    for got, want in zip(results(column(bounds)), results(bounds), strict=True):
        assert torch.equal(got, want)


def drafts(kind):
    """Two rows that continue earlier drafts with trees of three tokens."""
    x = make_call(kind, **TINY)
    return x | {
        "read_indices": slots([[0, 1], [2, 3]], x),
        "num_accepted_tokens": slots([2, 1], x),
        "write_indices": slots([[4, 5, 6], [7, 8, 3]], x),
        "parent_idx": slots([[-1, 0, 0], [-1, -1, 1]], x),
    }


def packed_rows(kind):
    x = make_call(kind, B=1, T=5, **TINY)
    return x | {
        "read_indices": slots([4, 0], x),
        "write_indices": slots([[5, 6, 7], [8, 2, 3]], x),
        "cu_seqlens": slots([0, 3, 5], x),
    }


def checkpoints(x, offsets):
    """For four sequences, of which the third starts from zeros."""
    x |= {"has_initial_state": slots([1, 1, 0, 1], x).bool()}
    if offsets:
        return x | {"checkpoint_indices": slots([8, 9, 10, 11], x), "checkpoint_offsets": slots([66, 2, 0, 3], x)}
    return x | {"checkpoint_indices": slots([[8, -1], [9, -1], [10, 3], [11, 2]], x), "checkpoint_every": 64}


LENGTHS = (70, 4, 0, 3)
CALLS = {
    "drafts": lambda kind: (KINDS[kind][0], drafts(kind)),
    "packed rows": lambda kind: (KINDS[kind][0], packed_rows(kind)),
    "checkpoints": lambda kind: (OPS[kind], checkpoints(make_prefill(kind, LENGTHS, slots=12, **TINY), False)),
    "offsets": lambda kind: (OPS[kind], checkpoints(make_prompts(kind, LENGTHS, slots=12, **TINY), True)),
    "layer": lambda kind: (OPS[kind], checkpoints(make_prompts(kind, LENGTHS, slots=12, **TINY), False)),
}


@pytest.mark.parametrize("call", CALLS)
def test_serving(call):
    op, x = CALLS[call]("gdn-raw")
    results = []
    for given in (x, with_columns(x)):
        pools = [copied(x["state_pool"])]
        given = given | {"state_pool": pools[0]}
        if x.get("convolution"):
            pools.append(copied(x["convolution"].pool))
            given["convolution"] = x["convolution"]._replace(pool=pools[1])
        results.append((op(**given, backend="triton"), *pools))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("backend", ["triton", *(["hopper"] if HOPPER else [])])
def test_a_graph_reads_the_bounds_that_are_there_when_it_replays(backend):
    x = make_inputs(PACKED, MEMBERS["gdn"], torch.bfloat16, "cuda")
    x = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in x.items()}
    bounds, op = x["cu_seqlens"].clone(), MEMBERS["gdn"].op
    x["cu_seqlens"] = column(bounds)
    op(**x, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op(**x, backend=backend)
    other = bounds.clone()
    other[1:-1] = other[1:-1].sub(7).clamp(min=0)
    x["cu_seqlens"].copy_(other)
    graph.replay()
    for got, want in zip(found, op(**(x | {"cu_seqlens": other}), backend=backend), strict=True):
        assert torch.equal(got, want)
