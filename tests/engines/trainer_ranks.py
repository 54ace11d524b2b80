"""A trainer's layer on one rank's part of a packed row: ``python trainer_ranks.py TRAINER RANK RANKS FOLDER``."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import doors
import pytest
import torch
import torch.distributed as dist
import trained_layers
from stand_ins import bare, stand_in

BOUNDS = torch.tensor(trained_layers.BOUNDS)


def enter_verl(patch):
    """verl's forward pass in the place of transformers'."""
    trained_layers.pretend_gpu(patch)
    doors.enter()
    stand_in("omegaconf")
    bare("verl", "verl.models")
    forward = import_module("verl.models.transformers.qwen3_5").qwen3_5_gated_delta_net_forward
    trained_layers.modelling().Qwen3_5GatedDeltaNet.forward = forward


def verl():
    enter_verl(pytest.MonkeyPatch())
    import_module("verl.utils.ulysses").set_ulysses_sequence_parallel_group(dist.group.WORLD)
    return trained_layers.build(), {"cu_seqlens": BOUNDS, "cu_seqlens_cpu": BOUNDS}


def enter_axolotl():
    doors.enter()
    stand_in("bitsandbytes", "addict")
    bare("axolotl", "axolotl.utils", "axolotl.utils.callbacks")


def _ringmaster():
    enter_axolotl()
    runtime = import_module("ringmaster.runtime")
    runtime.set_runtime(runtime.CPRuntime(config=None, varlen=(BOUNDS, 30)))
    return import_module("ringmaster.recurrent")


def axolotl_qwen3_5():
    recurrent = _ringmaster()
    import_module("axolotl.monkeypatch.models.qwen3_5.modeling").patch_qwen3_5_modeling_packing()
    layer = trained_layers.build()
    recurrent.wire_gated_delta([layer], dist.group.WORLD)
    return layer, {}


def axolotl_kimi_linear():
    recurrent, layer = _ringmaster(), own_kimi_linear()
    recurrent.wire_kda([layer], dist.group.WORLD)
    return layer, {}


def own_kimi_linear():
    """axolotl's."""
    modelling = import_module("axolotl.model_support.kimi_linear.modeling_kimi")
    linear = trained_layers.KDA | {"short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": []}
    sizes = {"hidden_size": trained_layers.COMMON["hidden_size"], "linear_attn_config": linear}
    given = trained_layers.build("kimi_linear")
    config = modelling.KimiLinearConfig(**sizes, rms_norm_eps=given.layer_norm_epsilon)
    layer = modelling.KimiDeltaAttention(config, layer_idx=0)
    layer.load_state_dict(under_kimi_names(given.state_dict()))
    return layer


def under_kimi_names(tensors):
    """axolotl's own Kimi-Linear has a convolution for each of queries, keys and values, and no module for the gate."""
    found = {name.removeprefix("forget_gate."): t for name, t in tensors.items()}
    parts = found.pop("conv1d.weight").chunk(3)
    return found | {f"{letter}_conv1d.weight": part for letter, part in zip("qkv", parts, strict=True)}


def run(trainer, ranks, folder):
    """What all ranks got: their outputs one after the other, and the sums of their gradients."""
    command = [sys.executable, "-W", "ignore", __file__, trainer]
    workers = [subprocess.Popen([*command, str(rank), str(ranks), folder]) for rank in range(ranks)]
    assert [worker.wait() for worker in workers] == [0] * ranks
    parts = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
    found = {name: sum(part[name] for part in parts) for name in parts[0]}
    return found | {name: torch.cat([part[name] for part in parts], 1) for name in ("output", "input")}


def main(trainer, rank, ranks, folder):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    layer, arguments = globals()[trainer]()
    own = slice(rank * trained_layers.BOUNDS[-1] // ranks, (rank + 1) * trained_layers.BOUNDS[-1] // ranks)
    torch.save(trained_layers.train(layer, "packed", own, **arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
