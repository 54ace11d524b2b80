"""What an example prints. To be called in a process of its own, since examples change what PyTorch and Triton are."""

import sys
from importlib import import_module
from pathlib import Path

EXAMPLES = str(Path(__file__).parent.parent / "examples")


def printed(name, *arguments):
    sys.path.append(EXAMPLES)
    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(import_module(name).main)
    return CliRunner().invoke(app, arguments).output
