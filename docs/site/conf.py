"""The documentation site. `make docs` builds it from the documents where they stand, without a network.

Sphinx reads the whole repository, so that a relative link means the same in the repository and on the site.
"""

import sys
from pathlib import Path

import flash_delta

sys.path.insert(0, str(Path(__file__).parent))

project = "flash_delta"
version = release = flash_delta.__version__
root_doc = "README"
source_suffix = {".rst": "restructuredtext", ".md": "markdown", ".ipynb": "markdown"}
include_patterns = ["*.md", "docs/**.md", "docs/**.rst", "flash_delta/**/README.md", "workshop/**/README.md"]
include_patterns += ["examples/*.ipynb", "upstream/README.md"]
exclude_patterns = ["docs/site", "build", "dist", "runs", "tests", "benchmarks", ".*", "**/__pycache__"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "as_on_a_host",
]

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 3
default_role = "literal"  # `name` in a docstring
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_use_rtype = False
OTHERS = r"(torch|transformers|collections|pathlib|typing|types)\..*|ModuleType"
# Named in signatures; no page has them.
PRIVATE = r"flash_delta\.(problem|ops\._context|parallel\.halo|layers\.(packing|state))\..*"
nitpick_ignore_regex = [("py:.*", f"{OTHERS}|{PRIVATE}")]

html_theme = "furo"
html_title = f"flash_delta {release}"
html_static_path = ["site.css", "site.js"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_math_renderer = "mathml"
html_copy_source = False
html_show_copyright = False
pygments_dark_style = "github-dark"
