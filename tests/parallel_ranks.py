"""What the processes of `test_parallel` do: run every case of a world, and write down what this rank got."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from tiny_layers import DELTA_LAYERS, D, random
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from flash_delta.layers import GatedDeltaNet, KimiDeltaAttention, MixerState, tensor_parallel_plan
from flash_delta.parallel import ContextParallel, head_tail
from flash_delta.testing import MEMBERS, Case, make_inputs

TOKENS = ("q", "k", "v", "g", "beta", "p")
Fragments = str | tuple[tuple[tuple[int, int], ...], ...] | None


@dataclass(frozen=True)
class Split:
    """A case, and how many of its tokens each rank of a world holds."""

    case: Case
    members: tuple[str, ...] = ("gdn", "kda")
    tokens: tuple[int, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float64,)
    ranks: tuple[int, ...] | None = None  # of the world; None: all
    fragments: Fragments = None


@dataclass(frozen=True)
class LayerSplit:
    name: str
    layer: str
    lengths: tuple[int, ...]
    tokens: tuple[int, ...] | None
    states: bool = True
    fragments: Fragments = None

    @property
    def bounds(self):
        return torch.tensor([0, *self.lengths]).cumsum(0)


def make_context(group, bounds, split):
    """``split.fragments``: None, what every rank holds, or of what heads and tails are taken: of "sequences", or of the
    row as a whole."""
    fragments = split.fragments
    if isinstance(fragments, str):
        cut = bounds if fragments == "sequences" else [0, int(bounds[-1])]
        fragments = head_tail(cut, dist.get_world_size(group))
    return ContextParallel(group, bounds, split.tokens, fragments)


def global_inputs(split, member, dtype):
    """A case's inputs as one device takes them, and its bounds."""
    x = make_inputs(split.case, MEMBERS[member], dtype)
    bounds = x.pop("cu_seqlens", torch.tensor([0, split.case.T])).tolist()
    return x, bounds


def loss_gradients(o_shape, state_shape, dtype):
    """The gradients of o and final_state that `testing.with_gradients` draws."""
    gen = torch.Generator().manual_seed(1)
    do = torch.randn(o_shape, generator=gen, dtype=torch.float64).to(dtype)
    return do, torch.randn(state_shape, generator=gen, dtype=torch.float32)


def ends(context):
    """The rows where sequences end, and which ones."""
    rows = [row for row, continues in enumerate(context.continues) if not continues]
    return rows, [context.sequences[row] for row in rows]


def where(context):
    """What puts the ranks' results together."""
    return {"rows": list(context.sequences), "ended": ends(context)[1], "held": context.split.fragments[context.rank]}


def run_op(context, member, x, dtype):
    """This rank's outputs and gradients of the loss that `testing.truth` takes of the whole row."""
    x = dict(x)
    N, rows = len(context.split.cu_seqlens) - 1, list(context.sequences)
    names = [name for name in x if isinstance(x[name], torch.Tensor)]
    leaves = {n: (context.shard(x[n]) if n in TOKENS else x[n]).detach().clone() for n in names}
    if "initial_state" in x:
        leaves["initial_state"] = leaves["initial_state"][rows].clone()
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    o, final = MEMBERS[member].op(**(x | leaves), cp_context=context)
    do, dS = loss_gradients((1, context.split.total, *o.shape[2:]), (N, *final.shape[1:]), dtype)
    dS = dS[rows].to(final.dtype)
    dS[list(context.continues)] = 0  # what goes on is nobody's final state
    gradients = torch.autograd.grad((o, final), list(leaves.values()), (context.shard(do), dS), materialize_grads=True)
    with torch.no_grad():  # what only the backward pass needs is not computed, and bits repeat
        again, _ = MEMBERS[member].op(**(x | leaves), cp_context=context)
    assert torch.equal(again, o)
    results = {"o": o.detach(), "final_state": final.detach()[ends(context)[0]]}
    return results | {f"d{n}": d for n, d in zip(leaves, gradients, strict=True)} | where(context)


def layer_inputs(split):
    torch.manual_seed(0)
    layer = DELTA_LAYERS[split.layer]().double()
    N, HV = len(split.lengths), layer.num_v_heads
    past = None
    if split.states:
        conv = None
        if layer.use_short_conv:
            widths = [c.hidden_size for c in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)]
            conv = tuple(random(N, width, 4, seed=i).requires_grad_() for i, width in enumerate(widths))
        past = MixerState(conv, random(N, HV, layer.head_k_dim, layer.head_v_dim, seed=5).requires_grad_())
    x = random(1, sum(split.tokens or split.lengths), D, seed=7).requires_grad_()
    return layer, x, past


def states_of(state):
    return [] if state is None else [*(state.conv or ()), state.recurrent]


def run_layer(context, split):
    layer, x, past = layer_inputs(split)
    rows, (ended, _) = list(context.sequences), ends(context)
    dy = context.shard(random(*x.shape, seed=8))
    x = context.shard(x).detach().requires_grad_()
    given = [s.detach()[rows].clone().requires_grad_() for s in states_of(past)]
    state = None
    if past is not None:
        state = MixerState(tuple(given[:-1]) or None, given[-1])
    y = layer(x, state=state, cp_context=context)
    finals = states_of(state)
    dfinals = [torch.zeros_like(s) for s in finals]
    for d, s in zip(dfinals, states_of(past), strict=True):
        d[ended] = random(*s.shape, seed=9)[rows][ended].to(d.dtype)
    leaves = [x, *layer.parameters(), *given]
    gradients = torch.autograd.grad((y, *finals), leaves, (dy, *dfinals), materialize_grads=True)
    count = len(list(layer.parameters()))
    return {
        "y": y.detach(), "dx": gradients[0], "dparameters": gradients[1 : 1 + count], "dstates": gradients[1 + count :],
        "finals": [s.detach()[ended] for s in finals], **where(context),
    }  # fmt: skip


def run_mesh(split):
    """Two rows side by side, each split over two ranks, under FSDP2 over the rows and activation checkpointing."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row = mesh["dp"].get_local_rank()
    layer, x, _ = layer_inputs(split)
    fully_shard(layer, mesh=mesh["dp"])
    context = make_context(mesh["cp"].get_group(), split.bounds, split)
    y = checkpoint(layer, (1 + row) * context.shard(x.detach()), cp_context=context, use_reentrant=False)
    y.square().sum().backward()
    gradients = [2 * p.grad.full_tensor() for p in layer.parameters()]  # FSDP's are means over its two shards
    for d in gradients:
        dist.all_reduce(d, group=mesh["cp"].get_group())
    try:
        ContextParallel(mesh, split.bounds)
    except ValueError as error:
        return {"row": row, "y": y.detach(), "dparameters": gradients, "refusal": str(error), **where(context)}


def heads_inputs(kind):
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "head_dim": 8, "expand_v": 2, "num_heads": 2, "num_v_heads": 4, "conv_bias": True}
    return kind(**sizes), random(2, 20, D, seed=7).float(), random(2, 20, D, seed=8).float()


def run_heads(size):
    """Heads over two ranks; on four, two rows side by side under FSDP2."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    results = {}
    for kind in (GatedDeltaNet, KimiDeltaAttention):
        layer, x, dy = heads_inputs(kind)
        parallelize_module(layer, mesh["tp"], tensor_parallel_plan(layer))
        assert layer.A_log._no_weight_decay
        if size > 2:
            fully_shard(layer, mesh=mesh["dp"])
            row = mesh["dp"].get_local_rank()
            x, dy = x[row : row + 1], 2 * dy[row : row + 1]  # FSDP's gradients are means
        x.requires_grad_()
        y = layer(x)
        y.backward(dy)
        whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                 for n, p in layer.named_parameters()}  # fmt: skip
        results[kind.__name__] = {"y": y.detach() * 1, "dx": x.grad / (size // 2), **whole}
    return results


def work(rank, size, out, splits, layers, mesh):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=size)
    results = {}
    for split in splits:
        group = dist.group.WORLD if split.ranks is None else dist.new_group(list(split.ranks))
        if split.ranks is not None and rank not in split.ranks:
            continue
        for member in split.members:
            for dtype in split.dtypes:
                x, bounds = global_inputs(split, member, dtype)
                context = make_context(group, bounds, split)
                results[split.case.name, member, dtype] = run_op(context, member, x, dtype)
    for split in layers:
        results[split.name] = run_layer(make_context(dist.group.WORLD, split.bounds, split), split)
    if mesh is not None:
        results[mesh.name] = run_mesh(mesh)
    results["heads"] = run_heads(size)
    torch.save(results, f"{out}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
