"""Whether results stay the same, bit for bit, while several processes share a GPU.

The GPU may be taken from a process in the middle of a kernel. That happens only while the GPU is busy for longer than a
time slice, so each process queues long work between its calls, and waits for results only once a round.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from flash_delta.testing import Isolated, Lost, Refused, Workload
from flash_delta.testing.calls import names_of_leaves, prepare, timed
from flash_delta.testing.judging import Answer
from flash_delta.testing.matrix import Cell
from flash_delta.testing.workload import make_tensors

NAME = "shared"
TIMEOUT_S = 1800.0  # for all rounds of all processes
PRODUCTS = (1, 4, 8)  # between two calls, in turns; on an H200 the last takes some 20 ms


def _row(kind: str, member: str, H: int, HV: int, lengths: tuple[int, ...], K: int = 128, **options) -> Workload:
    return Workload(NAME, kind, member, H, HV, len(lengths), max(lengths), lengths=lengths, K=K, V=K, **options)


MIXED = (8192, 1, 1024, 16, 300, 1, 2048)
ROWS = (
    _row("training", "gdn", 4, 4, (32768,)),  # in segments
    _row("training", "gdn", 16, 32, (1024,) * 8, l2norm=True, raw=True),
    _row("prefill", "gdn", 16, 32, MIXED, l2norm=True),
    _row("prefill", "kda", 32, 32, MIXED, l2norm=True, raw=True),
    _row("training", "kda", 16, 16, (8192,), l2norm=True, gates="unbounded", raw=True),
    _row("training", "kda", 16, 16, (1024,) * 8, l2norm=True, raw=True),
    _row("training", "gdn", 4, 4, (16384,), K=64),
    _row("training", "gdn", 16, 32, (1024,) * 8, K=64, l2norm=True),
    _row("prefill", "gdn", 16, 32, MIXED, K=64, l2norm=True),
    _row("decode", "gdn", 16, 32, (4,) * 64, l2norm=True, raw=True),
    _row("decode", "kda", 32, 32, (4,) * 64, l2norm=True, raw=True),
)


class Sharer:
    """One of the processes: a call of each row, and its results while no other process worked."""

    def __init__(self, device: torch.device, rows: tuple[Workload, ...] = ROWS, size: int = 4096):
        self.device, self.rows = device, rows
        self.factor = torch.randn(size, size, dtype=torch.float64, device=device) / size**0.5

    def work_alone(self) -> None:
        self.calls = {f"{row.member} {row.kind} {row.name}": self._call(row) for row in self.rows}
        self.alone = {name: call() for name, call in self.calls.items()}

    def work_beside(self, rounds: int) -> list[Cell]:
        """Calls every row in each round. Every output and gradient is compared with that of the call alone."""
        wrong: Counter[tuple[str, str]] = Counter()
        for number in range(rounds):
            names, differ = [], []
            for turn, (name, call) in enumerate(self.calls.items()):
                self._wait_long(PRODUCTS[(number + turn) % len(PRODUCTS)])
                for tensor, value in call().items():
                    names.append((name, tensor))
                    differ.append((_bits(value) != _bits(self.alone[name][tensor])).any())
            self._wait_long(PRODUCTS[-1])
            wrong.update(name for name, differs in zip(names, torch.stack(differ).tolist(), strict=True) if differs)
        return [
            Cell(row.member, row.dtype, NAME, f"{name}: {tensor}", wrong[name, tensor], 0)
            for row, (name, tensors) in zip(self.rows, self.alone.items(), strict=True)
            for tensor in tensors
        ]

    def _call(self, row: Workload) -> Callable[[], dict[str, Tensor]]:
        x = make_tensors(row, self.device)
        call = prepare(row, x)
        run, gradients = timed(row, call, x), [f"d{name}" for name in names_of_leaves(call)]

        def results() -> dict[str, Tensor]:
            o, state, *others = run()
            # States of a pool stay where they are, so they are copied before the next call writes them.
            found = {"o": o.detach(), "final_state": state.detach().clone()}
            if row.kind in ("prefill", "decode"):
                state.fill_(torch.nan)
            return found | dict(zip(gradients, others, strict=False))

        return results

    def _wait_long(self, products: int) -> None:
        """Queues work for the GPU, and does not wait for it."""
        x = self.factor
        for _ in range(products):
            x = x @ self.factor


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def judge_shared(make_sharer: Callable[[], Sharer], processes: int, rounds: int) -> list[Answer]:
    """One answer for each process."""
    sharers = [Isolated(make_sharer, TIMEOUT_S) for _ in range(processes)]
    answers = [Answer(NAME, "bits", f"process {number + 1} of {processes}") for number in range(processes)]

    def ask(method: str, *arguments: int) -> Callable[[Isolated, Answer], None]:
        def asked(sharer: Isolated, answer: Answer) -> None:
            try:
                answer.cells = sharer.call(method, *arguments) or []
            except (Refused, Lost) as error:
                answer.failure = str(error)

        return asked

    try:
        for sharer, answer in zip(sharers, answers, strict=True):
            ask("work_alone")(sharer, answer)
        if all(answer.failure is None for answer in answers):
            with ThreadPoolExecutor(processes) as pool:
                list(pool.map(ask("work_beside", rounds), sharers, answers))
    finally:
        for sharer in sharers:
            sharer.stop()
    return answers
