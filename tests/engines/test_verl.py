"""verl's packing of Qwen3.5 under fla's names, on one rank and on many, beside transformers' PyTorch code."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import doors
import pytest
import torch
import trained_layers
import verl_ranks

if find_spec("verl") is None:
    pytest.skip("it needs verl", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def verl():
    patch = pytest.MonkeyPatch()
    trained_layers.pretend_gpu(patch)
    verl_ranks.patch()
    yield
    doors.leave()
    patch.undo()


@pytest.mark.parametrize("kind", ["batch", "packed"])
def test_forward_and_backward(verl, truth, kind):
    bounds = torch.tensor(trained_layers.BOUNDS)
    arguments = {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds} if kind == "packed" else {}
    trained_layers.assert_close(trained_layers.train(trained_layers.build(), kind, **arguments), truth["qwen3_5", kind])


@pytest.mark.skipif(doors.FLA, reason="fla keeps calls on ranks, which need a GPU")
@pytest.mark.parametrize("ranks", [2, 5])
def test_a_row_over_ranks(truth, ranks, tmp_path):
    """Its context parallelism: every rank has its tokens of the output, and its part of the gradients."""
    command = [sys.executable, "-W", "ignore", Path(verl_ranks.__file__)]
    workers = [subprocess.Popen([*command, str(rank), str(ranks), tmp_path]) for rank in range(ranks)]
    assert [worker.wait() for worker in workers] == [0] * ranks
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    found = {name: sum(part[name] for part in parts) for name in parts[0]}
    found |= {name: torch.cat([part[name] for part in parts], 1) for name in ("output", "input")}
    trained_layers.assert_close(found, truth["qwen3_5", "packed"])
