"""Treats Ctrl-C and SIGTERM as requests: a run ends after its current step, with a checkpoint."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Notes the first SIGINT or SIGTERM. A second one has its usual effect. This works only in the main thread. If the
    process ignores a signal, as background jobs of a shell ignore Ctrl-C, it stays ignored.

        with stop_signals() as stop:
            RunTrainer(folder, model, tokenizer, corpus, settings, layout, stop).train()

    Yields:
        A function that returns the number of the received signal, or 0.
    """
    came = 0
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}

    def note(number: int, frame: object) -> None:
        nonlocal came
        came = number
        give_back()

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: came
    finally:
        give_back()
