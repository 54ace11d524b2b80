"""A run's checkpoints: `RUN/checkpoints/step-00000100/`, safetensors and JSON only, nothing that could execute code.

A checkpoint is written under another name and renamed when complete, and the one before it goes only after that, so a
run killed at any moment leaves one whole checkpoint. `config.json` and `model.safetensors` in it are what
`from_pretrained` reads; `optimizer.safetensors` holds `<parameter>.<moment>`; `trainer.json` says how far the run is.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch.optim import Optimizer
from transformers import PreTrainedModel


def save_checkpoint(run: Path, step: int, model: PreTrainedModel, optimizer: Optimizer, progress: dict) -> Path:
    folder = run / "checkpoints" / f"step-{step:08d}"
    unfinished = folder.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    save_file(_optimizer_tensors(optimizer), unfinished / "optimizer.safetensors")
    (unfinished / "trainer.json").write_text(json.dumps(progress))
    unfinished.rename(folder)
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other)
    return folder


def latest_checkpoint(run: str | Path) -> Path | None:
    """The run's newest complete checkpoint; None where there is none."""
    return max((Path(run) / "checkpoints").glob("step-????????"), default=None)


def require_checkpoint(run: str | Path) -> Path:
    folder = latest_checkpoint(run)
    if folder is None:
        raise FileNotFoundError(f"run: expected a folder that `flash-delta train --out` wrote, got {run}")
    return folder


def load_progress(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "trainer.json").read_text())


def load_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    """Puts the saved moments into an optimizer made with the same named parameters."""
    index = {name: i for i, name in enumerate(_names(optimizer))}
    state = {i: {} for i in index.values()}
    for key, tensor in load_file(checkpoint / "optimizer.safetensors").items():
        name, _, moment = key.rpartition(".")
        state[index[name]][moment] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _optimizer_tensors(optimizer: Optimizer) -> dict:
    names, state = _names(optimizer), optimizer.state_dict()["state"]
    return {f"{names[i]}.{moment}": tensor for i, moments in state.items() for moment, tensor in moments.items()}


def _names(optimizer: Optimizer) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]
