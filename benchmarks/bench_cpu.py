"""Ours beside the PyTorch fallback of Hugging Face transformers (its Qwen3-Next model), on the CPU, in one process.

    python benchmarks/bench_cpu.py [--json benchmarks/results/cpu/NAME.json]

B = 1, 4 key and 8 value heads, K = V = 128, norm in the op, final state returned. A round runs every contestant once,
so that a slow spell of the machine hits all of them; a figure is the median over the rounds. A case whose result is
wrong prints no time. The decode step is one token on a given state. Prints tables in Markdown.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import __version__ as transformers_version
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

import flash_delta
from flash_delta.testing import assert_accurate, relative_error

H, HV, K, V = 4, 8, 128, 128
LENGTHS = (512, 2048, 8192)
DTYPES = (torch.float32, torch.bfloat16)
OPTIONS = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}

Contestants = dict[str, Callable[[], None]]


def make_tensors(T: int, dtype: torch.dtype) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, T, heads, width, generator=gen).to(dtype) for heads, width in ((H, K), (H, K), (HV, V))]
    g = -torch.rand(1, T, HV, generator=gen) / 10
    beta = torch.rand(1, T, HV, generator=gen).to(dtype)
    return [t.requires_grad_() for t in (*qkv, g, beta)]


def check(T: int, dtype: torch.dtype) -> dict[str, float]:
    """Both against float64 (ours, whose float64 path the tests hold against the recurrence); ours must be right."""
    x = make_tensors(T, dtype)
    exact, _ = flash_delta.chunk_gated_delta_rule(*(t.double() for t in x), **OPTIONS)
    ours, _ = flash_delta.chunk_gated_delta_rule(*x, **OPTIONS)
    fallback, _ = theirs.torch_chunk_gated_delta_rule(*x, **OPTIONS)
    assert_accurate("o", ours, exact, dtype)
    return {"ours": relative_error(ours, exact), "transformers": relative_error(fallback, exact)}


def forward(op: Callable, x: list[torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            op(*x, **OPTIONS)

    return call


def forward_backward(op: Callable, x: list[torch.Tensor], **options: bool) -> Callable[[], None]:
    do = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).to(x[2].dtype)

    def call() -> None:
        o, _ = op(*x, **OPTIONS, **options)
        torch.autograd.grad(o, x, do)

    return call


def decode(op: Callable, x: list[torch.Tensor]) -> Callable[[], None]:
    state = torch.zeros(1, HV, K, V)

    def call() -> None:
        with torch.no_grad():
            op(*x[:3], g=x[3], beta=x[4], initial_state=state, **OPTIONS)

    return call


def time_ms(contestants: Contestants, rounds: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds + 1):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            if i:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"median": statistics.median(t), "min": min(t)} for name, t in times.items()}


def cases(T: int, dtype: torch.dtype) -> dict[str, tuple[Contestants, int]]:
    """Per case its contestants and the number of rounds."""
    chunk, fallback = flash_delta.chunk_gated_delta_rule, theirs.torch_chunk_gated_delta_rule
    x = make_tensors(T, dtype)
    training = {
        "ours": forward_backward(chunk, x),
        "ours, disable_recompute": forward_backward(chunk, x, disable_recompute=True),
        "transformers": forward_backward(fallback, x),
    }
    return {
        f"forward T={T}": ({"ours": forward(chunk, x), "transformers": forward(fallback, x)}, max(10, 40960 // T)),
        f"forward+backward T={T}": (training, max(3, 10240 // T)),
    }


def decode_cases(dtype: torch.dtype) -> dict[str, tuple[Contestants, int]]:
    x = make_tensors(1, dtype)
    ours = decode(flash_delta.fused_recurrent_gated_delta_rule, x)
    return {"decode step": ({"ours": ours, "transformers": decode(theirs.torch_recurrent_gated_delta_rule, x)}, 500)}


def saved_mb(op: Callable, x: list[torch.Tensor], **options: bool) -> float:
    """Megabytes that autograd keeps from forward to backward, each storage once; the inputs among them."""
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        outputs = op(*x, **OPTIONS, **options)  # alive while counted, so that no address is used twice
    del outputs
    return sum(kept.values()) / 1e6


def memory_row(T: int, dtype: torch.dtype) -> dict:
    """What is saved for the backward pass, beside the inputs, A and one float32 state per chunk of 64."""
    x, ours = make_tensors(T, dtype), flash_delta.chunk_gated_delta_rule
    chunk_data = T // 64 * HV * (64 * 64 + K * V) * 4
    return {
        "T": T,
        "dtype": str(dtype).removeprefix("torch."),
        "ours": saved_mb(ours, x),
        "ours, disable_recompute": saved_mb(ours, x, disable_recompute=True),
        "transformers": saved_mb(theirs.torch_chunk_gated_delta_rule, x),
        "inputs": sum(t.nbytes for t in x) / 1e6,
        "inputs, A, one state per chunk": (sum(t.nbytes for t in x) + chunk_data) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    rows, memory, errors = [], [], {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        errors[name] = {T: check(T, dtype) for T in LENGTHS}
        memory += [memory_row(T, dtype) for T in LENGTHS]
        todo = decode_cases(dtype)
        for T in LENGTHS:
            todo |= cases(T, dtype)
        for case, (contestants, rounds) in todo.items():
            rows.append({"case": case, "dtype": name, "ms": time_ms(contestants, rounds)})
    print(speed_table(rows), memory_table(memory), sep="\n\n")
    if arguments.json:
        machine = {
            "cpu": platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers_version,
        }
        results = {"machine": machine, "relative_error_of_o": errors, "rows": rows, "saved_mb": memory}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def speed_table(rows: list[dict]) -> str:
    lines = ["| case | dtype | ours, ms | transformers, ms | faster |", "|---|---|---|---|---|"]
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ours, fallback = (row["ms"][name]["median"] for name in ("ours", "transformers"))
        ratios.setdefault(row["case"].split(" T=")[0], []).append(fallback / ours)
        lines.append(f"| {row['case']} | {row['dtype']} | {ours:.2f} | {fallback:.2f} | {fallback / ours:.2f}x |")
    for case, values in ratios.items():
        lines.append(f"| **{case}, geometric mean** | | | | **{statistics.geometric_mean(values):.2f}x** |")
    return "\n".join(lines)


def memory_table(rows: list[dict]) -> str:
    columns = [name for name in rows[0] if name not in ("T", "dtype")]
    lines = [f"| saved for backward, MB | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        lines.append(f"| T={row['T']} {row['dtype']} | {' | '.join(f'{row[name]:.1f}' for name in columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
