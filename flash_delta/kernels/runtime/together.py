"""Compiles kernels in parallel, so that a failure leaves nothing behind.

Triton's AsyncCompileMode does the same, but up to Triton 3.6 it stays active if a compilation fails, and later calls
find the failed kernel in Triton's cache. Here a kernel gets into the cache when it is complete.
"""

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from triton.runtime._async_compile import active_mode

MOST_THREADS = 16  # a call has fewer large kernels


class Together:
    """What Triton gives compilations to, while it is the active mode."""

    def __init__(self, threads: ThreadPoolExecutor):
        self.threads = threads
        self.compiling: dict[Hashable, Future] = {}
        self.finishing: list[tuple[Future, Callable[[Any], None]]] = []

    def submit(
        self, key: Hashable, compile_it: Callable[[], Any], finish: Callable[[Any], None], *_: Callable[..., None]
    ) -> None:
        """Returns no kernel, so Triton's cache has none until ``finish`` puts it there."""
        if key not in self.compiling:
            self.compiling[key] = self.threads.submit(compile_it)
        self.finishing.append((self.compiling[key], finish))


def compile_together(wanted: Sequence[Callable[[], Any]], beside: Callable[[], Any]) -> list[Any]:
    """The compiled kernels that ``wanted`` ask Triton for, in this order. ``beside`` runs in another thread
    meanwhile."""
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        together, loading = Together(threads), threads.submit(beside)
        before = active_mode.set(together)
        try:
            found = [ask() for ask in wanted]
        finally:
            active_mode.reset(before)
        for future, finish in together.finishing:
            if future.exception() is None:
                finish(future.result())
        for future in (*together.compiling.values(), loading):
            future.result()  # raises what happened
    return [ask() if kernel is None else kernel for kernel, ask in zip(found, wanted, strict=True)]
