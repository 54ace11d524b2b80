"""An object in a process of its own, so that a crash, a hang or output there does no harm here."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Refused(Exception):
    """The object raised an error. Its process is still alive."""


class Lost(Exception):
    """The process died or did not answer in time."""


class _Answer(NamedTuple):
    value: Any = None
    error: str | None = None


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
        try:
            self.connection.send((method, arguments))
            if not self.connection.poll(self.timeout_s):
                self.stop(wait_s=0)
                raise Lost(f"no answer within {self.timeout_s:g} s")
            answer: _Answer = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            last = _last_line(Path(self.folder.name) / "log")
            self.stop()
            raise Lost(f"its process died: {last}") from error
        if answer.error is not None:
            raise Refused(answer.error)
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
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
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
            connection.send(_Answer(error=first_line(error)))
            if torch.cuda.is_initialized() and _context_is_lost():
                os._exit(1)


def _context_is_lost() -> bool:
    """Whether the CUDA context is lost, as after an illegal address. Every later call would fail too."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:200] if lines else "it printed nothing"
