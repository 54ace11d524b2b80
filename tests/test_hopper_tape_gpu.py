"""States that programs of the Hopper backend's loop hand over, on a GPU (plans/tape.py)."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("there is no Hopper GPU", allow_module_level=True)

import flash_delta
from flash_delta.kernels.hopper.plans.tape import lay_tape
from flash_delta.kernels.hopper.plans.tiles import WIDE
from flash_delta.kernels.hopper.scalar.backward.memory import choose_tapes
from flash_delta.kernels.hopper.scalar.backward.plan import Kept, ScanBack, plan_backward
from flash_delta.kernels.hopper.scalar.plan import Scan, plan_forward
from flash_delta.kernels.runtime.chip import chip_of
from flash_delta.kernels.runtime.plan import Plan, layouts_of
from flash_delta.kernels.runtime.run import ByTriton, given_to
from flash_delta.kernels.triton.backward.results import OutputGradients
from flash_delta.problem import Gate, Inputs, Problem
from workshop.tune.stages_hopper import call_of, make_back

HV, T, N, WIDTH = 16, 12000, 24, 128


def draw_bounds(seed):
    """Bounds of N sequences of very different lengths, some of them empty."""
    cuts = torch.randint(0, T + 1, (N - 1,), generator=torch.Generator().manual_seed(seed)).sort().values
    return torch.tensor([0, *cuts, T], device="cuda")


def draw(gate=()):
    seed = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(1, T, HV, *shape, generator=seed, device="cuda")

    q, k, v = (normal(WIDTH).bfloat16() for _ in range(3))
    decay, beta = -torch.rand_like(normal(*gate)) / 10, torch.rand_like(normal())
    return {"q": q, "k": k, "v": v, "g": decay, "beta": beta, "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize(("op", "gate"), [("chunk_gated_delta_rule", ()), ("chunk_kda", (WIDTH,))])
@torch.no_grad()
def test_a_graph_is_replayed_with_other_bounds(op, gate):
    """Beside work that takes multiprocessors away. Outputs are repeatable, and with one decay per head they have
    the bits of sequences that are called alone."""
    rule, x, bounds = getattr(flash_delta, op), draw(gate), draw_bounds(0)
    call = {**x, "output_final_state": True, "backend": "hopper"}
    rule(**call, cu_seqlens=bounds)
    torch.cuda.synchronize()
    graph, busy = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        o, states = rule(**call, cu_seqlens=bounds)
    square = torch.rand(2048, 2048, dtype=torch.float64, device="cuda")
    for seed in range(1, 101):
        bounds.copy_(draw_bounds(seed))
        with torch.cuda.stream(busy):
            square @ square
        graph.replay()
        if seed % 20 == 0:
            kept = o.clone(), states.clone()
            graph.replay()
            assert torch.equal(o, kept[0])
            assert torch.equal(states, kept[1])
            for n in range(N if op == "chunk_gated_delta_rule" else 0):
                part = slice(*bounds[n : n + 2].tolist())
                alone = {name: t[:, part] if torch.is_tensor(t) else t for name, t in call.items()}
                one, state = rule(**alone, batch_invariant=True)
                assert torch.equal(o[:, part], one)
                assert torch.equal(states[n : n + 1], state)


def test_gradients_of_a_graph_that_is_replayed_with_other_bounds():
    """Beside work that takes multiprocessors away. They are repeatable, and have the bits of sequences alone."""
    x, bounds = draw(), draw_bounds(0)
    tensors = {name: t.requires_grad_() for name, t in x.items() if torch.is_tensor(t)}
    call, do = {**x, "backend": "hopper"}, torch.randn_like(x["v"])

    def gradients(given, do, **more):
        o, _ = flash_delta.chunk_gated_delta_rule(**given, **more)
        return torch.autograd.grad(o, [given[name] for name in tensors], do)

    gradients(call, do, cu_seqlens=bounds)
    torch.cuda.synchronize()
    graph, busy = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        found = gradients(call, do, cu_seqlens=bounds)
    square = torch.rand(2048, 2048, dtype=torch.float64, device="cuda")
    for seed in range(1, 101):
        bounds.copy_(draw_bounds(seed))
        with torch.cuda.stream(busy):
            square @ square
        graph.replay()
        if seed % 20 == 0:
            kept = [t.clone() for t in found]
            graph.replay()
            assert all(map(torch.equal, found, kept))
            for first, after in pairwise(bounds.tolist()):
                if first < after:
                    part = slice(first, after)
                    alone = {name: t[:, part] if name in tensors else t for name, t in call.items()}
                    wanted = gradients(alone, do[:, part].contiguous(), batch_invariant=True)
                    assert all(torch.equal(t[:, part], want) for t, want in zip(found, wanted, strict=True))


def launch_wrongly(plan, *groups):
    """The results of a plan. After its tapes are laid, they are changed: the first program does nothing, and programs
    do not wait long. All memory begins as zeros, so that NaN is written only by programs that give up."""
    after = 1 + max(i for i, step in enumerate(plan.steps) if step.kernel is lay_tape)
    memory = tuple(replace(m, filled=0.0) if m.filled is None else m for m in plan.memory)
    given, names, device = given_to(plan, groups), [m.name for m in memory], groups[0][0].device
    made = ByTriton(Plan(plan.steps[:after], memory, memory), given)(device, groups)
    tables = [t for name, t in zip(names, made, strict=True) if name.startswith("table of tape")]
    assert tables
    for table in tables:
        borders = table[3:]
        assert borders[3] > 0, "the second program begins inside of an item"
        borders[0] = borders[2] + 1
        table[1] = 1000
    return ByTriton(Plan(plan.steps[after:], (), plan.results), [*given, *names])(device, (*groups, made))


def test_a_gradient_that_never_comes_is_reported():
    """The program that waits for it gives up, and the next call says so."""
    made = make_back("cuda", B=5, T=1024)
    p, x = call_of(made)
    p, chip = p._replace(needs_grad=True), chip_of(p.device)
    groups = x, OutputGradients(made["do"], None), Kept(made["saved"], None)
    plan = plan_backward(p, chip, *map(layouts_of, groups), choice=ScanBack(None, choose_tapes(p, chip)))
    dq, *_ = launch_wrongly(plan, *groups)
    torch.cuda.synchronize()
    assert dq.isnan().any()
    with pytest.raises(RuntimeError, match="an earlier call on cuda:0 lost a state between two programs"):
        flash_delta.chunk_gated_delta_rule(**draw(), backend="hopper")


def test_a_state_that_never_comes_is_reported():
    """The program that waits for it gives up, and the next call says so."""
    x = draw()
    inputs = Inputs(x["q"], x["k"], x["v"], x["g"], x["beta"], cu_seqlens=draw_bounds(0))
    sizes = {"B": 1, "T": T, "H": HV, "HV": HV, "K": WIDTH, "V": WIDTH, "N": N, "packed": True}
    p = Problem(
        op="test", **sizes, dtype=torch.bfloat16, device=x["q"].device, gate=Gate("scalar"), erase="decayed",
        l2norm=True, scale=WIDTH**-0.5,
    )  # fmt: skip
    plan = plan_forward(p, chip_of(p.device), layouts_of(inputs), choice=Scan(None, WIDE, taped=True))
    o, *_ = launch_wrongly(plan, inputs)
    torch.cuda.synchronize()
    assert o.isnan().any()
    with pytest.raises(RuntimeError, match="an earlier call on cuda:0 lost a state between two programs"):
        flash_delta.chunk_gated_delta_rule(**x, backend="hopper")
    o, _ = flash_delta.chunk_gated_delta_rule(**x, backend="hopper")
    assert o.isfinite().all()
