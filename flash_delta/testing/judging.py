"""Runs the cases of `flash-delta check`, several at a time, and reads and writes their answers."""

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from flash_delta.testing import Isolated, Lost, Refused, first_line
from flash_delta.testing.machine import machine
from flash_delta.testing.matrix import Cell, Judge

PEERS_DTYPES = ("float32", "bfloat16")
TIMEOUT_S = 120.0  # for one case, with its compilations
LONG_TIMEOUT_S = 600.0  # for peers, which may tune for minutes, and for cases of full size

Job = tuple[str, tuple[Any, ...]]  # a method of the judge and its arguments
Peers = Mapping[str, Callable[[torch.device], Any]]  # what makes an object with a method `case` that gives a PeerAnswer


class PeerAnswer(NamedTuple):
    """A peer's errors by tensor. If errors are missing, or those of gradients, it says why."""

    errors: dict[str, float]
    reason: str | None = None


@dataclass
class Answer:
    """The result of one case of one op in one dtype."""

    op: str
    dtype: str
    case: str
    cells: list[Cell] = field(default_factory=list)
    failure: str | None = None  # why there are no cells: the case raised an error, crashed or hung
    peers: dict[str, PeerAnswer] = field(default_factory=dict)
    log: str = ""  # beside a failure: the end of what was printed, with the error's traceback

    @property
    def names(self) -> tuple[str, str, str]:
        return self.op, self.dtype, self.case

    @property
    def right(self) -> bool:
        return self.failure is None and all(cell.right for cell in self.cells)

    @cached_property
    def line(self) -> str:
        """What `write` writes. It writes a file anew after each case, so it asks often."""
        line = {"op": self.op, "dtype": self.dtype, "case": self.case}
        if self.failure is not None:
            line |= {"failure": self.failure, "log": self.log}
        line["errors"] = {c.tensor: [_rounded(c.error), _rounded(c.allowed), _rounded(c.reference)] for c in self.cells}
        peers = {
            name: {"errors": {t: _rounded(e) for t, e in peer.errors.items()}, "reason": peer.reason}
            for name, peer in self.peers.items()
        }
        return json.dumps(line | ({"peers": peers} if peers else {}))


def _rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.3g}")


def names_of(job: Job) -> tuple[str, str, str]:
    """Op, dtype and case."""
    method, arguments = job
    if method == "stress":
        (stress,) = arguments
        return stress.workload.member, stress.workload.dtype, stress.name
    op, case, dtype = arguments
    return op, dtype, case.name


class Worker:
    """Runs one job after the other. Jobs on a GPU and jobs of peers run in separate processes."""

    def __init__(
        self, device: torch.device, backend: str | None, peers: Peers, timeout_s: float, threads: int | None = None
    ):
        self.judge, self.isolated = Judge(device, backend), None
        if device.type == "cuda":
            self.isolated = Isolated(partial(Judge, device, backend), timeout_s, threads=threads)
        self.peers = {
            name: Isolated(partial(make, device), LONG_TIMEOUT_S, threads=threads) for name, make in peers.items()
        }

    def answer(self, job: Job) -> Answer:
        method, arguments = job
        answer = Answer(*names_of(job))
        try:
            if self.isolated is not None:
                answer.cells = self.isolated.call(method, *arguments)
            else:
                answer.cells = getattr(self.judge, method)(*arguments)
        except (Refused, Lost) as error:
            answer.failure, answer.log = str(error), error.log
        except RuntimeError as error:  # from a job in this process
            answer.failure, answer.log = first_line(error), traceback.format_exc().strip()
        for name, peer in self.peers.items() if method == "case" and answer.dtype in PEERS_DTYPES else ():
            try:
                answer.peers[name] = peer.call("case", *arguments)
            except (Refused, Lost) as error:
                answer.peers[name] = PeerAnswer({}, str(error))
        return answer

    def stop(self) -> None:
        for process in [*self.peers.values(), *([self.isolated] if self.isolated else [])]:
            process.stop()


def judge(jobs: list[Job], device: torch.device, backend: str | None, peers: Peers, processes: int) -> Iterator[Answer]:
    """Yields the answers as they come. Cases that fill a GPU's memory run last, one at a time."""
    count = processes if device.type == "cuda" else 1
    # The reference runs on the CPU. Threads that wait for each other occupy cores that other processes need. With as
    # many threads as cores in each of six processes, a case took more than two minutes. Alone it takes seconds.
    threads = max(1, torch.get_num_threads() // count)
    workers = [Worker(device, backend, peers, TIMEOUT_S, threads) for _ in range(count)]
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def answer(job: Job) -> Answer:
        worker = free.get()
        try:
            return worker.answer(job)
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(count)
    try:
        for done in as_completed([pool.submit(answer, job) for job in jobs if job[0] == "case"]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.stop()
    alone = Worker(device, backend, {}, LONG_TIMEOUT_S)
    try:
        yield from (alone.answer(job) for job in jobs if job[0] == "stress")
    finally:
        alone.stop()


def write(path: Path, answers: list[Answer], device: torch.device) -> None:
    """One line per case: [error, allowed, torch backend's error] by tensor, and the peers' errors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join([a.line for a in answers])
    path.write_text(f'{{"machine": {json.dumps(machine(device))},\n "cases": [\n  {rows}\n]}}\n')


def read(path: Path | None, device: torch.device) -> list[Answer]:
    """The answers in a file that ``write`` made on such a machine, for cases where everything was right."""
    if path is None or not path.exists():
        raise ValueError(f"resume: expected --json with an existing file to continue, got {path}")
    written = json.loads(path.read_text())
    if written["machine"] != machine(device):
        raise ValueError(f"resume: expected results of this machine, {machine(device)}, got {written['machine']}")
    answers = []
    for line in written["cases"]:
        op, dtype, case = line["op"], line["dtype"], line["case"]
        cells = [Cell(op, dtype, case, tensor, *errors) for tensor, errors in line["errors"].items()]
        peers = {name: PeerAnswer(**answer) for name, answer in line.get("peers", {}).items()}
        answers.append(Answer(op, dtype, case, cells, line.get("failure"), peers))
    return [answer for answer in answers if answer.right]
