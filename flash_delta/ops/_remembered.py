"""What was found of earlier calls, so that one like them is not looked at again."""

from typing import Any

MOST = 1024  # calls; each takes some kilobytes


class Remembered(dict):
    """By all that can change what is found; forgotten when there are too many."""

    def __setitem__(self, key: tuple, found: Any) -> None:
        if len(self) >= MOST:
            self.clear()
        super().__setitem__(key, found)
