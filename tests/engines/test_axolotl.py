"""axolotl's packing under fla's names, eager and by its compiled operators, beside transformers' PyTorch code."""

from importlib import import_module
from importlib.util import find_spec

import doors
import pytest
import torch
import trained_layers
from stand_ins import bare, stand_in

if find_spec("axolotl") is None:
    pytest.skip("it needs axolotl", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = pytest.mark.parametrize("kind", ["batch", "packed"])
POSITIONS = {"position_ids": trained_layers.positions()}
BOUNDS = torch.tensor(trained_layers.BOUNDS)
PACKED = {  # by family: how a layer hears of documents
    "qwen3_5": POSITIONS,
    "qwen3_next": POSITIONS,
    "qwen4_exp": {"cu_seqlens": BOUNDS},
    "glm5_next": {"axolotl_cu_seqlens": BOUNDS},
}


@pytest.fixture(scope="module", autouse=True)
def axolotl():
    doors.enter()
    stand_in("bitsandbytes", "addict")
    bare("axolotl", "axolotl.utils", "axolotl.utils.callbacks")
    yield
    doors.leave()


def patch(family, **options):
    """Applies the family's patches; their module."""
    module = import_module(f"axolotl.monkeypatch.models.{family}.modeling")
    getattr(module, f"patch_{family}_modeling_packing")(**options)
    return module


@KINDS
@pytest.mark.parametrize("family", PACKED)
def test_forward_and_backward(truth, family, kind):
    patch(family)
    arguments = PACKED[family] if kind == "packed" else {}
    found = trained_layers.train(trained_layers.build(family), kind, **arguments)
    trained_layers.assert_close(found, truth[family, kind])


@pytest.mark.skipif(doors.FLA, reason="its operators call what only fla calls, so that fla keeps them")
@KINDS
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_compiled(truth, family, kind):
    """In one graph, which has axolotl's own operators."""
    assert patch(family, torch_compile=True)._FLA_COMPILED_OPS
    layer = trained_layers.build(family)
    layer.compile(fullgraph=True)
    arguments = PACKED[family] if kind == "packed" else {}
    trained_layers.assert_close(trained_layers.train(layer, kind, **arguments), truth[family, kind])


def under_kimi_names(tensors):
    """axolotl's own Kimi-Linear has a convolution for each of queries, keys and values, and no module for the gate."""
    found = {name.removeprefix("forget_gate."): t for name, t in tensors.items()}
    parts = found.pop("conv1d.weight").chunk(3)
    return found | {f"{letter}_conv1d.weight": part for letter, part in zip("qkv", parts, strict=True)}


DOCUMENTS = {  # of Kimi-Linear: positions, or the number of each token's document in place of a mask
    "batch": ("batch", {}),
    "packed": ("packed", POSITIONS),
    "numbered": ("packed", {"attention_mask": (POSITIONS["position_ids"] == 0).cumsum(-1)}),
}


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_kimi_linear(truth, documents):
    modelling = import_module("axolotl.model_support.kimi_linear.modeling_kimi")
    linear = trained_layers.KDA | {"short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": []}
    sizes = {"hidden_size": trained_layers.COMMON["hidden_size"], "linear_attn_config": linear}
    given = trained_layers.build("kimi_linear")
    layer = modelling.KimiDeltaAttention(
        modelling.KimiLinearConfig(**sizes, rms_norm_eps=given.layer_norm_epsilon), layer_idx=0
    )
    layer.load_state_dict(under_kimi_names(given.state_dict()))
    kind, arguments = DOCUMENTS[documents]
    found = trained_layers.train(layer, kind, **arguments)
    trained_layers.assert_close(found, under_kimi_names(truth["kimi_linear", kind]))
