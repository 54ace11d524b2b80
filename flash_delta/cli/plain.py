"""`flash-delta` without typer or rich: the two commands that need only torch."""

import argparse
import sys

import flash_delta
from flash_delta.cli.checking import all_right
from flash_delta.cli.info import info


def main(missing: str) -> None:
    """``missing``: the library that the other commands need."""
    more = f"{missing} is missing, which all other commands need: pip install 'flash-delta[train]' brings it"
    parser = argparse.ArgumentParser("flash-delta", epilog=more)
    parser.add_argument("--version", action="version", version=f"flash-delta {flash_delta.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="info | check")
    commands.add_parser("info", help="show versions, devices, and which backend runs two ops here and why")
    check = commands.add_parser("check", help="compare every op and gradient with the float64 reference, here")
    check.add_argument("--device", default="cpu", help="where to run: cpu, cuda, ...")
    check.add_argument("--full", action="store_true", help="all named cases")
    check.add_argument("--widths", action="store_true", help="all named cases with other widths of heads")
    check.add_argument("--hard", action="store_true", help="the cases where keys repeat, in bfloat16")
    check.add_argument("--case", help="only this case")
    check.add_argument("--backend", help="check this backend; none: the one the library takes")
    if sys.argv[1:] and sys.argv[1] not in ("info", "check", "-h", "--help", "--version"):
        print(f"flash-delta: {more}", file=sys.stderr)
        sys.exit(2)
    given = parser.parse_args()
    try:
        if given.command == "info":
            info()
        elif not all_right(given.device, given.full, given.widths, given.hard, given.case, given.backend):
            sys.exit(1)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
