"""The documentation site: every public name is on a page, the contents lead to every document, and it builds."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import flash_delta.integrations.fla

ROOT = Path(__file__).parent.parent
PAGES = {path: path.read_text() for path in (ROOT / "docs/api").glob("*.rst")}
NAMES = [
    name
    for text in PAGES.values()
    for name in re.findall(r"^\.\. (?:autofunction|autoclass|py:data):: ([\w.]+)", text, re.MULTILINE)
]
MODULES = [
    "ops",
    "ops.serving",
    "modules",
    "layers",
    "models",
    "parallel",
    "testing",
    "integrations.aiter",
    "integrations.fla",
]
MODULES = [f"flash_delta.{name}" for name in MODULES]
MODULES += [found.name for found in pkgutil.walk_packages(flash_delta.integrations.fla.__path__, f"{MODULES[-1]}.")]


def resolve(name):
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    return inspect.unwrap(found) if callable(found) else found


def test_pages_name_a_thing_once():
    assert sorted(set(NAMES)) == sorted(NAMES)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_place(module):
    if module == "flash_delta.models":
        pytest.importorskip("transformers")
    there = {id(resolve(name)) for name in NAMES}
    public = getattr(importlib.import_module(module), "__all__", ())
    assert [name for name in public if id(resolve(f"{module}.{name}")) not in there] == []


def test_every_name_of_the_front_door_has_a_place():
    public = set(re.findall(r" as (\w+)$", Path(flash_delta.__file__).read_text(), re.MULTILINE))
    assert public <= {name.removeprefix("flash_delta.") for name in NAMES}


def test_the_reference_lists_every_page():
    listed = re.findall(r"^:doc:`.* <(\w+)>`$", (ROOT / "docs/api/index.rst").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({path.stem for path in PAGES} - {"index"})


def test_contents_lead_to_every_document():
    contents = set((ROOT / "docs/site/contents.md").read_text().split())
    below = ("docs/notes/", "flash_delta/kernels/")  # their READMEs lead on: PAGES_BELOW in docs/site/as_on_a_host.py
    documents = [*ROOT.glob("*.md"), *ROOT.glob("examples/*.ipynb"), *PAGES]
    folders = ("docs", "flash_delta", "upstream", "workshop")
    documents += [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    names = {path.relative_to(ROOT).with_suffix("").as_posix() for path in documents} - {"README", "docs/site/contents"}
    children = {name for name in names if name.startswith(below) and name not in contents}
    assert names - children == {name for name in contents if "/" in name or name in names}


def test_the_built_site_fetches_nothing():
    """Neither scripts nor fonts, styles or pictures. CI runs `make docs` before the tests."""
    site = ROOT / "build/docs"
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    if not pages:
        pytest.skip("`make docs` has not run")
    for page in ("docs/api/training.html", "examples/equation.html"):
        assert "<math " in pages[page]
    fetched = re.compile(r"<(?:script|img|source|iframe)[^>]* src=.https?:|<link[^>]* href=.https?:")
    assert [name for name, page in pages.items() if fetched.search(page)] == []
    assert [path for path in site.rglob("*.css") if re.search(r"url\(.?https?:|@import", path.read_text())] == []
