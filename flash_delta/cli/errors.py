"""What a user did wrong, in one line; a bug of ours keeps its traceback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import typer

# The package that typer takes its parser from differs by typer's version: this is its base of wrong usage.
UsageError = typer.BadParameter.__base__


@contextmanager
def one_line_each(debug: bool) -> Iterator[None]:
    """Prints an error that a user can do something about, and ends with exit code 2; with debug it is raised."""
    try:
        yield
    except KeyboardInterrupt:
        typer.secho("stopped", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # of `flash-delta generate RUN | head`; typer ends quietly
        raise
    except (UsageError, ValueError, OSError, FloatingPointError, MemoryError, RuntimeError) as error:
        line = _line(error)
        if debug or line is None:
            raise
        typer.secho(f"error: {line}", fg=None if os.environ.get("NO_COLOR") else "red", err=True)
        raise typer.Exit(2) from error


def _line(error: Exception) -> str | None:
    """None if it is no user's."""
    if isinstance(error, UsageError):
        # Without arguments a group shows its help in this way.
        return None if type(error).__name__ == "NoArgsIsHelpError" else _joined(error.format_message())
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
        return f"out of memory, take smaller sizes (--batch-size, --seq-len, --hidden-size, --layers): {_joined(error)}"
    return _joined(error) if isinstance(error, ValueError | OSError | FloatingPointError) else None


def _joined(text: object) -> str:
    return " ".join(str(text).split())
