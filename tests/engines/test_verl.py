"""verl's packing of Qwen3.5 under fla's names, on one rank and on many, beside transformers' PyTorch code."""

from importlib.util import find_spec

import doors
import pytest
import torch
import trained_layers
import trainer_ranks

if find_spec("verl") is None:
    pytest.skip("it needs verl", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def verl():
    with pytest.MonkeyPatch.context() as patch:
        trainer_ranks.enter_verl(patch)
        yield
        doors.leave()


@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(verl, truth, kind):
    bounds = torch.tensor(trained_layers.BOUNDS)
    arguments = {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds} if kind == "packed" else {}
    trained_layers.assert_close(trained_layers.train(trained_layers.build(), kind, **arguments), truth["qwen3_5", kind])


@pytest.mark.skipif(doors.FLA, reason="fla keeps calls on ranks, which need a GPU")
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_row_over_ranks(truth, ranks, tmp_path):
    trainer_ranks.check("verl", ranks, tmp_path, truth["qwen3_5", "packed"])
