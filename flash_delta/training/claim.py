"""Makes sure that a run's folder belongs to one process, and can be written to."""

import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from flash_delta.training.checkpoint import latest_checkpoint

LOCK = ".lock"


def claim_folder(folder: Path, newest: Path | None, checkpoint_bytes: int) -> FileLock:
    """Makes the folder, locks it for this process and writes to it, before a run computes anything that it could not
    save.

    The system releases the lock when the process ends for any reason. So a killed run can be resumed at once.

    Args:
        folder: the run's folder.
        newest: the checkpoint that the run continues from; None before the first checkpoint.
        checkpoint_bytes: the size of a checkpoint on the disk.

    Returns:
        The lock. Its holder releases it. It is also released when nothing refers to it.

    Raises:
        ValueError: if another process has locked the folder or has left newer checkpoints in it, or if the folder
            cannot be written to or has no room for a checkpoint.
    """
    lock = FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock.acquire()
        with tempfile.TemporaryFile(dir=folder / "checkpoints") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        disk = shutil.disk_usage(folder)
    except Timeout:
        raise ValueError(f"folder: expected a folder that no other process trains in, got {folder}") from None
    except (OSError, NotImplementedError) as error:  # NotImplementedError comes from file systems without locks
        lock.release()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"folder: expected a folder that can be written to, got {folder} ({reason})") from error
    wrong = None
    if disk.free < checkpoint_bytes:
        wrong = f"expected {checkpoint_bytes / 1e9:.3g} GB of room for a checkpoint, got {disk.free / 1e9:.3g} GB"
    elif (found := latest_checkpoint(folder)) != newest:
        expected, got = (path.name if path else "no checkpoint" for path in (newest, found))
        wrong = f"expected {expected} as the newest, got {got}: another process has trained there, resume it;"
    if wrong is not None:
        lock.release()
        raise ValueError(f"folder: {wrong} in {folder}")
    return lock
