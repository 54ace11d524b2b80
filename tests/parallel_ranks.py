"""What the processes of `test_parallel` do: run every case of a world, and write down what this rank got."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.distributed as dist
from rank_groups import join, leave
from tiny_layers import LAYERS as EVERY_LAYER
from tiny_layers import D, random
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from flash_delta.layers import (
    Attention,
    Comba,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    KimiDeltaAttention,
    MixerState,
    SimpleGatedLinearAttention,
    tensor_parallel_plan,
)
from flash_delta.parallel import ContextParallel, DeviceContextParallel, head_tail
from flash_delta.testing import MEMBERS, Case, make_inputs

TOKENS = ("q", "k", "v", "g", "beta", "p", "b", "w")
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
    on_device: bool = False  # whether the host does not know the bounds


@dataclass(frozen=True)
class LayerSplit:
    name: str
    layer: str
    lengths: tuple[int, ...]
    tokens: tuple[int, ...] | None
    states: bool = True
    fragments: Fragments = None
    dtype: torch.dtype = torch.float64
    on_device: bool = False

    @property
    def bounds(self):
        return torch.tensor([0, *self.lengths]).cumsum(0)


@dataclass(frozen=True)
class Heads:
    """Layers whose heads are split over two ranks."""

    layers: dict[str, Callable[[], nn.Module]] = field(default_factory=lambda: SMALL)
    tokens: int = 20
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


GROUPED = {"hidden_size": D, "head_dim": 8, "expand_v": 2, "num_heads": 2, "num_v_heads": 4, "conv_bias": True}
ALIKE = {"hidden_size": D, "expand_k": 1, "expand_v": 2, "num_heads": 4}
SMALL = {
    "gdn": partial(GatedDeltaNet, **GROUPED),
    "kda": partial(KimiDeltaAttention, **GROUPED),
    "gdn2": partial(GatedDeltaNet2, **GROUPED),
    "comba": partial(Comba, **GROUPED),
    "delta": partial(DeltaNet, **ALIKE, use_beta=False, use_gate=True),
    "gla": partial(SimpleGatedLinearAttention, **ALIKE, num_kv_heads=2, gate_fn="gelu"),
    "attention": partial(Attention, D, 4, 2, head_dim=8),
}
OF_GPUS = {"hidden_size": 128, "head_dim": 64, "expand_v": 1, "num_heads": 4, "num_v_heads": 8, "conv_bias": True}
WIDE = {"gdn": partial(GatedDeltaNet, **OF_GPUS), "kda": partial(KimiDeltaAttention, **OF_GPUS)}
LAYERS = EVERY_LAYER | {f"{name}-wide": make for name, make in WIDE.items()}


def rounded(layer, dtype, device):
    """With the gates' parameters in at least float32, as models keep them."""
    gates = {name: p for name, p in layer.named_parameters(recurse=False) if name in ("A_log", "dt_bias")}
    layer.to(device, dtype)
    for p in gates.values():
        p.data = p.data.to(torch.promote_types(dtype, torch.float32))
    return layer


@cache
def device_context(group, N, tokens, device):
    """One for all cases with as many sequences and tokens, which write their bounds into it."""
    return DeviceContextParallel(group, torch.zeros(N + 1, dtype=torch.int32, device=device), tokens)


def make_context(group, bounds, split, device):
    """``split.fragments``: None, what every rank holds, or of what heads and tails are taken: of "sequences", or of the
    row as a whole."""
    if split.on_device:
        context = device_context(group, len(bounds) - 1, split.tokens, device)
        context.write(torch.as_tensor(bounds).to(device))
        return context
    fragments = split.fragments
    if isinstance(fragments, str):
        cut = bounds if fragments == "sequences" else [0, int(bounds[-1])]
        fragments = head_tail(cut, dist.get_world_size(group))
    return ContextParallel(group, bounds, split.tokens, fragments)


def global_inputs(split, member, dtype, device="cpu"):
    """A case's inputs as one device takes them, and its bounds."""
    x = make_inputs(split.case, MEMBERS[member], dtype, device)
    bounds = x.pop("cu_seqlens", torch.tensor([0, split.case.T])).tolist()
    x.pop("cu_seqlens_cpu", None)
    return x, bounds


def loss_gradients(o_shape, state_shape, dtype, device):
    """The gradients of o and final_state that `testing.with_gradients` draws."""
    gen = torch.Generator().manual_seed(1)
    do = torch.randn(o_shape, generator=gen, dtype=torch.float64).to(device, dtype)
    return do, torch.randn(state_shape, generator=gen, dtype=torch.float32).to(device)


def ends(context):
    """The rows where sequences end, and which ones."""
    if context.bounds is None:
        rows = context.ends.nonzero()[:, 0].tolist()
    else:
        rows = [row for row, continues in enumerate(context.continues) if not continues]
    return rows, [context.sequences[row] for row in rows]


def where(context):
    """What puts the ranks' results together."""
    return {"rows": list(context.sequences), "ended": ends(context)[1], "held": context.split.fragments[context.rank]}


def run_op(context, member, x, dtype):
    """This rank's outputs and gradients of the loss that `testing.truth` takes of the whole row."""
    x = dict(x)
    N, rows = len(context.row_bounds(x["q"].device)) - 1, list(context.sequences)
    names = [name for name in x if isinstance(x[name], torch.Tensor)]
    leaves = {n: (context.shard(x[n]) if n in TOKENS else x[n]).detach().clone() for n in names}
    if "initial_state" in x:
        leaves["initial_state"] = leaves["initial_state"][rows].clone()
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    o, final = MEMBERS[member].op(**(x | leaves), cp_context=context)
    do, dS = loss_gradients((1, context.split.total, *o.shape[2:]), (N, *final.shape[1:]), dtype, o.device)
    (ended, _), given = ends(context), dS[rows].to(final.dtype)
    dS = torch.zeros_like(given)  # what goes on is nobody's final state
    dS[ended] = given[ended]
    gradients = torch.autograd.grad((o, final), list(leaves.values()), (context.shard(do), dS), materialize_grads=True)
    with torch.no_grad():  # what only the backward pass needs is not computed
        again, _ = MEMBERS[member].op(**(x | leaves), cp_context=context)
    assert torch.equal(again, o) or o.is_cuda  # there the backend may depend on whether there are gradients
    results = {"o": o.detach(), "o again": again, "final_state": final.detach()[ends(context)[0]]}
    return results | {f"d{n}": d for n, d in zip(leaves, gradients, strict=True)} | where(context)


def layer_inputs(split, dtype=None, device="cpu"):
    """Weights, inputs and states are rounded to ``split.dtype`` (states to float32), and then given in ``dtype``."""
    torch.manual_seed(0)
    dtype = dtype or split.dtype
    layer = rounded(rounded(LAYERS[split.layer](), split.dtype, device), dtype, device)

    def given(*shape, seed, lowest=torch.bfloat16):
        t = random(*shape, seed=seed).to(torch.promote_types(split.dtype, lowest))
        return t.to(device, torch.promote_types(dtype, lowest)).requires_grad_()

    past = None
    if split.states:
        N, HV, conv = len(split.lengths), layer.num_v_heads, None
        if layer.use_short_conv:
            widths = [c.hidden_size for c in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)]
            conv = tuple(given(N, width, 4, seed=i) for i, width in enumerate(widths))
        past = MixerState(conv, given(N, HV, layer.head_k_dim, layer.head_v_dim, seed=5, lowest=torch.float32))
    return layer, given(1, sum(split.tokens or split.lengths), layer.hidden_size, seed=7), past


def states_of(state):
    return [] if state is None else [*(state.conv or ()), state.recurrent]


def run_layer(context, split, device):
    layer, x, past = layer_inputs(split, device=device)
    rows, (ended, _) = list(context.sequences), ends(context)
    dy = context.shard(random(*x.shape, seed=8).to(x))
    x = context.shard(x).detach().requires_grad_()
    given = [s.detach()[rows].clone().requires_grad_() for s in states_of(past)]
    state = None
    if past is not None:
        state = MixerState(tuple(given[:-1]) or None, given[-1])
    y = layer(x, state=state, cp_context=context)
    finals = states_of(state)
    dfinals = [torch.zeros_like(s) for s in finals]
    for d, s in zip(dfinals, states_of(past), strict=True):
        d[ended] = random(*s.shape, seed=9)[rows][ended].to(d)
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
    context = make_context(mesh["cp"].get_group(), split.bounds, split, x.device)
    y = checkpoint(layer, (1 + row) * context.shard(x.detach()), cp_context=context, use_reentrant=False)
    y.square().sum().backward()
    gradients = [2 * p.grad.full_tensor() for p in layer.parameters()]  # FSDP's are means over its two shards
    for d in gradients:
        dist.all_reduce(d, group=mesh["cp"].get_group())
    try:
        ContextParallel(mesh, split.bounds)
    except ValueError as error:
        return {"row": row, "y": y.detach(), "dparameters": gradients, "refusal": str(error), **where(context)}


def heads_inputs(kind, heads, dtype, wide=None, device="cpu"):
    """Everything is rounded to ``dtype``, and then given in the dtype ``wide``. Default: dtype."""
    torch.manual_seed(0)
    layer = rounded(rounded(heads.layers[kind](), dtype, device), wide or dtype, device)
    shape = 2, heads.tokens, layer.hidden_size
    return layer, *(random(*shape, seed=seed).to(dtype).to(device, wide or dtype) for seed in (7, 8))


def run_heads(size, heads, device):
    """Heads over two ranks; on four, two rows side by side under FSDP2."""
    mesh = init_device_mesh(device.type, (size // 2, 2), mesh_dim_names=("dp", "tp"))
    return {
        (kind, dtype): run_heads_of(kind, heads, dtype, mesh, device) for kind in heads.layers for dtype in heads.dtypes
    }


def run_heads_of(kind, heads, dtype, mesh, device):
    layer, x, dy = heads_inputs(kind, heads, dtype, device=device)
    rows = mesh["dp"].size()
    parallelize_module(layer, mesh["tp"], tensor_parallel_plan(layer))
    assert all(p._no_weight_decay for name, p in layer.named_parameters() if name == "A_log")
    if rows > 1:
        fully_shard(layer, mesh=mesh["dp"])
        row = mesh["dp"].get_local_rank()
        x, dy = x[row : row + 1], rows * dy[row : row + 1]  # FSDP's gradients are means
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
             for n, p in layer.named_parameters()}  # fmt: skip
    return {"y": y.detach() * 1, "dx": x.grad / rows, **whole}


def run_all(device, splits, layers, mesh, heads):
    """What this rank gets of every case."""
    rank, size, results = dist.get_rank(), dist.get_world_size(), {}
    for split in splits:
        group = dist.group.WORLD if split.ranks is None else dist.new_group(list(split.ranks))
        if split.ranks is not None and rank not in split.ranks:
            continue
        for member in split.members:
            for dtype in split.dtypes:
                x, bounds = global_inputs(split, member, dtype, device)
                context = make_context(group, bounds, split, device)
                results[split.case.name, member, dtype] = run_op(context, member, x, dtype)
    for split in layers:
        results[split.name] = run_layer(make_context(dist.group.WORLD, split.bounds, split, device), split, device)
    if mesh is not None:
        results[mesh.name] = run_mesh(mesh)
    return results | {"heads": run_heads(size, heads, device)}


def work(rank, size, out, splits, layers, mesh):
    device = join("gloo", rank, size, out)
    leave(run_all(device, splits, layers, mesh, Heads()), f"{out}/{rank}.pt")
