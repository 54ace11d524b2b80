"""Paths that commands are given: refused before the work that they are for."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def to_path(text: str | Path) -> Path:
    """Refuses what a shell makes of a variable that is not set: Path("") would be the folder that one is in."""
    if str(text) == "":
        from typer import BadParameter

        raise BadParameter("expected a path, got nothing")
    return Path(text)


# Of typer.Option and typer.Argument, which name themselves by the metavar in errors.
PATH, PATHS, RUN = ({"parser": to_path, "metavar": name} for name in ("PATH", "PATHS...", "RUN"))


def require_writable(option: str, file: Path) -> None:
    """Raises ValueError if the file cannot be written; makes the folders that it lies in, and leaves no file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            with file.open("ab"):
                pass
        else:
            with tempfile.TemporaryFile(dir=file.parent):
                pass
    except OSError as error:
        raise ValueError(f"{option}: expected a file that can be written, got {file} ({error.strerror})") from error


@contextmanager
def reading(option: str, file: Path, writer: str) -> Iterator[None]:
    """Around reading a file: whatever is wrong with what it holds is an error with its name."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: expected JSON that `{writer}` wrote, got {file} ({error})") from error
    except (UnicodeDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{option}: expected what `{writer}` wrote, got {file} ({what})") from error
