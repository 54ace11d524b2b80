"""Writes the stubs of fla's names: ``python tests/fla_stubs.py``. tests/test_fla_names.py compares them."""

import shutil
from pathlib import Path

from flash_delta.integrations._fla_mirror import homes, submodules
from flash_delta.integrations._fla_names import FLA, PATHS, SECOND_PATHS

FOLDER = Path(__file__).parent.parent.joinpath(*FLA.split("."))


def stubs() -> dict[Path, str]:
    """Every stub's path and text: a line for each name, in ruff's order."""
    return {_file(path): "".join(_lines(path)) for path in PATHS}


def _file(path: str) -> Path:
    place = FOLDER.joinpath(*path.split("."))
    return place / "__init__.pyi" if submodules(f"{FLA}.{path}") else place.with_suffix(".pyi")


def _lines(path: str) -> list[str]:
    if path in SECOND_PATHS:
        return [f"from {FLA}.{SECOND_PATHS[path]} import *  # noqa: F403\n"]
    rows = sorted((home, name[0].islower(), name) for name, home in homes(path).items())
    return [_line(f"from {home} import ", f"{name} as {name}") for home, _, name in rows]


def _line(start: str, name: str) -> str:
    return f"{start}{name}\n" if len(start + name) <= 120 else f"{start}(\n    {name},\n)\n"


def main() -> None:
    for package in submodules(FLA):
        shutil.rmtree(FOLDER / package, ignore_errors=True)
    for file, text in stubs().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main()
