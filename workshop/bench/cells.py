"""What tables are made of."""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]


def number(value: float | None) -> str:
    """The value with at least three digits."""
    if value is None:
        return ""
    digits = 4 if value < 0.1 else 3 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table.head)) if any(row[i] for row in table.rows)]
    return Table([table.head[i] for i in kept], [[row[i] for i in kept] for row in table.rows])


def line(cells: Iterable[str]) -> str:
    """A row in Markdown."""
    return f"| {' | '.join(cells)} |"


def between_marks(text: str, new: str) -> str:
    """The text with new lines between its two marks. Without marks it does not change."""
    marked = r"(?<=<!-- flash-delta-dev report -->\n).*?(?=<!-- end -->)"
    return re.sub(marked, lambda _: new, text, flags=re.DOTALL)


def markdown(table: Table) -> list[str]:
    """The lines of a table in Markdown."""
    return [line(table.head), "|---" * len(table.head) + "|", *map(line, table.rows)]
