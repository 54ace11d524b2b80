"""The files of a release: what they contain, and from which sources they were made."""

import email
import json
import subprocess
import tarfile
import zipfile
from pathlib import Path

from flash_delta import __version__
from flash_delta.kernels import TRITON
from flash_delta.kernels.runtime import pack

BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml", ".gitignore", "PKG-INFO"}
SDIST, WHEEL, KERNELS = "flash_delta-*.tar.gz", "flash_delta-*.whl", "flash_delta_kernels-*.whl"


def only_file(folder: Path, pattern: str) -> Path:
    """The only file with such a name."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ValueError(f"folder: expected one file {pattern} in {folder}, got {len(found)}")
    return found[0]


def require_files(folder: Path, root: Path) -> None:
    """Checks the sdist and both wheels in a folder against the checkout that they were made from."""
    if changed := _git(root, "status", "--porcelain"):
        raise ValueError(f"checkout: expected one without changes, got {', '.join(changed)}")
    package = set(_git(root, "ls-files", "flash_delta"))
    with tarfile.open(only_file(folder, SDIST)) as sdist:
        top = f"flash_delta-{__version__}/"
        names = {member.name.removeprefix(top) for member in sdist.getmembers() if member.isfile()}
    require_same("sdist", names, package | BESIDE)
    with zipfile.ZipFile(only_file(folder, WHEEL)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        require_same("wheel", names, package)
        require_version("wheel", wheel)
    with zipfile.ZipFile(only_file(folder, KERNELS)) as kernels:
        require_version("kernels", kernels)
        require_packs(kernels)


def require_same(what: str, found: set[str], wanted: set[str]) -> None:
    """Checks that an archive has these files and no others."""
    if found != wanted:
        more, missing = sorted(found - wanted)[:5], sorted(wanted - found)[:5]
        raise ValueError(f"{what}: expected the files that git has, got also {more}, and not {missing}")


def require_version(what: str, wheel: zipfile.ZipFile) -> None:
    """Checks a wheel's own version."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    version = email.message_from_bytes(wheel.read(name))["Version"]
    if version != __version__:
        raise ValueError(f"{what}: expected version {__version__}, got {version}")


def require_packs(wheel: zipfile.ZipFile) -> None:
    """Checks that the wheel has packs of all models for the oldest and the newest Triton, made from these sources, and
    the C module. Packs of other sources would be installed and then not be used."""
    names = wheel.namelist()
    if not any(name.endswith(".so") for name in names):
        raise ValueError("kernels: expected the C module in the wheel, got none (make kernels)")
    for triton in (".".join(map(str, version)) for version in TRITON):
        if not any(f"-triton-{triton}." in name and name.endswith("-all.zip") for name in names):
            raise ValueError(f"kernels: expected a pack of all models for Triton {triton} (make kernels), got {names}")
    wanted = pack.identity()
    for name in names:
        if name.endswith(".zip"):
            with wheel.open(name) as file, zipfile.ZipFile(file) as packed:
                found = json.loads(packed.read("pack.json"))["identity"]
            if unlike := [key for key in ("format", "sources") if found[key] != wanted[key]]:
                raise ValueError(
                    f"kernels: expected packs of these sources (make kernels), got {name} of other {unlike}"
                )


def _git(root: Path, *arguments: str) -> list[str]:
    ran = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return [line.strip() for line in ran.stdout.splitlines()]
