"""How layers of trainers come to be, alone, and on one rank of many.

``python trainer_ranks.py TRAINER RANK RANKS FOLDER`` runs one on that rank's part of a packed row.
"""

import logging
import signal
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


def enter_swift(patch):
    """ms-swift's patch, applied; its module."""
    trained_layers.pretend_gpu(patch)
    doors.enter()
    stand_in("datasets", "json_repair", "modelscope", "pandas", "requests", "urllib3")
    logger = logging.getLogger("swift")
    logger.addHandler(logging.NullHandler())
    import_module("modelscope.utils.logger").get_logger = lambda *_, **__: logger
    bare("swift", "swift.model", "swift.model.models")
    module = import_module("swift.model.models.qwen")
    module._patch_qwen3_5_linear_attention_sequence_parallel()
    return module


def swift():
    """Its sequence parallelism: between the projections a rank has all tokens of some heads."""
    patch, ranks = pytest.MonkeyPatch(), dist.get_world_size()
    patch.setenv("WORLD_SIZE", str(ranks))
    state = enter_swift(patch).sequence_parallel
    state.world_size, state.num_heads, state.padding_free = ranks, ranks, True
    state.extra_kwargs["text_position_ids"] = trained_layers.positions()
    state._init_device_mesh()
    return trained_layers.build(), {}


def enter_torchtitan():
    report = doors.enter()
    stand_in("tyro")
    for function in () if report is None else report.functions:
        import_module("spmd_types").register_local_autograd_function(function)


def own_torchtitan_layer(prepare=lambda config: None, **options):
    """``prepare`` takes its configuration."""
    heads = {name.replace("num_", "n_"): size for name, size in trained_layers.GDN.items()}
    models = import_module("torchtitan.models.qwen3_5")
    config = models._qwen35_deltanet_config(dim=trained_layers.COMMON["hidden_size"], layer_id=0, **heads, **options)
    prepare(config)
    layer = config.build()
    layer.load_state_dict(under_torchtitan_names(trained_layers.build().state_dict()))
    return layer


def under_torchtitan_names(tensors):
    """It splits the projection and the convolution of queries, keys and values."""
    found, sizes = dict(tensors), trained_layers.GDN
    keys, values = (sizes[f"num_{kind}_heads"] * sizes[f"{kind}_head_dim"] for kind in ("key", "value"))
    for old, new in (("in_proj_qkv", "in_proj"), ("conv1d", "conv")):
        parts = found.pop(f"{old}.weight").split([keys, keys, values])
        found |= {f"{new}_{letter}.weight": part for letter, part in zip("qkv", parts, strict=True)}
    return found


def torchtitan_documents(bounds):
    on_device = torch.tensor(bounds, dtype=torch.int32)
    metadata = import_module("torchtitan.models.common.attention").VarlenMetadata
    return metadata(on_device, on_device, 0, 0, tuple(bounds))


def torchtitan():
    """Its tensor parallelism, whose types it checks: between the projections a rank has all tokens of some heads."""
    enter_torchtitan()
    dims, types = import_module("torchtitan.distributed.parallel_dims"), import_module("spmd_types")
    dims.device_type = "cpu"
    utils, sharding = (import_module(f"torchtitan.{path}") for path in ("distributed.utils", "models.qwen3_5.sharding"))
    placement, ranks = sharding.dense_sequence_parallel_placement(), dist.get_world_size()
    layer = own_torchtitan_layer(lambda c: sharding._set_deltanet_sharding(c, attention_input_layout=placement))
    parallel = dims.ParallelDims(1, 1, 1, ranks, 1, 1, ranks)
    utils.get_spmd_context(parallel_dims=parallel)().__enter__()
    layer.parallelize(parallel)
    forward, checking = layer.forward, utils.get_spmd_context(parallel_dims=parallel, spmd_typechecking=True)
    documents = torchtitan_documents(trained_layers.BOUNDS)
    nothing = dict.fromkeys(("mrope_positions", "pixel_values", "pixel_values_videos", "grid_thw", "grid_thw_videos"))

    def checked(x):
        with checking():
            types.assert_type(x, placement.axis_types, placement.partition_spec)
            sharding.annotate_qwen35_input_spmd_types(attention_masks={"deltanet": documents}, **nothing)
            return forward(x, documents)

    layer.forward = checked
    return layer, {}


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


def check(trainer, ranks, folder, truth):
    """What all ranks got, put together, beside the ``truth``."""
    command = [sys.executable, "-W", "ignore", __file__, trainer]
    for start in map(str, range(3)):  # seldom, threads of torch abort a process that has ended
        (folder / start).mkdir()
        workers = [subprocess.Popen([*command, str(rank), str(ranks), folder / start]) for rank in range(ranks)]
        if -signal.SIGABRT not in (codes := [worker.wait() for worker in workers]):
            break
    assert codes == [0] * ranks
    folder = folder / start
    parts = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
    found = {name: together([part[name] for part in parts], whole) for name, whole in truth.items()}
    trained_layers.assert_close(found, truth)


def together(parts, whole):
    """Pieces of it, or terms of a sum."""
    cut = [axis for axis, size in enumerate(whole.shape) if parts[0].shape[axis] != size]
    return torch.cat(parts, cut[0]) if cut else sum(parts)


def main(trainer, rank, ranks, folder):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    layer, arguments = globals()[trainer]()
    own = slice(rank * trained_layers.BOUNDS[-1] // ranks, (rank + 1) * trained_layers.BOUNDS[-1] // ranks)
    torch.save(trained_layers.train(layer, "packed", own, **arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
