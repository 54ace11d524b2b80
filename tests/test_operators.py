"""Operators are made of annotations: a new option is named by `Problem`, `Options` and an op, and nowhere else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor

import flash_delta
from flash_delta.ops._operators.define import BackwardArguments, define, schema_type
from flash_delta.problem import Gate, Pools, Problem, Schema, marked

PACKAGE = Path(flash_delta.__file__).parent
NEW = {  # file -> the line behind which a field is added, and that field
    "problem/rule.py": ("    chunk_size: Schema[int] = 64\n", "    novel: Schema[Compiled[bool]] = False\n"),
    "ops/_check/options.py": ("    chunk_size: int = 64\n", '    novel: Annotated[bool, "use_novel"] = False\n'),
}
CALL = """
from importlib.util import find_spec
import torch, flash_delta
from flash_delta.ops._function import run
from flash_delta.problem import Inputs
from flash_delta.reference import backend

seen, forward = [], backend.forward

def watch(problem, *args):
    seen.append(problem)
    return forward(problem, *args)

def op(q, novel):
    options = {"op": "op", "gate": ("none", False, None), "erase": "decayed", "optional_beta": True, "novel": novel}
    return run(Inputs(q, q, q), options, None, output_final_state=False, backend="torch")[0]

backend.forward = watch
q = torch.randn(1, 5, 2, 8)
op(q, True), torch.compile(op, backend="eager", fullgraph=True)(q, True)
assert [problem.novel for problem in seen] == [True, True], seen
for name in ("delta_rule", "delta_rule_backward", "serve"):
    assert "bool novel" in str(getattr(torch.ops.flash_delta, name).default._schema), name
if find_spec("triton") is not None:
    from flash_delta.kernels.runtime.forbid import _facts
    assert _facts(seen[0])["novel"] is True
try:
    op(q, "yes")
except ValueError as error:
    assert str(error) == "op: use_novel: expected True or False, got 'yes'", error
else:
    raise AssertionError("'yes' went through")
"""


def test_a_new_option_is_named_in_two_tables(tmp_path):
    """It is checked, and arrives at backends, in schemas and among what kernels are compiled for."""
    copy = tmp_path / "flash_delta"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (line, field) in NEW.items():
        text = (copy / name).read_text()
        assert text.count(line) == 1
        (copy / name).write_text(text.replace(line, line + field))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", CALL], check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})


def test_what_kernels_are_compiled_for():
    """The error of a call that would have to be compiled names it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from flash_delta.kernels.runtime.forbid import _facts

    p = Problem(
        "op", 1, 1, 2, 4, 16, 32, 1, torch.float32, torch.device("cpu"), Gate("channel", False, -5.0), "decayed",
        0.5, packed=True, l2norm=True, pools=Pools(activation="silu", taps=4, window=3),
    )  # fmt: skip
    want = {
        "device": p.device, "H": 2, "HV": 4, "K": 16, "V": 32, "gate": "channel",
        "erase": "decayed", "packed": True, "l2norm": True, "raw_gate": False, "raw_beta": False, "bounded": True,
        "channel_strength": False, "reflects": True, "state_v_first": False, "batch_invariant": False, "taps": 4,
        "window": 3, "rolling": False, "steps": 1,
        "activation": "silu", "needs_grad": False, "disable_recompute": False,
    }  # fmt: skip
    assert _facts(p) == want
    assert _facts(p._replace(gate=Gate("channel"))) == want | {"bounded": False}
    assert _facts(p._replace(most_beta=1.0)) == want | {"reflects": False}


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (float | None, "float?"),
        (int, "int"),
        (Literal["a", "b"] | None, "str?"),
        (Literal["a"], "str"),
        (Tensor | None, "Tensor?"),
        (list[Tensor], "Tensor[]"),
    ],
)
def test_types_in_schemas(hint, kind):
    assert schema_type(hint) == kind


def test_only_what_tensors_do_not_tell_is_in_schemas():
    told = {"B", "T", "H", "HV", "K", "V", "N", "dtype", "device", "packed", "erase_keys", "strength_dtype"}
    assert not told & {*marked(Problem, Schema)}


class Pair(NamedTuple):
    x: Tensor
    bounds: Tensor
    bias: Tensor | None = None


class Settings(NamedTuple):
    factor: float | None
    keep: bool


def scale(pair: Pair, settings: Settings, backend: str | None) -> list[Tensor]:
    y = pair.x * settings.factor + (0 if pair.bias is None else pair.bias)
    return [y, y.sum(0), *([pair.x * 2] if settings.keep else [])]


def like(pair, settings, backend):
    kept = [torch.empty_like(pair.x)] if settings.keep else []
    return [torch.empty_like(pair.x), pair.x.new_empty(pair.x.shape[1:]), *kept]


def scale_backward(pair: Pair, behind: BackwardArguments, settings: Settings, backend: str | None) -> Pair:
    if settings.keep:
        assert torch.equal(behind.saved[0], pair.x * 2)
    d = sum(d for d in (behind.do, behind.dfinal) if d is not None).expand(pair.x.shape)
    return Pair(d * settings.factor, None, None if pair.bias is None else d.sum())


operator = define("test_scale", scale, like, backward=scale_backward, saved_from=lambda *_: 2)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_made_operator(biased, keep):
    """Bounds have no gradient, what is not there has none either, and saved results come back."""
    x, bias = torch.randn(3, 2, requires_grad=True), torch.randn((), requires_grad=True) if biased else None
    args = (x, torch.tensor([0, 3]), bias, 2.0, keep, None)
    torch.library.opcheck(operator, args)
    y, total, *_ = operator(*args)
    given = [t for t in (x, bias) if t is not None]
    want = torch.autograd.grad((scale(Pair(*args[:3]), Settings(2.0, keep), None)[0]).sum(), given)
    for one in (y.sum(), total.sum()):
        got = torch.autograd.grad(one, given, retain_graph=True)
        assert all(map(torch.equal, got, want))


def write(pool: Tensor, more: Tensor | None, value: int, backend: str | None) -> Tensor:
    pool.data.add_(value)  # as a kernel does, of which autograd knows nothing
    return pool.clone()


def test_what_is_written_is_in_the_schema():
    made = define("test_write", write, lambda pool, *_: torch.empty_like(pool), writes=["pool", "more"])
    schema = "(Tensor(a!) pool, Tensor(b!)? more, int value, str? backend) -> Tensor"
    assert str(made._schema).endswith(schema)
    pool = torch.zeros(2)
    assert made(pool, None, 3, None).tolist() == [3, 3]
    assert pool.tolist() == [3, 3]
    assert pool._version == 1
