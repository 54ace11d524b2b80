"""Threads that compile take turns with a kernel's first code.

Triton makes it in Python, under the interpreter's lock. Side by side all threads make theirs at a fraction of the rate
and end late, all at the same time; LLVM and ptxas, which need no lock, wait for that. In turns the first kernel is with
LLVM while the second one's code is made. Meanwhile no garbage is collected: Python would look again and again at all
that Triton is just making, which takes an eighth of the time (docs/notes/2026-11-25-first-call.md).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from threading import RLock
from typing import Any

from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

_turn = RLock()


@cache
def take_turns() -> None:
    """From now on, in this process."""
    for source in (ASTSource, GluonASTSource):
        source.make_ir = _in_turn(source.make_ir)


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage in circles stays where it is, unless it did before."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _in_turn(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def waits(*given: Any) -> Any:
        with _turn, no_collection():
            return make(*given)

    return waits
