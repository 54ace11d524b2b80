"""The contestants take turns on every row of a group."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from functools import partial

import torch

from flash_delta.testing import Isolated, Lost, Refused, Workload, allowed
from workshop.bench import contestants
from workshop.bench.entry import Entry, Samples
from workshop.bench.floor import Ceilings, floor
from workshop.bench.results import Result
from workshop.bench.timing import Spread

PEERS_ALLOWED = 2e-2  # as in public tests of these ops: rounding is below it, a wrong function above
ROUNDS = 3  # of samples; contestants take turns, so a machine that slows down slows all of them
STEP_ROUNDS = 12  # of whole steps: the same host may be half as fast a minute later


class Worker(Isolated):
    """A contestant's process. Its compile caches are new and empty, or the user's existing ones."""

    def __init__(self, contestant: str, device: torch.device, timeout_s: float, keep_caches: bool = False):
        caches = () if keep_caches else contestants.load(contestant).CACHES
        super().__init__(partial(Entry, contestant, device), timeout_s, caches)
        self.contestant = contestant


def run_group(
    workloads: Sequence[Workload],
    names: Sequence[str],
    device: torch.device,
    ceilings: Ceilings | None,
    timeout_s: float,
    keep_caches: bool = False,
) -> Iterator[Result]:
    """Yields the result of every contestant on every row, as they finish. A failure is a result with a reason. With
    ``keep_caches`` kernels may be compiled already. So first calls get no time, and compilations are not counted."""
    workers = {name: Worker(name, device, timeout_s, keep_caches) for name in names}
    run = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        for number, workload in enumerate(workloads):
            floor_ms = ceilings and floor(workload).ms(ceilings)
            started = {name: _start(worker, workload, device) for name, worker in workers.items()}
            able = {name: result for name, result in started.items() if result.reason is None}
            _sample({workers[name]: result for name, result in able.items()}, STEP_ROUNDS if workload.form else ROUNDS)
            for name, result in started.items():
                if keep_caches:
                    result.cold, result.first_call_s = False, None
                if result.reason is None:
                    layer = workload.hidden and not workload.of_fla
                    varied = name not in contestants.AGAIN and not layer and not workload.form
                    with_lengths = number == 0 and device.type == "cuda" and varied and not keep_caches
                    _finish(workers[name], result, with_lengths)
                _drop(workers[name])
                result.floor_ms, result.run = floor_ms, run
                yield result
    finally:
        for worker in workers.values():
            worker.stop()


def _start(worker: Worker, workload: Workload, device: torch.device) -> Result:
    """First call and accuracy. A wrong result gets no time."""
    name = worker.contestant
    result = Result(workload, name)
    result.reason = contestants.load(name).unsupported(workload, device)
    if result.reason is not None:
        return result
    result.cold = worker.process is None
    try:
        result.first_call_s, errors = worker.call("prepare", workload)
    except (Refused, Lost) as error:
        result.reason = str(error)
        return result
    result.errors = {tensor: error for tensor, (error, _) in errors.items()}
    result.allowed = {tensor: _limit(name, workload, reference) for tensor, (_, reference) in errors.items()}
    wrong = [tensor for tensor, error in result.errors.items() if not error <= result.allowed[tensor]]
    if wrong:
        off = ", ".join(f"{t} is off by {result.errors[t]:.1e} ({result.allowed[t]:.1e} allowed)" for t in wrong)
        result.reason = f"wrong: {off}"
    return result


def _sample(entries: dict[Worker, Result], count: int) -> None:
    rounds: dict[str, list[Samples]] = {}
    for _ in range(count):
        for worker, result in entries.items():
            if result.reason is None:
                try:
                    rounds.setdefault(worker.contestant, []).append(worker.call("sample"))
                except (Refused, Lost) as error:
                    result.reason = str(error)
    for worker, result in entries.items():
        if result.reason is None:
            samples = rounds[worker.contestant]
            graph = [ms for one in samples for ms in one.graph_ms]
            result.graph_ms = Spread.of(graph) if graph else None
            result.eager_ms = Spread.of([ms for one in samples for ms in one.eager_ms])
            host = [one.host_us for one in samples if one.host_us is not None]
            result.host_us = Spread.of(host) if host else None
            if samples[-1].no_graph is not None:
                result.notes.append(f"no CUDA graph: {samples[-1].no_graph}")


def _finish(worker: Worker, result: Result, with_lengths: bool) -> None:
    """Measures what is measured once per row, or once per group."""
    for question in ("costs", "lengths") if with_lengths else ("costs",):
        try:
            setattr(result, question, worker.call(question))
        except (Refused, Lost) as error:
            result.notes.append(f"no {question}: {error}")
            if "OutOfMemoryError" in str(error):  # only the end of this process frees the memory that it holds
                worker.stop()


def _drop(worker: Worker) -> None:
    """Frees memory for the others. A process that cannot do so is ended."""
    if worker.process is not None:
        try:
            worker.call("drop")
        except (Refused, Lost):
            worker.stop()


def _limit(contestant: str, workload: Workload, reference_error: float) -> float:
    """The allowed error. Ours is that of the accuracy tests. Peers only have to compute the same function, and through
    several layers they are allowed no less than we are."""
    ours = allowed(reference_error, getattr(torch, workload.dtype))
    return ours if contestant in (contestants.OURS, *contestants.AGAIN) else max(PEERS_ALLOWED, ours)
