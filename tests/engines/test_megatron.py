"""Megatron-Core's Gated DeltaNet under fla's names, forward and backward beside its own PyTorch code."""

import contextlib
from importlib.util import find_spec
from itertools import pairwise
from unittest import mock

import doors
import pytest
import torch

from flash_delta.reference import backend

if find_spec("megatron") is None:
    pytest.skip("it needs Megatron-Core", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
BOUNDS = [0, 13, 40, 70]


class Tracker:
    """Stands for Megatron's tracker of random states, which Megatron has for GPUs only."""

    def fork(self):
        return contextlib.nullcontext()


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """The module of the layers, on one CPU process."""
    doors.enter()
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.ssm import gated_delta_net
    from megatron.core.ssm.gated_delta_net import common

    patch.setattr(common, "get_cuda_rng_tracker", Tracker)
    parallel_state.initialize_model_parallel()
    yield gated_delta_net
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    patch.undo()
    doors.leave()


def make(megatron, deterministic):
    """A layer; Megatron's own PyTorch code is what its deterministic mode takes."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_attention_freq=1,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        bias_dropout_fusion=False,
        experimental_attention_variant="gated_delta_net",
        deterministic_mode=deterministic,
    )
    modules = megatron.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    torch.manual_seed(0)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = megatron.GatedDeltaNet(config, modules, layer_number=1, pg_collection=groups)
    with torch.no_grad():
        layer.conv1d.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
        layer.A_log.copy_(torch.linspace(-2, 1, len(layer.A_log)))
    return layer


def train(layer, x, weights, bounds=None):
    """The output, and the gradients of the input and of all parameters."""
    from megatron.core.packed_seq_params import PackedSeqParams

    packed = None
    if bounds is not None:
        bounds = torch.tensor(bounds, dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    x = x.clone().requires_grad_()
    y, _ = layer(x, None, packed_seq_params=packed)
    (y * weights).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(megatron, kind):
    ours, own = make(megatron, False), make(megatron, True)
    assert own.gated_delta_rule is not ours.gated_delta_rule
    own.load_state_dict(ours.state_dict())
    x, weights = torch.randn(2, 70, 1 if kind == "packed" else 2, 64)
    with mock.patch.object(backend, "backward", wraps=backend.backward) as backward:
        found = train(ours, x, weights, BOUNDS if kind == "packed" else None)
    assert backward.called
    parts = [slice(a, b) for a, b in pairwise(BOUNDS)] if kind == "packed" else [slice(None)]
    expected = [torch.cat(t) for t in zip(*(train(own, x[part], weights[part]) for part in parts), strict=True)]
    names = [name for name, p in own.named_parameters() if p.grad is not None]
    assert {"A_log", "dt_bias", "conv1d.weight", "in_proj.weight"} <= {*names}
    pairs = [(ours.get_parameter(name).grad, own.get_parameter(name).grad) for name in names]
    for a, b in [*zip(found, expected, strict=True), *pairs]:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())
