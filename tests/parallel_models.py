"""What the processes of `test_parallel_models` do."""

import torch
import torch.distributed as dist
from test_integrations_transformers import float64, tokens, with_gradients
from tiny_transformers import build

from flash_delta.integrations.transformers import enable
from flash_delta.parallel import ContextParallel, DeviceContextParallel, head_tail

LENGTHS = (23, 1, 14)
BOUNDS = [0, 23, 24, 38]
ATTENTION = "gathered_keys"


def whole(family):
    """The model, a row of documents, and where each of its tokens stands in its document."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return build(family, torch.float64), tokens(1, BOUNDS[-1]), positions


def run(family, context):
    """This rank's output, and its part of the gradients."""
    model, x, _ = whole(family)
    with float64(family), enable(model):
        model.set_attn_implementation(ATTENTION)
        y = model(context.shard(x), cp_context=context)[0]
        dy = torch.randn((1, BOUNDS[-1], y.shape[-1]), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(
            y, parameters, context.shard(dy).to(y), allow_unused=True, materialize_grads=True
        )
    return {"y": y.detach(), **dict(zip(names, gradients, strict=True)), "held": context.split.fragments[context.rank]}


def work(rank, size, out, families):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=size)
    contexts = {
        "runs": ContextParallel(dist.group.WORLD, BOUNDS),
        "bounds on the device": DeviceContextParallel(dist.group.WORLD, torch.tensor(BOUNDS), [20, 18]),
        "heads and tails": ContextParallel(dist.group.WORLD, BOUNDS, fragments=head_tail(BOUNDS, size)),
    }
    results = {(family, name): run(family, context) for family in families for name, context in contexts.items()}
    torch.save(results, f"{out}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def alone(family):
    model, x, positions = whole(family)
    with float64(family), enable(model):
        return with_gradients(model, model(x, position_ids=positions)[0])
