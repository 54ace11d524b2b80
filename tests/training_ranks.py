"""What the processes of `test_training_ranks` do: the same runs, each by all ranks together."""

import shutil
from dataclasses import asdict

import torch
from rank_groups import join, leave
from torch.distributed.fsdp import fully_shard

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.training import Corpus, Diverged, Layout, TrainConfig, Trainer
from flash_delta.training.claim import claim_folder
from flash_delta.training.ranks import Ranks

SETTINGS = {"steps": 4, "batch_size": 4, "seq_len": 33, "eval_every": 2, "eval_windows": 5, "checkpoint_every": 4}
RUNS = {  # number of ranks -> run -> what it computes, how ranks share it
    2: {
        "data parallel": ({}, Layout(shard=1)),
        "sharded": ({"batch_size": 8}, Layout(accumulate=2, activation_checkpointing=True)),
        "context parallel": ({}, Layout(context_parallel=2)),
        "packed": ({"packed": True}, Layout()),
        "packed, context parallel": ({"packed": True}, Layout(context_parallel=2, activation_checkpointing=True)),
        "bfloat16": ({"dtype": "bfloat16"}, Layout(activation_checkpointing=True)),
    },
    4: {"mesh": ({"packed": True, "batch_size": 8}, Layout(context_parallel=2, shard=2, accumulate=2))},
}
MIXERS = ["gdn", "kda", "attention"]


SIZES = {"hidden_size": 16, "num_heads": 1, "num_v_heads": 2, "head_dim": 8, "num_attention_heads": 2}
WIDE = {"hidden_size": 128, "num_heads": 2, "num_v_heads": 4, "head_dim": 64, "num_attention_heads": 2}  # for kernels


def tiny_model(dtype, mixers=MIXERS, sizes=SIZES):
    """In float64 sums in another order stay the same up to 1e-15, also behind Adam's division."""
    torch.manual_seed(0)
    config = FlashDeltaConfig(vocab_size=256, num_hidden_layers=len(mixers), mixers=mixers, **sizes)
    return FlashDeltaForCausalLM(config).to(dtype)


def make(folder, text, changes, layout, dtype=torch.float64):
    config = TrainConfig(**SETTINGS | changes)
    return Trainer.start(folder, tiny_model(dtype), Corpus.read([text]), config, layout)


def dtype_of(name):
    """Returns the parameters' dtype."""
    return torch.float32 if name == "bfloat16" else torch.float64


def results(trainer):
    """All that a run tells, but for times."""
    records = [asdict(record) | {"tokens_per_second": None} for record in trainer.run()]
    parameters = {n: p.detach() for n, p in trainer.model.named_parameters()}
    return records, {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in parameters.items()}


def stopped(trainer, rank):
    """The steps of a run that the second rank alone is asked to stop, and by what."""
    records = list(trainer.run(lambda: 15 if rank == 1 and trainer.step == 2 else 0))
    return len(records), trainer.stopped_by


def diverged(trainer, rank):
    """What is said where the second rank alone has a parameter that is not finite."""
    records = trainer.run()
    next(records)
    if rank == 1:
        next(iter(trainer.optimizer.state.values()))["exp_avg"].to_local().fill_(float("inf"))
    try:
        next(records)
    except Diverged as error:
        return str(error)


def locked(folder, text):
    """What is said where another process holds the folder."""
    trainer = make(folder, text, {}, Layout(), torch.float32)
    holder = claim_folder(folder, None, 0) if trainer.ranks.first else None
    try:
        trainer.run()
    except ValueError as error:
        return str(error)
    finally:
        if holder is not None:
            holder.release()


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
    model = shard(tiny_model(torch.bfloat16, *kind).to(device))
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


def shard(model):
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def loss_of_row(model, row, tokens=40):
    ids = (torch.arange(tokens, device=model.device)[None] * (3 + row)) % 256
    return model(ids, labels=ids, use_cache=False).loss


def sharded_gradients(rank, device, dtype):
    """Returns the loss and the ranks' mean gradients of a model whose parameters this library's training shards. Each
    rank has a row of its own."""
    model = tiny_model(torch.float32, MIXERS[:2], WIDE).to(device)
    Ranks.of(Layout(), device).distribute(model, dtype)
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
    join("gloo", rank, size, folder)
    got = {name: results(make(folder / name, text, *run, dtype_of(name))) for name, run in RUNS[size].items()}
    if size == 2:
        cut = make(folder / "cut", text, {"checkpoint_every": 2, "eval_every": 4}, Layout(), torch.float32).run()
        next(cut), next(cut)
        cut.close()
        if rank == 0:
            shutil.copytree(folder / "cut", folder / "cut-again")
        got["stopped"] = stopped(make(folder / "stopped", text, {}, Layout(), torch.float32), rank)
        got["diverged"] = diverged(
            make(folder / "diverged", text, {"checkpoint_every": 2}, Layout(), torch.float32), rank
        )
        got["locked"] = locked(folder / "locked", text)
        got["compiled"] = compiled_gradients(rank)
        if torch.__version__ >= (2, 12):  # an older FSDP2 takes one dtype
            got["bfloat16 weights"], got["fresh"] = gradients_in_bfloat16(rank), fresh_parameters()
        got["resumed"] = results(Trainer.resume(folder / "cut"))
    for name, refused in {"context_parallel": Layout(context_parallel=3), "shard": Layout(shard=3)}.items():
        try:
            make(folder / "refused", text, {}, refused)
        except ValueError as error:
            got[name] = str(error)
    leave(got, folder / f"{rank}.pt")
