"""Prints a user's mistake in one line. A bug of ours keeps its traceback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import typer

# Which package typer's parser comes from depends on typer's version. This is the base class of its usage errors.
UsageError = typer.BadParameter.__base__


@contextmanager
def one_line_each(debug: bool) -> Iterator[None]:
    """Prints an error that the user can fix, and ends with exit code 2. With ``debug`` the error is raised."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho("stopped", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # as with `flash-delta generate RUN | head`; typer then ends without a message
        raise
    except (UsageError, ValueError, OSError, FloatingPointError, MemoryError, RuntimeError) as error:
        line = _line(error)
        if debug or line is None:
            raise
        typer.secho(f"error: {line}", fg=None if os.environ.get("NO_COLOR") else "red", err=True)
        raise typer.Exit(2) from error


def _line(error: Exception) -> str | None:
    """The line for an error that the user can fix, or None for other errors."""
    if isinstance(error, UsageError):
        # A group of commands shows its help by this error if it gets no arguments.
        return None if type(error).__name__ == "NoArgsIsHelpError" else _joined(error.format_message())
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
        return f"out of memory, take smaller sizes (--batch-size, --seq-len, --hidden-size, --layers): {_joined(error)}"
    return _joined(error) if isinstance(error, ValueError | OSError | FloatingPointError) else None


def _joined(text: object) -> str:
    return " ".join(str(text).split())
