"""One long row through a Gated DeltaNet layer, or one of KDA, split over GPUs, forward and backward:

    torchrun --nproc-per-node 4 examples/context_parallel.py --tokens 131072
    torchrun --nproc-per-node 4 examples/context_parallel.py --tokens 131072 --mixer kda
    torchrun --nproc-per-node 4 examples/context_parallel.py --tokens 131072 --head-tail

Prints how long a step takes for the layer and for its op alone, beside one GPU with the whole row, and how far results
are from that GPU's. Efficiency is the time on one over the number of ranks times the time on all. Without a GPU it
runs on CPU processes (take a few thousand tokens): it shows how, its times mean nothing.
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flash_delta import chunk_gated_delta_rule, chunk_kda
from flash_delta.layers import GatedDeltaNet, KimiDeltaAttention
from flash_delta.parallel import ContextParallel, head_tail
from flash_delta.testing import relative_error

MIXERS = {"gdn": (GatedDeltaNet, chunk_gated_delta_rule), "kda": (KimiDeltaAttention, chunk_kda)}
OP_OPTIONS = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
Mixer = GatedDeltaNet | KimiDeltaAttention


def layer_step(layer: Mixer, x: Tensor, context: ContextParallel | None) -> tuple[Tensor, ...]:
    """The output, and the gradients of its squared sum: the weights' are this rank's part."""
    y = layer(x, cp_context=context)
    return y, *torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))


def op_step(
    op: Callable, layer: Mixer, tensors: dict[str, Tensor], context: ContextParallel | None
) -> tuple[Tensor, ...]:
    parameters = {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
    o, _ = op(**tensors, **parameters, **OP_OPTIONS, cp_context=context)
    return o, *torch.autograd.grad(o, [*tensors.values(), *parameters.values()], o.detach())


def milliseconds(step: Callable[[], tuple[Tensor, ...]], repeats: int) -> tuple[float, tuple[Tensor, ...]]:
    """Per step, once everything is compiled, and what a step returns."""
    results = step()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        results = step()
    wait()
    return 1e3 * (time.perf_counter() - start) / repeats, results


def wait() -> None:
    """For all ranks' devices: every rank measures the slowest."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def make_tensors(layer: Mixer, x: Tensor) -> dict[str, Tensor]:
    """What the layer would give its op."""
    with torch.no_grad():
        tensors, _ = layer.tokens(x)
    return {name: t.detach().requires_grad_() for name, t in tensors.items()}


def difference(context: ContextParallel, got: Tensor, want: Tensor) -> float:
    """Returns the error of a rank's tokens from the whole row's, or of the sum of all ranks' parts of a shared
    gradient."""
    if got.shape != want.shape:
        return relative_error(got, context.shard(want))
    dist.all_reduce(got, group=context.group)
    return relative_error(got, want)


def report(name: str, step: Callable, whole: object, part: object, context: ContextParallel, repeats: int) -> None:
    """Time the whole row on every rank by itself, then its split over all of them, and compare."""
    alone_ms, alone = milliseconds(lambda: step(whole, None), repeats)
    split_ms, split = milliseconds(lambda: step(part, context), repeats)
    error, *gradients = (difference(context, got, want) for got, want in zip(split, alone, strict=True))
    errors = [None] * context.size
    dist.all_gather_object(errors, (error, max(gradients)), group=context.group)
    if context.rank == 0:  # who alone prints: lines of several processes run into each other
        efficiency = alone_ms / (context.size * split_ms)
        print(
            f"{name}: one rank {alone_ms:.2f} ms, {context.size} ranks {split_ms:.2f} ms, efficiency {efficiency:.2f}"
        )
        for rank, (output, gradient) in enumerate(errors):
            print(f"{name}: rank {rank}, output {output:.1e} off, gradients up to {gradient:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for option, default in (
        ("tokens", 131072),
        ("hidden-size", 2048),
        ("heads", 16),
        ("head-dim", 128),
        ("repeats", 5),
    ):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--mixer", choices=MIXERS, default="gdn")
    parser.add_argument("--head-tail", action="store_true", help="each rank holds a head and a tail of the row")
    a = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",))

    torch.manual_seed(0)  # every rank the same layer and row; a loader would read a rank's own tokens only
    sizes = {"head_dim": a.head_dim, "num_heads": a.heads, "num_v_heads": 2 * a.heads, "expand_v": 1}
    mixer, op = MIXERS[a.mixer]
    layer = mixer(a.hidden_size, **sizes).to(device, torch.bfloat16 if gpu else torch.float32)
    row = torch.randn(1, a.tokens, a.hidden_size).to(device, layer.q_proj.weight.dtype)
    fragments = head_tail([0, a.tokens], ranks) if a.head_tail else None
    context = ContextParallel(mesh["cp"], cu_seqlens=[0, a.tokens], fragments=fragments)
    report("layer", lambda x, c: layer_step(layer, x, c), row, context.shard(row), context, a.repeats)
    whole = make_tensors(layer, row)
    part = {name: context.shard(t).detach().requires_grad_() for name, t in whole.items()}
    report("op", lambda x, c: op_step(op, layer, x, c), whole, part, context, a.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
