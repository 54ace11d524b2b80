"""Tables of plain text, which need no library, no colour and no minimum width."""

import shutil
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import NamedTuple

GAP = "  "  # between columns
WIDE = 160  # the width without a terminal
TIE = "\u00a0"  # between a name and its cell, so that no line breaks there
READABLE = 20  # if the last column of text would be narrower, it is not put beside the others


class Table(NamedTuple):
    """``rows`` have a cell for each name in ``head``. Only the last cell may have several lines, or be wrapped."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    title: str = ""


def show(tables: Iterable[Table]) -> None:
    width = shutil.get_terminal_size((WIDE, 24)).columns
    print("\n\n".join(draw(table, width) for table in tables))


def draw(table: Table, width: int) -> str:
    """Columns side by side if they fit. Otherwise a few lines per row, with each cell after its column's name."""
    *widths, _ = (max(map(len, column)) for column in zip(table.head, *table.rows, strict=True))
    rest = width - sum(widths) - len(GAP) * len(widths)
    longest = max((len(word) for row in table.rows for word in row[-1].split()), default=0)
    whole = max(len(line) for row in (table.head, *table.rows) for line in row[-1].split("\n"))
    fits = rest >= min(whole, max(READABLE, longest))
    lines = _columns(table, widths, rest) if fits else _blocks(table, width)
    return "\n".join([*wrap(table.title, width), *lines])


def _columns(table: Table, widths: Sequence[int], rest: int) -> list[str]:
    lines = []
    rule = tuple("-" * size for size in (*widths, min(rest, len(table.head[-1]))))
    for *cells, last in (table.head, rule, *table.rows):
        for part in [part for line in last.split("\n") for part in wrap(line, rest) or [""]]:
            padded = [cell.ljust(size) for cell, size in zip(cells, widths, strict=True)]
            lines.append(GAP.join([*padded, part]).rstrip())
            cells = [""] * len(widths)
    return lines


def _blocks(table: Table, width: int) -> list[str]:
    """Each row as lines. Short cells share a line, each with its name. A cell of several lines keeps its lines."""
    lines = []
    for row in table.rows:
        named = [(name, cell) for name, cell in zip(table.head, row, strict=True) if cell]
        short = ", ".join(f"{name}{TIE}{cell}" for name, cell in named if "\n" not in cell)
        long = [line for name, cell in named if "\n" in cell for line in (f"{name}:", *cell.split("\n"))]
        for text in (short, *long):
            lines += wrap(text, width, subsequent_indent=GAP, break_on_hyphens=False)
    return [line.replace(TIE, " ") for line in lines]
