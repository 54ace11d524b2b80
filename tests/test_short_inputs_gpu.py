"""Three ways to train short inputs without waiting for Python, as the guide has them, beside eager steps.

`make_graphed_callables` captures layers, `torch.compile(mode="reduce-overhead")` compiles them, and documents are
packed into a row. The bounds of documents are a tensor, which changes from step to step.
"""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from flash_delta.layers import GatedDeltaNet, KimiDeltaAttention
from flash_delta.testing import allowed, relative_error

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

WIDTH, T = 256, 200
BOUNDS = ((0, 70, 70, T), (0, 1, 130, T), (0, 64, 128, T))
OF_BOUNDS = pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])


class Stack(nn.Module):
    """Two layers with a residual stream. Takes bounds as a positional argument, as `make_graphed_callables` wants."""

    def __init__(self, kind):
        super().__init__()
        made = {"hidden_size": WIDTH, "num_heads": 2, "head_dim": 64}
        self.layers = nn.ModuleList(kind(**made) for _ in range(2))

    def forward(self, x, cu_seqlens=None):
        for layer in self.layers:
            x = x + layer(x, cu_seqlens=cu_seqlens)
        return x


@pytest.fixture(params=[GatedDeltaNet, KimiDeltaAttention])
def stack(request):
    torch.manual_seed(0)
    return Stack(request.param).to("cuda", torch.bfloat16)


def steps(packed, dtype=torch.bfloat16):
    """The inputs of three steps, which differ in values and in bounds."""
    for seed, bounds in enumerate(BOUNDS):
        generator = torch.Generator("cuda").manual_seed(seed)
        x, dy = torch.randn(2, 1, T, WIDTH, generator=generator, device="cuda").bfloat16().to(dtype)
        yield (x.requires_grad_(), *([torch.tensor(bounds, device="cuda")] if packed else [])), dy


def results(module, parameters, inputs, dy):
    y = module(*inputs)
    return [t.clone() for t in (y.detach(), *torch.autograd.grad(y, [inputs[0], *parameters], dy))]


def eager_results(stack, packed, dtype=torch.bfloat16):
    """The results of a copy, since autograd makes its nodes of the parameters on the stream of the capture."""
    stack = copy.deepcopy(stack).to(dtype)
    return [results(stack, list(stack.parameters()), *step) for step in steps(packed, dtype)]


# torch says this of any module that is captured, if its gradients come from another stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@OF_BOUNDS
def test_graphed(stack, packed):
    """A replayed graph runs the kernels of the eager step, so that bits are equal, with other bounds too."""
    expected, parameters = eager_results(stack, packed), list(stack.parameters())
    sample = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in next(steps(packed))[0])
    graphed = torch.cuda.make_graphed_callables(stack, sample)
    for step, want in zip(steps(packed), expected, strict=True):
        for got, of_eager in zip(results(graphed, parameters, *step), want, strict=True):
            assert torch.equal(got, of_eager)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch's own, which makes its memory pool
@OF_BOUNDS
def test_reduce_overhead(stack, packed):
    """Inductor rounds in other places. So results are as near to those in float64 as eager ones are."""
    expected, parameters = eager_results(stack, packed), list(stack.parameters())
    truth = eager_results(stack, packed, torch.float64)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(stack, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):  # warms up, captures, replays
        for step, of_eager, want in zip(steps(packed), expected, truth, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            for got, other, true in zip(results(compiled, parameters, *step), of_eager, want, strict=True):
                assert relative_error(got, true) <= allowed(relative_error(other, true), torch.bfloat16)
    assert not counters["inductor"]["cudagraph_skips"]
    assert counters["stats"]["unique_graphs"] == 1
