"""What kernels tell a profiler is what they do: the interpreter counts their products."""
# ruff: noqa: E402 (what is imported below needs Triton)

import os
from collections import defaultdict

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

import flash_delta
from workshop.check.interpreter import repair_interpreter

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="asks the interpreter")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def launches(monkeypatch):
    """By kernel: what it told, and the operations that it issued, of one launch after the other."""
    repair_interpreter()
    found, counts = defaultdict(list), [0]
    multiply, run = InterpreterBuilder.create_dot, InterpretedFunction.run

    def create_dot(self, a, b, *more):
        counts[0] += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return multiply(self, a, b, *more)

    def run_counted(self, *args, grid, warmup, **options):
        before = counts[0]
        given = dict(zip(self.arg_names, args, strict=False)) | options
        result = run(self, *args, grid=grid, warmup=warmup, **options)
        kernel = type("Metadata", (), {"name": self.fn.__name__})
        found[self.fn.__name__].append((self.launch_metadata(grid, kernel, given), counts[0] - before))
        return result

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpretedFunction, "run", run_counted)
    return found


def call(op, K, V, **more):
    """Forward and backward, two chunks; what is not asked for is no argument."""
    device = more.get("device", "cpu")
    x = {"q": (2, 64, 1, K), "k": (2, 64, 1, K), "v": (2, 64, 2, V)}
    x = {name: torch.randn(size).div(K**0.5).to(more.get("dtype", torch.bfloat16)) for name, size in x.items()}
    x |= {name: f(2, 64, 2) for name, f in more.items() if name in ("g", "beta")}
    if more.get("channel"):
        x["g"] = -torch.rand(2, 64, 2, K)
    if more.get("p"):
        x["p"] = torch.randn_like(x["k"])
    if op in (flash_delta.chunk_kda, flash_delta.chunk_comba):
        x |= {name: x[name].repeat_interleave(2, 2) for name in ("q", "k", "p") if name in x}
    x = {name: t.to(device).requires_grad_() for name, t in x.items()}
    o, _ = op(**x, backend=more.get("backend", "triton"), disable_recompute=more.get("kept", False))
    o.sum().backward()


def decay(*size):
    return -torch.rand(size)


MEMBERS = {
    "gdn": (flash_delta.chunk_gated_delta_rule, {"g": decay, "beta": torch.rand}),
    "kept": (flash_delta.chunk_gated_delta_rule, {"g": decay, "beta": torch.rand, "kept": True}),
    "kda": (flash_delta.chunk_kda, {"channel": True, "beta": torch.rand}),
    "kda float32": (flash_delta.chunk_kda, {"channel": True, "beta": torch.rand, "dtype": torch.float32}),
    "delta rule": (flash_delta.chunk_delta_rule, {"beta": torch.rand}),
    "comba": (flash_delta.chunk_comba, {"g": decay, "beta": torch.rand, "p": True}),
    "simple gla": (flash_delta.chunk_simple_gla, {"g": decay}),
}


@interpreted
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(("K", "V"), [(64, 128), (128, 64)])
def test_operations(launches, member, K, V):
    op, more = MEMBERS[member]
    call(op, K, V, **more)
    assert len(launches) >= 4
    for name, found in launches.items():
        for told, issued in found:
            flops = told.get("flops16", 0) + told.get("flops32", 0)
            assert flops == issued, (name, told)


def decode(slots, device="cpu"):
    tokens = {name: torch.randn(2, 1, 2, 64, device=device, dtype=torch.bfloat16) for name in ("q", "k", "v")}
    tokens |= {"g": -torch.rand(2, 1, 2, device=device), "beta": torch.rand(2, 1, 2, device=device)}
    pool, rows = torch.zeros(slots, 2, 64, 64, device=device), torch.arange(2, device=device)
    more = {"read_indices": rows, "write_indices": rows, "state_v_first": True}
    flash_delta.decode_gated_delta_rule(**tokens, state_pool=pool, backend="triton", **more)


@interpreted
def test_a_pool_counts_as_the_states_of_the_call(launches):
    for slots in (2, 9):
        decode(slots)
    (few, _), (many, _) = launches["decode"]
    assert few["bytes"] == many["bytes"] > 2 * 2 * 2 * 64 * 64 * 4  # two rows of two heads, read and written
    assert few["flops16"] == 2 * 2 * 2 * 64 * 64 * 3


@on_gpu
def test_a_hook_is_told_of_known_calls_also():
    heard = []

    def listen(metadata):
        heard.append(metadata.get())

    def calls():
        call(flash_delta.chunk_gated_delta_rule, 128, 128, g=decay, beta=torch.rand, device="cuda", backend=None)
        decode(4, "cuda")

    calls()
    knobs.runtime.launch_enter_hook.add(listen)
    try:
        calls()
    finally:
        knobs.runtime.launch_enter_hook.remove(listen)
    ours = [told for told in heard if "bytes" in told]
    assert {"decode", "pairs"} <= {told["name"].split()[0] for told in ours}
    assert all(told["bytes"] > 0 for told in ours)
    before = len(heard)
    calls()
    assert len(heard) == before
