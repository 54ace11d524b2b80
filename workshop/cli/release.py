"""`flash-delta-dev release`: checks the files of a release, and lists what to publish."""

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from flash_delta.cli.files import PATH
from flash_delta.cli.tables import Table, show
from workshop.cli.modules import require_modules


def release(
    folder: Annotated[Path, typer.Argument(help="With the sdist and both wheels.", **PATH)],
    environment: Annotated[Path, typer.Argument(help="A Python environment with only the wheels.", **PATH)],
) -> None:
    """Check the files of a release against this checkout, try them where nothing else is, and list what to publish.

    `make release` builds the files and the environment. Nothing is uploaded. Run it in a checkout without changes.
    """
    require_modules([])
    from flash_delta import __version__
    from workshop.release.files import KERNELS, SDIST, WHEEL, only_file, require_files
    from workshop.release.installed import require_installed

    root = Path(__file__).parents[2]  # of this checkout
    require_files(folder, root)
    require_installed(environment, (root / "README.md").read_text())
    files = [only_file(folder, pattern) for pattern in (SDIST, WHEEL, KERNELS)]
    rows = [(str(f), f"{f.stat().st_size:,}", hashlib.sha256(f.read_bytes()).hexdigest()) for f in files]
    show([Table(("to publish", "bytes", "sha256"), rows)])
    print(f"to PyPI:  twine upload {' '.join(map(str, files))}")
    print("to Hugging Face, as a package of kernels:  make hub, then the folder build/hub")
    print(f"to git:  git tag v{__version__}")
    if f"## {__version__} (not released yet)" in (root / "CHANGELOG.md").read_text():
        print(f'before that:  remove "(not released yet)" from {__version__} in CHANGELOG.md')
