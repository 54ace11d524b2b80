"""ms-swift's packing of Qwen3.5 under fla's names, beside transformers' PyTorch code."""

import logging
from importlib import import_module
from importlib.util import find_spec

import doors
import pytest
import torch
import trained_layers
from stand_ins import bare, stand_in

if find_spec("swift") is None:
    pytest.skip("it needs ms-swift", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def swift():
    """Its patch, applied."""
    patch = pytest.MonkeyPatch()
    trained_layers.pretend_gpu(patch)
    doors.enter()
    stand_in("datasets", "json_repair", "modelscope", "pandas", "requests", "urllib3")
    logger = logging.getLogger("swift")
    logger.addHandler(logging.NullHandler())
    import_module("modelscope.utils.logger").get_logger = lambda *_, **__: logger
    bare("swift", "swift.model", "swift.model.models")
    import_module("swift.model.models.qwen")._patch_qwen3_5_linear_attention_sequence_parallel()
    yield
    doors.leave()
    patch.undo()


@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(truth, kind):
    arguments = {"cu_seq_lens_q": torch.tensor(trained_layers.BOUNDS)} if kind == "packed" else {}
    trained_layers.assert_close(trained_layers.train(trained_layers.build(), kind, **arguments), truth["qwen3_5", kind])
