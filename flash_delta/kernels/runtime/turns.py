"""Makes compiling threads take turns at generating a kernel's first code.

Triton generates this code in Python, under the interpreter's lock. If all threads did so at once, each would be slow
and all would end late, and LLVM and ptxas, which need no lock, would wait. With turns, LLVM compiles the first kernel
while Python generates the second one's code. During this time no garbage is collected. Otherwise Python would visit all
new objects of Triton again and again, which takes an eighth of the time (docs/notes/2026-11-25-first-call.md).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock
from typing import Any

from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

_turn = RLock()


@contextmanager
def taking_turns() -> Iterator[None]:
    """A context in which threads take turns. Only one may be entered at a time. Afterwards Triton is as it was, unless
    other code has changed it meanwhile."""
    before = {source: source.make_ir for source in (ASTSource, GluonASTSource)}
    ours = {source: _in_turn(make) for source, make in before.items()}
    for source, make in ours.items():
        source.make_ir = make
    try:
        yield
    finally:
        for source, make in before.items():
            if source.make_ir is ours[source]:
                source.make_ir = make


@contextmanager
def no_collection() -> Iterator[None]:
    """A context without garbage collection. Afterwards it is on again, if it was on before."""
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
