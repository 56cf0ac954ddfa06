"""The docs site: the Markdown of this folder, the API from docstrings. `make docs` builds it without warnings."""

import re
from importlib.metadata import version as installed_version

from sphinx.application import Sphinx

project = "oelm"
release = version = installed_version("oelm")
copyright = "the oelm authors, MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "oelm"
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# Pages of the repository's root, and the pages of this site that show them.
ROOT_PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_ROOT_LINK = re.compile(r"\]\((?:\.\./)?(" + "|".join(map(re.escape, ROOT_PAGES)) + r")(#[^)]*)?\)")


def _within_site(source: list[str]) -> None:
    """Turn links to pages of the repository's root into links to this site's pages."""
    source[0] = _ROOT_LINK.sub(lambda link: f"]({ROOT_PAGES[link[1]]}{link[2] or ''})", source[0])


def setup(app: Sphinx) -> None:
    """Change links in pages, and in the pages that they include."""
    app.connect("source-read", lambda app, page, source: _within_site(source))
    app.connect("include-read", lambda app, path, page, source: _within_site(source))
