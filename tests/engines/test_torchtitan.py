"""torchtitan's Gated DeltaNet of Qwen3.5 under fla's names, beside transformers' PyTorch code: it has none itself."""

from importlib.util import find_spec

import doors
import pytest
import torch
import trained_layers
from stand_ins import stand_in
from trained_layers import BOUNDS, COMMON, GDN

if find_spec("torchtitan") is None:
    pytest.skip("it needs torchtitan", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
KEYS = GDN["num_key_heads"] * GDN["key_head_dim"]
VALUES = GDN["num_value_heads"] * GDN["value_head_dim"]


@pytest.fixture(scope="module")
def torchtitan():
    doors.enter()
    stand_in("tyro")
    from torchtitan.models import qwen3_5

    yield qwen3_5
    doors.leave()


def split(tensors):
    """Under torchtitan's names: it splits the projection and the convolution of queries, keys and values."""
    found = dict(tensors)
    for old, new in (("in_proj_qkv", "in_proj"), ("conv1d", "conv")):
        parts = found.pop(f"{old}.weight").split([KEYS, KEYS, VALUES])
        found |= {f"{new}_{letter}.weight": part for letter, part in zip("qkv", parts, strict=True)}
    return found


def make(torchtitan, backend):
    layer = torchtitan._qwen35_deltanet_config(
        dim=COMMON["hidden_size"],
        n_key_heads=GDN["num_key_heads"],
        n_value_heads=GDN["num_value_heads"],
        key_head_dim=GDN["key_head_dim"],
        value_head_dim=GDN["value_head_dim"],
        layer_id=0,
        fla_backend=backend,
    ).build()
    layer.load_state_dict(split(trained_layers.build().state_dict()))
    return layer


@pytest.mark.parametrize("backend", ["fla_chunked", "fla_fused_recurrent"])
@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(torchtitan, truth, kind, backend):
    """A batch is one row too, whose documents are its rows."""
    from torchtitan.models.common.attention import VarlenMetadata

    bounds = BOUNDS if kind == "packed" else [0, BOUNDS[-1], 2 * BOUNDS[-1]]
    on_device = torch.tensor(bounds, dtype=torch.int32)
    documents = VarlenMetadata(on_device, on_device, 0, 0, tuple(bounds))
    found = trained_layers.train(make(torchtitan, backend), kind, attention_masks=documents)
    trained_layers.assert_close(found, split(truth["qwen3_5", kind]))


def test_a_row_without_documents(torchtitan, truth):
    """Its convolution is PyTorch's here."""
    layer = make(torchtitan, "fla_chunked")
    whole, _ = trained_layers.tensors("batch")
    y = torch.cat([layer(row[None]) for row in whole])
    torch.testing.assert_close(y, truth["qwen3_5", "batch"]["output"], rtol=1e-4, atol=1e-5)
