"""A_log and dt_bias are float32 wherever a layer or a model is made, loaded, moved, sharded or reset."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from tiny_layers import DELTA_LAYERS, LAYERS
from tiny_model import KINDS, SIZES, tokens
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import AutoModelForCausalLM

import flash_delta
from flash_delta import layers, modules
from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM

GATES = ("A_log", "dt_bias")
NARROW = (torch.bfloat16, torch.float16)


def config():
    return FlashDeltaConfig(**SIZES, **KINDS["hybrid"])


def assert_kept(module, others):
    """Gates in float32, all other parameters in another dtype."""
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    assert any(name.endswith(GATES) for name in dtypes)
    assert dtypes == {name: torch.float32 if name.endswith(GATES) else others for name in dtypes}


@pytest.fixture
def in_bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_made_under_a_narrow_default(in_bfloat16):
    for layer in ("gdn", "kda", "comba"):
        assert_kept(DELTA_LAYERS[layer](), torch.bfloat16)
    drawn = torch.cat([DELTA_LAYERS["gdn"]().A_log.detach() for _ in range(9)])
    assert not torch.equal(drawn.bfloat16().float(), drawn)  # not rounded when they were drawn


@pytest.mark.parametrize("dtype", NARROW)
def test_made_from_a_configuration(dtype):
    assert_kept(AutoModelForCausalLM.from_config(config(), dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_moved(dtype):
    for cast in (lambda m: m.to(dtype), lambda m: m.type(dtype), lambda m: m.to(device="cpu", dtype=dtype)):
        model = FlashDeltaForCausalLM(config())
        model(tokens(1, 5), labels=tokens(1, 5)).loss.backward()
        gates = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith(GATES)}
        assert_kept(cast(model), dtype)
        for name, p in model.named_parameters():
            assert p.grad.dtype == p.dtype, name
            assert name not in gates or torch.equal(p, gates[name])
    assert_kept(FlashDeltaForCausalLM(config()).bfloat16(), torch.bfloat16)
    assert_kept(FlashDeltaForCausalLM(config()).half(), torch.float16)
    assert_kept(copy.deepcopy(FlashDeltaForCausalLM(config()).to(dtype)), dtype)


def test_moved_to_other_widths_and_devices():
    layer = DELTA_LAYERS["gdn"]().double()
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    layer.float()
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    layer.to("meta", torch.bfloat16)
    assert (layer.A_log.dtype, layer.A_log.device.type) == (torch.float32, "meta")
    assert layer.to_empty(device="cpu").A_log.dtype == torch.float32
    assert layer.A_log._no_weight_decay


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_from_narrow_tensors(assign):
    layer = DELTA_LAYERS["kda"]()
    file = io.BytesIO()
    torch.save({name: t.bfloat16() for name, t in layer.state_dict().items()}, file)
    file.seek(0)
    layer.load_state_dict(torch.load(file), assign=assign)
    assert_kept(layer, torch.bfloat16 if assign else torch.float32)
    assert layer.A_log.requires_grad
    assert layer.A_log._no_weight_decay


MODULES = LAYERS | {
    "not affine": lambda: modules.RMSNorm(8, elementwise_affine=False),
    "model": lambda: FlashDeltaForCausalLM(config()),
}


def named_values(module):
    return [*module.named_parameters(), *module.named_buffers()]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_with_parameters_can_be_reset(name):
    """Every module resets the parameters that are its own, as after `to_empty`."""
    made, layer = MODULES[name](), MODULES[name]()
    for t in (*layer.parameters(), *layer.buffers()):
        t.data.fill_(torch.nan)
    for module in layer.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()
    constants = ("weight", "decay", "D") if name == "not affine" else ("norm.weight", "decay", "D")
    for (parameter, got), (_, want) in zip(named_values(layer), named_values(made), strict=True):
        assert got.isfinite().all(), parameter
        assert torch.equal(got, want) or not parameter.endswith(constants), parameter


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="FSDP2 takes one dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_does_not_round_them(one_rank, dtype):
    """`tests/test_training_ranks.py` shards over two ranks."""
    model, x = FlashDeltaForCausalLM(config()).to(dtype), tokens(2, 9)
    want = copy.deepcopy(model).to(torch.bfloat16)(x, labels=x).loss
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=one_rank, mp_policy=policy)
    assert all(p._no_weight_decay for name, p in model.named_parameters() if name.endswith(GATES))
    loss = model(x, labels=x).loss
    loss.backward()
    assert torch.equal(loss, want)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()
    assert_kept(model, dtype)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="FSDP2 takes one dtype")
def test_a_policy_takes_a_layer_without_gates(one_rank):
    layer = layers.GatedDeltaProduct(hidden_size=16, num_heads=1, head_dim=8, use_forget_gate=False)
    fully_shard(layer, mesh=one_rank, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    layer(torch.randn(1, 9, 16)).sum().backward()
    assert layer.q_proj.weight.grad.to_local().isfinite().all()


def test_ops_take_tensors_of_one_device(one_rank):
    x = {name: torch.rand(1, 4, 2, 8) for name in "qkv"} | {name: -torch.rand(1, 4, 2) for name in ("g", "beta")}
    split = {name: distribute_tensor(t, one_rank, [Replicate()]) for name, t in x.items()}
    expected = r"expected a tensor of this rank alone \(its to_local\(\) or full_tensor\(\)\), got a DTensor"
    calls = [
        ("q", lambda: flash_delta.chunk_gated_delta_rule(**split)),
        ("g", lambda: flash_delta.chunk_gated_delta_rule(**x | {"g": split["g"]})),
        ("k", lambda: flash_delta.fused_recurrent_gated_delta_rule(**x | {"k": split["k"]})),
        ("x", lambda: modules.rms_norm(split["q"], torch.ones(8), 1e-5)),
        ("x", lambda: modules.causal_conv1d(split["g"], torch.ones(2, 4))),
        ("A_log", lambda: flash_delta.fused_gdn_gate(x["g"], split["g"][0, 0])),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f": {name}: {expected}"):
            call()
