"""The notebook on the equation runs from top to bottom, and every step of it is right."""

import json
import re
from pathlib import Path

import matplotlib
import pytest
import torch

NOTEBOOK = Path(__file__).parent.parent / "examples/equation.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
STEPS = ["cumulate", "scores", "solve", "scan", "output"]


@pytest.fixture(autouse=True)
def no_screen(monkeypatch):
    """Draws without a screen. The notebook computes in float64 by default, and that ends with it."""
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")
    matplotlib.use(before)
    torch.set_default_dtype(torch.float32)


def run():
    names = {}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    return names


def test_every_step_is_the_recurrence(capsys):
    names = run()
    found = dict(re.findall(r"^(.*): error (\S+)$", capsys.readouterr().out, re.MULTILINE))
    assert list(found)[2:] == [*STEPS, "chunk_gated_delta_rule"]
    assert all(float(error) < 1e-14 for error in found.values()), found
    linear, decayed, erased, both = names["newest"].values()
    assert linear > decayed > 0.5
    assert max(erased, both) < 1e-14
    assert len(names["axes"].lines) == 4


def test_it_is_kept_without_outputs():
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_links():
    text = "".join(line for cell in CELLS for line in cell["source"])
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all((NOTEBOOK.parent / link).exists() for link in links)
