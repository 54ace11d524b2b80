"""verl's packing of Qwen3.5 on `install`, beside transformers' PyTorch code."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import qwen_layer
import torch
from stand_ins import bare, stand_in

from flash_delta.integrations.fla import install, uninstall

if find_spec("verl") is None or find_spec("fla") is not None:
    pytest.skip("it needs verl, and no fla", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def verl():
    """Its forward pass, in the place of transformers'."""
    patch = pytest.MonkeyPatch()
    qwen_layer.pretend_gpu(patch)
    install()
    stand_in("omegaconf")
    bare("verl", "verl.models")
    forward = import_module("verl.models.transformers.qwen3_5").qwen3_5_gated_delta_net_forward
    qwen_layer.modelling().Qwen3_5GatedDeltaNet.forward = forward
    yield
    uninstall()
    patch.undo()


@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(truth, kind):
    bounds = torch.tensor(qwen_layer.BOUNDS)
    arguments = {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds} if kind == "packed" else {}
    qwen_layer.assert_close(qwen_layer.train(qwen_layer.build(), kind, **arguments), truth[kind])
