"""`flash-delta` and `python -m flash_delta`."""


def main() -> None:
    try:
        from flash_delta.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        from flash_delta.cli import plain

        plain.main(error.name)
    else:
        app()


if __name__ == "__main__":
    main()
