"""What tables are made of."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]


def in_markdown(table: Table) -> list[str]:
    head, *rows = (f"| {' | '.join(cells)} |" for cells in (table.head, *table.rows))
    return [head, "|---" * len(table.head) + "|", *rows]


def number(value: float | None) -> str:
    """The value with at least three digits."""
    if value is None:
        return ""
    digits = 4 if value < 0.1 else 3 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table.head)) if any(row[i] for row in table.rows)]
    return Table([table.head[i] for i in kept], [[row[i] for i in kept] for row in table.rows])


def between_marks(text: str, name: str, new: Iterable[str]) -> str:
    """The text with new lines between the two marks of this name."""
    begin, end = f"<!-- flash-delta-dev report: {name} -->\n", "<!-- end -->"
    lines = "".join(f"{line}\n" for line in new)
    text, found = re.subn(f"(?<={begin}).*?(?={end})", lambda _: lines, text, flags=re.DOTALL)
    if found != 1:
        raise ValueError(f"marks: expected those of the table {name!r} once, got them {found} times")
    return text
