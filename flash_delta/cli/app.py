"""The `flash-delta` application: its commands, and what an error looks like."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from flash_delta.cli.bench import bench
from flash_delta.cli.check import check
from flash_delta.cli.compile import compile_kernels
from flash_delta.cli.generate import generate
from flash_delta.cli.info import info
from flash_delta.cli.report import report
from flash_delta.cli.train import train
from flash_delta.cli.tune import tune


class Commands(typer.core.TyperGroup):
    """Says what the user did wrong in one line, without a traceback."""

    def invoke(self, ctx: typer.Context):
        try:
            return super().invoke(ctx)
        except (ValueError, FileNotFoundError) as error:
            if ctx.params["debug"]:
                raise
            Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    help="Gated-delta-rule linear attention: what runs here, whether it is right, and small models end to end.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (info, check, bench, tune, train, generate, report):
    app.command()(command)
app.command("compile")(compile_kernels)


@app.callback()
def options(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    pass
