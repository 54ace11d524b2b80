"""What the wheels do where nothing else of the repository is."""

import os
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

WHERE = "import flash_delta, flash_delta_kernels; print(flash_delta.__file__, *flash_delta_kernels.__path__, sep='\\n')"
KEPT = ("PATH", "HOME", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")


def first_example(readme: str) -> str:
    """The first block of Python in the README."""
    return re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]


def require_installed(environment: Path, readme: str) -> None:
    """Checks an environment in which only the wheels were installed: where they are, the README's first example, and
    the command."""
    python, command = (environment.absolute() / "bin" / name for name in ("python", "flash-delta"))
    for place in run(python, "-c", WHERE).splitlines():
        if not Path(place).resolve().is_relative_to(environment.resolve()):
            raise ValueError(f"environment: expected the wheels in {environment}, got {place}")
    run(python, "-c", first_example(readme))
    run(command, "--help")
    run(command, "check", "--case", "ragged")


def run(*command: str | Path) -> str:
    """The output of a command in an empty folder, without the variables that let Python import from elsewhere."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    with TemporaryDirectory() as folder:
        ran = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)
    if ran.returncode:
        what, last = Path(command[0]).name, (ran.stderr or ran.stdout).strip().splitlines()[-3:]
        raise ValueError(f"environment: expected {what} to run there, got exit code {ran.returncode}: {last}")
    return ran.stdout
