"""The house keeps its shape: who imports whom, how large things get, what an import costs, which calls must run."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import flash_delta
from flash_delta.kernels.runtime import fastcall

ROOT = Path(__file__).parent.parent
PACKAGE, WORKSHOP = ROOT / "flash_delta", ROOT / "workshop"
FILES = sorted([*PACKAGE.rglob("*.py"), *WORKSHOP.rglob("*.py")])

# A room may import itself and these, nothing else of the package. See ARCHITECTURE.md.
MAY_IMPORT = {
    "problem": set(),
    "backend": {"problem"},
    "reference": {"problem"},
    "kernels": {"problem"},
    "ops": {"problem", "backend", "reference", "kernels"},
    "modules": {"ops"},
    "parallel": {"problem"},  # the op to run comes with the call
    "layers": {"modules", "ops", "parallel"},
    "models": {"layers", "modules", "parallel"},
    "integrations": {"layers", "parallel", "modules", "ops"},
    "page": set(),
    "training": {"models", "parallel"},
    "report": {"training", "models", "layers", "ops", "page"},
    "testing": {"reference", "backend", "problem"},
    "proof": {"layers", "modules", "ops", "testing", "page"},
    "compiler": {"ops", "kernels"},
    "packs": {"integrations", "layers", "ops"},
    "cli": {"report", "training", "models", "ops", "testing", "compiler", "packs", "integrations", "proof"},
    # The workshop's rooms. No room of the library may import them.
    "workshop.check": {"testing", "reference", "problem"},
    # Layers of transformers are contestants, and what is around the rule stands beside those that lack it.
    "workshop.bench": {"workshop.check", "testing", "page", "integrations", "layers", "modules", "ops"},
    "workshop.numbers": {"workshop.bench", "cli"},
    "workshop.gate": {"compiler", "kernels", "problem"},
    "workshop.tune": {"workshop.gate", "workshop.bench", "testing", "compiler", "kernels", "reference", "problem"},
    "workshop.parity": {"training", "models", "ops"},
    "workshop.machine": {"workshop.bench", "cli", "compiler", "testing", "ops"},
    "workshop.release": {"kernels", "ops"},
    "workshop.cli": {
        "workshop.machine",
        "workshop.release",
        "workshop.gate",
        "workshop.bench",
        "workshop.numbers",
        "workshop.tune",
        "workshop.parity",
        "cli",
        "testing",
        "compiler",
    }
    | {"training"},
}
# Inside of kernels the same, of its own rooms.
KERNELS_MAY_IMPORT = {
    "device": set(),
    "runtime": {"device"},
    "triton": {"runtime", "device"},
    "hopper": {"runtime", "device", "triton"},
}
PRIVATE = {"kda", "gated_delta_rule", "gdn2", "simple_gla", "comba", "delta_rule", "serving"}  # not each other
THIRD_PARTY = {
    "problem": {"torch"},
    "backend": {"torch"},
    "reference": {"torch"},
    "kernels": {"torch", "triton"},
    "ops": {"torch"},
    "modules": {"torch"},
    "parallel": {"torch"},
    "layers": {"torch"},
    "integrations": {"torch"},
}

FRONT_DOOR = flash_delta.__dict__.keys() - MAY_IMPORT.keys()

# One file for each, which imports it where it is called.
ENGINES = {"integrations/vllm/plugin.py": "vllm", "integrations/sglang/plugin.py": "sglang"}

FILE_LINES, FUNCTION_LINES, FILES_OF_A_FOLDER = 250, 50, 16
KERNEL_FILE_LINES, KERNEL_LINES = 400, 120  # what a GPU runs is one function, which cannot call its pieces by name
OVER_BUDGET: dict[str, str] = {}  # path, or path:function -> why
# The lines of Python and C of what the wheel holds, of the workshop, and of the tests. A change that needs more raises
# a number here, and its message says by how much and why.
LINES = {"flash_delta": 44_345, "workshop": 7_794, "tests": 40_127}


def room(path: Path) -> str:
    """The room of a file: a folder of the library, or "workshop." and a folder there."""
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def room_of(module: str) -> str:
    package, *rest = module.split(".")
    return ".".join([package, *rest[:1]] if package == "workshop" else rest[:1])


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(imported(path))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_layering():
    assert not list(chain.from_iterable(map(wrong_imports, FILES)))


def wrong_imports(path: Path) -> Iterator[str]:
    """Says what a file imports from above, from beside, or from outside."""
    here, own = room(path), path.relative_to(ROOT).with_suffix("").parts[2:3]
    if here.split(".")[-1] in ("__init__", "__main__"):
        return
    for name in imports(path):
        top, *rest = name.split(".")
        if top in ("flash_delta", "workshop"):
            if name == "flash_delta" or (top == "flash_delta" and rest[0] in FRONT_DOOR):
                if not {"ops", "testing"} & {here, *MAY_IMPORT[here]}:
                    yield f"{path} imports {name}: below the front door"
            elif room_of(name) not in {here, *MAY_IMPORT[here]}:
                yield f"{path} imports {name}"
            elif here == "ops" and {*own} & PRIVATE and {*rest[1:2]} & PRIVATE - {*own}:
                yield f"{path} imports its sibling {name}"
        elif here in THIRD_PARTY and top not in sys.stdlib_module_names:
            engine = ENGINES.get(path.relative_to(PACKAGE).as_posix())
            if top not in {*THIRD_PARTY[here], engine}:
                yield f"{path} imports {name}"
    if here == "kernels":
        inner = path.relative_to(PACKAGE / "kernels").parts[0]
        rooms = {name.split(".")[2] for name in imports(path) if name.startswith("flash_delta.kernels.")}
        yield from (f"{path} imports kernels.{name}" for name in rooms & above(inner))


def above(inner: str) -> set[str]:
    """The rooms of kernels that a room may not import."""
    return KERNELS_MAY_IMPORT.keys() - {inner} - KERNELS_MAY_IMPORT.get(inner, set())


def test_budgets():
    long = {what: lines for path in FILES for what, lines, limit in sizes(path) if lines > limit}
    assert long.keys() == OVER_BUDGET.keys(), long


def sizes(path: Path) -> Iterator[tuple[str, int, int]]:
    """The lines of a file and of its functions without their docstrings, and how many they may have."""
    source, name, kernels = path.read_text(), str(path.relative_to(ROOT)), room(path) == "kernels"
    yield name, source.count("\n"), KERNEL_FILE_LINES if kernels else FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            jitted = kernels and any(".jit" in ast.unparse(d) for d in node.decorator_list)
            limit = KERNEL_LINES if jitted else FUNCTION_LINES
            yield f"{name}:{node.name}", body[-1].end_lineno - body[0].lineno + 1, limit


def test_budgets_of_c():
    """All that is C is one module, whose parts are named, and the driver of a pretended GPU."""
    paths = list(PACKAGE.rglob("*.c"))
    assert {path.name for path in paths} == {*fastcall.SOURCES, "fake_cuda.c"}
    assert not list(WORKSHOP.rglob("*.c"))
    for path in paths:
        lines = path.read_text().splitlines()
        assert len(lines) <= FILE_LINES, path
        assert max(map(len, lines)) <= 120, path


MEMORIES = {"run.compiled", "run.calls_that_compiled"}  # and the launches in a `KnownCall`, which is no module's
FACTS = {  # remembered of kernels, chips, files and sizes: nothing in them depends on a call's tensors
    "chip._chip", "cuda_driver._driven", "cuda_driver._thread", "cuda_driver.kernel_of", "cuda_driver.library",
    "launch.several_devices", "pack.identity", "pack.packs", "run._specializations", "workspace._layout",
}  # fmt: skip


GROWS = r"\{\}$|\[\]$|(\w+\.)*(set|dict|list|local|deque|\w*dict|\w*Dict|\w*Dictionary|Counter|Remembered)\("


def kept_in_modules(folder: Path) -> Iterator[str]:
    """What grows in modules: empty lists, dictionaries and sets, and functions with a cache."""
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if "cache" in "".join(map(ast.unparse, getattr(node, "decorator_list", []))):
                yield f"{path.stem}.{node.name}"
            elif getattr(node, "value", None) and re.match(GROWS, ast.unparse(node.value)):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                yield f"{path.stem}.{ast.unparse(target)}"


def test_calls_are_remembered_in_three_places():
    """What a call leaves is in these, which the folder's README names. Another memory could be asked a call that it
    does not know well enough."""
    runtime = PACKAGE / "kernels/runtime"
    assert set(kept_in_modules(runtime)) == MEMORIES | FACTS
    readme = (runtime / "README.md").read_text()
    assert all(f"`{name.split('.')[1]}`" in readme for name in MEMORIES)
    assert "`KnownCall.launches`" in readme


def test_folders_are_small():
    for folder in {path.parent for path in FILES}:
        files = [path for path in folder.iterdir() if path.is_file() and path.name not in ("__init__.py", "README.md")]
        assert len(files) <= FILES_OF_A_FOLDER, folder


def test_the_house_does_not_grow():
    lines = {
        folder: sum(
            len(path.read_text().splitlines()) for kind in ("py", "c") for path in (ROOT / folder).rglob(f"*.{kind}")
        )
        for folder in LINES
    }
    assert all(lines[folder] <= most for folder, most in LINES.items()), lines


READMES = [*(PACKAGE / "kernels").rglob("README.md"), WORKSHOP / "gate" / "cases" / "README.md"]


def test_every_folder_of_kernels_has_a_readme():
    folders = {path.parent for path in FILES if room(path) == "kernels"}
    assert {path.parent for path in READMES} == folders | {WORKSHOP / "gate" / "cases"}


def test_readmes_name_what_is_there():
    for readme in READMES:
        lines = [line for line in readme.read_text().splitlines() if line.startswith("* ")]
        named = {name for line in lines for name in re.findall(r"`(\w+\.(?:py|c))`", line.split(" — ")[0])}
        folders = {name for line in lines for name in re.findall(r"^\* \[(\w+)\]", line)}
        there = [p for p in readme.parent.iterdir() if p.name not in ("README.md", "__init__.py", "__pycache__")]
        assert named == {path.name for path in there if path.is_file()}, readme
        assert folders == {path.name for path in there if path.is_dir()}, readme


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_module_imports_itself_through_others():
    """Also where only a type checker looks."""
    names = {path: module_of(path) for path in FILES}
    modules = set(names.values())
    refuse_circles(
        {
            name: {n for n in imports(path) if n in modules and n != name and not name.startswith(f"{n}.")}
            for path, name in names.items()
        }
    )


def test_no_folder_of_kernels_imports_itself_through_others():
    """A folder is a room of its own, apart from the folders in it. So is a `backend.py`, which needs them all."""
    paths = [path for path in FILES if room(path) == "kernels" and path.name != "__init__.py"]
    rooms = {module_of(path): module_of(path if path.stem == "backend" else path.parent) for path in paths}
    needs: dict[str, set[str]] = {folder: set() for folder in rooms.values()}
    for path in paths:
        here = rooms[module_of(path)]
        needs[here] |= {rooms[name] for name in imports(path) if name in rooms} - {here}
    refuse_circles(needs)


def refuse_circles(needs: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def follow(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in sorted(needs[name]):
                follow(other, (*way, name))
            done.add(name)

    for name in needs:
        follow(name, ())


def test_the_page_on_architecture_names_what_is_there():
    """Each row of the table "Where to change what" names files that exist. One of them has the names in its subject."""
    table = (ROOT / "ARCHITECTURE.md").read_text().split("## Where to change what")[1].split("\n\n")[1]
    for row in table.splitlines()[2:]:
        quoted = re.findall(r"`([^`]+)`", row.split("|")[2])
        files = [name for name in quoted if "/" in name or name.endswith(".py")]
        assert files, row
        texts = []
        for name in files:
            found = [base / name for base in (PACKAGE, ROOT) if (base / name).exists()]
            assert found, f"{row}: there is no {name}"
            inside = found[0].rglob("*.py") if found[0].is_dir() else found
            texts += [path.read_text() for path in inside]
        subject = re.findall(r"`(\w+)`", row.split("|")[1])
        assert all(any(re.search(rf"\b{name}\b", text) for text in texts) for name in subject), row


def test_no_kwargs_in_ops():
    """Except where `wraps` gives a function the arguments of another."""
    for path in [*(PACKAGE / "ops").glob("*.py"), *(PACKAGE / "integrations" / "fla").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.args.kwarg:
                named = node.name in ("explain", "workspace_bytes")
                seen = named or any("wraps(" in ast.unparse(d) for d in node.decorator_list)
                assert seen, f"{path}: {node.name}: frameworks cannot see arguments inside **kwargs"


def test_import_needs_torch_only_and_touches_no_driver():
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"triton", "transformers", "numpy", "matplotlib", "rich", "typer", "safetensors"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Block())
import torch
calls = []
torch.cuda._lazy_init = lambda: calls.append(1)
torch._C._cuda_getDeviceCount = lambda: calls.append(1) or 0
import flash_delta, flash_delta.layers, flash_delta.modules, flash_delta.testing
import flash_delta.integrations.fla, flash_delta.integrations.transformers
q = torch.randn(1, 5, 2, 8)
flash_delta.chunk_delta_rule(q, q, q, torch.rand(1, 5, 2))
assert not calls
try:
    import flash_delta.models
except ImportError as error:
    assert "pip install 'flash-delta[transformers]'" in str(error), error
else:
    raise AssertionError("models without transformers")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_import_is_quick():
    """Fewer than 0.3 s on top of torch: one of three times, since other processes run beside."""
    code = "import time, torch; t = time.perf_counter(); import flash_delta; print(time.perf_counter() - t)"
    runs = (subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) for _ in range(3))
    assert any(float(seconds) < 0.3 for seconds in runs)


# Names of fla 0.6.0 in their order (users.md, appendix B): a call written for it, by position or by name, must run.
FLA = {
    "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel"
    " use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context"
    " | use_gate_in_kernel A_log dt_bias chunk_size transpose_state_layout head_first",
    "fused_recurrent_gated_delta_rule": "q k v g gk gv beta scale initial_state output_final_state"
    " use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval"
    " state_v_first cu_seqlens | transpose_state_layout",
    "chunk_gated_delta_product": "q k v g beta num_householder scale initial_state output_final_state"
    " use_qk_l2norm_in_kernel cu_seqlens cu_seqlens_cpu cp_context |",
    "chunk_kda": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel"
    " use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states"
    " state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs"
    " | A_log dt_bias chunk_size transpose_state_layout",
    "fused_recurrent_kda": "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel"
    " use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens"
    " | transpose_state_layout",
    "chunk_gdn2": "q k v g b w scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel"
    " cu_seqlens cu_seqlens_cpu safe_gate lower_bound disable_recompute return_intermediate_states state_v_first"
    " cp_context | A_log dt_bias chunk_size transpose_state_layout",
    "fused_recurrent_gdn2": "q k v g b w A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel"
    " use_gate_in_kernel lower_bound state_v_first cu_seqlens | transpose_state_layout",
    "chunk_simple_gla": "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu"
    " | chunk_size head_first",
    "chunk_comba": "q k v p g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens"
    " cu_seqlens_cpu |",
    "chunk_delta_rule": "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens"
    " cu_seqlens_cpu | chunk_size head_first",
    "fused_gdn_gate": "g A_log dt_bias output_dtype |",
    "fused_kda_gate": "g A_log dt_bias lower_bound output_dtype |",
    "naive_gdn_gate": "g A_log dt_bias output_dtype |",
    "naive_kda_gate": "g A_log dt_bias output_dtype |",
    "naive_kda_lowerbound_gate": "g A_log dt_bias lower_bound output_dtype |",
}


def test_signatures_of_the_ecosystem():
    for name, arguments in FLA.items():
        positional, keywords = (part.split() for part in arguments.split("|"))
        parameters = inspect.signature(getattr(flash_delta, name)).parameters
        ours = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert ours[: len(positional)] == positional, name
        assert parameters.keys() >= set(keywords), name


def test_every_argument_is_documented():
    shared = inspect.getdoc(flash_delta.chunk_gated_delta_rule) + inspect.getdoc(flash_delta.chunk_kda)
    for name in FLA:
        op = getattr(flash_delta, name)
        doc = inspect.getdoc(op)
        refers = ":func:" in doc
        for argument in inspect.signature(op).parameters:
            assert argument in doc or (refers and f"\n    {argument}: " in shared), f"{name}: {argument}"
        assert "Source: " in doc, name


def test_docstrings_begin_with_a_verb_or_their_subject():
    wrong = []
    for path in [*FILES, *(p for folder in ("tests", "examples") for p in sorted((ROOT / folder).rglob("*.py")))]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) else None
            if text and text.startswith(("Of ", "The same", "As ")):
                wrong.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


def test_changelog_names_the_version():
    assert f"## {flash_delta.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_contributing_is_short():
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    assert len(lines) <= 45
    assert not any(a == b == "" for a, b in pairwise(lines))


CALLERS = {
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "do", "initial_state", "dfinal"),
    *("cu_seqlens", "read_indices", "write_indices", "ring", "source", "gate", "weight"),
}
POINTER = {"find_chunk": 1, "bounds": 1}  # which argument is one; of the other readers, the first


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".")[-1]


def root(node: ast.expr) -> str:
    """The parameter that an address is made of."""
    while not isinstance(node, ast.Name):
        node = node.args[0] if isinstance(node, ast.Call) else node.left
    return node.id


def followers():
    """The kernels that wait for the one before them, and what they call before they do."""
    for path in sorted((PACKAGE / "kernels" / "triton").rglob("*.py")):
        for function in ast.parse(path.read_text()).body:
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            waits = [call.lineno for call in calls if name_of(call) == "follow"]
            if waits:
                parameters = {a.arg for a in function.args.args}
                yield function.name, parameters, [c for c in calls if c.lineno < waits[0]]


def test_a_kernel_that_starts_early_reads_only_the_callers_tensors():
    """What the kernels of its call write may not be there before `follow`; small batches only would show it."""
    for name, parameters, calls in followers():
        reads = [call for call in calls if name_of(call).startswith("load") or name_of(call) in POINTER]
        written = {"q"} if "CHANNEL" in parameters else set()  # `channel` hands the scans Qg as q
        assert {root(call.args[POINTER.get(name_of(call), 0)]) for call in reads} <= CALLERS - written, name
