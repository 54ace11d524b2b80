"""A run's checkpoints: `RUN/checkpoints/step-00000100/`, safetensors and JSON only, nothing that could execute code.

`config.json` and `model.safetensors` in it are what `from_pretrained` reads; `optimizer.safetensors` holds
`<parameter>.<moment>`; `trainer.json` is a `Run`. It is the same whatever number of ranks wrote it: whole tensors in
plain files. `saving.py` writes it, `loading.py` reads it.
"""

from pathlib import Path

NAME = "step-????????"  # LARGEST_STEP of the configuration has eight digits


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoints(run: str | Path) -> list[Path]:
    """The run's complete checkpoints, the newest one last."""
    return sorted((Path(run) / "checkpoints").glob(NAME))


def latest_checkpoint(run: str | Path) -> Path | None:
    """The run's newest complete checkpoint; None where there is none."""
    return next(reversed(checkpoints(run)), None)


def require_checkpoint(run: str | Path) -> Path:
    folder = latest_checkpoint(run)
    if folder is None:
        raise FileNotFoundError(f"run: expected a folder that `flash-delta train --out` wrote, got {run}")
    return folder
