"""Self-contained HTML pages and drawings with one look. They load nothing from elsewhere."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markupsafe import Markup
from matplotlib import style
from matplotlib.figure import Figure

HERE = Path(__file__).parent
MARKDOWN = MarkdownIt("commonmark", {"html": False})


@dataclass(frozen=True)
class Picture:
    title: str
    reading: str  # how to read it
    light: str  # data: URLs, one per colour scheme
    dark: str


def picture(title: str, reading: str, draw: Callable[[], Figure]) -> Picture:
    return Picture(title, reading, _data_url(draw, "default"), _data_url(draw, "dark_background"))


def svg_url(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def render(template: str, folder: Path = HERE, **values: Any) -> str:
    """A template of ``folder``, which may extend those of this folder. Its filters ``markdown`` and ``line`` read
    Markdown: paragraphs, or within a line."""
    templates = Environment(
        loader=FileSystemLoader([folder, HERE]), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters["markdown"] = lambda text: Markup(MARKDOWN.render(text))
    templates.filters["line"] = lambda text: Markup(MARKDOWN.renderInline(text))
    return templates.get_template(template).render(**values)


def _data_url(draw: Callable[[], Figure], scheme: str) -> str:
    image = io.StringIO()
    # Text as text, which takes a third of the bytes. No date and no random names, so that equal results give equal
    # pages.
    with style.context([scheme, {"svg.fonttype": "none", "svg.hashsalt": "flash_delta", "font.family": "sans-serif"}]):
        draw().savefig(image, format="svg", transparent=True, dpi=200, metadata={"Date": None})
    return svg_url(image.getvalue())
