"""Build the package that the Hugging Face library ``kernels`` loads: this library inside of it, by relative imports.

    python hub/build.py OUT

OUT is then a repository of the hub: its card, and in ``build/torch-universal`` what stands in `package/` beside
`flash_delta/`. Nothing is compiled before it runs, so one build serves every torch, Triton and GPU. The package's id
has a hash of all its files: two versions can be loaded into one process, and beside an installed flash_delta.
"""

import ast
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE.parent / "flash_delta"
ROOMS = ("problem", "ops", "kernels", "reference", "modules", "layers", "parallel")  # copied whole
INTEGRATIONS = ("_context", "transformers/functions")
FILES = ("__init__.py", "backend.py", *(f"integrations/{name}.py" for name in INTEGRATIONS))
METADATA = {
    "name": "flash-delta",
    "version": 1,  # goes up when a call of the version before would not run any more
    "kernels-minver": "0.17.0",
    "license": "MIT",
    "python-depends": [],
    "backend": {"type": "cpu"},  # there is no word for all of them; the folder's name says that it is universal
}


def build(out: Path) -> Path:
    """Writes the repository into ``out``, in place of an older build; returns the folder of the package."""
    sources = collect()
    package = out / "build" / "torch-universal"
    if package.exists():
        shutil.rmtree(package)
    for name, text in sources.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    digest = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:12]
    metadata = {"id": f"_flash_delta_universal_{digest}", **METADATA}
    (package / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(HERE / "card.md", out / "README.md")
    shutil.copy(HERE.parent / "LICENSE", out)
    return package


def collect() -> dict[str, str]:
    """The package's files by their paths in it, with relative imports."""
    paths = [LIBRARY / name for name in FILES]
    paths += [path for room in ROOMS for ending in ("*.py", "*.c") for path in (LIBRARY / room).rglob(ending)]
    found = {path.relative_to(LIBRARY.parent): path.read_text() for path in paths}
    found |= {path.relative_to(HERE / "package"): path.read_text() for path in (HERE / "package").rglob("*.py")}
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in found}
    return {
        path.as_posix(): relative(found[path], path, modules) if path.suffix == ".py" else found[path]
        for path in sorted(found)
    }


def relative(source: str, path: Path, modules: set[str]) -> str:
    """``source`` with imports of flash_delta as they have to be in the package's file ``path``.

    Raises:
        ValueError: if an import cannot be relative, or is of a module that is not among ``modules``.
    """
    lines, up = source.splitlines(keepends=True), "." * len(path.parts)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(level=0, module=module):
                old, new, known = f"from {module} import", f"from {up}{module} import", module in modules
            case ast.Import(names=names):
                module = ", ".join(alias.name for alias in names)
                parent, _, name = module.rpartition(".")
                old, new = f"import {module}", f"from {up}{parent} import {name}"
                known = module in modules and (not parent or names[0].asname is not None)
            case _:
                continue
        if not re.search(r"\bflash_delta\b", module):
            continue
        if not known:
            expected = "`import flash_delta`, `import ... as`, or `from` a module that is copied"
            raise ValueError(f"{path}, line {node.lineno}: expected {expected}, got {module}")
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(old, new, 1)
    return "".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python hub/build.py OUT")
    print(build(Path(sys.argv[1])))
