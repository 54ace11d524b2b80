"""`flash-delta` and `python -m flash_delta`."""

import sys


def main() -> None:
    try:
        from flash_delta.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"flash-delta: {error.name} is missing; pip install 'flash-delta[train]' brings it", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()
