"""What a decoding step of a transformers layer takes of the host: transformers' own part, and that of this library.

    python examples/decoding_step.py --device cuda
    python examples/decoding_step.py --pretend      without a GPU: launches go to a driver that does nothing
    python examples/decoding_step.py --pretend --profile 20

One token for each of a few rows goes through a Gated DeltaNet layer as of Qwen3-Next, eagerly and with a cache. Host
time hardly depends on a layer's width, so the layer is narrow. Timed are all of a step, and every call that `enable()`
sends to this library; what is left is transformers' Python, PyTorch's operators, and the copy of the state into the
cache. On a GPU nothing waits for the device while the clock runs. On a CPU all the arithmetic is in these times, too.

With ``--pretend`` tensors say that they are on a GPU and lie on the CPU (flash_delta/compiler/pretended_gpu.py).
Checks, keys and what is handed to the driver are real, as are PyTorch's operators for the CPU. A driver's launches, and
what PyTorch's operators take more on a GPU, come on top.
"""

import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.utils import logging

from flash_delta.cli.environment import require_device
from flash_delta.integrations.transformers import enable

WARM, AT_A_TIME = 50, 16  # steps before the clock runs; steps between two waits for a GPU, so that no queue is full
Step = Callable[[], Tensor]


def make_step(rows: int, device: torch.device) -> Step:
    """A layer with a cache that has seen a prompt, and one more token."""
    torch.manual_seed(0)
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    widths = {"hidden_size": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    types = ["linear_attention", "full_attention"]  # of which only the first is made
    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=types, **heads, **widths)
    layer = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0).to(device, torch.bfloat16).eval()
    cache, x = DynamicCache(config=config), torch.randn(rows, 9, 32, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        layer(x[:, :8], cache)
    return torch.no_grad()(lambda: layer(x[:, 8:], cache))


def watching(report: enable, watch: Callable[[str, Callable], Callable]) -> ExitStack:
    """While it is open, what `enable()` put into the layer's module is ``watch(name, function)`` instead."""
    stack = ExitStack()
    for entry in report.replaced:
        owner = getattr(entry.owner, "__module__", entry.owner.__name__)
        if owner == modeling_qwen3_next.__name__ and not hasattr(entry.new, "without_documents"):  # a whole model's
            name = entry.name if entry.owner is modeling_qwen3_next else "gated norm"
            stack.enter_context(patch.object(entry.owner, entry.name, watch(name, entry.new)))
    return stack


def microseconds(step: Step, steps: int, device: torch.device) -> float:
    """Median host time."""
    found = []
    for number in range(WARM + steps):
        if number % AT_A_TIME == 0 and device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        found.append(1e6 * (time.perf_counter() - start))
    return median(found[WARM:])


def parts(step: Step, report: enable, steps: int, device: torch.device) -> dict[str, float]:
    """Median host time of every call of ours in a step, by the name that transformers calls it by."""
    found: dict[str, list[float]] = {}

    def timed(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            found.setdefault(name, []).append(1e6 * (time.perf_counter() - start))
            return result

        return call

    with watching(report, timed):
        microseconds(step, steps, device)
    return {name: median(times[WARM:]) for name, times in found.items()}


@contextmanager
def pretended() -> Iterator[None]:
    from flash_delta.compiler.pretended_gpu import pretended_gpu

    with TemporaryDirectory() as place, pretended_gpu(Path(place)):
        yield


def main(
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    pretend: Annotated[bool, typer.Option("--pretend", help="Time launches on a CPU, without a GPU.")] = False,
    rows: Annotated[int, typer.Option(help="Rows that are decoded.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps that are timed; the median counts.")] = 2000,
    profile: Annotated[int, typer.Option(help="Print so many functions, by their own time.")] = 0,
) -> None:
    """Split the host time of a decoding step of a transformers layer into transformers' part and ours."""
    logging.set_verbosity_error()
    where = require_device("cpu" if pretend else device)
    step, table = make_step(rows, where), Table("host time of a step", Column("us", justify="right"))
    if not pretend:
        table.add_row("without enable()", f"{microseconds(step, steps, where):.1f}")
    with enable() as report, pretended() if pretend else ExitStack():
        total, ours = microseconds(step, steps, where), parts(step, report, steps, where)
        for name, us in (ours | {"ours": sum(ours.values())}).items():
            table.add_row(name if name == "ours" else f"  {name}", f"{us:.1f}")
        table.add_row("transformers' own", f"{total - sum(ours.values()):.1f}")
        table.add_row("with enable()", f"{total:.1f}")
        Console().print(table)
        if profile:
            with cProfile.Profile() as found:
                microseconds(step, steps, where)
            pstats.Stats(found).strip_dirs().sort_stats("tottime").print_stats(profile)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
