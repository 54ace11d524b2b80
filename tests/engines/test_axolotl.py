"""axolotl's packing under fla's names, eager and by its compiled operators, beside transformers' PyTorch code."""

from importlib import import_module
from importlib.util import find_spec

import doors
import pytest
import torch
import trained_layers
import trainer_ranks

from flash_delta.integrations.fla.takeover.door import Door

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
    trainer_ranks.enter_axolotl()
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


@KINDS
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_compiled(truth, family, kind, monkeypatch):
    """In one graph, which has axolotl's own operators."""
    run, ours = Door.run, set()
    monkeypatch.setattr(Door, "run", lambda door, *args, **kwargs: ours.add(door.name) or run(door, *args, **kwargs))
    assert patch(family, torch_compile=True)._FLA_COMPILED_OPS
    layer = trained_layers.build(family)
    layer.compile(fullgraph=True)
    arguments = PACKED[family] if kind == "packed" else {}
    trained_layers.assert_close(trained_layers.train(layer, kind, **arguments), truth[family, kind])
    assert not doors.FLA or ours >= {"chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"}


DOCUMENTS = {  # of Kimi-Linear: positions, or the number of each token's document in place of a mask
    "batch": ("batch", {}),
    "packed": ("packed", POSITIONS),
    "numbered": ("packed", {"attention_mask": (POSITIONS["position_ids"] == 0).cumsum(-1)}),
}


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_kimi_linear(truth, documents):
    kind, arguments = DOCUMENTS[documents]
    found = trained_layers.train(trainer_ranks.own_kimi_linear(), kind, **arguments)
    trained_layers.assert_close(found, trainer_ranks.under_kimi_names(truth["kimi_linear", kind]))


@pytest.mark.skipif(doors.FLA, reason="fla keeps calls on ranks, which need a GPU")
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_a_row_over_ranks(truth, family, ranks, tmp_path):
    """By ringmaster, which is axolotl's context parallelism."""
    expected = truth[family, "packed"]
    expected = trainer_ranks.under_kimi_names(expected) if family == "kimi_linear" else expected
    trainer_ranks.check(f"axolotl_{family}", ranks, tmp_path, expected)
