"""The documentation as a site: `make docs` builds it, strictly; the reference pages are generated from the code."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
from generate import generate

project = "Fedloop"
author = "Fedloop contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "Fedloop"
html_show_copyright = False
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
default_role = "code"
# Pages link to files of the repository and to pages outside of this folder.
suppress_warnings = ["myst.xref_ambiguous"]


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", lambda built: generate(Path(built.srcdir) / "reference"))
