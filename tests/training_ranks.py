"""What the processes of `test_training_ranks` do: the same runs, each by all ranks together."""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from rank_groups import join, leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.training import Corpus, Diverged, Layout, RunTrainer, Settings, byte_tokenizer

SETTINGS = Settings(steps=4, batch_size=4, seq_len=33, checkpoint_every=2)
RUNS = {  # number of ranks -> run -> what it computes, how ranks share it
    2: {
        "data parallel": ({"batch_size": 8}, Layout(accumulate=2, activation_checkpointing=True)),
        "context parallel": ({}, Layout(context_parallel=2)),
        "packed": ({"packed": True}, Layout()),
        "packed, context parallel": (
            {"packed": True},
            Layout(context_parallel=2, accumulate=2, activation_checkpointing=True),
        ),
        "bfloat16": ({"dtype": "bfloat16"}, Layout()),
    },
    4: {
        "mesh": ({"packed": True, "batch_size": 8}, Layout(context_parallel=2, accumulate=2)),
        "four share a row": ({"packed": True}, Layout(context_parallel=4)),
        "heads and tails": ({"packed": True}, Layout(context_parallel=4, head_tail=True)),
    },
}
MIXERS = ["gdn", "kda", "attention"]
SIZES = {"hidden_size": 16, "num_heads": 1, "num_v_heads": 2, "head_dim": 8, "num_attention_heads": 2}
WIDE = {"hidden_size": 128, "num_heads": 2, "num_v_heads": 4, "head_dim": 64, "num_attention_heads": 2}  # for kernels


def tiny_model(dtype, mixers=MIXERS, sizes=SIZES):
    """In float64 sums in another order stay the same up to 1e-15, also behind Adam's division."""
    torch.manual_seed(0)
    config = FlashDeltaConfig(vocab_size=256, num_hidden_layers=len(mixers), mixers=mixers, **sizes)
    return FlashDeltaForCausalLM(config).to(dtype)


def make(folder, text, changes, layout, **options):
    settings = replace(SETTINGS, **changes)
    model = tiny_model(torch.float32 if settings.dtype == "bfloat16" else torch.float64)
    return RunTrainer(folder, model, byte_tokenizer(), Corpus.read([text]), settings, layout, use_cpu=True, **options)


def results(trainer, resumed=None):
    """All that a run tells, but for times."""
    trainer.train(resume_from_checkpoint=resumed)
    names = ("step", "loss", "grad_norm", "learning_rate", "bits_per_byte", "eval_loss", "eval_bits_per_byte")
    told = [{name: log[name] for name in names if name in log} for log in trainer.state.log_history]
    return told, {n: p.detach() for n, p in trainer.model.named_parameters()}


def stopped(folder, text, rank):
    """The steps of a run that the second rank alone is asked to stop, and by what."""
    trainer = make(folder, text, {}, Layout(), stop=lambda: 15 if rank == 1 and trainer.state.global_step == 3 else 0)
    trainer.train()
    return trainer.state.global_step, trainer.stopped_by


def diverged(folder, text, rank):
    """What is said where the second rank alone gets a gradient that is not finite."""
    trainer = make(folder, text, {}, Layout())
    weight = trainer.model.lm_head.weight
    weight.register_hook(lambda g: g * float("nan") if rank == 1 and trainer.state.global_step == 2 else g)
    try:
        trainer.train()
    except Diverged as error:
        return str(error)


def compiled_gradients(rank):
    """Returns the ranks' mean gradients of a block in one graph under FSDP2. Each rank has a row of its own."""
    model = tiny_model(torch.float64, MIXERS[:1])
    for block in model.model.layers:
        block.compile(backend="eager", fullgraph=True)
    shard(model)
    loss_of_row(model, rank).backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def gradients_in_bfloat16(rank, device="cpu", *kind):
    """Returns the ranks' mean gradients of a model with bfloat16 weights and float32 gates under FSDP2. Each rank has a
    row of its own."""
    model = shard(tiny_model(torch.bfloat16, *kind).to(device), device)
    loss_of_row(model, rank).backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def assert_gradients_in_bfloat16(found, device="cpu", *kind):
    """Those of one process. A gate's gradient is not rounded when ranks sum it."""
    alone = []
    for row in range(2):
        model = tiny_model(torch.bfloat16, *kind).to(device)
        loss_of_row(model, row).backward()
        alone.append({name: p.grad.cpu() for name, p in model.named_parameters()})
    assert found.keys() == alone[0].keys()
    for name, got in found.items():
        gate = name.endswith(("A_log", "dt_bias"))
        assert got.dtype == (torch.float32 if gate else torch.bfloat16), name
        want, tolerance = (alone[0][name].float() + alone[1][name].float()) / 2, 1e-6 if gate else 2**-8
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())


def fresh_parameters():
    """Returns the parameters of a model that has values only after it was sharded."""
    with torch.device("meta"):
        model = shard(tiny_model(torch.bfloat16))
    model.to_empty(device="cpu").init_weights()
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def shard(model, device="cpu"):
    """Shards a model over all ranks. Without a mesh FSDP2 would take the GPUs of a machine that has some."""
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of_row(model, row, tokens=40):
    ids = (torch.arange(tokens, device=model.device)[None] * (3 + row)) % 256
    return model(ids, labels=ids, use_cache=False).loss


def sharded_gradients(rank, device, dtype):
    """Returns the loss and the ranks' mean gradients of a model whose float32 parameters are sharded. Products are in
    ``dtype``. Each rank has a row of its own."""
    model = shard(tiny_model(torch.float32, MIXERS[:2], WIDE).to(device), device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss = loss_of_row(model, rank, 150)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.full_tensor() for n, p in model.named_parameters()}}


def gradients_alone(rows, device, dtype):
    """Returns the loss of each row and the gradients of one process."""
    model = tiny_model(torch.promote_types(dtype, torch.float32), MIXERS[:2], WIDE).to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        losses = torch.stack([loss_of_row(model, row, 150) for row in range(rows)])
    losses.mean().backward()
    return {"loss": losses.detach(), **{n: p.grad for n, p in model.named_parameters()}}


def work(rank, size, folder, text):
    of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "x"}
    os.environ |= {name: str(value) for name, value in of_torchrun.items()}
    join("gloo", rank, size, folder)
    got = {name: results(make(folder / name, text, *run)) for name, run in RUNS[size].items()}
    if size == 2:
        got["stopped"] = stopped(folder / "stopped", text, rank)
        got["diverged"] = diverged(folder / "diverged", text, rank)
        got["resumed"] = results(make(folder / "packed", text, *RUNS[2]["packed"]), folder / "packed" / "checkpoint-2")
        got["compiled"] = compiled_gradients(rank)
        if torch.__version__ >= (2, 12):  # an older FSDP2 takes one dtype
            got["bfloat16 weights"], got["fresh"] = gradients_in_bfloat16(rank), fresh_parameters()
    for name, refused in {"context_parallel": Layout(context_parallel=3), "shard": Layout(shard=3)}.items():
        try:
            make(folder / "refused", text, {}, refused)
        except ValueError as error:
            got[name] = str(error)
    leave(got, folder / f"{rank}.pt")
