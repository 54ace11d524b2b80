"""One contestant's training with one seed: the losses of its steps and of the held-out text."""

import json
import time
import warnings
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback

from flash_delta import __version__
from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.models.from_fla import KINDS, NAMES
from flash_delta.training import Corpus, Layout, RunTrainer, Settings, byte_tokenizer
from flash_delta.training.progress import Lines

# The products' dtype and the backend. The first contestant is the one that others are compared with.
CONTESTANTS = {"torch": ("float32", "torch"), "flash_delta": ("bfloat16", None), "fla": ("bfloat16", None)}
FLA = {"gdn": ("gated_deltanet", "GatedDeltaNet"), "kda": ("kda", "KDA")}  # mixers that are compared, and fla's names
ATTENTION = "attention"  # it may stand beside one of them


def train(
    contestant: str, settings: Settings, corpus: Corpus, device: torch.device, compiled: bool = False
) -> dict[str, Any]:
    """The record of a run. Its windows and initial parameters depend on the corpus and the settings alone."""
    dtype, backend = CONTESTANTS[contestant]
    settings = replace(settings, dtype=dtype)
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32
    model = new_model(settings, backend)
    if contestant == "fla":
        model = as_fla(model)
    began = time.perf_counter()
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        if backend is None:  # a run on kernels shall not fall back to PyTorch
            warnings.filterwarnings("error", message=".*no kernel can run this")
        on_cpu = device.type == "cpu"
        layout = Layout(compile=compiled)
        trainer = RunTrainer(folder, model, byte_tokenizer(), corpus, settings, layout, use_cpu=on_cpu)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Lines())
        trainer.train()
    history = trainer.state.log_history
    return {
        "contestant": contestant,
        "settings": asdict(settings),
        "compiled": compiled,
        "corpus": corpus.summary.digest,
        "device": _device(device),
        "versions": _versions(contestant),
        "seconds": time.perf_counter() - began,
        "tokens_per_second": median(record["tokens_per_second"] for record in history if "loss" in record),
        "losses": [record["loss"] for record in history if "loss" in record],
        "held_out": next(record["eval_loss"] for record in history if "eval_loss" in record),
    }


def require_same(
    file: Path, contestant: str, settings: Settings, corpus: Corpus, device: torch.device, compiled: bool = False
) -> None:
    """Raises ValueError if the record in ``file`` is of another run than `train` would do now."""
    found, dtype = json.loads(file.read_text()), CONTESTANTS[contestant][0]
    wanted = asdict(replace(settings, dtype=dtype)) | {
        "compiled": compiled, "corpus": corpus.summary.digest, "device": _device(device),
        "versions": _versions(contestant),
    }  # fmt: skip
    kept = found["settings"] | {name: found.get(name) for name in ("compiled", "corpus", "device", "versions")}
    for name, value in wanted.items():
        if json.loads(json.dumps(value)) != kept[name]:
            raise ValueError(f"out: expected records with {name} {value}, or none, got {kept[name]} in {file}")


def new_model(settings: Settings, backend: str | None) -> FlashDeltaForCausalLM:
    """The model of a seed."""
    torch.manual_seed(settings.seed)
    names = settings.mixers.split(",")
    return FlashDeltaForCausalLM(
        FlashDeltaConfig(
            vocab_size=256,
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.layers,
            mixers=[names[layer % len(names)] for layer in range(settings.layers)],
            num_heads=settings.heads,
            head_dim=settings.head_dim,
            num_attention_heads=settings.heads,
            eos_token_id=255,
            backend=backend,
        )
    )


def as_fla(model: FlashDeltaForCausalLM) -> PreTrainedModel:
    """fla's model with the same parameters. If there is softmax attention, our model with fla's layers in place of
    ours: fla's own attention needs one more package."""
    from fla import models

    ours = model.config
    (mixer,) = {*ours.mixers} - {ATTENTION}
    model_type, name = FLA[mixer]
    sizes = {field: getattr(ours, field) for field in KINDS[model_type].same}
    config = getattr(models, f"{name}Config")(**sizes, intermediate_size=ours.intermediate_size)
    theirs = getattr(models, f"{name}ForCausalLM")(config)
    if ATTENTION not in ours.mixers:
        theirs.load_state_dict({_name_in_fla(name): tensor for name, tensor in model.state_dict().items()})
        return theirs
    for kind, block, their_block in zip(ours.mixers, model.model.layers, theirs.model.layers, strict=True):
        if kind != ATTENTION:
            their_block.attn.load_state_dict(block.mixer.state_dict())
            block.mixer = LayerOfFla(their_block.attn)
    return model


class LayerOfFla(nn.Module):
    """A layer of fla where our block has its mixer, for training on whole rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, *of_our_mixers: Any) -> Tensor:
        return self.layer(hidden_states)[0]


def _name_in_fla(name: str) -> str:
    for fla_name, our_name in NAMES.items():
        name = name.replace(our_name, fla_name)
    return name


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _versions(contestant: str) -> dict[str, str]:
    found = {"torch": torch.__version__, "flash_delta": __version__}
    return found | ({"fla": version("flash-linear-attention")} if contestant == "fla" else {})


def file_of(folder: Path, contestant: str, seed: int) -> Path:
    """Where a run's record is."""
    return folder / f"{contestant}-{seed}.json"
