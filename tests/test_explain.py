"""What `explain` says of launches is what a call launches, on a GPU that is none (pretended_gpu.py)."""

import shutil

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

CHUNKS = ["forward", "training", "packed", "empty"]
CASES = [
    *[(kind, backend, rule) for kind in CHUNKS for backend in ("hopper", "triton") for rule in ("gdn", "kda")],
    *[("prefill", backend, "gdn") for backend in ("hopper", "triton")],
    *[(kind, "hopper", "gdn") for kind in ("wide", "wide training", "padded")],
    ("decode", "triton", "gdn"),
    *[("recurrent", "triton", rule) for rule in ("gdn", "kda")],
]


def call_of(kind, rule):
    """An op, and arguments by name."""
    import torch
    from new_lengths import Calls

    import flash_delta

    if kind in ("prefill", "decode"):
        call = getattr(Calls(), kind)(300)
        return call.func, call.keywords
    T, width = {"packed": 4096, "empty": 0}.get(kind, 300), 100 if kind == "padded" else 128
    q, v = (torch.zeros(1, T, 2, columns, dtype=torch.bfloat16) for columns in (width, width * (1 + ("wide" in kind))))
    g = torch.zeros_like(q) if rule == "kda" else q[..., 0].float()
    x = {"q": q.requires_grad_("training" in kind), "k": q.detach(), "v": v, "g": g, "beta": v[..., 0]}
    if kind == "packed":
        x["cu_seqlens"] = torch.tensor([0, 5, 3000, 4096], dtype=torch.int32)
    name = {"gdn": "gated_delta_rule", "kda": "kda"}[rule]
    return getattr(flash_delta, f"{'fused_recurrent' if kind == 'recurrent' else 'chunk'}_{name}"), x


def told_and_launched(kind, backend, rule, place):
    """What is said of each pass, and what they launch: the beginnings of lines, with kernel and grid."""
    from unittest.mock import patch

    import torch

    import flash_delta
    from flash_delta.compiler.pretended_gpu import pretended_gpu
    from flash_delta.kernels.runtime import cuda_driver, run
    from flash_delta.ops import _known_calls

    launched = []

    def bind(kernel, grid, values):
        launched.append(f"{kernel.name}, grid {' x '.join(map(str, grid))}, ")
        return cuda_driver.BoundStep(kernel, grid, values)

    _known_calls.calls.clear()
    with pretended_gpu(place), patch.object(run, "BoundStep", bind):
        op, x = call_of(kind, rule)
        told = flash_delta.explain(op, **x, backend=backend, launches=True)
        o = op(**x, backend=backend)
        if "training" in kind:
            torch.autograd.grad(o[0], x["q"], torch.ones_like(o[0]))
    return told.launches, launched, str(told)


@pytest.mark.parametrize(("kind", "backend", "rule"), CASES)
def test_what_is_told_is_launched(process, place, kind, backend, rule):
    told, launched, text = process.submit(told_and_launched, kind, backend, rule, place).result()
    lines = "\n".join(told.values()).splitlines()
    assert len(lines) == len(launched)
    assert all(line.startswith(start) for line, start in zip(lines, launched, strict=True))
    assert all(f"\n  {line}\n" in f"{text}\n" for line in lines)
    assert bool(launched) == ((kind, backend) != ("empty", "hopper"))
    assert list(told) == ["forward", "backward"] if "training" in kind else len(told) <= 1
