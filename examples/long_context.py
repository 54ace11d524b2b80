"""A training loop of one's own on rows longer than a GPU should hold:

    torchrun --nproc-per-node 2 examples/long_context.py --tokens 131072 --device cuda

A byte-level model of Gated DeltaNet and KDA layers reads Python's standard library, or the texts that it is given, one
row of so many bytes per step. All ranks share the row's tokens (`ContextParallel`: states, and the last inputs of short
convolutions, cross from rank to rank) and the parameters (FSDP2). Prints bits per byte, throughput and peak memory, and
at the end the bits per byte of a held-out row in eight parts: what comes late in a long row is easier to foresee. On
CPU processes it is the same command without --device cuda (take a few thousand tokens); without torchrun, one process.
`flash-delta train --context-parallel N` does this with checkpoints.
"""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.parallel import ContextParallel
from flash_delta.training import Corpus
from flash_delta.training.corpus import training_starts

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
    model: FlashDeltaForCausalLM, optimizer: torch.optim.Optimizer, row: Tensor, context: ContextParallel
) -> float:
    """One step on one row; its bits per byte before it."""
    loss = nats(model, row, context).sum() / (len(row) - 1)  # this rank's part of the row's
    (loss * context.size).backward()  # of which FSDP takes the mean: together the gradient of the sum
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item() / math.log(2)


def start(device: torch.device) -> None:
    """Joins the ranks that torchrun started, or is the only one."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None, **alone)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("paths", nargs="*", help="texts; none: Python's standard library")
    sizes = {"tokens": 8192, "steps": 20, "layers": 8, "hidden-size": 1024, "heads": 8, "head-dim": 128}
    for option, default in sizes.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def build(a: argparse.Namespace, mesh: object, device: torch.device) -> FlashDeltaForCausalLM:
    """Makes the same fresh model on every rank and shards it. A layer keeps its input only."""
    torch.manual_seed(0)
    sizes = {"hidden_size": a.hidden_size, "num_heads": a.heads, "head_dim": a.head_dim}
    mixers = ["kda" if layer % 4 == 3 else "gdn" for layer in range(a.layers)]
    config = FlashDeltaConfig(vocab_size=256, num_hidden_layers=a.layers, mixers=mixers, **sizes)
    model = FlashDeltaForCausalLM(config).to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    renamed = hasattr(model, "activation_checkpointing_enable")  # by transformers, which warns of the old name then
    (model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable)()
    return model


def main() -> None:
    a = arguments()
    device = torch.device(a.device, int(os.environ.get("LOCAL_RANK", 0))) if a.device == "cuda" else torch.device("cpu")
    start(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, corpus = build(a, mesh, device), Corpus.read(a.paths)
    context = ContextParallel(mesh["cp"], cu_seqlens=[0, a.tokens])  # of every row: they are one sequence each
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for i in range(a.steps):
        began = time.perf_counter()
        row = window(corpus.train, a.tokens, seed=0, step=i)
        bits = step(model, optimizer, row, context)
        speed = a.tokens / (time.perf_counter() - began)
        peak = f", peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if device.type == "cuda" else ""
        if context.rank == 0:
            print(f"step {i + 1}: {bits:.3f} bits per byte, {speed:,.0f} tokens/s on {context.size} ranks{peak}")
    model.eval()
    row = window(corpus.held_out, a.tokens, seed=1, step=0)
    with torch.no_grad():
        parts = context.gather_tokens(nats(model, row, context), dim=0).chunk(PARTS)
    if context.rank == 0:
        print("held out, by part of the row: " + " ".join(f"{p.mean().item() / math.log(2):.3f}" for p in parts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
