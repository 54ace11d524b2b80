"""What the processes of `test_parallel_gpu` do."""

from dataclasses import replace

import torch
import torch.distributed as dist
from parallel_ranks import Heads, LayerSplit, Split, layer_inputs, make_context, run_all, where
from rank_groups import join, leave
from tiny_layers import random


def work(rank, size, folder, backend, kind, dtype, cases):
    """``cases``: of `run_all`; those of this kind and dtype run. Kinds "model", "weights": parameters are split over
    ranks, in float32 or with bfloat16 weights. Kind "graph": layers whose bounds are on the device, captured."""
    device = join(backend, rank, size, folder)
    if kind == "model":
        from training_ranks import sharded_gradients  # the others start without transformers

        found = sharded_gradients(rank, device, dtype)
    elif kind == "weights":
        from training_ranks import MIXERS, WIDE, gradients_in_bfloat16

        found = gradients_in_bfloat16(rank, device, MIXERS[:2], WIDE)
    elif kind == "graph":
        found = replay_all([split for split in cases[1] if split.on_device and split.dtype == dtype], device)
    else:
        found = run_all(device, *of_kind(kind, dtype, *cases))
    leave(found, folder / f"{rank}.pt")


def of_kind(kind, dtype, splits: list[Split], layers: list[LayerSplit], heads: Heads):
    splits = [replace(split, members=(kind,), dtypes=(dtype,)) for split in splits]
    layers = [split for split in layers if (split.layer, split.dtype) == (f"{kind}-wide", dtype)]
    return splits, layers, None, replace(heads, layers={kind: heads.layers[kind]}, dtypes=(dtype,))


def replay_all(splits: list[LayerSplit], device):
    """Captures a forward and backward pass of each layer once, and replays it with the bounds of each split."""
    found = {}
    for layer in dict.fromkeys(split.layer for split in splits):
        own = [split for split in splits if split.layer == layer]
        context = make_context(dist.group.WORLD, own[0].bounds, own[0], device)
        step = training_step(context, own[0], device)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own thread looks at its events
            y, (dx, *dparameters) = step()
        for split in own:
            context.write(split.bounds)
            graph.replay()
            results = {"y": y.clone(), "dx": dx.clone(), "dparameters": [d.clone() for d in dparameters]}
            found[split.name] = results | {"dstates": [], "finals": []} | where(context)
    return found


def training_step(context, split, device):
    """A function without arguments, which returns a layer's output and the gradients of its input and parameters."""
    layer, x, _ = layer_inputs(split, device=device)
    dy = context.shard(random(*x.shape, seed=8).to(x))
    x = context.shard(x).detach().requires_grad_()

    def step():
        y = layer(x, cp_context=context)
        return y.detach(), torch.autograd.grad(y, [x, *layer.parameters()], dy)

    return step
