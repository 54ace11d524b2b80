"""The `flash-delta` application: its commands, and what an error looks like."""

import re
import shutil
from collections.abc import Callable
from typing import Annotated

import typer

import flash_delta
from flash_delta.cli.check import check
from flash_delta.cli.errors import one_line_each
from flash_delta.cli.generate import generate
from flash_delta.cli.info import info
from flash_delta.cli.pack import pack
from flash_delta.cli.prove import prove
from flash_delta.cli.report import report
from flash_delta.cli.train import train

WIDEST = 100  # width of help text: longer lines are hard to read


class Commands(typer.core.TyperGroup):
    """Commands that report a user's mistake in one line, without a traceback."""

    def make_context(self, info_name: str | None, args: list[str], parent=None, **extra) -> typer.Context:
        extra.setdefault("terminal_width", min(shutil.get_terminal_size().columns, WIDEST))
        with one_line_each(debug="--debug" in args):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: typer.Context):
        with one_line_each(ctx.params["debug"]):
            return super().invoke(ctx)


def first_sentence(command: Callable[..., None]) -> str:
    """The whole first sentence about a command. The parser would cut it."""
    return re.split(r"[.;:] |\.?\n", command.__doc__)[0]


def make_app(program: str, about: str, commands: dict[str, Callable[..., None]]) -> typer.Typer:
    """The application of these commands, by their names."""
    app = typer.Typer(
        cls=Commands,
        help=about,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its panels cut words on a narrow terminal
    )
    for name, command in commands.items():
        app.command(name, short_help=first_sentence(command))(command)

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(f"{program} {flash_delta.__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        pass

    return app


app = make_app(
    "flash-delta",
    "Gated-delta-rule linear attention: what runs here, whether it is right, and small models end to end.",
    {
        "info": info,
        "check": check,
        "prove": prove,
        "train": train,
        "generate": generate,
        "report": report,
        "pack": pack,
    },
)
