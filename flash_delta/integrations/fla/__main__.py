"""``python -m flash_delta.integrations.fla`` prints what this library's members lack beside an installed fla.

It reads fla's source files and imports none of them. So it needs neither a GPU nor the packages that fla depends on.
"""

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

HERE = "flash_delta.integrations.fla"
FAMILY = {
    "ops": (
        *("comba", "cp", "delta_rule", "gated_delta_product", "gated_delta_rule"),
        *("gdn2", "kda", "simple_gla", "utils"),
    ),
    "modules": ("causal_conv1d", "norm"),
    "layers": ("comba", "delta_net", "gated_deltanet", "gated_deltaproduct", "gdn2", "kda", "simple_gla", "utils"),
}
INSIDE = ("backends", "triton_ascend", "wy_fast")  # parts of paths that only fla itself imports


def absent(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields, by module, the names and arguments that the fla in ``root`` has and this library's members lack."""
    for room, members in FAMILY.items():
        for member in members:
            paths = sorted((root / room / member).rglob("*.py")) or [root / room / f"{member}.py"]
            for path in paths:
                parts = path.relative_to(root).with_suffix("").parts
                if path.exists() and path.stem != "__init__" and not set(INSIDE) & {*parts}:
                    module = "." + ".".join(parts)
                    names = list(_absent_of(module, _public(ast.parse(path.read_text()))))
                    if names:
                        yield module, names


def _absent_of(module: str, theirs: dict[str, list[str]]) -> Iterator[str]:
    try:
        ours = vars(import_module(HERE + module))
    except ModuleNotFoundError:
        ours = {}
    for name, arguments in theirs.items():
        if name not in ours:
            yield name
            continue
        known = signature(ours[name]).parameters
        missing = [argument for argument in arguments if argument not in known]
        if missing:
            yield f"{name}({', '.join(missing)})"


def _public(tree: ast.Module) -> dict[str, list[str]]:
    """Functions and classes that users call, with their arguments: no kernels, autograd Functions or their passes."""
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        inside = node.name.endswith(("Function", "_kernel")) or {"fwd", "bwd", "kernel"} & {*node.name.split("_")}
        inside = inside or any(ast.unparse(base).endswith("Function") for base in getattr(node, "bases", ()))
        if not inside and not any("jit" in ast.unparse(d) for d in node.decorator_list):
            found[node.name] = _arguments(node)
    return found


def _arguments(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        return _arguments(made[0])[1:] if made else []
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def main() -> int:
    """Prints the list. Returns the exit code: 0, or 2 if there is no fla."""
    spec = find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        print("expected an installed fla to compare with: pip install flash-linear-attention", file=sys.stderr)
        return 2
    count = 0
    for module, names in absent(Path(spec.submodule_search_locations[0])):
        print(f"{module}: {', '.join(names)}")
        count += len(names)
    print(f"{count} names are absent")
    return 0


if __name__ == "__main__":
    sys.exit(main())
