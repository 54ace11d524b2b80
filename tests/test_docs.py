"""The documentation keeps its word: the README's examples run, the mathematics is proven."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from workshop.bench import tables
from workshop.bench.page import read_groups
from workshop.bench.speed import fullest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
STORY = (ROOT / "docs/how-the-kernels-work.md").read_text()
MARKDOWN = sorted(path for folder in (".", "upstream", "docs/**") for path in ROOT.glob(f"{folder}/*.md"))
PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda code: code.split("from ")[1].split(" ")[0])
def test_readme_example(example):
    exec(compile(example, "README.md", "exec"), {})


def test_readme_has_examples():
    assert len(EXAMPLES) == 4


def test_mathematics():
    out = subprocess.run(
        [sys.executable, ROOT / "docs/check_math.py"], check=True, capture_output=True, text=True
    ).stdout
    assert "all assertions hold" in out
    proven = set(re.findall(r"^([A-Z]\d)\b", out, re.MULTILINE))
    quoted = set(re.findall(r"\[([A-Z]\d)(?:-([A-Z]\d))?", (ROOT / "docs/mathematics.md").read_text()))
    assert {tag for pair in quoted for tag in pair if tag} <= proven


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: p.name)
def test_links(path):
    for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_the_chunk_form():
    """The code that says so proves that it is the recurrence."""
    (code,) = re.findall(r"```python\n(.*?)```", STORY, re.DOTALL)
    exec(compile(code, "docs/how-the-kernels-work.md", "exec"), {})


def test_times_of_the_floor():
    """How the kernels work: rows, times and floors are those of the benchmarks, and the bars are their quotients."""
    table = re.search(r"\| row of benchmarks.md .*?\n\n", STORY, re.DOTALL)[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    for row, ms, floor, _ in rows:
        assert (ms, floor) == measured(row, "flash_delta", "floor")
    quotients = [f"{float(ms) / float(floor):.1f}" for _, ms, floor, _ in rows]
    assert [times for *_, times in rows] == quotients
    picture = (ROOT / "docs/pictures/floor.svg").read_text()
    assert re.findall(r">(forward|training|decode) (.*?)<", picture) == [tuple(r[0].split(" ", 1)) for r in rows]
    assert re.findall(r">([\d.]+) .<", picture) == quotients
    assert re.findall(r'width="(\d+)" height="24"', picture) == [f"{50 * float(x):.0f}" for x in quotients]


def test_times_of_training():
    table = re.search(r"\| row \| flash_delta \| FlashQLA .*?\n\n", STORY, re.DOTALL)[0]
    for row, *times, _ in (line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]):
        assert tuple(times) == measured(f"training {row}", "flash_delta", "flash_qla")


def test_shares_of_decoding():
    for states, name in ("", "float32 states, share of the copy rate"), (", bfloat16 states", "bfloat16 states"):
        shares = re.search(rf"\| {name} \| (.*) \|", STORY)[1].split(" | ")
        for rows, share in zip((1, 8, 32, 64, 128, 256), shares, strict=True):
            row = f"decode 16/32 batch {rows}{states}"
            assert measured(row, "flash_delta", table=tables.bandwidth, among="decode") == (share.removesuffix(" %"),)


def measured(row, *names, table=tables.times, among=""):
    """The numbers of a row that docs/benchmarks.md prints in these columns. Of a group that was measured on several
    GPUs the README's run counts. ``among``: the group that has the row, if several have it."""
    groups = fullest(group for folder, group in read_groups(ROOT / "benchmarks/results") if folder != "cpu")
    for group in (group for group in groups if group.group.startswith(among)):
        head, lines, *_ = table(group)
        for cells in lines:
            if cells[0] == row:
                return tuple(re.search(r"[\d.]+", cells[head.index(name)])[0] for name in names)
    raise AssertionError(f"benchmarks/results has no row {row}")


OF_CODE = [ROOT / name for name in ("docs/how-the-kernels-work.md", "docs/adding-a-backend.md", "ARCHITECTURE.md")]
OF_CODE += (ROOT / "flash_delta/kernels").rglob("README.md")


@pytest.fixture(scope="module")
def names():
    """The names that Python's and C's code gives to things, and those of files."""
    found = {"Makefile"}
    for path in (path for room in ("flash_delta", "workshop", "tests") for path in (ROOT / room).rglob("*.py")):
        found |= {path.name, *path.relative_to(ROOT).with_suffix("").parts}
        for node in ast.walk(ast.parse(path.read_text())):
            for kind, field in NAMED.items():
                if isinstance(node, kind) and isinstance(value := getattr(node, field), str):
                    found.update(value.split("."))
    return found.union(*(re.findall(r"\w+", path.read_text()) for path in ROOT.glob("flash_delta/**/*.c")))


NAMED = {ast.FunctionDef: "name", ast.ClassDef: "name", ast.arg: "arg", ast.keyword: "arg", ast.Name: "id"}
NAMED |= {ast.Attribute: "attr", ast.alias: "name", ast.Constant: "value"}


@pytest.mark.parametrize("path", OF_CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_document_names_is_there(path, names):
    """Functions, kernels, fields and files in back quotes."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for quoted in re.findall(r"`(\w[\w.]*)(?:\(.*?\))?(?:=\w+)?`", text):
        assert quoted in names or names.issuperset(quoted.split(".")), quoted


@pytest.mark.parametrize("path", PICTURES, ids=lambda p: p.stem)
def test_pictures(path):
    """Each one is well-formed, has a title for readers who cannot see it, knows dark pages, and is shown somewhere."""
    text = path.read_text()
    picture = ElementTree.fromstring(text)
    assert picture.get("viewBox")
    assert picture.findtext("{*}title")
    assert "prefers-color-scheme: dark" in text
    assert f"(pictures/{path.name})" in STORY


# Compressed phrases that a reader has to read twice. CONTRIBUTING.md quotes some beside what to write.
PHRASES = ("but for ", "what is no ", "is meant", "goes first", "lies ready", " all the same", "behind it")
PLAIN = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "upstream/README.md")]
PLAIN += [path for path in (ROOT / "docs").rglob("*.md") if "notes" not in path.parts]
PLAIN += [path for kind in ("py", "c", "md") for path in ROOT.glob(f"flash_delta/**/*.{kind}")]
PLAIN += [path for kind in ("py", "md") for path in ROOT.glob(f"workshop/**/*.{kind}")]


@pytest.mark.parametrize("phrase", PHRASES)
def test_plain_english(phrase):
    found = [str(path.relative_to(ROOT)) for path in PLAIN if phrase in path.read_text(encoding="utf-8").lower()]
    assert not found


def test_architecture_is_one_page():
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 90
