"""ms-swift's packing of Qwen3.5 under fla's names, on one rank and on two, beside transformers' PyTorch code."""

from importlib.util import find_spec

import doors
import pytest
import torch
import trained_layers
import trainer_ranks

if find_spec("swift") is None:
    pytest.skip("it needs ms-swift", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def swift():
    with pytest.MonkeyPatch.context() as patch:
        trainer_ranks.enter_swift(patch)
        yield
        doors.leave()


@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(swift, truth, kind):
    arguments = {"cu_seq_lens_q": torch.tensor(trained_layers.BOUNDS)} if kind == "packed" else {}
    trained_layers.assert_close(trained_layers.train(trained_layers.build(), kind, **arguments), truth["qwen3_5", kind])


def test_a_row_over_ranks(truth, tmp_path):
    trainer_ranks.check("swift", 2, tmp_path, truth["qwen3_5", "packed"])
