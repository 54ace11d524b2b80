"""Writes computed numbers into README and guide, and finds those that nobody has computed."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from workshop.numbers.claims import CLAIMS, README, Claim
from workshop.numbers.given import GIVEN
from workshop.numbers.readme import with_tables
from workshop.numbers.sources import Results

HOLE, NUMBER = "{}", r"(\d(?:[\d,.]*\d)?)"
COUNT = r"(?:an?|one|two|three|four|five|six|ten|twenty|thirty|half\s+an)"
MEASURED = re.compile(
    r"(?<![\w.,^])\d[\d,.]*(?:"
    r"x(?!\w)"  # 1.1x
    r"|\s*%"
    r"|\s+(?:[mun]?s|seconds?|minutes?|hours?|[KMGT]B(?:/s)?|TFLOP/s|tokens/s|tokens\s+per\s+second)\b"
    r"|e-\d+)"
    r"|(?<![\w.,^])\d+\.\d+\s+(?:times|of)\b"  # 1.08 of the GPU's time
    r"|(?<![\w.,^])\d+\s+of\s+\d+\s+(?:rows|cases)\b"
    rf"|\b{COUNT}\s+(?:seconds|minutes?|hours?)\b"
)
# What is not prose: blocks of code, tables that `flash-delta-dev report` writes, code in a line, addresses of links.
NOT_PROSE = re.compile(r"```.*?```|<!-- flash-delta-dev report.*?<!-- end -->|`[^`]*`|(?<=\])\([^)]*\)", re.DOTALL)


def pages(root: Path) -> list[str]:
    """The pages whose numbers are computed."""
    return [README, *sorted(str(p.relative_to(root)) for p in root.glob("docs/guide/*.md")), "docs/fla.md"]


def write_numbers(results: Path, root: Path, claims: Iterable[Claim] = CLAIMS) -> list[Path]:
    """Writes README's tables and the numbers of all claims into the pages below ``root``, and returns the pages that
    changed. A claim whose words do not stand in its page exactly once is an error. Pages that are not there are left
    out: the results may be those of another machine."""
    sources, changed = Results(results), []
    by_page: dict[Path, list[Claim]] = {}
    for claim in claims:
        by_page.setdefault(root / claim.page, []).append(claim)
    for path, here in by_page.items():
        if path.is_file():
            before = text = path.read_text(encoding="utf-8")
            if path.name == README and path.parent == root:
                text = with_tables(text, sources)
            for claim in here:
                text = with_numbers(text, claim, claim.numbers(sources))
            if text != before:
                path.write_text(text, encoding="utf-8")
                changed.append(path)
    return changed


def with_numbers(text: str, claim: Claim, numbers: Sequence[str]) -> str:
    """The text with these numbers in the claim's words. Lines are broken where they were."""
    found = list(pattern(claim.words).finditer(text))
    if len(found) != 1:
        raise ValueError(f"{claim.page}: expected these words once, got them {len(found)} times: {claim.words}")
    places = [found[0].span(i) for i in range(1, claim.words.count(HOLE) + 1)]
    for (start, end), number in reversed(list(zip(places, numbers, strict=True))):
        text = text[:start] + number + text[end:]
    return text


def pattern(words: str) -> re.Pattern[str]:
    """These words in a page: a number for each {}, and lines may be broken anywhere between words."""
    pieces = (r"\s+".join(map(re.escape, re.split(r"\s+", piece))) for piece in words.split(HOLE))
    return re.compile(NUMBER.join(pieces))


def without_source(page: str, text: str, claims: Iterable[Claim] = CLAIMS) -> Iterator[str]:
    """Yields each number of a page that looks like a measurement and is neither computed nor among ``GIVEN``."""
    words = [claim.words for claim in claims if claim.page == page] + [g.words for g in GIVEN if g.page == page]
    spans = [found.span() for known in words for found in pattern(known).finditer(text)]
    prose = NOT_PROSE.sub(lambda found: " " * len(found[0]), text)
    for number in MEASURED.finditer(prose):
        if not any(start <= number.start() and number.end() <= end for start, end in spans):
            yield f"{page}: {text[max(0, number.start() - 40) : number.end() + 20]!r}"
