"""Ctrl-C and SIGTERM as a request: a run ends after the step that it is in, with a checkpoint."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Notes the first SIGINT or SIGTERM; a second one does what it did before. In the main thread only. A signal that
    the process ignores, as a shell's background jobs ignore Ctrl-C, stays ignored.

        with stop_signals() as stop:
            for record in trainer.run(stop):
                ...

    Yields:
        A function that returns the number of the signal that came, 0 if none did.
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
