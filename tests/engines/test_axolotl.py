"""axolotl's packing of Qwen3.5 on `install`, eager and by its compiled operators, beside transformers' PyTorch code."""

import importlib
from importlib.util import find_spec

import pytest
import qwen_layer
from stand_ins import bare, stand_in

from flash_delta.integrations.fla import install, uninstall

if find_spec("axolotl") is None or find_spec("fla") is not None:
    pytest.skip("it needs axolotl, and no fla", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def axolotl():
    """Its module of Qwen3.5's patches."""
    install()
    stand_in("bitsandbytes", "addict")
    bare("axolotl", "axolotl.utils", "axolotl.utils.callbacks")
    yield importlib.import_module("axolotl.monkeypatch.models.qwen3_5.modeling")
    uninstall()


def arguments(kind):
    return {"position_ids": qwen_layer.positions()} if kind == "packed" else {}


@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(axolotl, truth, kind):
    axolotl.patch_qwen3_5_modeling_packing()
    qwen_layer.assert_close(qwen_layer.train(qwen_layer.build(), kind, **arguments(kind)), truth[kind])


@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_compiled(axolotl, truth, kind):
    """In one graph, which has axolotl's own operators."""
    axolotl.patch_qwen3_5_modeling_packing(torch_compile=True)
    assert axolotl._FLA_COMPILED_OPS
    layer = qwen_layer.build()
    layer.compile(fullgraph=True)
    qwen_layer.assert_close(qwen_layer.train(layer, kind, **arguments(kind)), truth[kind])
