"""What was found of earlier calls, so that one like them is not looked at again."""

from typing import Any

MOST = 512  # calls of a generation; each takes some kilobytes


class Remembered(dict):
    """By all that can change what is found; ``remembered[key]`` is None of a call that is not known.

    There are two generations: these items, and those of the ``old`` one, which come back when they are asked for. When
    there are too many, these become the old ones, and what of those was not asked for all the while is forgotten, one
    for every call that is remembered from then on: so a call that comes again and again stays, however many others
    come in between, nothing is ever forgotten in one go, and to find a call takes no more than a look into a dict.
    """

    def __init__(self) -> None:
        self.old: dict[Any, Any] = {}
        self.forgotten: list[Any] = []

    def __missing__(self, key: Any) -> Any:
        found = self.old.get(key)
        if found is not None:
            self[key] = found
        return found

    def __setitem__(self, key: Any, found: Any) -> None:
        if len(self) >= MOST:
            self.forgotten += self.old.values()
            self.old = dict(self)
            super().clear()
        super().__setitem__(key, found)
        del self.forgotten[-1:]

    def clear(self) -> None:
        super().clear()
        self.old = {}
