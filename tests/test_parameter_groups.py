"""Which parameters weight decay is for: the model's own, and as wrappers name them."""

import copy

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny_model import KINDS, SIZES
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from flash_delta.models import (
    FlashDeltaConfig,
    FlashDeltaForCausalLM,
    FlashDeltaForSequenceClassification,
    parameter_groups,
)

UNDECAYED = ("A_log", "dt_bias", "norm.weight", "bias")


def build(cls=FlashDeltaForCausalLM, **options):
    torch.manual_seed(0)
    return cls(FlashDeltaConfig(**SIZES, **KINDS["hybrid"], **options))


def names(groups):
    decayed, others = groups
    return decayed["param_names"], others["param_names"]


def assert_split(model, expected):
    """Every trainable parameter of `model` once, in the right group, under its own name."""
    groups = parameter_groups(model, weight_decay=0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    pairs = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    assert len(pairs) == len(trainable) == expected
    assert all(trainable[name] is p for name, p in pairs)
    decayed, others = names(groups)
    assert all(name.endswith(UNDECAYED) for name in others)
    assert not any(name.endswith(UNDECAYED) for name in decayed)


@pytest.mark.parametrize("cls", [FlashDeltaForCausalLM, FlashDeltaForSequenceClassification])
def test_models(cls):
    model = build(cls)
    assert_split(model, len(list(model.parameters())))
    decayed, others = names(parameter_groups(copy.deepcopy(model), 0.1))
    assert "model.embed_tokens.weight" in decayed
    assert "model.layers.0.mixer.q_conv1d.weight" in decayed
    assert {"model.norm.weight", "model.layers.2.mixer.g_proj.1.bias", "model.layers.2.mixer.dt_bias"} <= set(others)


def test_tied_weights_come_once():
    decayed, _ = names(parameter_groups(build(tie_word_embeddings=True), 0.1))
    assert decayed.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in decayed


def test_peft_trains_its_own_parameters_only():
    model = get_peft_model(build(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
    decayed, others = names(parameter_groups(model, 0.1))
    assert others == []
    assert decayed
    assert all("lora_" in name for name in decayed)
    torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)


def test_a_mark_counts_whatever_the_shape():
    layer = nn.Linear(3, 4)
    layer.weight._no_weight_decay = True
    assert names(parameter_groups(layer, 0.1)) == ([], ["weight", "bias"])


def test_numbers_without_a_dimension_do_not_decay():
    layer = nn.Linear(3, 4, bias=False)
    layer.scale = nn.Parameter(torch.tensor(1.0))
    assert names(parameter_groups(layer, 0.1)) == (["weight"], ["scale"])


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_wrapped_models(one_rank):
    count = len(list(build().parameters()))
    assert_split(torch.compile(build()), count)
    assert_split(DistributedDataParallel(build()), count)
    model = build()
    for block in model.model.layers:
        fully_shard(block, mesh=one_rank)
    assert_split(fully_shard(model, mesh=one_rank), count)


@pytest.mark.filterwarnings("ignore")  # torch's own, of an interface that it keeps for old code
def test_flattened_parameters_are_refused(one_rank):
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 4), device_id=torch.device("cpu")))
    with pytest.raises(ValueError, match="model: expected a model that FullyShardedDataParallel has not flattened"):
        parameter_groups(model, 0.1)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_decay_is_a_number_of_at_least_0(value):
    with pytest.raises(ValueError, match=f"weight_decay: expected a finite number of at least 0, got {value}"):
        parameter_groups(nn.Linear(3, 4), value)


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ValueError, match="model: expected parameters that need a gradient, got none"):
        parameter_groups(nn.Linear(3, 4).requires_grad_(False), 0.1)
