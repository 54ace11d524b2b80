"""What the first call takes in a new process: from a pack of kernels, from Triton's cache on disk, and with nothing.

    flash-delta pack --model Qwen3-Next --tp 1 --target sm_90a --out build/packs
    python examples/first_call.py --kernels build/packs --processes 5

Each line is one kind of call, and one way to come by its kernels: "pack", "Triton's cache", in one process "pack, no C
compiler", and with ``--cold`` also "nothing". Medians of processes are printed. The calls are those of Qwen3-Next's
layers (16/32 heads of 128): a forward pass of 8,192 tokens, a training step of them, and serving: a prompt on a pool
and the token after it. PyTorch, its first work on the GPU and its first `torch.autograd.grad` come before the clock
runs. All results of a kind of call have to be the same bits.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

KINDS = "forward", "training", "serving"
H, HV, D, TOKENS = 16, 32, 128, 8192


def call(kind: str) -> list[Any]:
    """Runs a call, and returns its results."""
    import torch

    import flash_delta
    from flash_delta.ops.serving import Convolution

    if kind == "serving":
        n, width = 256, (2 * H + HV) * D
        mixed = torch.randn(1, n, width, dtype=torch.bfloat16)
        q, k, v = (t.unflatten(-1, (-1, D)) for t in mixed.split([H * D, H * D, HV * D], -1))
        g, beta = torch.randn(2, 1, n, HV, dtype=torch.bfloat16)
        rows, windows = torch.ones(1, dtype=torch.int32), torch.zeros(2, 3, width, dtype=torch.bfloat16)
        pool = torch.zeros(2, HV, D, D)
        given = {
            "state_pool": pool, "state_v_first": True, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": False, "A_log": torch.zeros(HV),
            "dt_bias": torch.zeros(HV), "read_indices": rows, "write_indices": rows, "null_slot": 0,
            "convolution": Convolution(windows.mT, torch.randn(width, 4, dtype=torch.bfloat16)),
        }  # fmt: skip
        bounds = torch.tensor([0, n], dtype=torch.int32)
        o = flash_delta.prefill_gated_delta_rule(
            q, k, v, g, beta, **given, cu_seqlens=bounds, max_prompts=1, has_initial_state=torch.zeros(1).bool()
        )
        last = (t[:, -1:] for t in (q, k, v, g, beta))
        return [o, flash_delta.decode_gated_delta_rule(*last, **given), pool, windows]
    trains = kind == "training"
    q, k = (torch.randn(1, TOKENS, H, D, dtype=torch.bfloat16, requires_grad=trains) for _ in "qk")
    v, do = (torch.randn(1, TOKENS, HV, D, dtype=torch.bfloat16, requires_grad=trains) for _ in "vo")
    g, beta = -torch.rand(1, TOKENS, HV), torch.rand(1, TOKENS, HV, dtype=torch.bfloat16)
    x = [q, k, v, g.requires_grad_(trains), beta.requires_grad_(trains)]
    o, _ = flash_delta.chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, allow_neg_eigval=False)
    return [o, *torch.autograd.grad(o, x, do.detach())] if trains else [o]


def child(kind: str) -> dict[str, Any]:
    """Measures in this process, which is new."""
    import torch

    torch.set_default_device("cuda")
    torch.manual_seed(0)
    x = torch.randn(8, 8, requires_grad=True)
    torch.autograd.grad(x * x, x, x)
    torch.cuda.synchronize()
    importing = timed_imports()
    importlib.import_module("flash_delta")
    compiled, times = note_compilations(), {}
    for name in ("first", "second"):
        torch.manual_seed(1)
        start = time.perf_counter() - sum(importing)
        results = call(kind)
        torch.cuda.synchronize()
        times[name] = time.perf_counter() - start - sum(importing)
    times["imports"] = sum(importing)
    digest = hashlib.sha256()
    for t in results:
        digest.update(t.detach().float().cpu().numpy().tobytes())
    return times | {"compiled": len(compiled), "bits": digest.hexdigest()[:12], "GPU": torch.cuda.get_device_name()}


def timed_imports() -> list[float]:
    """How long each import takes from now on that is asked for by name: those of this library, with Triton's."""
    import_module, seconds, inside = importlib.import_module, [], []

    def timed(*names: str) -> Any:
        inside.append(names)
        start = time.perf_counter()
        try:
            return import_module(*names)
        finally:
            inside.pop()
            if not inside:
                seconds.append(time.perf_counter() - start)

    importlib.import_module = timed
    return seconds


def note_compilations() -> list[str]:
    """The names of kernels that Triton makes or takes from its cache from now on."""
    from triton import knobs

    names: list[str] = []
    knobs.runtime.jit_cache_hook = lambda *, fn, **_: names.append(fn.name)
    return names


def main(
    kernels: Annotated[Path, typer.Option(help="A folder with a pack for this GPU.")],
    processes: Annotated[int, typer.Option(help="How many processes for each line.")] = 5,
    cold: Annotated[bool, typer.Option(help="Also with an empty cache of Triton.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file for the results, as JSON.")] = None,
    own: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    if own:
        print(json.dumps(child(own)))
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with TemporaryDirectory() as place:
        warm = {"FLASH_DELTA_KERNELS": "", "TRITON_CACHE_DIR": f"{place}/warm"}
        for n, kind in product(range(processes), KINDS):
            packed = {"FLASH_DELTA_KERNELS": str(kernels)}
            empty = {"TRITON_CACHE_DIR": f"{place}/{kind}{n}"}
            ways = {"pack": packed | empty, "Triton's cache": warm} | ({"nothing": warm | empty} if cold else {})
            if n == 0:
                run(kind, warm)  # fills Triton's cache
                ways |= {"pack, no C compiler": packed | empty | {"CC": "/bin/false"}}
            for way, settings in ways.items():
                found.setdefault(kind, {}).setdefault(way, []).append(run(kind, settings))
                if out is not None:  # after each process, for runs that are stopped
                    out.write_text(json.dumps(found, indent=1))
    show(found)
    if any(len({r["bits"] for rows in ways.values() for r in rows}) > 1 for ways in found.values()):
        raise typer.Exit(1)


def run(kind: str, settings: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--kernels", ".", "--own", kind]
    settings = settings | {"PYTHONDONTWRITEBYTECODE": ""}  # a package that pip installed has bytecode
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}, {settings}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]) | {"said": done.stderr.strip()}


def show(found: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    table = Table(
        "call", "kernels from", "imports, s", "first call, s", "together, s", "second call, ms", "compiled", "bits"
    )
    for kind, ways in found.items():
        for way, rows in ways.items():
            imports, first, second = ([r[name] for r in rows] for name in ("imports", "first", "second"))
            both = [a + b for a, b in zip(imports, first, strict=True)]
            seconds = [f"{median(times):.3f}" for times in (imports, first, both)]
            compiled, bits = max(r["compiled"] for r in rows), sorted({r["bits"] for r in rows})
            table.add_row(kind, way, *seconds, f"{1e3 * median(second):.2f}", str(compiled), " ".join(bits))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
