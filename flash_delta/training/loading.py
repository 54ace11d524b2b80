"""Reads checkpoints. They may be truncated, written by another program, or contain NaN and infinities.

Files are checked before they are loaded: the keys of JSON, and the names and shapes of tensors in the header of their
file. An error names the file. torch.distributed.checkpoint lets each rank read its own part of the moments, for any
number of ranks.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flash_delta.models import FlashDeltaConfig, FlashDeltaForCausalLM
from flash_delta.training.run import read_json
from flash_delta.training.saving import moments_of

Shapes = dict[str, list[int]]


def load_model(checkpoint: Path) -> FlashDeltaForCausalLM:
    """The checkpoint's model, on the CPU.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not what `flash-delta train` writes, or if a parameter is not finite.
    """
    file = checkpoint / "model.safetensors"
    shapes = _shapes(file)
    config = _config(checkpoint / "config.json", len(shapes))
    with torch.device("meta"):
        model = _built(config, checkpoint / "config.json")
    tied = set(model._tied_weights_keys) if config.tie_word_embeddings else set()  # one of two tied tensors is enough
    expected = {name: list(p.shape) for name, p in model.state_dict().items() if name not in tied}
    _require_shapes(file, expected, {name: shape for name, shape in shapes.items() if name not in tied})
    model = FlashDeltaForCausalLM.from_pretrained(checkpoint)
    _require_finite(file, model.named_parameters())
    return model


def load_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    """Loads saved moments into an optimizer with the same named parameters. If a rank has parts, it loads only its
    parts.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it does not hold the moments of these parameters, or if one is not finite.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {moment: tensor.detach() for moment, tensor in state.items()}
    moments, file = moments_of(optimizer), checkpoint / "optimizer.safetensors"
    _require_shapes(file, {name: list(moment.shape) for name, moment in moments.items()}, _shapes(file))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .* to load in a single process", UserWarning)
        dcp.load(moments, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
    _require_finite(file, moments.items())


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor with a NaN or an infinity in this rank's part."""
    local = ((name, t.to_local() if isinstance(t, DTensor) else t) for name, t in tensors)
    return next((name for name, t in local if not t.detach().isfinite().all()), None)


def _config(file: Path, tensors: int) -> FlashDeltaConfig:
    content = read_json(file)
    kind, layers = content.get("model_type"), content.get("num_hidden_layers")
    if kind != FlashDeltaConfig.model_type:
        raise ValueError(f"{file}: expected model_type {FlashDeltaConfig.model_type!r}, got {kind!r}")
    if not isinstance(layers, int) or not 1 <= layers <= tensors:  # a model of any number would be built below
        raise ValueError(f"{file}: expected num_hidden_layers as in model.safetensors beside it, got {layers!r}")
    try:
        return FlashDeltaConfig.from_dict(content)
    except Exception as error:  # transformers raises various errors for a wrong type
        raise ValueError(f"{file}: expected the configuration of a FlashDelta model, got: {_line(error)}") from error


def _built(config: FlashDeltaConfig, file: Path) -> FlashDeltaForCausalLM:
    try:
        return FlashDeltaForCausalLM(config)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"{file}: expected sizes that fit each other, got: {_line(error)}") from error


def _shapes(file: Path) -> Shapes:
    """The shapes of all tensors in the file, which must be complete."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: expected a file that `flash-delta train` wrote, got none")
    try:
        with safe_open(file, "pt") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file}: expected a whole file of safetensors, got: {_line(error)}") from error


def _require_shapes(file: Path, expected: Shapes, found: Shapes) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise ValueError(f"{file}: expected {name} among {len(expected)} tensors, got {len(found)} without it")
        if name not in expected:
            raise ValueError(f"{file}: expected {len(expected)} tensors, got {name}, which is none of them")
        if expected[name] != found[name]:
            shape = f"{expected[name]}, as config.json beside it has it"
            raise ValueError(f"{file}: expected {name} of shape {shape}, got {found[name]}")


def _require_finite(file: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    name = first_not_finite(tensors)
    if name is not None:
        raise ValueError(f"{file}: expected finite numbers, got {name} with NaN or infinity; remove {file.parent}"
                         " to go on from the checkpoint before it")  # fmt: skip


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
