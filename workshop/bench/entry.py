"""What a contestant's process does: first call, accuracy, samples, costs."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from flash_delta.testing import (
    Workload,
    first_line,
    judge,
    make_tensors,
    output_gradient,
    output_like,
    relative_error,
    without_padding,
)
from flash_delta.testing.calls import names_of_leaves, timed
from workshop.bench import contestants, timing
from workshop.bench.contestants.call import OWN_GRAPHS
from workshop.bench.floor import floor
from workshop.check.elementwise import judge_elementwise, make_elementwise
from workshop.check.layer import judge_layer, make_layer

ROUND_S = 0.5  # at most, for one round of samples
SAMPLES = 12  # in a round, if they fit into its time
LENGTHS = 1000  # random ones
LENGTHS_S = 20.0  # then the remaining lengths are left out
STEPPED = 64  # without gradients, fla's layers run calls of up to so many tokens token by token
REPLAY_DIFFERS = (
    1e-3  # relative L2; a library need not repeat itself bitwise, but a graph must not replay stale numbers
)
WARM = 3  # calls of a compiled step before its time starts: PyTorch captures its graphs in the second one
STALL_MS = 50.0  # a call that takes the host so much longer than the median call was compiling or tuning


class Samples(NamedTuple):
    graph_ms: list[float]  # empty on a CPU, or if the call cannot be captured
    eager_ms: list[float]
    no_graph: str | None = None  # why the call cannot be captured
    host_us: float | None = None  # of a whole step: the median time until a call returns


class Costs(NamedTuple):
    host_us: float | None
    peak_mb: float | None  # on a GPU
    saved_mb: float | None  # for backward, with kind "training"
    copy_ms: float | None = None  # a copy of the bytes that the row must move, with kind "decode" on a GPU


class Lengths(NamedTuple):
    """The times of calls with random lengths (decoding: batch sizes) after the first call."""

    tried: int
    stalls: int  # calls that took the host STALL_MS longer than the median call
    stalled_s: float
    compilations: int | None  # by Triton, if it is installed


class Entry:
    """One contestant. Between ``prepare`` and ``drop`` it holds its call of one workload."""

    def __init__(self, contestant: str, device: torch.device):
        self.contestant, self.device = contestant, device

    def prepare(self, workload: Workload) -> tuple[float, dict[str, tuple[float, float]]]:
        """Seconds of the first call; every result's error, and the torch backend's with products in its dtype."""
        self.workload = workload
        self.x = make(workload, self.device)
        self.call = contestants.load(self.contestant).prepare(workload, self.x)
        self.run = timed(workload, self.call, self.x)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.no_graph: str | None = None
        first = self._first_call()
        if workload.form:
            for _ in range(WARM):
                o, *_ = self.run()
            self._compare(o)
        return first

    def drop(self) -> None:
        """Free all memory, because the other contestants need it."""
        if self.workload.form:
            torch.compiler.reset()  # what is compiled keeps its layers and graphs
        self.x = self.call = self.run = self.graph = self.first_o = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _first_call(self) -> tuple[float, dict[str, tuple[float, float]]]:
        kept: list[tuple[Tensor | None, ...]] = []
        seconds = timing.seconds(lambda: kept.append(self.run()), self.device)
        o, state, *gradients = kept[0]
        self.first_o = self.call.joined(o).detach().clone()
        results = {"o": without_padding(self.x, self.first_o.view(output_like(self.x).shape))}
        if self.workload.states:
            state = self.call.finished(state)
            results["final_state"] = (state.mT if self.call.state_v_first else state).detach()
        for name, d in zip(names_of_leaves(self.call), gradients, strict=False):  # no gradients unless training
            results[f"d{name}"] = d.reshape(self.x[name].shape)
        if self.workload.hidden:
            return seconds, judge_layer(self.workload, self.x, results, output_gradient(self.x))
        return seconds, (judge_elementwise if self.workload.around else judge)(self.workload, self.x, results)

    def _repeats(self) -> int:
        """Calls that fit a round."""
        return max(1, min(SAMPLES, int(ROUND_S / timing.seconds(self.run, self.device))))

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph, (o, *_) = timing.captured(self.run, self.device)
        graph.replay()
        self._compare(o)
        return graph

    def _compare(self, o: Tensor) -> None:
        """Refuses a replay whose o is not that of the first call."""
        o = self.call.joined(o)
        error = relative_error(o, self.first_o.view(o.shape))
        if self.workload.kind != "decode" and error > REPLAY_DIFFERS:  # decoding may have updated the state
            raise RuntimeError(f"a replay's o is {error:.1e} away from the first call's")

    def sample(self) -> Samples:
        """A round of samples. The first round also captures the graph."""
        on_gpu, form = self.device.type == "cuda", self.workload.form
        if on_gpu and form in ("", "called") and self.graph is None and self.no_graph is None:
            try:
                self.graph = self._captured()
            except Exception as error:  # a library's refusal is a result
                self.no_graph = first_line(error)
        repeats = self._repeats()
        host = median(timing.host_us(self.run, self.device, 1) for _ in range(repeats)) if form else None
        if not on_gpu:
            return Samples([], timing.milliseconds(self.run, self.device, repeats), self.no_graph, host)
        graph = timing.milliseconds(self.graph.replay, self.device, repeats) if self.graph else []
        eager = [timing.eager_ms(self.run, self.device, max(1, repeats // 3)) for _ in range(2)]
        return Samples(graph, eager, self.no_graph, host)

    def costs(self) -> Costs:
        w, saved = self.workload, None
        if w.kind == "training" and w.form not in OWN_GRAPHS:
            parameters = [t for name, t in self.call.inputs.items() if w.form and name != "hidden_states"]
            saved = timing.saved_bytes(self.call.run, parameters) / 1e6
        if self.device.type == "cpu":
            return Costs(None, None, saved)
        calls = self._repeats()
        host = min(timing.host_us(self.run, self.device, calls) for _ in range(3))
        copy = timing.copy_ms(floor(w).bytes, self.device) if w.kind == "decode" else None
        peak = None if w.form in OWN_GRAPHS else timing.peak_bytes(self.run, self.device) / 1e6
        return Costs(host, peak, saved, copy)

    def lengths(self) -> Lengths:
        """Calls with up to 16 sequences of random lengths, 8192 tokens at most (decoding: batch sizes up to 256)."""
        draw, host_ms = random.Random(0), []
        prepare, end = contestants.load(self.contestant).prepare, time.perf_counter() + LENGTHS_S
        with triton_compilations() as compiled:
            while len(host_ms) < LENGTHS and time.perf_counter() < end:
                workload = drawn(self.workload, draw)
                x = make(workload, self.device)
                run = timed(workload, prepare(workload, x), x)
                host_ms.append(timing.host_us(run, self.device, calls=1) / 1e3)
                x = run = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # frees the blocks of so many sizes, since the others need the memory
        stalls = [ms for ms in host_ms if ms > median(host_ms) + STALL_MS]
        return Lengths(len(host_ms), len(stalls), sum(stalls) / 1e3, compiled[0] if compiled else None)


def drawn(workload: Workload, draw: random.Random) -> Workload:
    """The workload with random lengths. With up to `STEPPED` tokens, fla's layers make another call than the one that
    was timed. So their lengths are greater."""
    decode = workload.kind == "decode"
    N = draw.randint(1, 256 if decode else 16)
    least = STEPPED // N + 1 if workload.of_fla else 1
    return replace(workload, N=N, T=1 if decode else draw.randint(least, 8192 // N), lengths=(), tree=False)


def make(workload: Workload, device: torch.device) -> dict[str, Tensor]:
    return (make_layer if workload.hidden else make_elementwise if workload.around else make_tensors)(workload, device)


@contextmanager
def triton_compilations() -> Iterator[list[int]]:
    """A list of one number that counts the kernels Triton compiles inside the block; empty without Triton."""
    try:
        from triton import knobs
    except ImportError:
        yield []
        return
    count = [0]

    def listen(*, cache_hit: bool, **_) -> None:
        count[0] += not cache_hit

    knobs.compilation.listener = listen
    try:
        yield count
    finally:
        knobs.compilation.listener = None
