"""Checks of paths that a command gets, before the command starts its work."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def to_path(text: str | Path) -> Path:
    """Refuses an empty path, which a shell makes of an unset variable. Path("") would be the current folder."""
    if str(text) == "":
        from typer import BadParameter

        raise BadParameter("expected a path, got nothing")
    return Path(text)


# Keywords for typer.Option and typer.Argument. Their errors show the metavar as the name.
PATH, PATHS, RUN = ({"parser": to_path, "metavar": name} for name in ("PATH", "PATHS...", "RUN"))


def require_writable(option: str, file: Path) -> None:
    """Raises ValueError if the file cannot be written. Makes the file's folders, but leaves no file there."""
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
    """Runs code that reads a file. If the contents are wrong, the error names the file."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: expected JSON that `{writer}` wrote, got {file} ({error})") from error
    except (UnicodeDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{option}: expected what `{writer}` wrote, got {file} ({what})") from error
