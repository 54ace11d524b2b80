"""What a training step of an op, forward and backward, takes of the host: PyTorch's part, and that of this library.

    python examples/training_step.py --device cuda
    python examples/training_step.py --pretend      without a GPU: launches go to a driver that does nothing
    python examples/training_step.py --pretend --profile 20

Timed are a call of the op, and `torch.autograd.grad` of its output. Within that, autograd starts our backward pass, on
a GPU in a thread of its own: it is timed where it runs, too. Beside it stands a step of a Function that takes and
returns as many tensors and does nothing. So much is PyTorch's, threads and all. With ``--one-thread`` backward passes
run in the thread that asks for them (`torch.autograd.set_multithreading_enabled`). With ``--new-lengths`` no call has
been there before: each has a length of its own.

With ``--pretend`` tensors say that they are on a GPU and lie on the CPU (flash_delta/compiler/pretended_gpu.py).
Checks, keys and what is handed to the driver are real. A driver's launches, and what PyTorch's allocator and its
threads take more on a GPU, come on top.
"""

import cProfile
import ctypes
import pstats
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flash_delta.cli.environment import require_device
from flash_delta.ops import _function
from flash_delta.testing import Workload

WARM, AT_A_TIME = 20, 8  # steps before the clock runs; steps between two waits for a GPU, so that no queue is full
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
ROWS = tuple(
    Workload("host", "training", member, H, HV, N, 8192 // N, packed=N > 1, states=False)
    for member, H, HV, N in (("gdn", 16, 32, 1), ("gdn", 4, 8, 1), ("gdn", 16, 32, 8), ("kda", 32, 32, 1))
)


class Step(NamedTuple):
    """A forward pass, and the backward pass of what it returned."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], Any]
    tensors: list[Tensor]  # whose gradients that gives


class Times(NamedTuple):
    """Times of the host, in us."""

    forward: float
    backward: float
    inside: float  # of the backward pass: in our code


def make_step(w: Workload, device: torch.device, shorter: int = 0) -> Step:
    """Makes a step on the row ``w``, with so many tokens less. Values do not matter."""
    T = w.tokens - shorter
    channels = (w.HV, w.K) if w.gate == "channel" else (w.HV,)

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(1, T, *shape, dtype=dtype, device=device, requires_grad=True)

    wanted = [zeros(w.H, w.K), zeros(w.H, w.K), zeros(w.HV, w.V)]
    wanted += [zeros(*channels, dtype=torch.float32), zeros(w.HV, dtype=torch.float32)]
    do = torch.zeros(1, T, w.HV, w.V, dtype=torch.bfloat16, device=device)
    bounds, op = [w.T * n for n in range(w.N)] + [T], w.op.op
    packed = {"cu_seqlens": torch.tensor(bounds, device=device), "cu_seqlens_cpu": bounds} if w.packed else {}
    return Step(lambda: op(*wanted, **packed)[0], lambda o: torch.autograd.grad(o, wanted, do), wanted)


class Nothing(torch.autograd.Function):
    """Takes and returns as many tensors as `DeltaRule`."""

    @staticmethod
    def forward(ctx, problem: None, known: None, *tensors: Tensor | None):
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return torch.empty_like(tensors[2]), None, None

    @staticmethod
    def backward(ctx, do: Tensor, *_: Any):
        return None, None, *(torch.empty_like(t) for t in ctx.saved_tensors)


@contextmanager
def inside(found: list[float]) -> Iterator[None]:
    """Adds up what our backward passes take, in whichever thread they run."""
    backward = _function.DeltaRule.backward

    def timed(*given: Any) -> Any:
        start = time.perf_counter()
        result = backward(*given)
        found.append(1e6 * (time.perf_counter() - start))
        return result

    with patch.object(_function.DeltaRule, "backward", staticmethod(timed)):
        yield


def empty_step(w: Workload, device: torch.device) -> Step:
    """A step of `Nothing` on the tensors of a row."""
    plain = make_step(w, device)
    return Step(lambda: Nothing.apply(None, None, *plain.tensors)[0], plain.backward, plain.tensors)


def measure(steps: Iterable[Step], device: torch.device) -> Times:
    """Medians of all steps but the first ones."""
    forward, backward, within = [], [], []
    with inside(within):
        for number, step in enumerate(steps):
            if number % AT_A_TIME == 0 and device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            o = step.forward()
            between = time.perf_counter()
            gradients = step.backward(o)
            end = time.perf_counter()
            del o, gradients
            forward.append(1e6 * (between - start))
            backward.append(1e6 * (end - between))
    return Times(*(median(us[WARM:] or [0.0]) for us in (forward, backward, within)))


def steps_of(w: Workload, device: torch.device, number: int, new: bool) -> Iterator[Step]:
    """Every one of ``number`` steps, and some before; of ``new`` lengths."""
    same = make_step(w, device)
    for count in range(WARM + number):
        yield make_step(w, device, count) if new else same


@contextmanager
def pretended() -> Iterator[None]:
    from flash_delta.compiler.pretended_gpu import pretended_gpu

    libc = ctypes.CDLL(None)  # a GPU's allocator keeps what it has: so shall the CPU's, and ask the system for nothing
    libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, -1)
    with TemporaryDirectory() as place, pretended_gpu(Path(place)):
        yield


def told(found: Times) -> list[str]:
    return [f"{us:.1f}" for us in (*found, found.forward + found.backward)]


def main(
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
    pretend: Annotated[bool, typer.Option("--pretend", help="Time launches on a CPU, without a GPU.")] = False,
    steps: Annotated[int, typer.Option(help="Steps that are timed; the median counts.")] = 1000,
    new_lengths: Annotated[bool, typer.Option("--new-lengths", help="Every step has another length.")] = False,
    one_thread: Annotated[bool, typer.Option("--one-thread", help="Backward passes in the thread that asks.")] = False,
    profile: Annotated[int, typer.Option(help="Print so many functions of each row, by their own time.")] = 0,
) -> None:
    """Split the host time of a training step of the ops into PyTorch's part and ours."""
    where, console = require_device("cpu" if pretend else device), Console()
    console.width = max(console.width, 100)
    table = Table("us of the host", *("forward", "backward", "of it ours", "step"))
    multithreaded = torch.autograd.set_multithreading_enabled(not one_thread)
    with pretended() if pretend else ExitStack(), multithreaded:
        nothing = measure([empty_step(ROWS[0], where)] * (WARM + steps), where)
        table.add_row("a Function that does nothing", *told(nothing))
        for w in ROWS:
            found = measure(steps_of(w, where, steps, new_lengths), where)
            table.add_row(f"{w.op.name} {w.name}", *told(found))
            if profile:
                with cProfile.Profile() as calls:
                    measure(steps_of(w, where, steps, new_lengths), where)
                pstats.Stats(calls).strip_dirs().sort_stats("tottime").print_stats(profile)
        console.print(table)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
