"""LLaMA-Factory's packing of Qwen3.5 under fla's names, beside transformers' PyTorch code."""

from importlib.util import find_spec
from types import SimpleNamespace

import doors
import pytest
import trained_layers
from stand_ins import bare, stand_in

if find_spec("llamafactory") is None:
    pytest.skip("it needs LLaMA-Factory", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def llamafactory():
    """Its patch, applied."""
    doors.enter()
    stand_in("datasets")
    bare("llamafactory", "llamafactory.model")
    from llamafactory.model.patcher import patch_qwen3_5_forward

    config = SimpleNamespace(architectures=["Qwen3_5ForConditionalGeneration"])
    patch_qwen3_5_forward(SimpleNamespace(config=config))
    yield
    doors.leave()


@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(truth, kind):
    arguments = {"position_ids": trained_layers.positions()} if kind == "packed" else {}
    trained_layers.assert_close(trained_layers.train(trained_layers.build(), kind, **arguments), truth["qwen3_5", kind])
