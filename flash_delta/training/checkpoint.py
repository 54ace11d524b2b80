"""A run's checkpoints: `RUN/checkpoints/step-00000100/`, safetensors and JSON only, nothing that could execute code.

`from_pretrained` reads its `config.json` and `model.safetensors`. `optimizer.safetensors` has `<parameter>.<moment>`.
`trainer.json` is a `Run`. A checkpoint has whole tensors in plain files, the same for any number of ranks. `saving.py`
writes it, `loading.py` reads it.
"""

from pathlib import Path

NAME = "step-????????"  # LARGEST_STEP of the configuration has eight digits


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoints(run: str | Path) -> list[Path]:
    """The run's complete checkpoints, the newest one last."""
    return sorted((Path(run) / "checkpoints").glob(NAME))


def latest_checkpoint(run: str | Path) -> Path | None:
    """The run's newest complete checkpoint, or None if there is none."""
    return next(reversed(checkpoints(run)), None)


def require_checkpoint(run: str | Path) -> Path:
    folder = latest_checkpoint(run)
    if folder is None:
        raise FileNotFoundError(f"run: expected a folder that `flash-delta train --out` wrote, got {run}")
    return folder
