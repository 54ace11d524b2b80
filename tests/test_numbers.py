"""Every measured number in README and guide is computed from the JSON of a measurement."""

import re
from pathlib import Path

import pytest

from workshop.numbers.claims import CLAIMS, Claim
from workshop.numbers.given import GIVEN
from workshop.numbers.pages import pages, pattern, with_numbers, without_source, write_numbers
from workshop.numbers.readme import TABLES, with_tables
from workshop.numbers.sources import Results

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def test_the_committed_numbers_are_those_of_the_committed_results(tmp_path):
    """Every number of every claim and every line of a table is changed, and `report` brings all of them back."""
    for page in {claim.page for claim in CLAIMS}:
        text = (ROOT / page).read_text()
        for claim in CLAIMS:
            if claim.page == page:
                text = with_numbers(text, claim, ["77.7"] * claim.words.count("{}"))
        text = re.sub(
            r"(?<=<!-- flash-delta-dev report: )(.*? -->\n).*?(?=<!-- end)", r"\1| old |\n", text, flags=re.DOTALL
        )
        assert text.count("| old |") == (len(TABLES) if page == "README.md" else 0)
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(text)
    changed = write_numbers(RESULTS, tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in changed} == {claim.page for claim in CLAIMS}
    for path in changed:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), "run flash-delta-dev report"


@pytest.mark.parametrize("page", pages(ROOT))
def test_every_number_has_a_source(page):
    assert not list(without_source(page, (ROOT / page).read_text()))


def test_what_is_given_stands_in_its_page():
    gone = [g for g in GIVEN if not pattern(g.words).search((ROOT / g.page).read_text())]
    assert not gone


@pytest.mark.parametrize(
    "words",
    [
        "1.1x as fast", "at 87 % efficiency", "took 0.63\nms", "12,000 tokens per second", "5.9 GB",
        "half an hour", "an error of 3e-4", "1.08 of the time", "ahead in 9 of 12 rows", "2.2 KB", "20 us",
        "in a minute", "4.2 TB/s",
    ],
)  # fmt: skip
def test_a_number_without_a_source_is_found(words):
    assert len(list(without_source("README.md", f"It was so: {words}, on an H200.", []))) == 1


def test_facts_are_no_measurements():
    text = "In torch 2.13.0 with 16/32 heads of 128, up to 3,200 tokens: `x 5 ms`, [page](5x.md), 2x3 and 10^7 times."
    assert not list(without_source("README.md", f"{text}\n```\nmake demo (five minutes)\n```\n", []))


def test_a_claim_covers_its_own_numbers_only():
    claim = Claim("README.md", "It is {}x as fast", lambda results: ("2.0",))
    text = "It is 1.5x\nas fast. It is 3x as slow."
    (left,) = without_source("README.md", text, [claim])
    assert "3x as slow" in left
    assert with_numbers(text, claim, ["2.0"]) == "It is 2.0x\nas fast. It is 3x as slow."
    with pytest.raises(ValueError, match=re.escape("README.md: expected these words once, got them 0 times")):
        with_numbers("It is fast.", claim, ["2.0"])
    with pytest.raises(ValueError, match="zip"):
        with_numbers(text, claim, ["2.0", "3.0"])


def test_readme_keeps_the_marks_of_its_tables():
    with pytest.raises(ValueError, match="marks: expected those of the table 'my model' once, got them 0 times"):
        with_tables("# flash_delta\n", Results(RESULTS))
