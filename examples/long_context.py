"""A training loop of one's own on rows longer than a GPU should hold:

    torchrun --nproc-per-node 2 examples/long_context.py --tokens 131072 --device cuda
    torchrun --nproc-per-node 8 examples/long_context.py --tokens 131072 --device cuda --context-parallel 4
    torchrun --nproc-per-node 8 examples/long_context.py --tokens 131072 --device cuda --tensor-parallel 2

A byte-level model reads Python's standard library, or the texts that it is given. Ranks are a mesh of three dimensions.
The ranks of a group "cp" share the tokens of a row (`ContextParallel`: states, and the last inputs of short
convolutions, cross from rank to rank). Those of a group "tp" share heads, and the inner width of the MLPs. The groups
of "dp" read rows of their own, one per step. FSDP2 splits the parameters over "dp" and "cp". Without options all ranks
share a row.

Prints bits per byte, throughput, the share of the GPUs' peak arithmetic, and peak memory. At the end it prints the bits
per byte of a held-out row in eight parts: what comes late in a long row is easier to foresee. --out keeps checkpoints,
which torch writes while training goes on, and continues from the last one. On CPU processes it is the same command
without --device cuda (take a few thousand tokens); without torchrun, one process. `flash-delta train --context-parallel
N` is transformers' Trainer with such rows.
"""

import argparse
import math
import os
import time
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from flash_delta.layers import tensor_parallel_plan
from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.parallel import ContextParallel
from flash_delta.training import Corpus
from flash_delta.training.corpus import training_starts
from flash_delta.training.flops import share_of_peak

MLP = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
PARTS = 8


def window(text: Tensor, tokens: int, seed: int, step: int) -> Tensor:
    start = int(training_starts(len(text), 1, tokens, seed=seed, step=step)[0])
    return text[start : start + tokens].long()


def nats(model: FlashDeltaForCausalLM, row: Tensor, context: ContextParallel) -> Tensor:
    """-ln p of each of this rank's tokens' next ones [T]; 0 at the row's very end, after which there is none."""
    targets = F.pad(row[1:], (0, 1), value=-100)
    mine, next_ones = (context.shard(x[None]).to(model.device) for x in (row, targets))
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        logits = model(input_ids=mine, cp_context=context, use_cache=False).logits[0]
    return F.cross_entropy(logits.float(), next_ones[0], ignore_index=-100, reduction="none")


def step(
    model: FlashDeltaForCausalLM,
    optimizer: torch.optim.Optimizer,
    row: Tensor,
    context: ContextParallel,
    mesh: DeviceMesh,
) -> float:
    """One step on one row of each group; their bits per byte before it."""
    loss = nats(model, row, context).sum() / (len(row) - 1)  # this rank's part of the row's
    (loss * context.size).backward()  # FSDP takes the mean over parts and rows: together the gradient of the rows' mean
    clip(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach() / mesh["dp"].size()
    for group in ("dp", "cp"):
        dist.all_reduce(loss, group=mesh[group].get_group())
    return loss.item() / math.log(2)


def clip(model: nn.Module, most: float) -> None:
    """Does what `clip_grad_norm_` does, which takes no gradients that are split over different meshes."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    norm = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    factor = (most / norm).clamp(max=1.0)
    for g in gradients:
        (g.to_local() if isinstance(g, DTensor) else g).mul_(factor)


def start(device: torch.device) -> None:
    """Joins the ranks that torchrun started, or is the only one."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"  # gloo is for checkpoints
    dist.init_process_group(backend, device_id=device if gpu else None, **alone)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("paths", nargs="*", help="texts; none: Python's standard library")
    sizes = {"tokens": 8192, "steps": 20, "layers": 8, "hidden-size": 1024, "heads": 8, "head-dim": 128}
    for option, default in sizes.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--mixers", default="gdn,gdn,gdn,kda", help="layers repeat them; also attention, gdn2, gdp")
    parser.add_argument("--context-parallel", type=int, help="ranks that share a row; none: all")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share heads")
    parser.add_argument("--out", type=Path, help="a folder for checkpoints")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def make_mesh(a: argparse.Namespace, device: torch.device) -> DeviceMesh:
    ranks, tp = dist.get_world_size(), a.tensor_parallel
    cp = a.context_parallel or ranks // tp
    if cp * tp == 0 or ranks % (cp * tp):
        raise SystemExit(f"expected a number of ranks that {cp} x {tp} (tokens, heads) divide, got {ranks}")
    return init_device_mesh(device.type, (ranks // (cp * tp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))


def build(a: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> FlashDeltaForCausalLM:
    """Makes the same fresh model on every rank and splits it. A layer keeps its input only."""
    torch.manual_seed(0)
    shards = mesh["dp", "cp"]._flatten("shards")
    sizes = {"hidden_size": a.hidden_size, "num_heads": a.heads, "head_dim": a.head_dim, "num_attention_heads": a.heads}
    names = a.mixers.split(",")
    mixers = [names[layer % len(names)] for layer in range(a.layers)]
    config = FlashDeltaConfig(vocab_size=256, num_hidden_layers=a.layers, mixers=mixers, **sizes)
    model = FlashDeltaForCausalLM(config).to(device)
    for layer in model.model.layers:
        if mesh["tp"].size() > 1:
            parallelize_module(layer.mixer, mesh["tp"], tensor_parallel_plan(layer.mixer))
            parallelize_module(layer.mlp, mesh["tp"], MLP)
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
    renamed = hasattr(model, "activation_checkpointing_enable")  # by transformers, which warns of the old name then
    (model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable)()
    return model


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def load_last(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the last whole checkpoint, and returns after how many steps it was written; 0 without one."""
    done = [int(folder.name) for folder in out.glob("*") if (folder / ".metadata").exists()]  # it is written last
    if not done:
        return 0
    found = parts_of(model, optimizer)
    dcp.load(found, checkpoint_id=out / str(max(done)))
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return max(done)


def train(
    a: argparse.Namespace, model: FlashDeltaForCausalLM, text: Tensor, context: ContextParallel, mesh: DeviceMesh
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    done = load_last(a.out, model, optimizer) if a.out else 0
    rows, ranks, saving = mesh["dp"].size(), dist.get_world_size(), None
    share = share_of_peak(model, a.tokens, model.device, ranks)
    for i in range(done, a.steps):
        began = time.perf_counter()
        row = window(text, a.tokens, seed=mesh["dp"].get_local_rank(), step=i)
        bits = step(model, optimizer, row, context, mesh)
        speed = rows * a.tokens / (time.perf_counter() - began)
        if dist.get_rank() == 0:
            line = f"step {i + 1}: {bits:.3f} bits per byte, {speed:,.0f} tokens/s on {ranks} ranks"
            line += f", {share * speed:.1%} of peak arithmetic" if share else ""
            peak = f", peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if model.device.type == "cuda" else ""
            print(line + peak, flush=True)
        if a.out and ((i + 1) % a.checkpoint_every == 0 or i + 1 == a.steps):
            if saving:
                saving.result()
            saving = save(a.out / str(i + 1), model, optimizer)
    if saving:
        saving.result()


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Future:
    """Copies parameters and moments to the host, and lets another thread write them."""
    return dcp.async_save(parts_of(model, optimizer), checkpoint_id=folder)


def main() -> None:
    a = arguments()
    device = torch.device(a.device, int(os.environ.get("LOCAL_RANK", 0))) if a.device == "cuda" else torch.device("cpu")
    start(device)
    mesh = make_mesh(a, device)
    model, corpus = build(a, mesh, device), Corpus.read(a.paths)
    context = ContextParallel(mesh["cp"], cu_seqlens=[0, a.tokens])  # of every row: they are one sequence each
    train(a, model, corpus.train, context, mesh)
    model.eval()
    row = window(corpus.held_out, a.tokens, seed=1, step=0)
    with torch.no_grad():
        parts = context.gather_tokens(nats(model, row, context), dim=0).chunk(PARTS)
    if dist.get_rank() == 0:
        print("held out, by part of the row: " + " ".join(f"{p.mean().item() / math.log(2):.3f}" for p in parts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
