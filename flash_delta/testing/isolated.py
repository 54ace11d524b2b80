"""An object in a process of its own, so that a crash, a hang or output there does no harm here."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

LOG_LINES = 40  # a traceback, and what a compiler says above it


class Failed(Exception):
    """A call that gave no answer. ``log`` has the last lines that the process printed during the call."""

    def __init__(self, reason: str, log: str = ""):
        super().__init__(reason)
        self.log = log


class Refused(Failed):
    """The object raised an error. Its process lives on, unless the error has made a GPU useless to it."""


class Lost(Failed):
    """The process died or did not answer in time."""


class _Answer(NamedTuple):
    value: Any = None
    error: str | None = None
    ends: bool = False  # whether the error ends the process, too


class Isolated:
    """Calls methods of an object. The first call starts a new process, where ``make()`` makes the object; so does the
    first call after a crash.

    ``caches``: environment variables that are set to empty folders in the process. The folders are removed when it
    stops. ``threads``: how many threads it uses on the CPU. None: torch's default, which assumes that no other process
    computes.
    """

    def __init__(
        self, make: Callable[[], object], timeout_s: float, caches: tuple[str, ...] = (), threads: int | None = None
    ):
        self.make, self.timeout_s, self.caches, self.threads = make, timeout_s, caches, threads
        self.process: multiprocessing.process.BaseProcess | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """The method's answer; raises Refused or Lost."""
        if self.process is None:
            self._start()
        log = Path(self.folder.name) / "log"
        before = log.stat().st_size
        try:
            self.connection.send((method, arguments))
            if not self.connection.poll(self.timeout_s):
                printed = _last_lines(log, before)
                self.stop(wait_s=0)
                raise Lost(f"no answer within {self.timeout_s:g} s", printed)
            answer: _Answer = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            printed = _last_lines(log, before)
            self.stop()
            last = printed.splitlines()[-1][:200] if printed else "it printed nothing"
            raise Lost(f"its process died: {last}", printed) from error
        if answer.error is not None:
            printed = _last_lines(log, before)
            if answer.ends:  # so the next call starts another process, and is not lost with this one
                self.stop()
            raise Refused(answer.error, printed)
        return answer.value

    def stop(self, wait_s: float = 10.0) -> None:
        """End the process. It has ``wait_s`` seconds to end by itself."""
        if self.process is not None:
            self.connection.close()  # the process then ends by itself
            self.process.join(wait_s)
            self.process.kill()
            self.process.join()
            self.folder.cleanup()
            self.process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self.connection, theirs = context.Pipe()
        self.folder = tempfile.TemporaryDirectory(prefix="flash-delta-", ignore_cleanup_errors=True)
        (Path(self.folder.name) / "log").touch()
        arguments = (theirs, self.make, self.caches, self.threads, Path(self.folder.name))
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()


def first_line(error: Exception) -> str:
    """The error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _serve(
    connection: Connection, make: Callable[[], object], caches: tuple[str, ...], threads: int | None, folder: Path
) -> None:
    log = os.open(folder / "log", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for variable in caches:
        os.environ[variable] = str(folder / variable.lower())
    if threads is not None:
        torch.set_num_threads(threads)
    served = make()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_Answer(getattr(served, method)(*arguments)))
        except Exception as error:
            traceback.print_exc()
            ends = torch.cuda.is_initialized() and _context_is_lost()
            connection.send(_Answer(error=first_line(error), ends=ends))
            if ends:
                os._exit(1)


def _context_is_lost() -> bool:
    """Whether the CUDA context is lost, as after an illegal address. Every later call would fail too."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _last_lines(log: Path, start: int) -> str:
    """The last lines of the file after its first ``start`` bytes."""
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-LOG_LINES:])
