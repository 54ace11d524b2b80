"""torchtitan's Gated DeltaNet of Qwen3.5 under fla's names, beside transformers' PyTorch code: it has none itself."""

from importlib.util import find_spec

import doors
import pytest
import torch
import trained_layers
import trainer_ranks
from trained_layers import BOUNDS
from trainer_ranks import under_torchtitan_names

if find_spec("torchtitan") is None:
    pytest.skip("it needs torchtitan", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def torchtitan():
    trainer_ranks.enter_torchtitan()
    yield
    doors.leave()


@pytest.mark.parametrize("backend", ["fla_chunked", "fla_fused_recurrent"])
@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(truth, kind, backend):
    """A batch is one row too, whose documents are its rows."""
    documents = trainer_ranks.torchtitan_documents(BOUNDS if kind == "packed" else [0, BOUNDS[-1], 2 * BOUNDS[-1]])
    layer = trainer_ranks.own_torchtitan_layer(fla_backend=backend)
    found = trained_layers.train(layer, kind, attention_masks=documents)
    trained_layers.assert_close(found, under_torchtitan_names(truth["qwen3_5", kind]))


def test_a_row_without_documents(truth):
    """Its convolution is PyTorch's here."""
    layer = trainer_ranks.own_torchtitan_layer()
    whole, _ = trained_layers.tensors("batch")
    y = torch.cat([layer(row[None]) for row in whole])
    torch.testing.assert_close(y, truth["qwen3_5", "batch"]["output"], rtol=1e-4, atol=1e-5)


def test_heads_over_ranks(truth, tmp_path):
    trainer_ranks.check("torchtitan", 2, tmp_path, under_torchtitan_names(truth["qwen3_5", "packed"]))
