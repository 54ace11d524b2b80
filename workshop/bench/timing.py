"""How long a call takes, what it costs the host, and what memory it needs."""

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

Run = Callable[[], Any]

FLUSH_BYTES = 256 * 2**20  # several times the largest L2 cache


class Spread(NamedTuple):
    """Median, 10th and 90th percentile of the samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> "Spread":
        ordered = sorted(samples)
        last = len(ordered) - 1
        return cls(median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


def milliseconds(run: Run, device: torch.device, repeats: int) -> list[float]:
    """The time of each single call. On a GPU, events measure it with a cold L2 cache, so the host's time stays hidden.

    The cache is filled by reads. Written lines would have to leave the cache during the timed call.
    """
    if device.type == "cpu":
        return [1e3 * seconds(run, device) for _ in range(repeats)]
    flush = torch.zeros(FLUSH_BYTES // 4, device=device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        flush.sum()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairs]


def copy_ms(moved: int, device: torch.device, repeats: int = 30) -> float:
    """The time of a copy that reads and writes so many bytes together, measured as calls are: as a CUDA graph."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    graph, _ = captured(lambda: target.copy_(source), device)
    return median(milliseconds(graph.replay, device, repeats))


def seconds(run: Run, device: torch.device) -> float:
    """The time of one call by the host's clock, until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def eager_ms(run: Run, device: torch.device, calls: int) -> float:
    """The time per call of several calls in a row, as a loop in Python sees it, with the overhead of launches."""

    def several() -> None:
        for _ in range(calls):
            run()

    return 1e3 * seconds(several, device) / calls


def host_us(run: Run, device: torch.device, calls: int) -> float:
    """Microseconds until a call returns, while the GPU still works. With few calls the GPU's queue never fills."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    synchronize(device)
    return 1e6 * elapsed / calls


def captured(run: Run, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """``run`` as a CUDA graph, and the tensors that a replay writes. Call ``run`` before, as compiling cannot be
    captured."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs


def peak_bytes(run: Run, device: torch.device) -> int:
    """The most memory that torch allocates during a call in addition to what it had before, with the outputs."""
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def saved_bytes(forward: Run, parameters: Iterable[Tensor] = ()) -> int:
    """The bytes that autograd keeps for the backward pass. Each storage counts once, and inputs count too, but not
    these parameters."""
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        outputs = forward()  # alive while counted, so that no address is used twice
    del outputs
    for t in parameters:
        kept.pop(t.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
