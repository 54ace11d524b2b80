"""What a code host does by itself: links to folders and code, pictures by theme, plain blocks, notebooks, formulas."""

import json
import os
import re
import shutil
from pathlib import Path

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

SITE = Path(__file__).parent
ROOT = SITE.parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([\w./-]+)\)")
PICTURE = re.compile(r'<picture>\s*<source .*?srcset="(.*?)">\s*<img (.*?)src="(.*?)"(.*?)>\s*</picture>', re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES_BELOW = {"docs/notes/README": "*", "flash_delta/kernels/README": "**/README"}
LANGUAGES = {".py": "python", ".c": "c"}

linked: set[str] = set()  # files of code that a document links to; each becomes a page


def read(app, name, source):
    """Change a document's text before it is parsed."""
    folder = (ROOT / name).parent
    document = app.env.doc2path(name)
    if document.suffix == ".ipynb":
        source[0] = notebook(document.name, source[0])

    def link(match):
        text, target = match.groups()
        path = (folder / target).resolve()
        if (path / "README.md").exists():
            return f"[{text}]({target}/README.md)"
        if not path.is_file() or path.suffix in (".md", ".html", ".ipynb"):
            return match[0]
        file = path.relative_to(ROOT).as_posix()
        linked.add(file)
        return f'<a href="{os.path.relpath(ROOT / "code" / file, folder)}.html">{text}</a>'

    text = PICTURE.sub(r'<img class="only-light" \2src="\3"\4>\n<img class="only-dark" \2src="\1"\4>', source[0])
    text = FENCE.sub(lambda block: f"```{block[1] or 'text'}\n{block[2]}```", text)
    source[0] = LINK.sub(link, text)
    if name == app.config.root_doc:
        source[0] += (SITE / "contents.md").read_text()
    if name in PAGES_BELOW:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{PAGES_BELOW[name]}\n```\n"


def notebook(name, text):
    """A notebook as Markdown: its text and its code, without results, which are not kept."""
    parts = ["---\nmyst:\n  enable_extensions: [dollarmath]\n---"]
    for cell in json.loads(text)["cells"]:
        lines = "".join(cell["source"])
        parts.append(lines if cell["cell_type"] == "markdown" else f"```python\n{lines}\n```")
    parts.insert(2, f"{{download}}`Download the notebook <{name}>`, and run it to see what it prints and draws.")
    return "\n\n".join(parts)


def code_pages(app):
    for file in sorted(linked):
        path = ROOT / file
        code = app.builder.highlighter.highlight_block(path.read_text(), LANGUAGES.get(path.suffix, "none"))
        yield f"code/{file}", {"title": file, "body": f"<h1>{file}</h1>{code}"}, "page.html"


def formula(display, tag):
    """MathML, which browsers draw without a script."""

    def visit(translator, node):
        mathml = tex2mathml(node.astext()).replace("<math ", f'<math display="{display}" ', 1)
        translator.body.append(f'<{tag} class="math">{mathml}</{tag}>')
        raise SkipNode

    return visit, None


def front_page(app, exception):
    if exception is None and app.builder.name == "html":
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app):
    app.connect("source-read", read)
    app.connect("html-collect-pages", code_pages)
    app.connect("build-finished", front_page)
    app.add_html_math_renderer("mathml", formula("inline", "span"), formula("block", "div"))
