"""The documentation as a site: `make docs` builds it, strictly; the reference pages are generated from the code."""

from __future__ import annotations

from pathlib import Path

import typer.main
from sphinx.application import Sphinx

from coordinator.commands import cli
from coordinator.reference import pages
from edge_client.commands import cli as edge_cli

PROGRAMS = {
    "fedloop": typer.main.get_command(cli.app),
    "fedloop-edge": typer.main.get_command(edge_cli.app),
}

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
    app.connect(
        "builder-inited",
        lambda built: pages.write(Path(built.srcdir) / pages.FOLDER, PROGRAMS),
    )
