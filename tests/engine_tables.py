"""The guide's tables of what vLLM's and SGLang's tensors are called, and which argument takes each."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/guide/serving.md"


def rows(engine):
    """Returns the rows of an engine's table: the names, what they are, and the argument."""
    _, table = PAGE.read_text().split(f"| {engine} | what it is | argument here |\n|---|---|---|\n")
    lines = table.split("\n\n")[0].splitlines()
    return [tuple(re.split(r" \| ", line.strip("| \n"))) for line in lines]


def words(cell):
    """The identifiers of a cell's code, without shapes and numbers."""
    code = " ".join(re.sub(r"\[.*?\]", " ", span) for span in re.findall(r"`([^`]+)`", cell))
    return set(re.findall(r"[A-Za-z_]\w*", code))


def missing(engine, paths):
    """The engine's names in the table that are in none of its files ``paths``."""
    found = {word for path in paths for word in re.findall(r"\w+", path.read_text())}
    return {word for cell, *_ in rows(engine) for word in words(cell)} - found
