"""`from_fla` beside fla's own models: the same logits, fla's from its own kernels in Triton's interpreter.

Softmax attention of fla calls flash-attn, which has no kernels for a CPU. PyTorch's attention stands in for it.
"""

import inspect
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F

if find_spec("triton") is None or find_spec("fla") is None:
    pytest.skip("it needs fla and Triton", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("it runs fla's kernels in Triton's interpreter", allow_module_level=True)
import triton

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    pytest.skip("this Triton's interpreter cannot run fla's loops", allow_module_level=True)
from fla_interpreter import prepare, repair

from flash_delta.models import FlashDeltaForCausalLM, from_fla, parameter_groups
from flash_delta.models.from_fla import KINDS
from flash_delta.training import Settings
from workshop.parity.runs import FLA, as_fla, new_model

prepare()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the missing GPU
    from fla import models as fla
    from fla.layers import attn
repair()

pytestmark = pytest.mark.filterwarnings("ignore")  # of fla's
SIZES = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 48, "initializer_range": 0.3}
HEADS = {"head_dim": 16}
SOFTMAX = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "rope_theta": 500.0}
MODELS = {
    "gdn": ("GatedDeltaNet", HEADS),
    "gdn-grouped": ("GatedDeltaNet", HEADS | {"num_v_heads": 4, "expand_v": 0.5, "allow_neg_eigval": True}),
    "gdn-hybrid": ("GatedDeltaNet", HEADS | {"attn": SOFTMAX, "tie_word_embeddings": True}),
    "kda": ("KDA", HEADS | {"fuse_norm": False, "hidden_ratio": 3, "attn": [SOFTMAX | {"num_heads": 2}]}),
    "kda-bounded": ("KDA", HEADS | {"lower_bound": -4.0, "num_v_heads": 4}),
    "kda-safe": ("KDA", HEADS | {"lower_bound": -5.0, "safe_gate": True, "allow_neg_eigval": True}),
    "gdp": ("GatedDeltaProduct", HEADS | {"num_householder": 3, "use_forget_gate": True, "conv_size": 3}),
    "gdp-ungated": ("GatedDeltaProduct", HEADS | {"num_householder": 2, "allow_neg_eigval": True, "norm_eps": 1e-2}),
    "delta_net": ("DeltaNet", {"intermediate_size": 24}),
    "delta_net-wide": ("DeltaNet", {"expand_k": 0.5, "expand_v": 1.5, "allow_neg_eigval": True}),
}


def attend(q, k, v, causal, window_size):
    """flash-attn's function: q [B, T, H, d], k and v [B, T, HV, d]."""
    assert (causal, window_size) == (True, (-1, -1))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def build(kind, **changes):
    """fla's model, with random numbers also where a fresh model has ones: each norm is another."""
    name, options = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(fla, f"{name}ForCausalLM")(getattr(fla, f"{name}Config")(**SIZES | options | changes)).eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(autouse=True)
def softmax_attention(monkeypatch):
    monkeypatch.setattr(attn, "flash_attn_func", attend)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_logits(kind, tmp_path):
    """Those of the model that is written as ours and read back."""
    theirs = build(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    from_fla(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    ours = FlashDeltaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert ours.num_parameters() == theirs.num_parameters()
    ids = torch.randint(48, (2, 20))
    expected = theirs(ids, use_cache=False).logits
    assert torch.linalg.norm(ours(ids).logits - expected) < 1e-5 * torch.linalg.norm(expected)


@torch.no_grad()
@pytest.mark.parametrize("mixers", [*FLA, *(f"{mixer},attention" for mixer in FLA)])
def test_models_of_loss_parity(mixers):
    """They start from the same logits, and decay the same parameters."""
    settings = Settings(mixers=mixers, layers=2, hidden_size=32, heads=2, head_dim=16)
    ours, theirs = new_model(settings, "torch").eval(), as_fla(new_model(settings, "torch")).eval()
    ids = torch.randint(256, (2, 20))
    expected = theirs(ids, use_cache=False).logits
    assert torch.linalg.norm(ours(ids).logits - expected) < 1e-5 * torch.linalg.norm(expected)
    decayed = [[p.numel() for p in parameter_groups(model, 0.1)[0]["params"]] for model in (ours, theirs)]
    assert sorted(decayed[0]) == sorted(decayed[1])
    layers = {type(module) for module in theirs.modules() if type(module).__module__.startswith("fla.layers")}
    assert len(layers) == 1


def test_every_field_of_fla_is_known():
    """Each is read, refused unless it has the value that our layers compute, or said to change nothing."""
    for model_type, kind in KINDS.items():
        name = next(name for name, _ in MODELS.values() if getattr(fla, f"{name}Config").model_type == model_type)
        parameters = inspect.signature(getattr(fla, f"{name}Config")).parameters
        fields = {field: p.default for field, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
        fixed = {field: values[0] for field, values in kind.fixed.items()}
        assert fields == {**kind.same, **kind.converted, **fixed, **{field: fields[field] for field in kind.unread}}
