"""The documentation site: `make docs` builds it from the documents where they stand, without a network.

Sphinx reads the whole repository, so that a relative link means the same in the repository and on the site.
"""

import os
import re
import shutil
from pathlib import Path

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

import flash_delta

ROOT = Path(__file__).parent.parent

project = "flash_delta"
version = release = flash_delta.__version__
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "docs/**.rst", "flash_delta/**/README.md"]
exclude_patterns = ["docs/contents.md", "build", "dist", "runs", "tests", "benchmarks", ".*", "**/__pycache__"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 3
highlight_language = "none"  # of blocks that do not name theirs
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_use_rtype = False
PRIVATE = r"flash_delta\.(problem|ops\._context|parallel\.halo)\..*"  # named in signatures; no page has them
nitpick_ignore_regex = [("py:.*", rf"(torch|transformers|collections|typing|types)\..*|ModuleType|{PRIVATE}")]

html_theme = "furo"
html_title = f"flash_delta {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([\w./-]+)\)")
PICTURE = re.compile(r'<picture>\s*<source .*?srcset="(.*?)">\s*<img (.*?)src="(.*?)"(.*?)>\s*</picture>', re.DOTALL)
CHILDREN = {"docs/notes/README": "*", "flash_delta/kernels/README": "**/README"}
CODE: set[str] = set()  # files that a document links to; each becomes a page


def source_read(app, name, source):
    """What a code host does by itself: links to folders and to code, and pictures that follow the theme."""

    folder = (ROOT / name).parent

    def link(match):
        text, target = match.groups()
        path = (folder / target).resolve()
        if (path / "README.md").exists():
            return f"[{text}]({target}/README.md)"
        if path.is_file() and path.suffix not in (".md", ".html"):
            file = path.relative_to(ROOT).as_posix()
            CODE.add(file)
            return f'<a href="{os.path.relpath(ROOT / "code" / file, folder)}.html">{text}</a>'
        return match[0]

    text = PICTURE.sub(r'<img class="only-light" \2src="\3"\4>\n<img class="only-dark" \2src="\1"\4>', source[0])
    source[0] = LINK.sub(link, text)
    if name == root_doc:
        source[0] += (ROOT / "docs/contents.md").read_text()
    if name in CHILDREN:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{CHILDREN[name]}\n```\n"


def code_pages(app):
    for path in sorted(CODE):
        language = {".py": "python", ".c": "c"}.get(Path(path).suffix, "none")
        code = app.builder.highlighter.highlight_block((ROOT / path).read_text(), language)
        yield f"code/{path}", {"title": path, "body": f"<h1>{path}</h1>{code}"}, "page.html"


def formula(as_block):
    """Formulas are MathML, which browsers draw without help."""

    def visit(translator, node):
        display = "block" if as_block else "inline"
        translator.body.append(tex2mathml(node.astext()).replace("<math ", f'<math display="{display}" ', 1))
        raise SkipNode

    return visit, None


def front_page(app, exception):
    if not exception and app.builder.name == "html":
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app):
    app.connect("source-read", source_read)
    app.connect("html-collect-pages", code_pages)
    app.connect("build-finished", front_page)
    app.add_html_math_renderer("mathml", inline_renderers=formula(False), block_renderers=formula(True))
