"""`flash-delta-dev` and `python -m workshop`."""

from workshop.cli.app import app

if __name__ == "__main__":
    app()
